"""Random programs: overlapping reads, scratch, kernels, sources in any order, moves cut anyhow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from p2pdpt.errors import DeadlockError, HazardError
from p2pdpt.testing.programs import Local, Program, check, touched
from p2pdpt.testing.reference import run_reference
from p2pdpt.topology import ADD, COPY, MAX, MIN, PROD, Operation, Recv, Region, Send

if TYPE_CHECKING:
    import random

    from p2pdpt.testing.programs import Move

__all__ = ["random_all_reduce", "random_program"]


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
            if isinstance(move, list):
                self.chance.shuffle(move)
            for region in touched(rank, move if isinstance(move, Local) else tuple(move))[1]:
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
        phase[rank] = kernel = Local(src, dst)
        moves = self.moves()
        moves[rank].append(kernel)
        if _sound(self, moves) is not None:
            self.add(phase)

    def moves(self) -> list[list[Move]]:
        """Return the moves of each rank, one for each phase it takes part in."""
        moves: list[list[Move]] = [[] for _ in range(self.size)]
        for phase in self.phases:
            for rank, listed in enumerate(phase):
                if isinstance(listed, Local):
                    moves[rank].append(listed)
                elif listed:
                    moves[rank].append(tuple(listed))
        return moves

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
    maker = _Maker(chance, size, length)
    kinds = [maker.fold, maker.fold, maker.compute]
    if size > 1:
        kinds += [maker.spread, maker.rotate, maker.rotate]
    for _ in range(phases):
        chance.choice(kinds)()
    moves = maker.moves()
    found = _sound(maker, moves)
    assert found is not None
    for _ in range(3 * phases):
        changed = list(moves)
        rank = chance.randrange(size)
        changed[rank] = _recut(chance, changed[rank])
        program = _sound(maker, changed)
        if program is not None:
            moves, found = changed, program
    return found


def random_all_reduce(chance: random.Random, size: int, length: int) -> Program:
    """Make a program for :class:`~p2pdpt.testing.programs.AllReduce`.

    Each of some chunks is added up along a tree of its own, in an order of its own, by ranks
    whose contribution is inside or was given away; then it spreads along another tree. The
    chunks' operations are interleaved, and share moves where nothing changes by it.

    Args:
        chance: decides.
        size: ranks.
        length: elements of the bucket.
    """
    cuts = sorted(chance.randint(0, length) for _ in range(chance.randint(0, 3)))
    queues = [
        _tree(chance, size, Region(start, stop))
        for start, stop in zip([0, *cuts], [*cuts, length], strict=True)
    ]
    moves: list[list[Move]] = [[] for _ in range(size)]
    while any(queues):
        queue = chance.choice([queue for queue in queues if queue])
        for rank, operations in queue.pop(0).items():
            moves[rank].append(operations)
    found = Program(length, (), tuple(tuple(each) for each in moves))
    check(found)
    for _ in range(4 * size):
        rank = chance.randrange(size)
        joined = _joined(chance, list(found.moves[rank]))
        changed = Program(
            length, (), (*found.moves[:rank], tuple(joined), *found.moves[rank + 1 :])
        )
        try:
            check(changed)
        except (HazardError, DeadlockError):
            continue
        found = changed
    return found


def _tree(
    chance: random.Random, size: int, region: Region
) -> list[dict[int, tuple[Operation, ...]]]:
    """Return the phases that add up one chunk and spread it."""
    phases: list[dict[int, tuple[Operation, ...]]] = []
    holders, spent = list(range(size)), list[int]()
    while len(holders) > 1:
        group = chance.sample(holders, chance.randint(2, len(holders)))
        to = chance.choice(spent if spent and chance.random() < 0.3 else group)
        phase: dict[int, tuple[Operation, ...]] = {
            rank: (Send(to, region),) for rank in group if rank != to
        }
        phase[to] = (Recv(chance.sample(group, len(group)), region, ADD),)
        phases.append(phase)
        spent = [rank for rank in (*spent, *group) if rank != to]
        holders = [*(rank for rank in holders if rank not in group), to]
    needing = [rank for rank in range(size) if rank not in holders]
    while needing:
        peer = chance.choice(holders)
        group = chance.sample(needing, chance.randint(1, len(needing)))
        phase = {rank: (Recv(peer, region),) for rank in group}
        phase[peer] = (Send(group, region),)
        phases.append(phase)
        holders += group
        needing = [rank for rank in needing if rank not in group]
    return phases


def _joined(chance: random.Random, moves: list[Move]) -> list[Move]:
    """Join two moves of different chunks that follow each other."""
    if len(moves) < 2:
        return moves
    index = chance.randrange(len(moves) - 1)
    one, other = moves[index], moves[index + 1]
    assert not isinstance(one, Local)
    assert not isinstance(other, Local)
    chunks = [{_region(each) for each in move} for move in (one, other)]
    if chunks[0] & chunks[1]:
        return moves
    return [*moves[:index], (*one, *other), *moves[index + 2 :]]


def _region(operation: Operation) -> Region:
    region = operation.what if isinstance(operation, Send) else operation.region
    assert isinstance(region, Region)
    return region


def _sound(maker: _Maker, moves: list[list[Move]]) -> Program | None:
    length, *scratch = maker.lengths
    program = Program(length, tuple(scratch), tuple(tuple(each) for each in moves))
    try:
        check(program)
        # A kernel may read only elements that hold the same contributions, joined alike.
        for weights in ([2.0] * program.size, [2.0 ** (1 + rank) for rank in range(program.size)]):
            run_reference(program, [np.zeros(length, np.float32)] * program.size, weights=weights)
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
