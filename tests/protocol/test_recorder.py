"""Plans recorded from topologies give the simulator's bits when their folds are replayed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from p2pdpt import kernels
from p2pdpt.dtypes import DTYPES, DType
from p2pdpt.errors import DeadlockError, IncompleteError, MismatchError, TopologyError
from p2pdpt.protocol.plan import Plan, PlanSource, PlanWait
from p2pdpt.protocol.recorder import Unplannable, record
from p2pdpt.protocol.round_io import MINE, RESULT, WIDE
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.runtime.drivers.collectives import Broadcast
from p2pdpt.testing.programs import AllReduce
from p2pdpt.testing.random_programs import random_all_reduce
from p2pdpt.testing.reference import narrowed, run_reference
from p2pdpt.testing.simulator import simulate
from p2pdpt.topology import (
    ADD,
    ANY,
    COPY,
    Bucket,
    Facts,
    Links,
    Recv,
    Region,
    Send,
    Topology,
)
from p2pdpt_plugins.mapreduce import MapReduce
from p2pdpt_plugins.ring import Ring

KERNELS = kernels.load("off")


def planned(
    topology: Topology,
    size: int,
    length: int,
    dtype: str = "float32",
    reduction: Reduction = Reduction.MEAN,
    *,
    fuse: bool = True,
) -> Plan:
    return record(
        topology,
        Bucket(length, dtype),
        DTYPES[dtype],
        size=size,
        facts=Facts(),
        reduction=reduction,
        fuse=fuse,
    )


def replay(
    plan: Plan, given: Sequence[Any], dtype: DType, weights: Sequence[float], seed: int
) -> list[Any]:
    """Run a plan in steps of random length, on whichever rank may go on; return the results."""
    size, length = len(given), len(given[0])
    areas: list[dict[int, Any]] = [
        {
            MINE: mine,
            RESULT: np.full(length, 77, dtype.storage),
            WIDE: np.full(length, np.nan, np.float32) if dtype.half else None,
        }
        for mine in given
    ]
    folds = plan.weigh(weights)
    counts = [0] * size
    places = [[0, 0] for _ in range(size)]
    draw = random.Random(seed)
    while True:
        live = [rank for rank in range(size) if places[rank][0] < len(plan.folds[rank])]
        if not live:
            break
        draw.shuffle(live)
        for rank in live:
            index, done = places[rank]
            fold = plan.folds[rank][index]
            count = min(fold.length - done, draw.randint(1, 1 + length // 5))
            if any(
                counts[wait.rank] < wait.need + (done + count if wait.slope else 0)
                for wait in fold.waits
            ):
                continue
            low, high = fold.start + done, fold.start + done + count
            sources = [
                areas[s.rank][s.area][s.start + done : s.start + done + count] for s in fold.sources
            ]
            how = folds[fold.number]
            KERNELS.fold(
                areas[rank][fold.area][low:high],
                sources,
                dtype,
                fold.combine,
                how.scales,
                how.divisor,
            )
            counts[rank] += count
            places[rank] = [index + 1, 0] if done + count == fold.length else [index, done + count]
            break
        else:
            pytest.fail("nothing can move")
    assert counts == list(plan.totals)
    return [each[RESULT] for each in areas]


class Tree(Topology):
    """Up a binary heap and down again."""

    static: ClassVar[bool] = True

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        rank, whole = links.rank, bucket.region
        children = [c for c in (2 * rank + 1, 2 * rank + 2) if c < links.size]
        if children:
            await links.move(Recv((*children, rank), whole, bucket.combine))
        if rank:
            await links.move(Send((rank - 1) // 2, whole))
            await links.move(Recv((rank - 1) // 2, whole))
        await links.move(Send(children, whole))


class Halving(Topology):
    """Rabenseifner's halving and doubling."""

    static: ClassVar[bool] = True

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        region, kept, distance = bucket.region, [], links.size // 2
        while distance:
            partner = links.rank ^ distance
            low, high = region.chunks(2)
            keep, give = (low, high) if links.rank < partner else (high, low)
            await links.move(
                Send(partner, give), Recv(sorted((partner, links.rank)), keep, bucket.combine)
            )
            kept.append((partner, keep, give))
            region, distance = keep, distance // 2
        for partner, keep, give in reversed(kept):
            await links.move(Send(partner, keep), Recv(partner, give))


