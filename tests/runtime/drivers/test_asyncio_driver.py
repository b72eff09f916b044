"""The asyncio driver over real channels, all ranks in one loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdpt import kernels
from p2pdpt.channel import Channel, PeerInfo
from p2pdpt.dtypes import DTYPES
from p2pdpt.errors import HazardError, MismatchError, PeerFailedError, TopologyError
from p2pdpt.memory import BucketMemory, allocate
from p2pdpt.protocol import sending, tasks
from p2pdpt.runtime.drivers import round_memory
from p2pdpt.runtime.drivers.asyncio_driver import AsyncioDriver, Reduction, RoundKey
from p2pdpt.runtime.drivers.collectives import Broadcast
from p2pdpt.testing.chaos_transport import ChaosTransport
from p2pdpt.testing.loopback_door import LoopbackDoor
from p2pdpt.testing.memory_mesh import memory_mesh
from p2pdpt.testing.memory_transport import MemoryTransport
from p2pdpt.testing.programs import Scripted
from p2pdpt.testing.random_programs import random_program
from p2pdpt.testing.reference import run_reference
from p2pdpt.testing.simulator import simulate
from p2pdpt.testing.topology_kit import pattern
from p2pdpt.topology import ADD, ANY, Bucket, Links, Message, Recv, Region, Send, Topology
from p2pdpt_plugins.mapreduce import MapReduce
from p2pdpt_plugins.ring import Ring
from p2pdpt_transports.tcp import TcpTransport


@asynccontextmanager
async def drivers(size: int, **options: Any) -> AsyncIterator[list[AsyncioDriver]]:
    """Connect `size` drivers in a full mesh over loopback."""
    channels: list[list[Channel | None]] = [[None] * size for _ in range(size)]
    doors = [LoopbackDoor(f"{rank}") for rank in range(size)]
    transports, infos, arrived = [], [], asyncio.Event()
    for rank, door in enumerate(doors):
        await door.__aenter__()
        transport = TcpTransport(door)
        transports.append(transport)

        def accept(channel: Channel, rank: int = rank) -> None:
            channels[rank][int(channel.peer.name)] = channel
            arrived.set()

        await transport.listen(accept)
        infos.append(door.me)
    for low in range(size):
        for high in range(low + 1, size):
            peer: PeerInfo = infos[high]
            channels[low][high] = await transports[low].connect(peer)
    while any(channels[i][j] is None for i in range(size) for j in range(size) if i != j):
        arrived.clear()
        await arrived.wait()
    made = [
        AsyncioDriver(
            rank=rank, size=size, channels=channels[rank], kernels=kernels.default(), **options
        )
        for rank in range(size)
    ]
    try:
        yield made
    finally:
        for driver in made:
            await driver.close()
        for row in channels:
            for channel in row:
                if channel is not None:
                    channel.abort()
        for door in doors:
            await door.__aexit__(None, None, None)


def key(step: int = 0, bucket: int = 0) -> RoundKey:
    return RoundKey(1, 0, step, 0, bucket)


def filled(values: Any, dtype: str = "float32", in_place: bool = False) -> BucketMemory:
    memory = allocate(DTYPES[dtype], len(values), in_place=in_place)
    memory.mine[:] = values
    return memory


async def run_all(
    made: list[AsyncioDriver],
    topology: Topology,
    memories: list[BucketMemory],
    where: RoundKey,
    weights: list[float] | None = None,
    **options: Any,
) -> None:
    await asyncio.gather(
        *(
            driver.run(
                topology,
                memory,
                where,
                weight=1.0 if weights is None else weights[driver.rank],
                **options,
            )
            for driver, memory in zip(made, memories, strict=True)
        )
    )


@settings(max_examples=12, deadline=None)
@given(
    size=st.integers(1, 4),
    length=st.sampled_from([0, 1, 5, 1000, 70_001, 300_000]),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "float16", "int32"]),
    topology=st.sampled_from([Ring(), MapReduce(), MapReduce(reducer=0)]),
    weights=st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=4, max_size=4),
    in_place=st.booleans(),
)
def test_the_same_bits_as_in_the_simulator(
    size: int, length: int, dtype: str, topology: Topology, weights: list[float], in_place: bool
) -> None:
    element = DTYPES[dtype]
    reduction = Reduction.MEAN if element.inexact else Reduction.SUM
    rng = np.random.default_rng(length)
    contributions = []
    for _ in range(size):
        if element.inexact:
            floats = rng.standard_normal(length).astype(element.wide)
            stored = np.empty(length, element.storage)
            kernels.default().copy(stored, floats, element)
        else:
            stored = rng.integers(-99, 99, length).astype(element.storage)
        contributions.append(stored)
    expected = simulate(
        topology,
        contributions,
        dtype=dtype,
        reduction=reduction,
        weights=weights[:size],
        seed=length,
    )

    async def real() -> list[BucketMemory]:
        async with drivers(size) as made:
            memories = [filled(each, dtype, in_place) for each in contributions]
            await run_all(made, topology, memories, key(), weights, reduction=reduction)
            return memories

    with asyncio.Runner() as runner:
        memories = runner.run(real())
    for memory, result in zip(memories, expected.results, strict=True):
        np.testing.assert_array_equal(memory.result.view(np.uint8), result.view(np.uint8))
        memory.close()


async def test_later_steps_replay_the_recorded_round() -> None:
    """The plan is kept with the bucket; contributions and weights are those of each step."""
    size, length = 3, 5000
    async with drivers(size) as made:
        memories = [filled(np.zeros(length)) for _ in range(size)]
        for step in range(6):
            rng = np.random.default_rng(step)
            given_ = [rng.standard_normal(length).astype(np.float32) for _ in range(size)]
            weights = [float(rng.integers(0, 4)) for _ in range(size)]
            for memory, each in zip(memories, given_, strict=True):
                memory.mine[:] = each
            await run_all(made, Ring(), memories, key(step), weights)
            expected = simulate(Ring(), given_, weights=weights, seed=step).results[0]
            for memory in memories:
                np.testing.assert_array_equal(memory.result, expected)
                assert len(memory.plans) <= 1


async def test_many_buckets_at_once_in_any_order() -> None:
    size = 3
    async with drivers(size) as made:
        buckets = [
            [filled(pattern(rank, 1000 + 7000 * index)) for rank in range(size)]
            for index in range(6)
        ]
        jobs = [
            driver.run(MapReduce() if index % 2 else Ring(), memories[rank], key(bucket=index))
            for rank, driver in enumerate(made)
            for index, memories in (
                reversed(list(enumerate(buckets))) if rank == 1 else enumerate(buckets)
            )
        ]
        await asyncio.gather(*jobs)
        for memories in buckets:
            for memory in memories:
                expected = sum(pattern(r, memory.length).astype(np.float64) for r in range(3)) / 3
                np.testing.assert_allclose(memory.result, expected, rtol=1e-6)


@pytest.mark.parametrize("root", [0, 2])
async def test_broadcast_copies_the_root(root: int) -> None:
    async with drivers(4) as made:
        memories = [filled(pattern(rank, 100_000)) for rank in range(4)]
        await run_all(made, Broadcast(root), memories, key(), reduction=Reduction.NONE)
        for memory in memories:
            np.testing.assert_array_equal(memory.result, pattern(root, 100_000))


async def test_a_closed_channel_names_the_peer() -> None:
    async with drivers(3) as made:
        memories = [filled(pattern(rank, 3_000_000)) for rank in range(3)]
        jobs = [
            asyncio.ensure_future(made[rank].run(Ring(), memories[rank], key(7, 2)))
            for rank in (0, 1)
        ]
        await asyncio.sleep(0.01)
        for channel in made[2].channels:
            if channel is not None:
                channel.abort()
        for job in jobs:
            with pytest.raises(
                PeerFailedError, match=r"peer 2 .*exchange of bucket 2 \(ring\) at step 7"
            ):
                await job
        for rank in (0, 1):
            np.testing.assert_array_equal(memories[rank].mine, pattern(rank, 3_000_000))


async def test_abort_reaches_running_and_later_rounds() -> None:
    async with drivers(2) as made:
        memory = filled(pattern(0, 10))
        job = asyncio.ensure_future(made[0].run(Ring(), memory, key(3)))
        await asyncio.sleep(0)
        made[0].abort(PeerFailedError("node1", "127.0.0.1:1", "ValueError: bad sample 1234"))
        for attempt in (job, made[0].run(Ring(), memory, key(4))):
            with pytest.raises(PeerFailedError, match="ValueError: bad sample 1234"):
                await attempt


async def test_cancel_leaves_the_channels_usable() -> None:
    async with drivers(2) as made:
        big = [filled(pattern(rank, 4_000_000)) for rank in range(2)]
        jobs = [asyncio.ensure_future(made[r].run(Ring(), big[r], key(0))) for r in range(2)]
        await asyncio.sleep(0.003)
        for job in jobs:
            job.cancel()
        for job in jobs:
            with pytest.raises(asyncio.CancelledError):
                await job
        kept = [memory.result.copy() for memory in big]
        small = [filled(pattern(rank, 5000)) for rank in range(2)]
        await run_all(made, Ring(), small, key(1))
        np.testing.assert_array_equal(
            small[0].result, (pattern(0, 5000) + pattern(1, 5000)) / np.float32(2)
        )
        for memory, before, rank in zip(big, kept, range(2), strict=True):
            np.testing.assert_array_equal(memory.result, before)
            np.testing.assert_array_equal(memory.mine, pattern(rank, 4_000_000))


class Pushing(Topology):
    """Everybody pushes to rank 0, which adds up and returns the sum."""

    agreement: ClassVar = "eventual"

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        whole = bucket.region
        if links.rank:
            await links.move(Send(0, Message("push", 5, (whole,))))
            await links.move(Recv(0, whole))
            return
        total = links.scratch(len(whole))
        await links.local(lambda dst, src: np.copyto(dst, src), whole, total)
        for _ in range(links.size - 1):
            (message,) = await links.move(Recv(ANY))
            pushed = message.regions[0]
            copy = links.scratch(len(whole))
            await links.local(lambda dst, src: np.copyto(dst, src), pushed, copy)
            await links.local(lambda dst, src: np.add(dst, src, out=dst), copy, total)
            links.release(message)
        await links.local(lambda dst, src: np.copyto(dst, src), total, whole)
        await links.move(Send(range(1, links.size), whole))


@pytest.mark.parametrize("length", [3, 200_000])
async def test_any_source_messages_and_local_kernels(length: int) -> None:
    async with drivers(3) as made:
        memories = [filled(pattern(rank, length)) for rank in range(3)]
        for step in range(2):
            await run_all(made, Pushing(), memories, key(step), reduction=Reduction.SUM)
        expected = sum(pattern(rank, length) for rank in range(3))
        for memory in memories:
            np.testing.assert_array_equal(memory.result, expected)


class Raising(Topology):
    """Fails in its own way."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        raise self.error


