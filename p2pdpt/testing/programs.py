"""Random programs, and what they must compute: the proof of a driver.

A program is what a topology would issue: for each rank, moves of matched sends and receives over
random regions, with overlapping reads, scratch, kernels, several sources in any order, and moves
cut differently on every rank. :func:`reference` runs one as the contract reads, one rank after
the other in numpy; any driver, in any schedule, must give the same bits::

    program = random_program(random.Random(seed), size=3, length=20)
    outcome = simulate(Scripted(program), contributions, reduction=Reduction.SUM)
    expected = reference(program, contributions, reduction=Reduction.SUM)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from p2pdpt.dtypes import dtype_named
from p2pdpt.errors import DeadlockError, HazardError, MismatchError
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.topology import ADD, COPY, MAX, MIN, PROD, Operation, Recv, Region, Send, Topology

if TYPE_CHECKING:
    import random

    from p2pdpt.dtypes import DType
    from p2pdpt.topology import Bucket, Combine, Links

__all__ = ["Local", "Program", "Scripted", "check", "random_program", "reference"]


@dataclass(frozen=True)
class Local:
    """A kernel that writes three times one region into another."""

    src: Region
    dst: Region


Move = tuple[Operation, ...] | Local


@dataclass(frozen=True)
class Program:
    """What every rank issues.

    Attributes:
        length: elements of the bucket.
        scratch: lengths of the spaces 1, 2, ... of every rank.
        moves: for each rank, its moves in order.
    """

    length: int
    scratch: tuple[int, ...]
    moves: tuple[tuple[Move, ...], ...]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.moves)


@dataclass(frozen=True)
class Scripted(Topology):
    """Issues a program."""

    static: ClassVar[bool] = True
    agreement: ClassVar[Literal["exact", "eventual"]] = "eventual"
    program: Program

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        """Issue this rank's moves."""
        for length in self.program.scratch:
            links.scratch(length)
        for move in self.program.moves[links.rank]:
            if isinstance(move, Local):
                await links.local(thrice, move.src, move.dst)
            else:
                await links.move(*move)


def thrice(dst: Any, src: Any) -> None:
    """Write three times `src` to `dst`."""
    with np.errstate(all="ignore"):
        np.multiply(src, 3, out=dst)


def check(program: Program) -> None:
    """Refuse a program that breaks a rule of the contract.

    The operations of one move complete together, so moves that meet are one node of a graph,
    and a rank's moves follow each other; this graph must have no cycle.

    Raises:
        HazardError: two writes of one element in one move, or scratch read before it is written.
        MismatchError: a send and its receive differ in length, or one is missing.
        DeadlockError: moves wait for each other in a cycle.
    """
    meets: dict[tuple[int, int], list[tuple[tuple[int, int], int]]] = {}
    for rank, moves in enumerate(program.moves):
        written = [np.zeros(length, bool) for length in (0, *program.scratch)]
        for number, move in enumerate(moves):
            reads, writes = _touched(rank, move)
            for region in reads:
                if region.space and not written[region.space][region.start : region.stop].all():
                    raise HazardError(f"rank {rank} reads {region}, which was never written")
            for index, region in enumerate(writes):
                for other in writes[:index]:
                    if region.space == other.space and max(region.start, other.start) < min(
                        region.stop, other.stop
                    ):
                        raise HazardError(f"move {number} of rank {rank} writes {region} twice")
                if region.space:
                    written[region.space][region.start : region.stop] = True
            for operation in () if isinstance(move, Local) else move:
                if isinstance(operation, Send):
                    assert isinstance(operation.what, Region)
                    for peer in operation.to:
                        place = ((rank, number), len(operation.what))
                        meets.setdefault((rank, peer), []).append(place)
    _check_meetings(program, meets)


def _touched(rank: int, move: Move) -> tuple[list[Region], list[Region]]:
    if isinstance(move, Local):
        return [move.src], [move.dst]
    reads, writes = [], []
    for operation in move:
        if isinstance(operation, Send):
            assert isinstance(operation.what, Region)
            reads.append(operation.what)
        else:
            assert isinstance(operation.sources, tuple)
            writes.append(operation.region)
            if rank in operation.sources:
                reads.append(operation.region)
    return reads, writes


