"""One rank's part of one round: runs a topology's coroutine and the operations it issues.

The same object serves the simulator and the asyncio driver, which is why they give the same
bits: it decides what is sent, where arriving elements go, what is folded in which order and
when, and the driver (a :class:`~p2pdpt.protocol.round_io.RoundIO`) only carries it out. It has no
clock, socket, task or array.

A ``static`` topology never looks at what arrives, so its coroutine runs ahead to its end at
once, every receive is granted ahead, and the operations follow each other element by element.
The tasks it issued are kept: the same round of the next step replays them without the coroutine.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

from p2pdpt.errors import HazardError, IncompleteError, TopologyError
from p2pdpt.protocol.mailbox import Mailbox, is_mail
from p2pdpt.protocol.posting import Flight, Posted, Request
from p2pdpt.protocol.round_io import MINE, RESULT, RoundIO, Slice
from p2pdpt.protocol.spaces import Spaces
from p2pdpt.protocol.tasks import LocalTask, Read, RecvTask, SendTask, Source, Task
from p2pdpt.protocol.weighting import Fold, Reduction, finish, join, leaf
from p2pdpt.topology import ADD, ANY, COPY, Handle, Links, Message, Recv, Region, Send

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Iterable, Sequence

    from p2pdpt.channel import Meta
    from p2pdpt.dtypes import DType
    from p2pdpt.topology import Bucket, Combine, Facts, Kernel, Operation, Topology

__all__ = ["Round"]


class Round(Links):
    """One rank's part of one round of one topology.

    Attributes:
        finished: whether the result is complete and nothing is in flight.
        length: elements of the bucket.
    """

    def __init__(
        self,
        topology: Topology,
        bucket: Bucket,
        dtype: DType,
        io: RoundIO,
        *,
        rank: int,
        size: int,
        facts: Facts,
        reduction: Reduction = Reduction.MEAN,
        weight: float = 1.0,
        in_place: bool = False,
        seed: int = 0,
        run_ahead: bool = True,
    ) -> None:
        """Prepare a round; ``begin`` starts it.

        Args:
            topology: whose ``exchange`` is run.
            bucket: what the topology is shown.
            dtype: its element type.
            io: the driver.
            rank, size, facts: of the view.
            reduction: what becomes of a complete fold.
            weight: of this rank's contribution; only for ``Reduction.MEAN``.
            in_place: whether `mine` and `result` are one area.
            seed: for ``links.rng``, the same on all members.
            run_ahead: whether a static topology may run ahead.
        """
        self.rank, self.size, self.facts = rank, size, facts
        self.finished = False
        self.io = io
        self._bucket = bucket
        self.length = bucket.length
        self._half = dtype.half
        self._wide_width = dtype.wide_itemsize
        self._exact = topology.agreement == "exact" and reduction is not Reduction.NONE
        self._reduction = reduction
        self._in_place = in_place
        self._leaf = leaf(weight if reduction is Reduction.MEAN else 1.0)
        self._random: random.Random | None = None
        self._seed = seed
        self._ahead = topology.static and run_ahead
        self._coroutine: Coroutine[Any, Any, None] | None = None
        self._topology = topology
        self._request: Request | None = None
        self._resuming = False
        self._returned = False
        self._applying = 0
        self._spaces = Spaces(bucket.length, in_place=in_place, replayed=self._ahead)
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._sends: dict[tuple[int, int], SendTask] = {}
        self._receives: dict[tuple[int, int], tuple[RecvTask, Source]] = {}
        self._incomplete: set[Task] = set()
        self._flight = Flight()
        self._recorded: list[Task] | None = [] if self._ahead else None
        self._first: list[Task] | None = None
        self._queue: deque[Task] = deque()
        self._pumping = False
        self._move = 0
        self._last_space = 0
        self._mailbox = Mailbox(self)

    # What a plugin sees.

    def move(self, *operations: Operation) -> Awaitable[list[Message]]:
        return Request("move", self._post(operations), len(operations), None)

    def post(self, *operations: Operation) -> tuple[Handle, ...]:
        return self._post(operations)

    def wait(
        self,
        handles: Iterable[Handle],
        *,
        count: int | None = None,
        deadline: float | None = None,
    ) -> Awaitable[list[Handle]]:
        posted = [handle for handle in handles if isinstance(handle, Posted)]
        wanted = len(posted) if count is None else min(count, len(posted))
        return Request("wait", posted, wanted, deadline)

    def local(self, kernel: Kernel, src: Region, dst: Region) -> Awaitable[None]:
        self._move += 1
        handle = Posted("kernel")
        handle.writes, handle.reads = dst, (src,)
        self._flight.check([handle], self._spaces.length_of)
        read = self._spaces.read(src, self._leaf)
        hazards = self._spaces.hazards(dst)
        task = LocalTask(
            dst, self._move, src, read, kernel, hazards, self._progressed, half=self._half
        )
        handle.tasks = [task]
        self._spaces.reads(task, src.space, read)
        self._spaces.writes(task, dst)
        self._track(task, [read], hazards)
        self._flight.add([handle])
        return Request("local", [handle], 1, None)

    def scratch(self, length: int) -> Region:
        space = self.next_space()
        self.add_space(space, length)
        return Region(0, length, space)

    def apply(self, shard: int, message: Message) -> Awaitable[None]:
        self._mailbox.check_held(message)
        handle = Posted("apply")
        handle.reads = message.regions
        self._flight.check([handle], self._spaces.length_of)
        self._flight.add([handle])
        self._applying += 1

        def done() -> None:
            handle.finished = handle.awaited = True
            self._applying -= 1
            self.release(message)
            self._pump()

        slices = [Slice(region.space, region.start, region.stop) for region in message.regions]
        self.io.apply(shard, message, slices, done)
        return Request("local", [handle], 1, None)

    def release(self, message: Message) -> None:
        for region in message.regions:
            self._flight.check_free(region.space)
        self._mailbox.release(message)

    @property
    def now(self) -> float:
        self._make_dynamic()
        return self.io.now()

    @property
    def rng(self) -> random.Random:
        if self._random is None:
            self._record_nothing()
            self._random = random.Random(self._seed)
        return self._random

    # What a driver calls.

    def begin(self) -> None:
        """Run the coroutine up to its first wait.

        Raises whatever the topology raises, here and from every call below.
        """
        self._coroutine = self._topology.exchange(self, self._bucket)
        self._pump()

    @property
    def recorded(self) -> list[Task] | None:
        """The operations so far, in order, or None if they depended on more than the view."""
        return self._recorded if self._returned else None

    def written(self) -> list[tuple[int, int, Task | None]]:
        """Return ``(start, stop, last writer)`` over the whole bucket, in order."""
        return self._spaces.pieces()

    @property
    def replayable(self) -> bool:
        """Whether ``replay`` may run this round again: it finished and depended on nothing."""
        return self.finished and self._recorded is not None

    def rest(self) -> None:
        """Let go of the driver object, until ``replay`` brings another."""
        del self.io

    def replay(self, io: RoundIO, weight: float) -> None:
        """Run the recorded operations again, with another driver object and weight."""
        assert self._recorded is not None
        self.io = io
        self.finished = False
        self._leaf = leaf(weight if self._reduction is Reduction.MEAN else 1.0)
        for task in self._recorded:
            task.reset(self._leaf)
        self._incomplete.update(self._recorded)
        # While tasks start, bytes that came ahead may already let others go on.
        self._pumping = True
        try:
            for task in self._recorded:
                task.start(io)
            if self._first is None:
                self._first = [task for task in self._recorded if task.first]
            for task in self._first:
                self._mark(task)
        finally:
            self._pumping = False
        self._pump()

    def land(
        self, peer: int, ordinal: int, start: int, count: int, width: int, meta: Meta
    ) -> Slice | memoryview:
        """Return where elements of a frame go; may be fewer than `count`."""
        if is_mail(ordinal):
            return self._mailbox.land(peer, start, count)
        task, source = self._receives[peer, ordinal]
        return task.land(source, start, count, width)

    def arrived(self, peer: int, ordinal: int, count: int, meta: Meta) -> None:
        """Note that the next `count` elements of a message are where ``land`` put them."""
        if is_mail(ordinal):
            self._mailbox.arrived(peer, count)
        else:
            task, source = self._receives[peer, ordinal]
            if task.note_arrived(source, count, meta):
                self._progressed(task, pump=False)
            else:
                self._mark(task)
        self._pump()

    def drained(self, peer: int, ordinal: int, upto: int) -> None:
        """Note that the elements of an outgoing message below `upto` have left memory."""
        if is_mail(ordinal):
            return  # its bytes are nobody else's
        task = self._sends[peer, ordinal]
        if task.note_drained(peer, ordinal, upto):
            self._progressed(task, pump=False)
            self._pump()

    def tick(self) -> None:
        """Look at the clock: a deadline may have passed."""
        self._pump()

    def abort(self, error: BaseException) -> None:
        """End the coroutine by raising `error` where it waits; whatever it does is ignored."""
        coroutine, self._coroutine = self._coroutine, None
        self._queue.clear()
        # One that runs now issued the operation that failed; it is closed where it waits next.
        if coroutine is None or self._resuming:
            return
        try:
            if self._request is not None:
                coroutine.throw(error)
        except BaseException:
            # The error itself, or what the plugin made of it: the round is over either way.
            pass
        _close(coroutine)

    def stuck(self) -> list[str]:
        """Return what is not finished, an operation a line, for people."""
        tasks = sorted(self._incomplete, key=lambda task: (task.move, task.region))
        lines = [f"move {task.move}: {task.describe()}" for task in tasks]
        if self._request is not None and not self._returned:
            waiting = [
                handle.text
                for handle in self._request.handles
                if not handle.tasks and not handle.finished
            ]
            lines += [f"move {self._move}: {text}" for text in waiting]
        return lines

    # Issuing operations.

    def _post(self, operations: Sequence[Operation]) -> tuple[Posted, ...]:
        self._move += 1
        handles = []
        for operation in operations:
            handle = Posted(operation)
            if isinstance(operation, Send):
                what = operation.what
                handle.reads = (what,) if isinstance(what, Region) else what.regions
            elif isinstance(operation, Recv):
                if operation.sources is not ANY:
                    handle.writes = operation.region
            else:
                raise TopologyError(f"{operation!r} is neither a Send nor a Recv")
            handles.append(handle)
        self._flight.check(handles, self._spaces.length_of)
        # All sends read the state before the move, so they are resolved before any receive
        # of the move becomes the writer of its region; and so are own contributions.
        prepared = [self._prepare(operation) for operation in operations]
        receives = []
        for operation, handle, (read, own) in zip(operations, handles, prepared, strict=True):
            if isinstance(operation, Send):
                self._post_send(operation, handle, read)
            else:
                receives.append((operation, handle, own))
        for operation, handle, own in receives:
            self._post_receive(operation, handle, own)
        self._flight.add(handles)
        return tuple(handles)

    def _prepare(self, operation: Operation) -> tuple[Read | None, Read | None]:
        if isinstance(operation, Send):
            what = operation.what
            if not isinstance(what, Region):
                return None, None
            return self._spaces.read(what, self._leaf), None
        if operation.sources is not ANY and self.rank in operation.sources:
            return None, self._spaces.read(operation.region, self._leaf)
        return None, None

    def _post_send(self, operation: Send, handle: Posted, read: Read | None) -> None:
        for peer in operation.to:
            self._check_peer(peer, "send to")
        what = operation.what
        if isinstance(what, Message):
            self._make_dynamic()
            handle.finished = True
            handle.tasks = self._mailbox.send(operation.to, what)
            return
        assert read is not None
        if not operation.to or not len(what):
            for peer in operation.to:
                self._sent[peer] = self._sent.get(peer, 0) + 1
            handle.finished = True
            return
        to = []
        for peer in operation.to:
            ordinal = self._sent.get(peer, 0)
            self._sent[peer] = ordinal + 1
            to.append((peer, ordinal))
        handle.tasks = [self._start_send(what, to, read)]

    def _post_receive(self, operation: Recv, handle: Posted, own: Read | None) -> None:
        if operation.sources is ANY:
            self._make_dynamic()

            def deliver(message: Message) -> None:
                handle.finished = True
                handle.mail = message

            self._mailbox.expect(deliver)
            return
        region = operation.region
        sources: list[Source | Read] = []
        for peer in operation.sources:
            if peer == self.rank:
                if operation.combine is COPY:
                    raise HazardError("a rank cannot copy a region from itself")
                assert own is not None
                sources.append(own)
                continue
            self._check_peer(peer, "receive from")
            ordinal = self._received.get(peer, 0)
            self._received[peer] = ordinal + 1
            sources.append(Source(peer, ordinal))
        if not len(region):
            handle.finished = True
            return
        handle.tasks = [self._start_receive(region, sources, operation.combine)]

    def send_region(self, region: Region, to: Sequence[tuple[int, int]]) -> Task:
        """Send a region of a message under the ordinals given."""
        return self._start_send(region, to, self._spaces.read(region, self._leaf))

    def receive_region(self, region: Region, source: Source) -> Task:
        """Receive a region of a message into leased memory."""
        return self._start_receive(region, [source], COPY)

    def _start_send(self, region: Region, to: Sequence[tuple[int, int]], read: Read) -> Task:
        task = SendTask(region, self._move, to, read)
        for peer, ordinal in to:
            self._sends[peer, ordinal] = task
        self._spaces.reads(task, region.space, read)
        self._track(task, [read], [])
        task.start(self.io)
        return task

    def _start_receive(
        self, region: Region, sources: list[Source | Read], combine: Combine
    ) -> Task:
        reduction, size, exact = self._reduction, self.size, self._exact

        def worth(metas: Sequence[Meta]) -> Fold:
            return join(metas, combine, reduction, size, exact)

        hazards = self._spaces.hazards(region)
        task = RecvTask(
            region,
            self._move,
            sources,
            combine,
            hazards,
            half=self._half,
            wide_width=self._wide_width,
            join=worth,
        )
        reads = []
        for source in sources:
            if isinstance(source, Source):
                self._receives[source.peer, source.ordinal] = (task, source)
            else:
                reads.append(source)
        self._spaces.writes(task, region)
        self._track(task, reads, hazards)
        task.start(self.io)
        return task

    def _make_dynamic(self) -> None:
        """Stop running ahead: the topology looks at what only time tells."""
        self._ahead = False
        self._record_nothing()

    def _record_nothing(self) -> None:
        self._recorded = None
        self._spaces.replayed = False

    def _check_peer(self, peer: int, verb: str) -> None:
        if not 0 <= peer < self.size:
            raise TopologyError(f"{verb} rank {peer}, but the view has ranks 0..{self.size - 1}")
        if peer == self.rank:
            raise TopologyError(f"{verb} itself: rank {peer} may only list itself as a source")

    def _track(
        self, task: Task, reads: Sequence[Read], hazards: Sequence[tuple[Task, int, int]]
    ) -> None:
        """Let a new task follow those that it waits for."""
        for read in reads:
            for _, _, writer in read.parts:
                if writer is not None:
                    writer.followers.append(task)
        for other, _, _ in hazards:
            other.followers.append(task)
        self._incomplete.add(task)
        if self._recorded is not None:
            self._recorded.append(task)
        self._mark(task)

    # Going on.

    def add_space(self, space: int, length: int) -> None:
        """Make a space of `length` elements; the mailbox leases them too."""
        self.io.scratch(space, length)
        self._spaces.add(space, length)

    def drop_space(self, space: int) -> None:
        """Give a leased space back."""
        self._spaces.drop(space)
        self.io.drop(space)

    def next_space(self) -> int:
        """Return a number for another space, never used before."""
        self._last_space += 1
        return self._last_space

    def _mark(self, task: Task) -> None:
        if not task.dirty:
            task.dirty = True
            self._queue.append(task)

    def _progressed(self, task: Task, *, pump: bool = True) -> None:
        for follower in task.followers:
            self._mark(follower)
        if task.complete:
            self._incomplete.discard(task)
        if pump:
            self._pump()

    def _pump(self) -> None:
        """Let tasks and the coroutine go on until both wait for the outside."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while True:
                while self._queue:
                    task = self._queue.popleft()
                    task.dirty = False
                    if task.advance(self.io):
                        self._progressed(task, pump=False)
                if self._returned or not self._resume():
                    break
            if self._returned and not (self._incomplete or self._applying or self.finished):
                self._finish()
        finally:
            self._pumping = False

    def _resume(self) -> bool:
        """Resume the coroutine if what it awaits has come; return whether it ran."""
        if self._coroutine is None:
            return False
        value: Any = None
        request = self._request
        if request is not None:
            ready = [handle for handle in request.handles if handle.done]
            if request.kind == "wait":
                self._make_dynamic()
                late = request.deadline is not None and self.io.now() >= request.deadline
                if len(ready) < request.count and not late:
                    if request.deadline is not None:
                        self.io.wake_at(request.deadline)
                    return False
                value = ready
                for handle in ready:
                    handle.awaited = True
            else:
                if not self._ahead and len(ready) < len(request.handles):
                    return False
                for handle in request.handles:
                    handle.awaited = True
                if request.kind == "move":
                    value = [each.mail for each in request.handles if each.mail is not None]
        self._request = None
        coroutine = self._coroutine
        self._resuming = True
        try:
            awaited = coroutine.send(value)
        except StopIteration:
            self._returned = self._coroutine is not None
            return self._returned
        finally:
            self._resuming = False
        if self._coroutine is None:
            _close(coroutine)
            return False
        if not isinstance(awaited, Request):
            raise TopologyError(
                f"{self._topology.describe()} awaits {awaited!r}; a topology awaits only links"
            )
        self._request = awaited
        return True

    def _finish(self) -> None:
        self._mailbox.close()
        for start, stop, writer in self._spaces.pieces():
            position = start
            for run_stop, area, meta in (
                ((stop, MINE, self._leaf),) if writer is None else writer.runs
            ):
                if run_stop <= position:
                    continue
                run_stop = min(run_stop, stop)
                if position == run_stop:
                    break
                if self._exact and meta.contributions not in (0, self.size):
                    raise IncompleteError(
                        f"{self._topology.describe()} ended while elements {position}.."
                        f"{run_stop} of rank {self.rank} held {meta.contributions} of {self.size} "
                        "contributions"
                    )
                scales, divisor = finish(meta, self._reduction)
                settled = area == RESULT or (area == MINE and self._in_place)
                if not settled or scales is not None or divisor is not None:
                    self.io.fold(
                        Slice(RESULT, position, run_stop),
                        [Slice(area, position, run_stop)],
                        COPY if scales is None and divisor is None else ADD,
                        scales,
                        divisor,
                    )
                position = run_stop
        self.finished = True


def _close(coroutine: Coroutine[Any, Any, None]) -> None:
    try:
        coroutine.close()
    except BaseException:
        # A plugin that goes on awaiting, or fails in its own way, cannot keep the round alive.
        pass