async def test_a_plugin_s_error_is_chained() -> None:
    async with drivers(1) as made:
        memory = filled(pattern(0, 4))
        with pytest.raises(TopologyError, match=r"raising.* raised RuntimeError") as caught:
            await made[0].run(Raising(RuntimeError("boom")), memory, key())
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(HazardError, match="two"):
            await made[0].run(Raising(HazardError("two")), memory, key())


class Uneven(Topology):
    """Sends five elements where four are expected."""

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        if links.rank:
            await links.move(Send(0, Region(0, 5)))
        else:
            await links.move(Recv((0, 1), Region(0, 4), ADD))


async def test_a_mismatch_is_an_error_at_the_receiver() -> None:
    async with drivers(2) as made:
        memories = [filled(pattern(rank, 9)) for rank in range(2)]
        jobs = [asyncio.ensure_future(made[r].run(Uneven(), memories[r], key())) for r in (0, 1)]
        with pytest.raises(TopologyError):
            await jobs[0]
        jobs[1].cancel()
        await asyncio.wait(jobs)
        assert jobs[1].cancelled() or isinstance(jobs[1].exception(), TopologyError)


async def test_stuck_rounds_say_what_they_wait_for() -> None:
    async with drivers(2) as made:
        job = asyncio.ensure_future(made[0].run(Ring(), filled(pattern(0, 8)), key(4, 1)))
        await asyncio.sleep(0.01)
        assert made[0].stuck() == [
            "bucket 1 of step 4: move 1: receive (add) into elements 4..8: "
            "rank 1 sent 0 of 4 elements",
            "bucket 1 of step 4: move 2: receive (copy) into elements 0..4: "
            "rank 1 sent 0 of 4 elements",
            "bucket 1 of step 4: move 2: send of elements 4..8 to rank 1: "
            "0 of 4 elements were ready",
        ]
        job.cancel()
        await asyncio.wait([job])