def _check_meetings(
    program: Program, meets: dict[tuple[int, int], list[tuple[tuple[int, int], int]]]
) -> None:
    node = {
        (rank, number): (rank, number)
        for rank, moves in enumerate(program.moves)
        for number in range(len(moves))
    }

    def find(place: tuple[int, int]) -> tuple[int, int]:
        while node[place] != place:
            place = node[place]
        return place

    taken: dict[tuple[int, int], int] = {}
    for rank, moves in enumerate(program.moves):
        for number, move in enumerate(moves):
            for operation in () if isinstance(move, Local) else move:
                if isinstance(operation, Send):
                    continue
                assert isinstance(operation.sources, tuple)
                for peer in operation.sources:
                    if peer == rank:
                        continue
                    index = taken.get((peer, rank), 0)
                    taken[peer, rank] = index + 1
                    sent = meets.get((peer, rank), [])
                    if index >= len(sent) or sent[index][1] != len(operation.region):
                        raise MismatchError(f"receive {index} of rank {rank} from rank {peer}")
                    node[find((rank, number))] = find(sent[index][0])
    for pair, sent in meets.items():
        if taken.get(pair, 0) != len(sent):
            raise MismatchError(f"rank {pair[0]} sends more than rank {pair[1]} receives")
    waits: dict[tuple[int, int], set[tuple[int, int]]] = {find(place): set() for place in node}
    for rank, moves in enumerate(program.moves):
        for number in range(1, len(moves)):
            waits[find((rank, number))].add(find((rank, number - 1)))
    while free := [place for place, before in waits.items() if not before]:
        for place in free:
            del waits[place]
        for before in waits.values():
            before.difference_update(free)
    if waits:
        raise DeadlockError(f"moves wait for each other: {sorted(waits)}")


# Making programs.