CASES = [
    (Ring(), (2, 3, 5)),
    (MapReduce(), (2, 4)),
    (MapReduce(reducer=1), (3,)),
    (Tree(), (2, 5, 7)),
    (Halving(), (2, 4, 8)),
]


@pytest.mark.parametrize(("topology", "sizes"), CASES, ids=lambda each: str(each))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_replay_gives_the_simulator_s_bits(
    topology: Topology, sizes: tuple[int, ...], dtype: str
) -> None:
    element = DTYPES[dtype]
    for size in sizes:
        for length in (1, 64, 501):
            rng = np.random.default_rng(length)
            if element.inexact:
                given = [np.empty(length, element.storage) for _ in range(size)]
                for each in given:
                    KERNELS.copy(each, rng.standard_normal(length).astype(element.wide), element)
                reduction = Reduction.MEAN
            else:
                given = [rng.integers(-9, 9, length).astype(np.int32) for _ in range(size)]
                reduction = Reduction.SUM
            for weights in ([2.0] * size, [float((3 * rank + 1) % 4) for rank in range(size)]):
                expected = simulate(
                    topology, given, dtype=dtype, weights=weights, reduction=reduction
                ).results
                for fuse in (False, True):
                    if fuse and len(set(weights)) > 1:
                        continue
                    plan = planned(topology, size, length, dtype, reduction, fuse=fuse)
                    results = replay(plan, given, element, weights, length)
                    for result, wanted in zip(results, expected, strict=True):
                        np.testing.assert_array_equal(result.view(np.uint8), wanted.view(np.uint8))


@settings(max_examples=80)
@drawn(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 6),
    length=st.sampled_from([1, 8, 40]),
    name=st.sampled_from(["float32", "bfloat16", "float16", "int32"]),
    fuse=st.booleans(),
)
def test_random_trees_of_folds(seed: int, size: int, length: int, name: str, fuse: bool) -> None:
    """Whatever order and tree a topology adds up in, its plan gives the reference's bits."""
    chance = random.Random(seed)
    program = random_all_reduce(chance, size, length)
    dtype = DTYPES[name]
    rng = np.random.default_rng(seed)
    if dtype.inexact:
        wide = [rng.standard_normal(length).astype(dtype.wide) for _ in range(size)]
        given: list[Any] = [narrowed(each, dtype) for each in wide]
        reduction = Reduction.MEAN
    else:
        given = [rng.integers(-9, 9, length, dtype=np.int32) for _ in range(size)]
        reduction = Reduction.SUM
    weights = [2.0 if fuse else chance.choice((0.0, 1.0, 2.5)) for _ in range(size)]
    expected = run_reference(program, given, dtype=name, reduction=reduction, weights=weights)
    plan = planned(AllReduce(program), size, length, name, reduction, fuse=fuse)
    for result, wanted in zip(replay(plan, given, dtype, weights, seed), expected, strict=True):
        np.testing.assert_array_equal(result.view(np.uint8), wanted.view(np.uint8))


def test_a_fused_ring_is_one_fold_for_each_owner() -> None:
    """In the ring's own order, then every other chunk is copied from its owner."""
    plan = planned(Ring(), 4, 1000)
    first, *copies = plan.folds[1]
    assert (first.area, first.start, first.length, first.combine) == (RESULT, 500, 250, ADD)
    assert first.sources == tuple(PlanSource(rank, MINE, 500) for rank in (2, 3, 0, 1))
    assert first.waits == ()
    assert first.shared
    assert [(fold.combine, fold.start, fold.sources[0]) for fold in copies] == [
        (COPY, 250, PlanSource(0, RESULT, 250)),
        (COPY, 0, PlanSource(3, RESULT, 0)),
        (COPY, 750, PlanSource(2, RESULT, 750)),
    ]
    assert [fold.waits for fold in copies] == [
        (PlanWait(0, 0, True),),
        (PlanWait(3, 0, True),),
        (PlanWait(2, 0, True),),
    ]
    assert plan.totals == (1000,) * 4


