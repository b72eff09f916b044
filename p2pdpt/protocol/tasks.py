"""The operations of one rank in one round, as tasks that progress element by element.

A task has finished a prefix of its region; whoever depends on it follows that prefix, so that a
chain of operations streams through a node without the plugin cutting anything. Nothing here
touches memory or a network: tasks tell :class:`~p2pdpt.protocol.round_io.RoundIO` what to do with
which slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from p2pdpt.channel import Meta
from p2pdpt.errors import HazardError
from p2pdpt.protocol.round_io import MINE, RESULT, SEGMENT, WIDE, WINDOW, RoundIO, Slice
from p2pdpt.topology import COPY, Combine, Region

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from p2pdpt.topology import Kernel

__all__ = ["LocalTask", "Read", "RecvTask", "SendTask", "Source", "Task"]


class Task:
    """One operation: how far it has come, and who follows it.

    Attributes:
        region: what it reads (sends) or writes (receives, locals).
        length: its elements.
        done: elements of the region finished, always a prefix.
        runs: what the finished prefix is: ``(stop, area, meta)`` in absolute elements.
        followers: tasks that may be able to go on when this one has.
        move: number of the move that issued it.
    """

    __slots__ = ("dirty", "done", "followers", "length", "move", "region", "runs")

    streams: ClassVar[bool] = True
    """Whether ``done`` counts elements of ``region`` one by one."""

    def __init__(self, region: Region, move: int) -> None:
        self.region = region
        self.length = region.stop - region.start
        self.done = 0
        self.runs: list[tuple[int, int, Meta]] = []
        self.followers: list[Task] = []
        self.move = move
        self.dirty = False

    @property
    def complete(self) -> bool:
        """Whether the whole region is finished."""
        return self.done >= self.length

    @property
    def first(self) -> bool:
        """Whether it may go on as soon as it has started, before anything has come."""
        return True

    def reset(self, leaf: Meta) -> None:
        """Begin anew, for another round of the same operations."""
        self.done = 0
        self.runs.clear()
        self.dirty = False

    def start(self, io: RoundIO) -> None:
        """Tell the driver what the task will send or receive."""

    def advance(self, io: RoundIO) -> bool:
        """Go on as far as possible; return whether something was finished."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return what the task is and what it waits for, for people."""
        raise NotImplementedError

    def finish_run(self, stop: int, area: int, meta: Meta) -> None:
        """Note that the region is finished up to `stop` (absolute)."""
        self.done = stop - self.region.start
        runs = self.runs
        if runs and runs[-1][1] == area and runs[-1][2] == meta:
            runs[-1] = (stop, area, meta)
        else:
            runs.append((stop, area, meta))


class Read:
    """This rank's own data as it was when an operation was issued.

    Attributes:
        parts: ``(start, stop, writer)`` in absolute elements; None where nobody has written
            and the elements are this node's contribution.
    """

    __slots__ = ("leaf", "parts")

    def __init__(self, parts: list[tuple[int, int, Task | None]], leaf: Meta) -> None:
        self.parts = parts
        self.leaf = leaf

    def available(self, position: int) -> int:
        """Return up to where elements from `position` on exist already."""
        for _, stop, writer in self.parts:
            if stop <= position:
                continue
            if writer is not None:
                reached = writer.region.start + writer.done
                if reached < stop:
                    return reached if reached > position else position
            position = stop
        return position

    def run(self, position: int) -> tuple[int, int, Meta]:
        """Return ``(stop, area, meta)`` of the available elements at `position`."""
        for _, stop, writer in self.parts:
            if stop <= position:
                continue
            if writer is None:
                return stop, MINE, self.leaf
            for run_stop, area, meta in writer.runs:
                if run_stop > position:
                    return min(stop, run_stop), area, meta
            break
        raise AssertionError(f"element {position} is not available")