class _Maker:
    """Collects phases: in each, every rank has the operations of one move."""

    def __init__(self, chance: random.Random, size: int, length: int) -> None:
        self.chance, self.size = chance, size
        self.lengths = [
            length,
            *(chance.randint(1, length + 2) for _ in range(chance.randint(0, 2))),
        ]
        self.phases: list[list[list[Operation] | Local]] = []
        self.written = [
            [
                np.zeros(n, bool) if space else np.ones(n, bool)
                for space, n in enumerate(self.lengths)
            ]
            for _ in range(size)
        ]

    def region(self, rank: int, length: int | None = None, *, read: bool) -> Region | None:
        """Draw a region, for a read one that holds something; None if none was found."""
        chance = self.chance
        for _ in range(6):
            space = chance.randrange(len(self.lengths)) if chance.random() < 0.4 else 0
            whole = self.lengths[space]
            count = chance.randint(0, whole) if length is None else length
            if count > whole:
                continue
            start = chance.choice((0, chance.randint(0, whole - count)))
            if not read or self.written[rank][space][start : start + count].all():
                return Region(start, start + count, space)
        return None

    def add(self, phase: list[list[Operation] | Local]) -> None:
        """Add a phase, and remember what it writes."""
        self.phases.append(phase)
        for rank, move in enumerate(phase):
            for region in _touched(rank, move if isinstance(move, Local) else tuple(move))[1]:
                self.written[rank][region.space][region.start : region.stop] = True

    def fold(self) -> None:
        """One rank receives from several, itself perhaps among them."""
        chance = self.chance
        rank = chance.randrange(self.size)
        region = self.region(rank, read=False)
        combine = chance.choice((COPY, ADD, ADD, ADD, MIN, MAX, PROD))
        if region is None:
            return
        phase: list[list[Operation] | Local] = [[] for _ in range(self.size)]
        ranks = list(range(self.size))
        chance.shuffle(ranks)
        sources = []
        for peer in ranks[: chance.randint(1, self.size)]:
            if peer == rank:
                if combine is not COPY and self._holds(rank, region):
                    sources.append(peer)
                continue
            given = self.region(peer, len(region), read=True)
            if given is not None and (combine is not COPY or not sources):
                sources.append(peer)
                _operations(phase, peer).append(Send(rank, given))
        if sources:
            _operations(phase, rank).append(Recv(sources, region, combine))
            self.add(phase)

    def spread(self) -> None:
        """One rank sends one region to several."""
        chance = self.chance
        rank = chance.randrange(self.size)
        given = self.region(rank, read=True)
        peers = [peer for peer in range(self.size) if peer != rank and chance.random() < 0.7]
        if given is None or not peers:
            return
        phase: list[list[Operation] | Local] = [[] for _ in range(self.size)]
        taken = []
        for peer in peers:
            region = self.region(peer, len(given), read=False)
            if region is not None:
                taken.append(peer)
                own = self._holds(peer, region) and chance.random() < 0.4
                sources = chance.choice(((rank, peer), (peer, rank))) if own else (rank,)
                combine = ADD if own else COPY
                _operations(phase, peer).append(Recv(sources, region, combine))
        if taken:
            _operations(phase, rank).append(Send(taken, given))
            self.add(phase)

    def rotate(self) -> None:
        """Several ranks send to each other in a circle, from where they receive or nearby."""
        chance = self.chance
        ranks = list(range(self.size))
        chance.shuffle(ranks)
        ranks = ranks[: chance.randint(2, max(2, self.size))]
        if len(ranks) > self.size:
            return
        whole = self.lengths[0]
        count = chance.randint(0, whole)
        phase: list[list[Operation] | Local] = [[] for _ in range(self.size)]
        for rank, after, before in zip(
            ranks, [*ranks[1:], ranks[0]], [ranks[-1], *ranks[:-1]], strict=True
        ):
            start = chance.randint(0, whole - count)
            other = start if chance.random() < 0.6 else chance.randint(0, whole - count)
            own = chance.random() < 0.6
            sources = tuple(sorted((rank, before))) if own else (before,)
            operations = _operations(phase, rank)
            operations.append(Send(after, Region(start, start + count)))
            operations.append(Recv(sources, Region(other, other + count), ADD if own else COPY))
        self.add(phase)

    def compute(self) -> None:
        """One rank runs a kernel."""
        rank = self.chance.randrange(self.size)
        src = self.region(rank, read=True)
        dst = None if src is None else self.region(rank, len(src), read=False)
        if src is None or dst is None or src.space == dst.space:
            return
        phase: list[list[Operation] | Local] = [[] for _ in range(self.size)]
        phase[rank] = Local(src, dst)
        self.add(phase)

    def _holds(self, rank: int, region: Region) -> bool:
        return bool(self.written[rank][region.space][region.start : region.stop].all())


def _operations(phase: list[list[Operation] | Local], rank: int) -> list[Operation]:
    found = phase[rank]
    assert isinstance(found, list)
    return found


def random_program(chance: random.Random, size: int, length: int, phases: int = 8) -> Program:
    """Make a program that keeps every rule; see :func:`check`.

    Args:
        chance: decides.
        size: ranks.
        length: elements of the bucket.
        phases: at most so many groups of matched operations.
    """
    while True:
        program = _attempt(chance, size, length, phases)
        if program is not None:
            return program


def _attempt(chance: random.Random, size: int, length: int, phases: int) -> Program | None:
    maker = _Maker(chance, size, length)
    kinds = [maker.fold, maker.fold, maker.compute]
    if size > 1:
        kinds += [maker.spread, maker.rotate, maker.rotate]
    for _ in range(phases):
        chance.choice(kinds)()
    moves: list[list[Move]] = [[] for _ in range(size)]
    for phase in maker.phases:
        for rank, listed in enumerate(phase):
            if isinstance(listed, Local):
                moves[rank].append(listed)
            elif listed:
                chance.shuffle(listed)
                moves[rank].append(tuple(listed))
    found = _sound(maker, moves)
    for _ in range(3 * phases if found is not None else 0):
        changed = list(moves)
        rank = chance.randrange(size)
        changed[rank] = _recut(chance, changed[rank])
        program = _sound(maker, changed)
        if program is not None:
            moves, found = changed, program
    return found