def test_an_unfused_ring_keeps_its_partial_sums() -> None:
    plan = planned(Ring(), 3, 9, fuse=False)
    adds = [[fold for fold in each if fold.combine is ADD] for each in plan.folds]
    assert [len(each) for each in adds] == [2, 2, 2]
    half = planned(Ring(), 3, 9, "bfloat16", fuse=False)
    assert [fold.area for fold in half.folds[0] if fold.combine is ADD] == [WIDE, RESULT]


def test_a_broadcast_is_read_from_its_root() -> None:
    plan = planned(Broadcast(1), 3, 10, reduction=Reduction.NONE)
    for folds in plan.folds:
        assert [fold.sources for fold in folds] == [(PlanSource(1, MINE, 0),)]
    given = [np.full(10, rank, np.float32) for rank in range(3)]
    for result in replay(plan, given, DTYPES["float32"], [1.0] * 3, 0):
        np.testing.assert_array_equal(result, given[1])


class Odd(Topology):
    """Runs whatever it is given."""

    static: ClassVar[bool] = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        other = 1 - links.rank
        whole = bucket.region
        match self.kind:
            case "swap":
                for _ in range(2):
                    await links.move(Send(other, whole), Recv(sorted((0, 1)), whole, ADD))
            case "scratch":
                links.scratch(3)
            case "clock":
                assert links.now >= 0
            case "random":
                links.rng.random()
            case "any":
                await links.move(Recv(ANY))
            case "deadlock":
                await links.move(Recv(other, whole))
                await links.move(Send(other, whole))
            case "half":
                part = Region(0, 4)
                await links.move(Send(other, part), Recv((0, 1), part, ADD))
            case "silent":
                if links.rank:
                    await links.move(Recv(0, whole))
            case "unheard":
                if links.rank:
                    await links.move(Send(0, whole))
            case "uneven":
                await links.move(Send(other, Region(0, 3)), Recv(other, Region(0, 4)))


class Loose(Ring):
    agreement: ClassVar = "eventual"


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("scratch", Unplannable, "scratch"),
        ("clock", Unplannable, "clock"),
        ("random", Unplannable, "depends on more"),
        ("any", Unplannable, "depends on more"),
        ("swap", TopologyError, "twice"),
        ("deadlock", DeadlockError, r"rank 0: receive \(copy\)"),
        ("silent", MismatchError, "rank 1 receives from rank 0, which does not send"),
        ("unheard", MismatchError, "rank 1 sends to rank 0, which does not receive"),
        ("uneven", MismatchError, "sends 3 elements to rank"),
    ],
)
def test_what_cannot_be_planned_says_why(kind: str, error: type[TopologyError], text: str) -> None:
    reduction = Reduction.MEAN if kind == "swap" else Reduction.NONE
    with pytest.raises(error, match=text):
        planned(Odd(kind), 2, 8, reduction=reduction)


def test_a_result_that_lacks_contributions_is_refused() -> None:
    for kind in ("silent", "half"):
        with pytest.raises(IncompleteError, match=r"h[oe]ld 1 of 2 contributions"):
            planned(Odd(kind), 2, 8)


def test_members_that_end_apart_are_not_planned() -> None:
    with pytest.raises(Unplannable, match="same result"):
        planned(Loose(), 2, 8)


class First(Topology):
    """Rank 0 adds what two of three have, and nobody finishes it."""

    static: ClassVar[bool] = True

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        if links.rank == 1:
            await links.move(Send(0, bucket.region))
        elif links.rank == 0:
            await links.move(Recv((0, 1), bucket.region, ADD))


def test_what_shared_memory_cannot_hold_is_not_planned() -> None:
    with pytest.raises(Unplannable, match="nobody to share"):
        planned(Ring(), 1, 8)
    with pytest.raises(Unplannable, match="half precision that nobody rounds"):
        planned(First(), 3, 8, "bfloat16", Reduction.NONE)


class Doubling(Topology):
    """Both partners overwrite what the other reads, in one move."""

    static: ClassVar[bool] = True

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        for distance in (1, 2):
            partner = links.rank ^ distance
            await links.move(
                Send(partner, bucket.region),
                Recv(sorted((partner, links.rank)), bucket.region, ADD),
            )


def test_overwriting_what_is_read_in_one_move_is_not_planned() -> None:
    with pytest.raises(Unplannable, match="overwrite what they read"):
        planned(Doubling(), 4, 8)