# Random programs over channels that delay and reorder.


@asynccontextmanager
async def chaotic(size: int, seed: int) -> AsyncIterator[list[AsyncioDriver]]:
    """Connect `size` drivers in memory; frames overtake each other."""
    transport = ChaosTransport.around(MemoryTransport, seed=seed, delay=4)
    async with memory_mesh(size, transport) as rows:
        made = [
            AsyncioDriver(rank=rank, size=size, channels=row, kernels=kernels.default())
            for rank, row in enumerate(rows)
        ]
        try:
            yield made
        finally:
            for driver in made:
                await driver.close()


@contextmanager
def tiny(window: int, frame: int) -> Iterator[None]:
    """Make windows, segments, frames and eager messages a few elements long."""
    with (
        mock.patch.object(tasks, "WINDOW", window),
        mock.patch.object(round_memory, "WINDOW", window),
        mock.patch.object(tasks, "SEGMENT", window),
        mock.patch.object(sending, "EAGER_LENGTH", window),
        mock.patch.object(sending, "FRAME_BYTES", frame),
    ):
        yield


def same_bits(found: Any, expected: Any) -> None:
    """Compare bits; of a NaN only that it is one."""
    nans = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nans)
    np.testing.assert_array_equal(found[~nans].view(np.uint8), expected[~nans].view(np.uint8))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    length=st.sampled_from([1, 8, 40]),
    window=st.sampled_from([1, 4, 64]),
    frame=st.sampled_from([8, 20, 1 << 20]),
    dtype=st.sampled_from(["float32", "float16", "float64"]),
    in_place=st.booleans(),
)
def test_random_programs_and_their_replays(
    seed: int, size: int, length: int, window: int, frame: int, dtype: str, in_place: bool
) -> None:
    chance = random.Random(seed)
    program = random_program(chance, size, length)
    topology = Scripted(program)

    async def real() -> None:
        async with chaotic(size, seed) as made:
            memories = [filled(np.zeros(length), dtype, in_place) for _ in range(size)]
            for step in range(3):
                rng = np.random.default_rng([seed, step])
                given_ = [rng.standard_normal(length).astype(dtype) for _ in range(size)]
                weights = [chance.choice((0.0, 1.0, 1.0, 2.5)) for _ in range(size)]
                try:
                    expected = run_reference(program, given_, weights=weights)
                except HazardError:
                    # With these weights a kernel reads elements of different worth.
                    continue
                for memory, each in zip(memories, given_, strict=True):
                    memory.mine[:] = each
                async with asyncio.timeout(20):
                    await run_all(made, topology, memories, key(step), weights)
                for memory, wanted in zip(memories, expected, strict=True):
                    same_bits(memory.result, wanted)
            for memory in memories:
                memory.close()

    with tiny(window, frame), asyncio.Runner() as runner:
        runner.run(real())


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 4),
    window=st.sampled_from([2, 8, 64]),
    topology=st.sampled_from([Ring(), MapReduce(), None]),
)
def test_rounds_after_rounds_that_were_cancelled(
    seed: int, size: int, window: int, topology: Topology | None
) -> None:
    """Cancelled at any turn, on some ranks earlier than on others, and replays as well."""
    chance = random.Random(seed)
    length = 60
    program = random_program(chance, size, length)
    chosen = topology or Scripted(program)
    given_ = [pattern(rank, length) for rank in range(size)]
    if topology is None:
        expected = run_reference(program, given_)
    else:
        expected = simulate(topology, given_).results

    async def real() -> None:
        async with chaotic(size, seed) as made:
            memories = [filled(each) for each in given_]
            for step in range(6):
                jobs = [
                    asyncio.ensure_future(driver.run(chosen, memory, key(step)))
                    for driver, memory in zip(made, memories, strict=True)
                ]
                async with asyncio.timeout(20):
                    if step in (1, 2, 4):
                        for job in chance.sample(jobs, size):
                            for _ in range(chance.randrange(12)):
                                await asyncio.sleep(0)
                            job.cancel()
                        await asyncio.wait(jobs)
                        ended = [memory.result.copy() for memory in memories]
                        for _ in range(10):
                            await asyncio.sleep(0)
                        for memory, mine, result in zip(memories, given_, ended, strict=True):
                            np.testing.assert_array_equal(memory.mine, mine)
                            same_bits(memory.result, result)
                    else:
                        await asyncio.gather(*jobs)
                        for memory, wanted in zip(memories, expected, strict=True):
                            same_bits(memory.result, wanted)
            for memory in memories:
                memory.close()

    with tiny(window, 16), asyncio.Runner() as runner:
        runner.run(real())


