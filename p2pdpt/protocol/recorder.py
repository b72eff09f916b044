"""Records what a static topology does on all ranks, and orders it for native replay.

Every rank records the operations of *all* ranks, from inputs that are agreed, so all hold the
same plan. Sends and receives are matched, receives are cut so that every source is one slice,
copies are read past to where the data was first written, chains of partial sums are joined into
one fold, and one topological sort over all ranks gives each its order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2pdpt.errors import DeadlockError, IncompleteError, MismatchError, TopologyError
from p2pdpt.protocol.intervals import IntervalMap
from p2pdpt.protocol.plan import Plan, PlanFold, PlanSource, PlanWait, Worth
from p2pdpt.protocol.round import Round
from p2pdpt.protocol.round_io import MINE, RESULT, WIDE, RoundIO
from p2pdpt.protocol.tasks import Read, RecvTask, SendTask, Source
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.topology import ADD, COPY, Combine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from p2pdpt.channel import Meta
    from p2pdpt.dtypes import DType
    from p2pdpt.protocol.round_io import Slice
    from p2pdpt.topology import Bucket, Facts, Kernel, Message, Topology

__all__ = ["Unplannable", "record"]


class Unplannable(TopologyError):
    """The topology cannot be replayed in shared memory; the text says why."""


@dataclass(eq=False, slots=True)
class _Piece:
    """A fold under construction: a range of a receive in which every source is one slice."""

    rank: int
    order: int
    start: int
    length: int
    combine: Combine
    sources: list[tuple[PlanSource, _Piece | None, int]]
    contributions: int
    area: int = RESULT
    finished: bool = False
    readers: list[_Piece] = field(default_factory=list)
    hazards: list[_Piece] = field(default_factory=list)
    number: int = -1
    before: int = 0
    gone: bool = False


def record(
    topology: Topology,
    bucket: Bucket,
    dtype: DType,
    *,
    size: int,
    facts: Facts,
    reduction: Reduction,
    fuse: bool,
) -> Plan:
    """Record what `topology` does on all ranks and order it.

    Args:
        topology, bucket, dtype, size, facts, reduction: as of the round; agreed by all ranks.
        fuse: join chains of partial sums into one fold, which is right to the bit where all
            weights are equal.

    Raises:
        Unplannable: it is not static, or needs memory that is not shared; the asyncio driver
            runs it.
        TopologyError: it broke a rule.
    """
    exact = topology.agreement == "exact" and reduction is not Reduction.NONE
    if size == 1:
        raise Unplannable("there is nobody to share memory with")
    if reduction is not Reduction.NONE and not exact:
        raise Unplannable("its members do not end with the same result")
    rounds = _record_all(topology, bucket, dtype, size, facts, reduction)
    pieces = _cut(rounds, size, exact=exact, half=dtype.half)
    if exact:
        _check_complete(topology, pieces, size, bucket.length)
    if reduction is Reduction.NONE:
        # Whoever keeps its own contribution copies it into its result.
        pieces += _keep_leaves(rounds, pieces, size)
        if any(piece.area == WIDE for piece in pieces):
            raise Unplannable("it leaves sums of half precision that nobody rounds")
    if fuse:
        _fuse(pieces)
    alive = [piece for piece in pieces if not piece.gone]
    for piece in alive:
        _refuse_overlap(piece)
    _find_hazards(alive, size, bucket.length)
    return _assemble(alive, size, fuse, reduction, exact)


class _Silent(RoundIO):
    """A driver that does nothing: what it is asked for is what the round recorded."""

    def open_send(self, peer: int, ordinal: int, length: int) -> None:
        pass

    def push(self, peer: int, ordinal: int, data: Slice, meta: Meta) -> None:
        pass

    def push_bytes(self, peer: int, ordinal: int, payload: bytes) -> None:
        pass

    def open_receive(self, peer: int, ordinal: int, length: int) -> None:
        pass

    def cancel_receive(self, peer: int, ordinal: int) -> None:
        pass

    def grant(self, peer: int, ordinal: int, upto: int) -> None:
        pass

    def fold(
        self,
        out: Slice,
        sources: Sequence[Slice],
        combine: Combine,
        scales: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        pass

    def local(
        self, kernel: Kernel, src: Sequence[Slice], dst: Slice, done: Callable[[], None]
    ) -> None:
        raise Unplannable("it computes with a kernel of its own")

    def apply(
        self, shard: int, message: Message, data: Sequence[Slice], done: Callable[[], None]
    ) -> None:
        raise Unplannable("it applies messages to a store")

    def scratch(self, area: int, length: int) -> None:
        raise Unplannable("it uses scratch memory")

    def drop(self, area: int) -> None:
        pass

    def staging(self, length: int) -> tuple[int, int]:
        return 0, 0

    def release(self, areas: tuple[int, int]) -> None:
        pass

    def now(self) -> float:
        raise Unplannable("it looks at the clock")

    def wake_at(self, when: float) -> None:
        pass


def _record_all(
    topology: Topology,
    bucket: Bucket,
    dtype: DType,
    size: int,
    facts: Facts,
    reduction: Reduction,
) -> list[tuple[Round, list[RecvTask], dict[tuple[int, int], SendTask]]]:
    recorded = []
    for rank in range(size):
        round_ = Round(
            topology,
            bucket,
            dtype,
            _Silent(),
            rank=rank,
            size=size,
            facts=facts,
            reduction=reduction,
        )
        try:
            round_.begin()
            tasks = round_.recorded
            if tasks is None:
                raise Unplannable("what it does depends on more than the view and the bucket")
        finally:
            round_.abort(Unplannable("it was recorded"))
        receives = []
        sends = {}
        for task in tasks:
            if isinstance(task, RecvTask):
                receives.append(task)
            elif isinstance(task, SendTask):
                for address in task.to:
                    sends[address] = task
        recorded.append((round_, receives, sends))
    return recorded


def _cut(
    rounds: list[tuple[Round, list[RecvTask], dict[tuple[int, int], SendTask]]],
    size: int,
    *,
    exact: bool,
    half: bool,
) -> list[_Piece]:
    """Return the receives of all ranks in ranges whose every source is one slice."""
    made: dict[int, list[_Piece]] = {}
    pieces: list[_Piece] = []
    waiting = [
        (rank, order, task)
        for rank, (_, receives, _) in enumerate(rounds)
        for order, task in enumerate(receives)
    ]
    while waiting:
        left = []
        for rank, order, task in waiting:
            reads = []
            for source in task.sources:
                if isinstance(source, Read):
                    reads.append((rank, task.region.start, source))
                    continue
                send = rounds[source.peer][2].get((rank, source.ordinal))
                if send is None:
                    raise MismatchError(
                        f"rank {rank} receives from rank {source.peer}, which does not send"
                    )
                if len(send.region) != len(task.region):
                    raise MismatchError(
                        f"rank {source.peer} sends {len(send.region)} elements to rank {rank}, "
                        f"which expects {len(task.region)}"
                    )
                reads.append((source.peer, send.region.start, send.read))
            writers = {id(w) for _, _, read in reads for _, _, w in read.parts if w is not None}
            if not writers <= made.keys():
                left.append((rank, order, task))
                continue
            made[id(task)] = _pieces_of(rank, order, task, reads, made, size, exact, half)
            pieces += made[id(task)]
        if len(left) == len(waiting):
            stuck = "\n  ".join(f"rank {rank}: {task.describe()}" for rank, _, task in left)
            raise DeadlockError(f"these operations wait for each other:\n  {stuck}")
        waiting = left
    received = {
        (rank, source.peer, source.ordinal)
        for rank, (_, receives, _) in enumerate(rounds)
        for task in receives
        for source in task.sources
        if isinstance(source, Source)
    }
    for rank, (_, _, sends) in enumerate(rounds):
        for peer, ordinal in sends:
            if (peer, rank, ordinal) not in received:
                raise MismatchError(f"rank {rank} sends to rank {peer}, which does not receive")
    return pieces


def _pieces_of(
    rank: int,
    order: int,
    task: RecvTask,
    reads: list[tuple[int, int, Read]],
    made: dict[int, list[_Piece]],
    size: int,
    exact: bool,
    half: bool,
) -> list[_Piece]:
    # For each source: (stop, slice, writer's piece, offset in it), all as offsets in the task.
    runs: list[list[tuple[int, PlanSource, _Piece | None, int]]] = []
    for owner, base, read in reads:
        found: list[tuple[int, PlanSource, _Piece | None, int]] = []
        for start, stop, task_before in read.parts:
            if task_before is None:
                found.append((stop - base, PlanSource(owner, MINE, start), None, 0))
                continue
            for piece in made[id(task_before)]:
                low, high = max(start, piece.start), min(stop, piece.start + piece.length)
                if low < high:
                    found.append((high - base, *_origin(owner, piece, low)))
        runs.append(found)
    result = []
    done, length = 0, len(task.region)
    places = [0] * len(runs)
    begins = [0] * len(runs)
    while done < length:
        stop = min(run[places[index]][0] for index, run in enumerate(runs))
        sources: list[tuple[PlanSource, _Piece | None, int]] = []
        contributions = 0
        for index, run in enumerate(runs):
            end, source, writer, offset = run[places[index]]
            skip = done - begins[index]
            sources.append((source._replace(start=source.start + skip), writer, offset + skip))
            held = 1 << source.rank if writer is None else writer.contributions
            if exact and held & contributions:
                raise TopologyError("a fold counts a contribution twice")
            contributions |= held
            if end == stop:
                places[index] += 1
                begins[index] = stop
        made_piece = _Piece(
            rank,
            order,
            task.region.start + done,
            stop - done,
            task.combine,
            sources,
            contributions,
        )
        complete = contributions == (1 << size) - 1
        made_piece.finished = exact and complete
        if half and not complete and task.combine is ADD:
            made_piece.area = WIDE
        elif half and task.combine is COPY and sources[0][0].area == WIDE:
            made_piece.area = WIDE
        elif half and task.combine not in (ADD, COPY) and not complete:
            made_piece.area = WIDE
        for _, writer, _ in sources:
            if writer is not None:
                writer.readers.append(made_piece)
        result.append(made_piece)
        done = stop
    return result


def _origin(rank: int, piece: _Piece, start: int) -> tuple[PlanSource, _Piece | None, int]:
    """Return where an element of a piece was first written: copies are read past."""
    if piece.combine is not COPY:
        return PlanSource(rank, piece.area, start), piece, start - piece.start
    source, writer, offset = piece.sources[0]
    skip = start - piece.start
    return source._replace(start=source.start + skip), writer, offset + skip


def _check_complete(topology: Topology, pieces: list[_Piece], size: int, length: int) -> None:
    """Refuse plans after which a result would lack contributions."""
    for rank in range(size):
        last: IntervalMap[_Piece | None] = IntervalMap(length, None)
        for piece in sorted(pieces, key=lambda each: each.order):
            if piece.rank == rank:
                last.assign(piece.start, piece.start + piece.length, piece)
        for start, stop, writer in last.pieces():
            held = 1 if writer is None else writer.contributions.bit_count()
            if start < stop and held < size:
                raise IncompleteError(
                    f"{topology.describe()} ends while elements {start}..{stop} of rank {rank} "
                    f"hold {held} of {size} contributions"
                )


def _keep_leaves(
    rounds: list[tuple[Round, list[RecvTask], dict[tuple[int, int], SendTask]]],
    pieces: list[_Piece],
    size: int,
) -> list[_Piece]:
    kept = []
    for rank in range(size):
        for start, stop, writer in rounds[rank][0].written():
            if writer is None and start < stop:
                source = PlanSource(rank, MINE, start)
                order = len(rounds[rank][1])
                kept.append(
                    _Piece(rank, order, start, stop - start, COPY, [(source, None, 0)], 1 << rank)
                )
    return kept


def _fuse(pieces: list[_Piece]) -> None:
    """Turn a partial sum that one fold continues into the beginning of that fold.

    The partial must read contributions only, be read by that fold alone and whole, and be its
    first source; its own output is then never needed, because the results of an exact topology
    are written later.
    """
    for piece in pieces:
        while piece.combine is ADD:
            source, first, offset = piece.sources[0]
            if (
                first is None
                or offset
                or first.combine is not ADD
                or first.finished
                or first.length != piece.length
                or first.readers != [piece]
                or any(before is not None for _, before, _ in first.sources)
            ):
                break
            del source
            piece.sources[:1] = first.sources
            first.gone = True


def _refuse_overlap(piece: _Piece) -> None:
    """Refuse a fold that would overwrite what it has yet to read."""
    for source, _, _ in piece.sources:
        apart = abs(source.start - piece.start)
        same = source.rank == piece.rank and source.area == piece.area
        if same and 0 < apart < piece.length:
            raise Unplannable("it moves a region over a part of itself")


def _find_hazards(pieces: list[_Piece], size: int, length: int) -> None:
    """Let each write wait for those who read what it overwrites."""
    for area in (RESULT, WIDE):
        for rank in range(size):
            latest: IntervalMap[_Piece | None] = IntervalMap(length, None)
            mine = [each for each in pieces if each.rank == rank and each.area == area]
            for piece in sorted(mine, key=lambda each: (each.order, each.start)):
                stop = piece.start + piece.length
                for low, high, earlier in latest.lookup(piece.start, stop):
                    if earlier is None:
                        continue
                    piece.hazards.append(earlier)
                    for reader in earlier.readers:
                        if (
                            not reader.gone
                            and reader is not piece
                            and _reads(reader, earlier, low, high)
                        ):
                            piece.hazards.append(reader)
                latest.assign(piece.start, stop, piece)


def _reads(reader: _Piece, earlier: _Piece, low: int, high: int) -> bool:
    for source, piece, _ in reader.sources:
        if piece is earlier and source.start < high and low < source.start + reader.length:
            return True
    return False


def _assemble(
    pieces: list[_Piece], size: int, fused: bool, reduction: Reduction, exact: bool
) -> Plan:
    ordered = _sort(pieces)
    totals = [0] * size
    for number, piece in enumerate(ordered):
        piece.number = number
        piece.before = totals[piece.rank]
        totals[piece.rank] += piece.length
    folds: list[list[PlanFold]] = [[] for _ in range(size)]
    worth = []
    for piece in ordered:
        needs: dict[int, tuple[int, bool]] = {}

        def need(
            rank: int,
            upto: int,
            slope: bool,
            needs: dict[int, tuple[int, bool]] = needs,
            piece: _Piece = piece,
        ) -> None:
            if rank == piece.rank:
                return  # the own folds run in order
            old, old_slope = needs.get(rank, (0, False))
            # Two needs of one rank: the stricter; a slope and a constant become constant.
            end, old_end = (
                upto + (piece.length if slope else 0),
                old + (piece.length if old_slope else 0),
            )
            if slope == old_slope or not old:
                needs[rank] = max((upto, slope), (old, old_slope))
            else:
                needs[rank] = (max(end, old_end), False)

        for source, writer, offset in piece.sources:
            if writer is None:
                need(source.rank, 0, False)
            else:
                need(writer.rank, writer.before + offset, True)
        for hazard in piece.hazards:
            need(hazard.rank, hazard.before + hazard.length, False)
        folds[piece.rank].append(
            PlanFold(
                piece.area,
                piece.start,
                piece.length,
                piece.combine,
                tuple(source for source, _, _ in piece.sources),
                tuple(
                    PlanWait(rank, upto, slope)
                    for rank, (upto, slope) in sorted(needs.items())
                    if upto or slope
                ),
                piece.number,
                any(reader.rank != piece.rank for reader in piece.readers),
            )
        )
        worth.append(
            Worth(
                piece.combine,
                tuple(
                    (True, source.rank) if writer is None else (False, writer.number)
                    for source, writer, _ in piece.sources
                ),
            )
        )
    return Plan(
        tuple(tuple(each) for each in folds),
        tuple(totals),
        fused,
        reduction,
        exact,
        tuple(worth),
    )


def _sort(pieces: list[_Piece]) -> list[_Piece]:
    """Return all folds so that each comes after what it waits for."""
    after: dict[int, list[_Piece]] = {id(piece): [] for piece in pieces}
    missing: dict[int, int] = {}
    for piece in pieces:
        waits = {
            id(each): each
            for each in (*(w for _, w, _ in piece.sources if w is not None), *piece.hazards)
            if each is not piece
        }
        missing[id(piece)] = len(waits)
        for each in waits.values():
            after[id(each)].append(piece)
    ready = [
        (piece.order, piece.start, piece.rank, index, piece)
        for index, piece in enumerate(pieces)
        if not missing[id(piece)]
    ]
    indices = {id(piece): index for index, piece in enumerate(pieces)}
    heapq.heapify(ready)
    ordered = []
    while ready:
        *_, piece = heapq.heappop(ready)
        ordered.append(piece)
        for each in after[id(piece)]:
            missing[id(each)] -= 1
            if not missing[id(each)]:
                heapq.heappush(ready, (each.order, each.start, each.rank, indices[id(each)], each))
    if len(ordered) < len(pieces):
        raise Unplannable("its members overwrite what they read from each other in one move")
    return ordered
