"""Native rounds: the simulator's bits, and quiet ends."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdpt import kernels
from p2pdpt.dtypes import DTYPES
from p2pdpt.errors import (
    ChannelClosedError,
    PeerFailedError,
    SessionError,
    TopologyError,
    UnavailableError,
)
from p2pdpt.memory import BucketMemory, allocate
from p2pdpt.protocol.recorder import Unplannable
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.runtime.drivers.asyncio_driver import RoundKey
from p2pdpt.runtime.drivers.native_driver import ABI, AT_ONCE, NativeDriver, unavailable
from p2pdpt.testing.simulator import simulate
from p2pdpt.topology import ADD, MAX, MIN, PROD, Bucket, Combine, Links, Recv, Send, Topology
from p2pdpt_plugins.mapreduce import MapReduce
from p2pdpt_plugins.ring import Ring

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

F32 = DTYPES["float32"]
FOLDS = {ADD: Reduction.MEAN, MIN: Reduction.NONE, MAX: Reduction.NONE, PROD: Reduction.NONE}


class Tree(Topology):
    """Reduce up a binary heap, then copy down: folds of up to three, and long chains."""

    static = True

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        rank, whole = links.rank, bucket.region
        children = [c for c in (2 * rank + 1, 2 * rank + 2) if c < links.size]
        parent = (rank - 1) // 2
        if children:
            await links.move(Recv((*children, rank), whole, bucket.combine))
        if rank:
            await links.move(Send(parent, whole))
            await links.move(Recv(parent, whole))
        await links.move(Send(children, whole))


class Doubling(Topology):
    """Halve the vector while the distance doubles, then the way back (Rabenseifner)."""

    static = True

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        region, kept = bucket.region, []
        distance = links.size // 2
        while distance:
            partner = links.rank ^ distance
            low, high = region.chunks(2)
            keep, give = (low, high) if links.rank < partner else (high, low)
            await links.move(
                Send(partner, give),
                Recv(sorted((partner, links.rank)), keep, bucket.combine),
            )
            kept.append((partner, keep, give))
            region = keep
            distance //= 2
        for partner, keep, give in reversed(kept):
            await links.move(Send(partner, keep), Recv(partner, give))


class Clock(Topology):
    """Looks at the clock, which no plan can."""

    static: ClassVar[bool] = True

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        assert links.now >= 0


TOPOLOGIES: dict[str, Topology] = {
    "ring": Ring(),
    "mapreduce": MapReduce(),
    "mapreduce:reducer=0": MapReduce(reducer=0),
    "tree": Tree(),
    "doubling": Doubling(),
}


class Hub:
    """Native drivers of all ranks in one process, which really share memory with themselves.

    Attributes:
        names: what was shared, in the order in which it was first.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.names: list[str] = []
        self._shared: dict[str, dict[int, tuple[bytes, list[int]]]] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self.drivers = [
            NativeDriver(rank=rank, size=size, share=self.share(rank)) for rank in range(size)
        ]

    async def open(self) -> Hub:
        await asyncio.gather(*(driver.open() for driver in self.drivers))
        return self

    def share(self, rank: int) -> Any:
        async def share(name: str, payload: bytes, descriptors: Sequence[int]) -> Any:
            given_ = self._shared.setdefault(name, {})
            if not given_:
                self.names.append(name)
            assert rank not in given_, f"rank {rank} shares {name} twice"
            given_[rank] = payload, list(descriptors)
            for other, driver in enumerate(self.drivers):
                if other != rank:
                    driver.announced(name)
            waiting = self._waiting.setdefault(name, [])
            if len(given_) < self.size:
                waiting.append(asyncio.get_running_loop().create_future())
                await waiting[-1]
            for each in waiting:
                if not each.done():
                    each.set_result(None)
            return [
                (given_[other][0], [os.dup(fd) for fd in given_[other][1]])
                if other != rank
                else None
                for other in range(self.size)
            ]

        return share

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()
            driver.close()


