"""Programs of operations, to prove drivers with.

A program is what a topology would issue: for each rank, moves of matched sends and receives.
:func:`~p2pdpt.testing.random_programs.random_program` makes them and
:func:`~p2pdpt.testing.reference.run_reference` says what they compute; any driver, in any order,
must give the same bits::

    program = random_program(random.Random(seed), size=3, length=20)
    outcome = simulate(Scripted(program), contributions, reduction=Reduction.SUM)
    expected = run_reference(program, contributions, reduction=Reduction.SUM)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from p2pdpt.errors import DeadlockError, HazardError, MismatchError
from p2pdpt.topology import Operation, Region, Send, Topology

if TYPE_CHECKING:
    from p2pdpt.topology import Bucket, Links

__all__ = ["AllReduce", "Local", "Move", "Program", "Scripted", "check", "thrice", "touched"]


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


@dataclass(frozen=True)
class AllReduce(Scripted):
    """Issues a program after which every rank holds every contribution once."""

    agreement: ClassVar[Literal["exact", "eventual"]] = "exact"


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
            reads, writes = touched(rank, move)
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


def touched(rank: int, move: Move) -> tuple[list[Region], list[Region]]:
    """Return the regions that a move reads and those it writes."""
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