async def test_a_mismatch_found_while_posting_ends_the_round() -> None:
    """The sender's message is already here when the receive of another length is posted."""
    async with drivers(2) as made:
        memories = [filled(pattern(rank, 9)) for rank in range(2)]
        sender = asyncio.ensure_future(made[1].run(Uneven(), memories[1], key()))
        await asyncio.sleep(0.02)
        with pytest.raises(MismatchError, match="has 5 elements at its sender and 4 here"):
            await made[0].run(Uneven(), memories[0], key())
        sender.cancel()
        await asyncio.wait([sender])
        fine = [filled(pattern(rank, 9)) for rank in range(2)]
        await run_all(made, Ring(), fine, key(1))
        np.testing.assert_array_equal(fine[0].result, (pattern(0, 9) + pattern(1, 9)) / 2)


@pytest.mark.parametrize("told", [False, True])
async def test_a_channel_that_closed_before_the_round_names_the_peer(told: bool) -> None:
    lost: list[int] = []

    def on_lost(rank: int, error: Exception) -> None:
        lost.append(rank)
        made[1 - rank].abort(PeerFailedError(f"node{rank}", "somewhere", "it is gone"))

    async with drivers(2, **({"on_lost": on_lost} if told else {})) as made:
        channel = made[0].channels[1]
        assert channel is not None
        channel.abort()
        await asyncio.sleep(0.02)
        for driver in made:
            with pytest.raises(PeerFailedError, match="it is gone" if told else "peer [01] at"):
                await driver.run(Ring(), filled(pattern(0, 9)), key())
        assert set(lost) == ({0, 1} if told else set())