def _sound(maker: _Maker, moves: list[list[Move]]) -> Program | None:
    length, *scratch = maker.lengths
    program = Program(length, tuple(scratch), tuple(tuple(each) for each in moves))
    try:
        check(program)
        # A kernel may read only elements that hold the same contributions, joined alike.
        for weights in ([2.0] * program.size, [2.0 ** (1 + rank) for rank in range(program.size)]):
            reference(program, [np.zeros(length, np.float32)] * program.size, weights=weights)
    except (HazardError, DeadlockError):
        return None
    return program


def _recut(chance: random.Random, moves: list[Move]) -> list[Move]:
    """Split a move, or join two that follow each other."""
    if not moves:
        return moves
    index = chance.randrange(len(moves))
    move, after = moves[index], moves[index + 1 : index + 2]
    if isinstance(move, Local):
        return moves
    if after and not isinstance(after[0], Local) and chance.random() < 0.7:
        return [*moves[:index], (*move, *after[0]), *moves[index + 2 :]]
    middle = chance.randint(0, len(move))
    parts = [part for part in (move[:middle], move[middle:]) if part]
    return [*moves[:index], *parts, *moves[index + 1 :]]


# What a program computes.


@dataclass(frozen=True)
class _Values:
    """Elements in the wide type, and for each its scale, total weight and contributions."""

    data: Any
    worth: Any

    def part(self, region: Region) -> _Values:
        """Return a copy of a region."""
        cut = slice(region.start, region.stop)
        return _Values(self.data[cut].copy(), self.worth[cut].copy())

    def write(self, region: Region, values: _Values) -> None:
        """Overwrite a region."""
        self.data[region.start : region.stop] = values.data
        self.worth[region.start : region.stop] = values.worth


def reference(
    program: Program,
    contributions: Sequence[Any],
    *,
    dtype: str | None = None,
    reduction: Reduction = Reduction.MEAN,
    weights: Sequence[float] | None = None,
) -> list[Any]:
    """Return what every rank must end with.

    Sends read the state before their move, and so do own contributions; folds go in the listed
    order; half precision is summed in float32 and rounded at the end.

    Args:
        program: which keeps the rules.
        contributions: for each rank, shape ``(length,)``, in the storage of `dtype`.
        dtype: the element type, if numpy's name does not tell.
        reduction: what becomes of the result.
        weights: of the contributions, for ``MEAN``.

    Raises:
        HazardError: a kernel reads elements that hold different contributions.
        DeadlockError: no rank can go on, however much is kept of what was sent.
    """
    element = dtype_named(dtype or str(contributions[0].dtype))
    ranks = []
    for rank, mine in enumerate(contributions):
        weight = 1.0 if weights is None or reduction is not Reduction.MEAN else weights[rank]
        worth = np.tile([weight, weight, 1.0], (len(mine), 1))
        spaces = [_Values(_widened(mine, element), worth)]
        for length in program.scratch:
            spaces.append(_Values(np.zeros(length, element.wide), np.zeros((length, 3))))
        ranks.append(_Rank(rank, program.moves[rank], spaces))
    sent: dict[tuple[int, int], deque[_Values]] = {}
    with np.errstate(all="ignore"):
        while any(not rank.ended for rank in ranks):
            if not any([rank.go_on(sent) for rank in ranks]):
                raise DeadlockError("no rank can go on")
        return [_finished(rank.spaces[0], element, reduction) for rank in ranks]