class SendTask(Task):
    """A region that leaves for one or several ranks."""

    __slots__ = ("drained", "pushed", "read", "to")

    def __init__(
        self, region: Region, move: int, to: Sequence[tuple[int, int]], read: Read
    ) -> None:
        super().__init__(region, move)
        self.to = tuple(to)
        self.read = read
        self.pushed = 0
        self.drained = dict.fromkeys(self.to, 0)

    def reset(self, leaf: Meta) -> None:
        super().reset(leaf)
        self.read.leaf = leaf
        self.pushed = 0
        for each in self.to:
            self.drained[each] = 0

    @property
    def first(self) -> bool:
        """Whether it begins with this node's contribution."""
        return self.read.parts[0][2] is None

    def start(self, io: RoundIO) -> None:
        for peer, ordinal in self.to:
            io.open_send(peer, ordinal, self.length)

    def advance(self, io: RoundIO) -> bool:
        length, base = self.length, self.region.start
        if self.pushed == length:
            return False
        limit = self.read.available(base + self.pushed) - base
        if limit < length and limit - self.pushed < SEGMENT:
            return False
        while self.pushed < limit:
            stop, area, meta = self.read.run(base + self.pushed)
            stop = min(stop, base + limit)
            data = Slice(area, base + self.pushed, stop)
            self.pushed = stop - base
            for peer, ordinal in self.to:
                io.push(peer, ordinal, data, meta)
        return False

    def note_drained(self, peer: int, ordinal: int, upto: int) -> bool:
        """Note that elements have left; return whether the slowest copy has progressed."""
        self.drained[peer, ordinal] = upto
        slowest = min(self.drained.values())
        progressed = slowest > self.done
        self.done = slowest
        return progressed

    def describe(self) -> str:
        ranks = ", ".join(str(peer) for peer, _ in self.to)
        waits = (
            f"{self.pushed} of {self.length} elements were ready"
            if self.pushed < self.length
            else f"{self.done} of {self.length} elements were taken"
        )
        return f"send of {_name(self.region)} to rank {ranks}: {waits}"


class Source:
    """What one rank sends to a receive.

    Attributes:
        arrived: elements in memory.
        granted: elements the sender may send.
        areas: staging, or empty when elements land in place.
        runs: ``(stop, area, meta)`` of what arrived, as offsets from the message's start.
    """

    __slots__ = ("areas", "arrived", "granted", "landing", "ordinal", "peer", "runs")

    def __init__(self, peer: int, ordinal: int) -> None:
        self.peer = peer
        self.ordinal = ordinal
        self.arrived = 0
        self.granted = 0
        self.areas: tuple[int, int] | None = None
        self.landing = RESULT
        self.runs: list[tuple[int, int, Meta]] = []

    def reset(self) -> None:
        """Begin anew."""
        self.arrived = self.granted = 0
        self.areas = None
        self.runs.clear()