@pytest.fixture
async def start() -> AsyncIterator[Callable[[int], Awaitable[Hub]]]:
    hubs: list[Hub] = []

    async def start(size: int) -> Hub:
        hubs.append(Hub(size))
        return await hubs[-1].open()

    yield start
    for hub in hubs:
        hub.close()


Start = Callable[[int], Awaitable[Hub]]


def key(step: int = 0, bucket: int = 0, attempt: int = 0, stream: int = 0) -> RoundKey:
    return RoundKey(1, stream, step, attempt, bucket)


async def run(
    driver: NativeDriver,
    memory: BucketMemory,
    round_key: RoundKey,
    topology: Topology = TOPOLOGIES["ring"],
    combine: Combine = ADD,
    reduction: Reduction = Reduction.MEAN,
    weight: float = 1.0,
) -> None:
    await driver.run(
        topology, memory, round_key, combine=combine, reduction=reduction, weight=weight
    )


def fill(memory: BucketMemory, seed: int) -> None:
    rng = np.random.default_rng(seed)
    if memory.dtype.inexact:
        values = rng.standard_normal(memory.length).astype(memory.dtype.wide)
        kernels.load("off").copy(memory.mine, values, memory.dtype)
    else:
        memory.mine[:] = rng.integers(-9, 9, memory.length)


@settings(max_examples=40)
@given(
    size=st.sampled_from([2, 3, 4, 8]),
    length=st.integers(0, 300),
    dtype=st.sampled_from(sorted(DTYPES)),
    topology=st.sampled_from(sorted(TOPOLOGIES)),
    combine=st.sampled_from([ADD, ADD, MIN, MAX, PROD]),
    weights=st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=8, max_size=8), min_size=1, max_size=3
    ),
)
async def test_bits_are_those_of_the_simulator(
    size: int,
    length: int,
    dtype: str,
    topology: str,
    combine: Combine,
    weights: list[list[float]],
) -> None:
    """Rounds of one bucket, with weights that change."""
    if topology == "doubling" and size == 3:
        size = 4
    kind = DTYPES[dtype]
    reduction = Reduction.MEAN if kind.inexact else Reduction.SUM
    if combine is not ADD:
        reduction = Reduction.NONE
    hub = await Hub(size).open()
    try:
        memories = [allocate(kind, length) for _ in range(size)]
        against = hub.drivers[0].reason_against(
            TOPOLOGIES[topology], memories[0], combine, reduction
        )
        assert against == ""
        for step, each in enumerate(weights):
            for rank, memory in enumerate(memories):
                fill(memory, 10 * step + rank)
            await asyncio.gather(
                *(
                    run(driver, memory, key(step), TOPOLOGIES[topology], combine, reduction, weight)
                    for driver, memory, weight in zip(hub.drivers, memories, each, strict=False)
                )
            )
            expected = simulate(
                TOPOLOGIES[topology],
                [memory.mine for memory in memories],
                dtype=dtype,
                combine=combine,
                reduction=reduction,
                weights=each[:size],
            ).results
            for memory, right in zip(memories, expected, strict=True):
                assert memory.result.tobytes() == right.tobytes()
        assert hub.names == ["signals", "bucket 0, step 0, attempt 0"]
    finally:
        hub.close()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_long_buckets_in_several_segments(start: Start, size: int, dtype: str) -> None:
    hub = await start(size)
    memories = [allocate(DTYPES[dtype], 150_001) for _ in range(size)]
    for rank, memory in enumerate(memories):
        fill(memory, rank)
    given_ = [memory.mine.copy() for memory in memories]
    for step in range(3):
        await asyncio.gather(
            *(run(d, m, key(step)) for d, m in zip(hub.drivers, memories, strict=True))
        )
        expected = simulate(TOPOLOGIES["ring"], given_, dtype=dtype).results
        for memory, before, right in zip(memories, given_, expected, strict=True):
            assert memory.result.tobytes() == right.tobytes()
            assert memory.mine.tobytes() == before.tobytes()
    # Everybody reads the other chunks of everybody once, in half precision as wide sums.
    assert all(driver.bytes_read > 0 and driver.bytes_lent > 0 for driver in hub.drivers)
    total = sum(driver.bytes_read for driver in hub.drivers)
    assert total == sum(driver.bytes_lent for driver in hub.drivers)