class Stubborn(Topology):
    """Goes on awaiting after it was told to end, twice."""

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        try:
            await links.move(Recv(1 - links.rank, bucket.region))
        except BaseException:
            try:
                await links.wait([])
            except BaseException:
                await links.wait([])


async def test_a_plugin_cannot_keep_a_round_alive() -> None:
    async with drivers(2) as made:
        job = asyncio.ensure_future(made[0].run(Stubborn(), filled(pattern(0, 9)), key()))
        await asyncio.sleep(0.01)
        made[0].abort(PeerFailedError("node1", "somewhere", "it is gone"))
        with pytest.raises(PeerFailedError, match="it is gone"):
            await job


class Collecting(Topology):
    """Rank 0 takes messages of all sizes from everybody, and ends with a receive open."""

    agreement: ClassVar = "eventual"

    def __init__(self, messages: int) -> None:
        self.messages = messages
        self.seen: list[tuple[int, int, float]] = []

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        if links.rank:
            for number in range(self.messages):
                part = bucket.region.chunk(number % 3, 3)
                region = Region(part.start, part.start) if number % 4 == 3 else part
                await links.move(Send(0, Message("push", number, (region, region))))
            return
        handles = list(links.post(*[Recv(ANY)] * 2))
        for _ in range(self.messages * (links.size - 1)):
            (taken,) = (await links.wait(handles, count=1))[:1]
            handles.remove(taken)
            message = taken.message
            assert message is not None
            first, second = message.regions
            assert len(first) == len(second)
            found = links.scratch(1)
            await links.local(lambda dst, src: dst.fill(src.sum()), second, found)
            await links.local(
                lambda dst, src, m=message: self.seen.append((m.source, m.clock, float(src[0]))),  # type: ignore[misc]
                found,
                Region(0, 0),
            )
            links.release(message)
            handles += links.post(Recv(ANY))


@pytest.mark.parametrize("length", [9, 60_000])
async def test_many_messages_of_many_senders(length: int) -> None:
    """Short ones come before anybody asks, long ones when they are asked for; round after round."""
    async with drivers(4) as made:
        memories = [filled(pattern(rank, length)) for rank in range(4)]
        for step in range(3):
            topology = Collecting(6)
            async with asyncio.timeout(20):
                await run_all(made, topology, memories, key(step), reduction=Reduction.NONE)
            for rank in (1, 2, 3):
                mine = [entry for entry in topology.seen if entry[0] == rank]
                assert [clock for _, clock, _ in mine] == list(range(6))
                for _, clock, total in mine:
                    part = Region(0, length).chunk(clock % 3, 3)
                    values = memories[rank].mine[part.start : part.stop]
                    assert total == (0.0 if clock % 4 == 3 else float(values.sum()))