class RecvTask(Task):
    """A region that is written from what listed ranks sent, the own rank perhaps among them.

    Elements land in place where nothing else needs the memory and nothing is folded; else in
    staging of ``window`` elements for each source, from where they are folded in the listed
    order.
    """

    __slots__ = (
        "combine",
        "direct",
        "every_hazard",
        "half",
        "hazards",
        "join",
        "limited",
        "sources",
        "staged",
        "wide_width",
        "window",
    )

    def __init__(
        self,
        region: Region,
        move: int,
        sources: Sequence[Source | Read],
        combine: Combine,
        hazards: list[tuple[Task, int, int]],
        *,
        half: bool,
        wide_width: int,
        join: Callable[[Sequence[Meta]], tuple[Meta, tuple[float, ...] | None, float | None]],
    ) -> None:
        super().__init__(region, move)
        self.sources = tuple(sources)
        self.combine = combine
        self.every_hazard = tuple(hazards)
        self.hazards = hazards
        self.half = half
        self.wide_width = wide_width
        self.join = join
        self.direct = False
        self.limited = True
        self.window = min(self.length, WINDOW)
        for task, _, _ in hazards:
            # A send of the same move must have left before its elements are overwritten, and it
            # may wait for the window of a peer that waits likewise. Both get on in step, unless
            # the send lags by more than a window is sure to be ahead: then all needs a place.
            if task.move == move and region.start - task.region.start > WINDOW // 2:
                self.window = self.length
        # A copy whose memory is busy with earlier moves waits for them, which needs no staging
        # and cannot block them. Within its own move a peer may wait for us in turn, and what
        # comes ahead of a grant must have a place: both need staging.
        # Scratch is wide, so half precision that arrives for it is converted on the way.
        self.staged = (
            combine is not COPY
            or (half and region.space != RESULT)
            or (
                bool(hazards)
                and (self.length <= WINDOW or any(task.move == move for task, _, _ in hazards))
            )
        )

    def reset(self, leaf: Meta) -> None:
        super().reset(leaf)
        self.hazards = list(self.every_hazard)
        self.direct = False
        self.limited = True
        for source in self.sources:
            if isinstance(source, Source):
                source.reset()
            else:
                source.leaf = leaf

    @property
    def first(self) -> bool:
        """Whether it waits for no other rank."""
        return not any(isinstance(source, Source) for source in self.sources)

    def start(self, io: RoundIO) -> None:
        length = self.length
        if not self.staged and not self.hazards:
            self.direct = True
        for source in self.sources:
            if isinstance(source, Source):
                if self.staged:
                    source.areas = io.staging(self.window)
                io.open_receive(source.peer, source.ordinal, length)
        self._grant(io)

    def land(self, source: Source, start: int, count: int, width: int) -> Slice:
        """Return where elements of a frame go; see :meth:`p2pdpt.channel.Landing.buffer`."""
        wide = self.half and width == self.wide_width
        if source.areas is None:
            if self.region.space != RESULT:
                source.landing = self.region.space
            else:
                source.landing = WIDE if wide else RESULT
            base = self.region.start
            return Slice(source.landing, base + start, base + start + count)
        source.landing = source.areas[1] if wide else source.areas[0]
        position = start % self.window
        return Slice(source.landing, position, min(position + count, self.window))

    def note_arrived(self, source: Source, count: int, meta: Meta) -> bool:
        """Note elements that are in memory; return whether the region progressed by it."""
        source.arrived += count
        if source.areas is None:
            self.finish_run(self.region.start + source.arrived, source.landing, meta)
            return True
        runs = source.runs
        if runs and runs[-1][1] == source.landing and runs[-1][2] == meta:
            runs[-1] = (source.arrived, source.landing, meta)
        else:
            runs.append((source.arrived, source.landing, meta))
        return False

    def advance(self, io: RoundIO) -> bool:
        if self.complete:
            return False
        clear = self._clear()
        if not self.staged:
            if not self.direct and clear >= self.region.stop:
                self.direct = True
                self._grant(io)
            return False
        base = self.region.start
        begun = self.done
        limit = clear - base
        for source in self.sources:
            if isinstance(source, Source):
                reached = source.arrived
            else:
                reached = source.available(base + begun) - base
            if reached < limit:
                limit = reached
        while self.done < limit:
            self._fold(io, limit)
        if self.complete:
            for source in self.sources:
                if isinstance(source, Source) and source.areas is not None:
                    io.release(source.areas)
        elif self.limited:
            self._grant(io)
        return self.done > begun

    def _fold(self, io: RoundIO, limit: int) -> None:
        base, done, window = self.region.start, self.done, self.window
        stop = min(limit, done - done % window + window)
        found: list[tuple[int, Meta, bool]] = []
        for source in self.sources:
            if isinstance(source, Source):
                while source.runs[0][0] <= done:
                    del source.runs[0]
                end, area, meta = source.runs[0]
                found.append((area, meta, True))
            else:
                end, area, meta = source.run(base + done)
                end -= base
                found.append((area, meta, False))
            stop = min(stop, end)
        meta, scales, divisor = self.join([each[1] for each in found])
        position = done % window
        count = stop - done
        slices = [
            Slice(area, position, position + count)
            if remote
            else Slice(area, base + done, base + stop)
            for area, _, remote in found
        ]
        if self.region.space != RESULT:
            area = self.region.space
        elif not self.half:
            area = RESULT
        elif self.combine is COPY:
            source = self.sources[0]
            assert isinstance(source, Source)
            assert source.areas is not None
            area = RESULT if found[0][0] == source.areas[0] else WIDE
        else:
            area = RESULT if meta.contributions == 0 else WIDE
        io.fold(Slice(area, base + done, base + stop), slices, self.combine, scales, divisor)
        self.finish_run(base + stop, area, meta)

    def _clear(self) -> int:
        """Return up to which absolute element no earlier task needs the memory."""
        if not self.hazards:
            return self.region.stop
        limit = self.region.stop
        left = []
        for task, start, stop in self.hazards:
            reached = task.region.start + task.done if task.streams else start
            if reached < stop and not task.complete:
                left.append((task, start, stop))
                limit = min(limit, max(start, reached))
        self.hazards = left
        return limit

    def _instant(self) -> bool:
        """Whether all that arrives can be folded at once."""
        if self.hazards:
            return False
        remote = 0
        for source in self.sources:
            if isinstance(source, Source):
                remote += 1
            elif source.available(self.region.start) < self.region.stop:
                return False
        return remote <= 1

    def _grant(self, io: RoundIO) -> None:
        length = self.length
        if self.direct:
            upto = length
        elif not self.staged:
            return
        else:
            upto = length if self._instant() else min(length, self.done + self.window)
        self.limited = upto < length
        for source in self.sources:
            if isinstance(source, Source) and upto > source.granted:
                # Small grants would cost more messages than they free memory.
                if upto < length and upto - source.granted < self.window // 2:
                    continue
                source.granted = upto
                io.grant(source.peer, source.ordinal, upto)

    def describe(self) -> str:
        verb = "copy" if self.combine is COPY else self.combine.name.lower()
        waits = []
        for source in self.sources:
            if isinstance(source, Source):
                if source.arrived < self.length:
                    waits.append(
                        f"rank {source.peer} sent {source.arrived} of {self.length} elements"
                    )
            elif source.available(self.region.start) < self.region.stop:
                waits.append("the own part is not ready")
        if self.hazards:
            waits.append("the memory is still in use")
        return f"receive ({verb}) into {_name(self.region)}: {'; '.join(waits) or 'folding'}"