class _Rank:
    """One rank's place in its program."""

    def __init__(self, rank: int, moves: tuple[Move, ...], spaces: list[_Values]) -> None:
        self.rank, self.moves, self.spaces = rank, moves, spaces
        self.next = 0
        self._own: list[_Values] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.next == len(self.moves)

    def go_on(self, sent: dict[tuple[int, int], deque[_Values]]) -> bool:
        """Issue the next move, or complete it; return whether anything was done."""
        if self.ended:
            return False
        move = self.moves[self.next]
        if isinstance(move, Local):
            self._compute(move)
            self.next += 1
            return True
        receives = [each for each in move if isinstance(each, Recv)]
        if self._own is None:
            self._own = [self._part(each.region) for each in receives]
            for each in move:
                if isinstance(each, Send):
                    assert isinstance(each.what, Region)
                    for peer in each.to:
                        queue = sent.setdefault((self.rank, peer), deque())
                        queue.append(self._part(each.what))
            return True
        needed: dict[int, int] = {}
        for receive in receives:
            for peer in self._sources(receive):
                needed[peer] = needed.get(peer, 0) + (peer != self.rank)
        if any(len(sent.get((peer, self.rank), ())) < count for peer, count in needed.items()):
            return False
        for receive, own in zip(receives, self._own, strict=True):
            values = [
                own if peer == self.rank else sent[peer, self.rank].popleft()
                for peer in self._sources(receive)
            ]
            self.spaces[receive.region.space].write(
                receive.region, _folded(values, receive.combine)
            )
        self._own = None
        self.next += 1
        return True

    def _sources(self, receive: Recv) -> tuple[int, ...]:
        assert isinstance(receive.sources, tuple)
        return receive.sources

    def _part(self, region: Region) -> _Values:
        return self.spaces[region.space].part(region)

    def _compute(self, move: Local) -> None:
        values = self._part(move.src)
        if len(np.unique(values.worth, axis=0)) > 1:
            raise HazardError(f"a kernel reads {move.src}, whose elements differ in worth")
        thrice(values.data, values.data)
        self.spaces[move.dst.space].write(move.dst, values)


def _folded(sources: Sequence[_Values], combine: Combine) -> _Values:
    if combine is COPY:
        return sources[0]
    data = np.empty_like(sources[0].data)
    worth = np.empty_like(sources[0].worth)
    every = np.concatenate([source.worth for source in sources], axis=1)
    # Elements whose sources are worth the same are computed together.
    start = 0
    for stop in range(1, len(data) + 1):
        if stop == len(data) or (every[stop] != every[start]).any():
            terms = [source.data[start:stop] for source in sources]
            metas = [source.worth[start] for source in sources]
            data[start:stop], scale = _joined(terms, [meta[0] for meta in metas], combine)
            total = sum(float(meta[1]) for meta in metas)
            worth[start:stop] = (scale, total, sum(meta[2] for meta in metas))
            start = stop
    return _Values(data, worth)


def _joined(terms: list[Any], scales: list[float], combine: Combine) -> tuple[Any, float]:
    scale = scales[0] if combine is ADD else 1.0
    if combine is ADD and any(each != scale for each in scales):
        scale = 1.0
        # What counts nothing is not read: it may be anything.
        terms = [
            term * term.dtype.type(factor)
            for term, factor in zip(terms, scales, strict=True)
            if factor
        ]
    result = terms[0].copy()
    for term in terms[1:]:
        if combine is ADD:
            result = result + term
        elif combine is PROD:
            result = result * term
        else:
            less = term < result if combine is MIN else term > result
            result = np.where(less | (term != term), term, result)
    return result, scale


def _finished(values: _Values, element: DType, reduction: Reduction) -> Any:
    data = values.data.copy()
    if reduction is Reduction.MEAN:
        for index, (scale, total, _) in enumerate(values.worth):
            if total == 0.0:
                data[index] = 0
            elif total / scale != 1.0:
                data[index : index + 1] /= data.dtype.type(total / scale)
    return _narrowed(data, element)


def _widened(stored: Any, element: DType) -> Any:
    if element.name == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(element.wide)


def _narrowed(wide: Any, element: DType) -> Any:
    """Round to nearest, ties to even; what is not a number stays so."""
    if element.name != "bfloat16":
        return wide.astype(element.storage)
    bits = wide.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), 0x7FC0, rounded).astype(np.uint16)