async def test_many_buckets_at_once_in_any_order(start: Start) -> None:
    size, count = 3, 12
    hub = await start(size)
    memories = [[allocate(F32, 10 + 3000 * i) for i in range(count)] for _ in range(size)]
    for step in range(10):
        for rank in range(size):
            for memory in memories[rank]:
                memory.mine[:] = rank + step

        async def work(rank: int, order: random.Random, step: int = step) -> None:
            tasks = []
            for bucket in order.sample(range(count), count):
                work = run(hub.drivers[rank], memories[rank][bucket], key(step, bucket))
                tasks.append(asyncio.ensure_future(work))
                if order.random() < 0.5:
                    await asyncio.sleep(0)
            await asyncio.gather(*tasks)

        await asyncio.gather(*(work(rank, random.Random(10 * step + rank)) for rank in range(size)))
        assert all((m.result == step + 1).all() for each in memories for m in each)
    assert len(hub.names) == 1 + count


async def test_a_hundred_rounds_with_new_memory_leak_nothing(start: Start) -> None:
    hub = await start(2)

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    memories: list[BucketMemory] = []
    counts = []
    for step in range(100):
        # One member keeps its memory, the other comes with new one.
        memories = [*memories[:1], allocate(DTYPES["float16"], 1000)]
        if step == 0:
            memories.append(allocate(DTYPES["float16"], 1000))
        for rank, memory in enumerate(memories):
            memory.mine[:] = rank + step
        await asyncio.gather(
            *(run(d, m, key(step)) for d, m in zip(hub.drivers, memories, strict=True))
        )
        assert (memories[0].result == np.float16(step + 0.5)).all()
        counts.append(descriptors())
    # When the worker lets go of the memory of before is its own affair.
    assert max(counts[50:]) <= max(counts[:50])
    assert len(hub.names) == 101


async def test_whoever_has_begun_with_old_memory_begins_again(start: Start) -> None:
    hub = await start(2)
    one, two = allocate(F32, 9), allocate(F32, 9)
    one.mine[:], two.mine[:] = 1, 2
    await asyncio.gather(run(hub.drivers[0], one, key()), run(hub.drivers[1], two, key()))
    waiting = asyncio.create_task(run(hub.drivers[0], one, key(1)))
    await asyncio.sleep(0.02)
    other = allocate(F32, 9)
    other.mine[:] = 5
    await run(hub.drivers[1], other, key(1))
    await waiting
    assert (one.result == 3).all() and (other.result == 3).all()
    assert hub.names[2:] == ["bucket 0, step 1, attempt 0"]


async def test_a_cancelled_round_touches_nothing_and_the_bucket_goes_on(start: Start) -> None:
    hub = await start(2)
    memories = [allocate(F32, 100_000) for _ in range(2)]
    for rank, memory in enumerate(memories):
        memory.mine[:] = rank
    await asyncio.gather(*(run(d, m, key()) for d, m in zip(hub.drivers, memories, strict=True)))
    alone = asyncio.create_task(run(hub.drivers[0], memories[0], key(1)))
    await asyncio.sleep(0.02)
    alone.cancel()
    alone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alone
    memories[0].result[:] = 7
    # The other member has missed that round; both go on with the next.
    memories[0].mine[:] = 9
    await asyncio.gather(*(run(d, m, key(2)) for d, m in zip(hub.drivers, memories, strict=True)))
    assert all((memory.result == 5).all() for memory in memories)


async def test_a_cancelled_share_is_repeated(start: Start) -> None:
    hub = await start(2)
    memories = [allocate(F32, 10) for _ in range(2)]
    alone = asyncio.create_task(run(hub.drivers[0], memories[0], key()))
    await asyncio.sleep(0)
    alone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alone
    await asyncio.gather(*(run(d, m, key(1)) for d, m in zip(hub.drivers, memories, strict=True)))