class LocalTask(Task):
    """A kernel that reads one region and writes another."""

    __slots__ = (
        "ended",
        "every_hazard",
        "half",
        "hazards",
        "kernel",
        "notify",
        "read",
        "source",
        "started",
    )

    streams = False

    @property
    def complete(self) -> bool:
        """Whether the kernel has run, also where it writes nothing."""
        return self.ended

    def __init__(
        self,
        region: Region,
        move: int,
        source: Region,
        read: Read,
        kernel: Kernel,
        hazards: list[tuple[Task, int, int]],
        notify: Callable[[Task], None],
        *,
        half: bool,
    ) -> None:
        super().__init__(region, move)
        self.half = half
        self.source = source
        self.read = read
        self.kernel = kernel
        self.every_hazard = tuple(hazards)
        self.hazards = hazards
        self.notify = notify
        self.started = self.ended = False

    def reset(self, leaf: Meta) -> None:
        super().reset(leaf)
        self.read.leaf = leaf
        self.hazards = list(self.every_hazard)
        self.started = self.ended = False

    def advance(self, io: RoundIO) -> bool:
        if self.started or self.read.available(self.source.start) < self.source.stop:
            return False
        self.hazards = [each for each in self.hazards if not each[0].complete]
        if self.hazards:
            return False
        self.started = True
        slices = []
        metas = set()
        position = self.source.start
        while position < self.source.stop:
            stop, area, meta = self.read.run(position)
            stop = min(stop, self.source.stop)
            slices.append(Slice(area, position, stop))
            metas.add(meta)
            position = stop
        if not slices:
            slices.append(Slice(self.source.space, position, position))
        if len(metas) > 1:
            raise HazardError(
                f"a kernel reads {_name(self.source)}, whose parts hold different contributions"
            )
        meta = metas.pop() if metas else Meta(1.0, 1.0, 0)
        region = self.region
        area = WIDE if self.half and region.space == RESULT and meta.contributions else region.space

        def done() -> None:
            self.ended = True
            self.finish_run(region.stop, area, meta)
            self.notify(self)

        io.local(self.kernel, slices, Slice(area, region.start, region.stop), done)
        return False

    def describe(self) -> str:
        state = "running" if self.started else "waiting for its input"
        return f"kernel from {_name(self.source)} into {_name(self.region)}: {state}"


def _name(region: Region) -> str:
    space = "" if region.space == 0 else f" of space {region.space}"
    return f"elements {region.start}..{region.stop}{space}"