@pytest.mark.parametrize("seed", range(12))
async def test_abort_at_any_point_is_quick_and_quiet(start: Start, seed: int) -> None:
    size, draw = 2 + seed % 2, random.Random(seed)
    hub = await start(size)
    memories = [[allocate(F32, 400_000) for _ in range(2)] for _ in range(size)]
    for rank in range(size):
        for memory in memories[rank]:
            memory.mine[:] = rank + 1
    # Sometimes one member never comes.
    missing = size - 1 if seed % 3 == 0 else size

    async def work(rank: int) -> None:
        for step in range(1000):
            await asyncio.gather(
                *(
                    run(hub.drivers[rank], memory, key(step, bucket))
                    for bucket, memory in enumerate(memories[rank])
                )
            )

    first = [asyncio.create_task(work(rank)) for rank in range(size)]
    if missing < size:
        await asyncio.sleep(0.02)
        first[missing].cancel()
    await asyncio.sleep(draw.random() * 0.05)
    failure = PeerFailedError("n9", "127.0.0.1:9", "it was killed")
    begun = time.perf_counter()
    for driver in hub.drivers:
        driver.abort(failure)
    ends = await asyncio.gather(*first, return_exceptions=True)
    took = time.perf_counter() - begun
    for rank, end in enumerate(ends):
        if rank == missing or not isinstance(end, PeerFailedError):
            assert isinstance(end, asyncio.CancelledError | PeerFailedError)
            continue
        assert end.operation.startswith("exchange of bucket") and end.reason == "it was killed"
        assert end is not failure and end.step is not None
    # Whoever raised has let go: what is written now stays.
    for rank in range(size):
        for memory in memories[rank]:
            memory.result[:] = 77
    await asyncio.sleep(0.01)
    assert all(
        (m.result == 77).all() and (m.mine == r + 1).all() for r in range(size) for m in memories[r]
    )
    # Generous, since the machine may be busy; the executor looks after every segment.
    assert took < 2
    with pytest.raises(PeerFailedError):
        await run(hub.drivers[0], memories[0][0], key(5000))


LONG = AT_ONCE + 1
"""Elements of a bucket that only the worker reduces."""


async def test_closing_ends_what_waits_and_the_thread(start: Start) -> None:
    hub = await start(2)
    memories = [allocate(F32, LONG) for _ in range(2)]
    await asyncio.gather(*(run(d, m, key()) for d, m in zip(hub.drivers, memories, strict=True)))
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("p2pdpt-native") == 2
    waiting = asyncio.create_task(run(hub.drivers[0], memories[0], key(1)))
    await asyncio.sleep(0.01)
    hub.close()
    with pytest.raises(ChannelClosedError, match="the group has left"):
        await waiting
    assert "p2pdpt-native" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ChannelClosedError):
        await run(hub.drivers[0], memories[0], key(2))


async def test_different_buckets_are_told_to_all(start: Start) -> None:
    hub = await start(3)
    memories = [allocate(F32, length) for length in (10, 10, 11)]
    ends = await asyncio.gather(
        *(run(d, m, key()) for d, m in zip(hub.drivers, memories, strict=True)),
        return_exceptions=True,
    )
    assert [type(end) for end in ends] == [TopologyError] * 3
    assert str(ends[0]) == (
        "bucket 0, step 0, attempt 0 has 10 float32 here and 11 float32 on rank 2"
    )
    memories[2] = allocate(F32, 10)
    await asyncio.gather(*(run(d, m, key(1)) for d, m in zip(hub.drivers, memories, strict=True)))


async def test_one_members_reason_holds_for_all(start: Start) -> None:
    hub = await start(2)
    memories = [allocate(F32, 10), allocate(F32, 10, in_place=True)]
    for step in range(3):
        ends = await asyncio.gather(
            *(run(d, m, key(step)) for d, m in zip(hub.drivers, memories, strict=True)),
            return_exceptions=True,
        )
        assert [(type(end), str(end)) for end in ends] == [
            (Unplannable, "its bucket is in place")
        ] * 2
    # It is agreed once and for all.
    memories[1] = allocate(F32, 10)
    with pytest.raises(Unplannable, match="in place"):
        await run(hub.drivers[1], memories[1], key(3))
    assert len(hub.names) == 2


async def test_a_reason_may_come_later(start: Start) -> None:
    hub = await start(2)
    memories = [allocate(F32, 10) for _ in range(2)]
    await asyncio.gather(*(run(d, m, key()) for d, m in zip(hub.drivers, memories, strict=True)))
    waiting = asyncio.create_task(run(hub.drivers[0], memories[0], key(1)))
    await asyncio.sleep(0.02)
    with pytest.raises(Unplannable, match="in place"):
        await run(hub.drivers[1], allocate(F32, 10, in_place=True), key(1))
    with pytest.raises(Unplannable, match="in place"):
        await waiting


async def test_what_speaks_against_a_round(start: Start) -> None:
    (driver, _) = (await start(2)).drivers
    memory = allocate(F32, 10)

    class Dynamic(Ring):
        static: ClassVar[bool] = False

    class Wrong(Ring):
        async def exchange(self, links: Links, bucket: Bucket) -> None:
            raise KeyError("x")

    def against(topology: Topology, chosen: BucketMemory = memory) -> str:
        return driver.reason_against(topology, chosen, ADD, Reduction.MEAN)

    assert against(TOPOLOGIES["tree"]) == ""
    assert against(Dynamic()) == "it is not static"
    assert "clock" in against(Clock())
    assert against(Ring(), allocate(F32, 10, in_place=True)) == "its bucket is in place"
    with pytest.raises(TopologyError, match=r"raised KeyError\('x'\)"):
        against(Wrong())
    closed = allocate(F32, 10)
    closed.areas[0].sealed = False
    assert against(Ring(), closed) == "its memory cannot be shared read-only"


async def test_a_bucket_is_exchanged_once_at_a_time(start: Start) -> None:
    hub = await start(2)
    memories = [allocate(F32, 10) for _ in range(2)]
    first = asyncio.create_task(run(hub.drivers[0], memories[0], key()))
    await asyncio.sleep(0)
    with pytest.raises(SessionError, match="bucket 0 is being exchanged already"):
        await run(hub.drivers[0], memories[0], key(1))
    await asyncio.gather(first, run(hub.drivers[1], memories[1], key()))


async def test_collectives_have_names_of_their_own(start: Start) -> None:
    hub = await start(2)
    memories = [allocate(F32, 10) for _ in range(2)]
    await asyncio.gather(
        *(run(d, m, key(4, stream=255)) for d, m in zip(hub.drivers, memories, strict=True))
    )
    assert hub.names[1] == "collective 000000ff, call 4"


async def test_a_worker_that_breaks_lets_nobody_wait(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = await start(2)
    memories = [allocate(F32, LONG) for _ in range(2)]

    def broken(active: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(hub.drivers[0], "_replay_all", broken)
    with pytest.raises(MemoryError, match="no more"):
        await asyncio.gather(
            *(run(d, m, key()) for d, m in zip(hub.drivers, memories, strict=True))
        )
    hub.drivers[1].abort(ChannelClosedError("it broke"))


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unavailable() == ""
    monkeypatch.setenv("P2PDPT_NATIVE", "off")
    assert unavailable() == "the compiled module is switched off (P2PDPT_NATIVE=off)"
    with pytest.raises(UnavailableError, match="switched off"):
        NativeDriver(rank=0, size=2, share=None)  # type: ignore[arg-type]
    monkeypatch.delenv("P2PDPT_NATIVE")
    monkeypatch.setattr("p2pdpt.runtime.drivers.native_driver.ABI", 99)
    assert unavailable() == f"the compiled module is stale ({ABI} instead of 99); build it again"
