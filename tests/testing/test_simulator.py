"""The simulator, and through it the engine of a round: the same bits in every schedule."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdpt.dtypes import DTYPES, DType
from p2pdpt.errors import DeadlockError, HazardError, MismatchError, TopologyError
from p2pdpt.protocol import mailbox, tasks
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.runtime.drivers import round_memory
from p2pdpt.testing import network as simulated
from p2pdpt.testing.programs import AllReduce, Program, Scripted
from p2pdpt.testing.random_programs import random_all_reduce, random_program
from p2pdpt.testing.reference import narrowed, run_reference, widened
from p2pdpt.testing.simulator import Network, Simulation, simulate
from p2pdpt.testing.topology_kit import pattern
from p2pdpt.topology import ADD, ANY, COPY, Bucket, Links, Message, Recv, Region, Send, Topology
from p2pdpt_plugins.mapreduce import MapReduce
from p2pdpt_plugins.ring import Ring

HEADER = simulated.HEADER_BYTES


@contextmanager
def windows(window: int, segment: int, eager: int) -> Iterator[None]:
    """Make everything tiny that is large in earnest, so that short buckets meet its edges."""
    with (
        mock.patch.object(tasks, "WINDOW", window),
        mock.patch.object(round_memory, "WINDOW", window),
        mock.patch.object(mailbox, "WINDOW", window),
        mock.patch.object(tasks, "SEGMENT", segment),
        mock.patch.object(simulated, "EAGER_BYTES", eager),
    ):
        yield


def drawn(chance: random.Random, size: int, length: int, dtype: DType) -> list[Any]:
    rng = np.random.default_rng(chance.randrange(2**32))
    if dtype.inexact:
        return [
            narrowed(rng.standard_normal(length).astype(dtype.wide), dtype) for _ in range(size)
        ]
    return [rng.integers(-9, 9, length).astype(dtype.storage) for _ in range(size)]


def assert_same_bits(found: Any, expected: Any, dtype: DType) -> None:
    """Compare bits; of a NaN only that it is one."""
    if dtype.inexact:
        nans = np.isnan(widened(found, dtype))
        np.testing.assert_array_equal(nans, np.isnan(widened(expected, dtype)))
        found, expected = found[~nans], expected[~nans]
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


WEIGHTS = (0.0, 1.0, 1.0, 2.5, 3.0)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    length=st.sampled_from([1, 3, 8, 20, 40]),
    phases=st.integers(1, 10),
    window=st.sampled_from([1, 2, 3, 4, 8, 64, 1 << 16]),
    segment=st.sampled_from([1, 4, 16, 1 << 17]),
    eager=st.booleans(),
    name=st.sampled_from(["float32", "float32", "bfloat16", "float16", "float64", "int8"]),
    equal=st.booleans(),
    in_place=st.booleans(),
    run_ahead=st.booleans(),
)
def test_random_programs_give_the_bits_of_the_reference(
    seed: int,
    size: int,
    length: int,
    phases: int,
    window: int,
    segment: int,
    eager: bool,
    name: str,
    equal: bool,
    in_place: bool,
    run_ahead: bool,
) -> None:
    """Whatever the frames, windows, latencies and weights; and so do two replays of each."""
    chance = random.Random(seed)
    dtype = DTYPES[name]
    reduction = Reduction.MEAN if dtype.inexact else Reduction.SUM
    program = random_program(chance, size, length, phases)
    simulation = None
    for _ in range(3 if run_ahead else 1):
        weights = [2.0 if equal else chance.choice(WEIGHTS) for _ in range(size)]
        contributions = drawn(chance, size, length, dtype)
        try:
            expected = run_reference(
                program, contributions, dtype=name, reduction=reduction, weights=weights
            )
        except HazardError:
            # With these weights a kernel reads elements of different worth.
            break
        given_ = [each.copy() for each in contributions]
        with windows(window, segment, window if eager else 0):
            if simulation is None:
                simulation = Simulation(
                    Scripted(program),
                    given_,
                    dtype=name,
                    reduction=reduction,
                    weights=weights,
                    seed=seed,
                    in_place=in_place,
                    run_ahead=run_ahead,
                    network=Network(
                        frame_elements=(1, chance.choice((1, 3, length))),
                        latency_s=chance.choice(((2e-5, 2e-4), (0.0, 1e-3), (1e-4, 1e-4))),
                    ),
                )
                outcome = simulation.run()
            else:
                outcome = simulation.replay(given_, weights)
        for result, wanted in zip(outcome.results, expected, strict=True):
            assert_same_bits(result, wanted, dtype)


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 6),
    length=st.sampled_from([0, 1, 8, 40]),
    window=st.sampled_from([1, 4, 64]),
    name=st.sampled_from(["float32", "bfloat16", "float16", "int16"]),
    equal=st.booleans(),
    in_place=st.booleans(),
    run_ahead=st.booleans(),
)
def test_random_trees_of_folds_are_finished_on_the_spot(
    seed: int,
    size: int,
    length: int,
    window: int,
    name: str,
    equal: bool,
    in_place: bool,
    run_ahead: bool,
) -> None:
    """Exact agreement: whoever has all contributions divides and rounds, and sends the result."""
    chance = random.Random(seed)
    dtype = DTYPES[name]
    reduction = Reduction.MEAN if dtype.inexact else Reduction.SUM
    program = random_all_reduce(chance, size, length)
    weights = [2.0 if equal else chance.choice(WEIGHTS) for _ in range(size)]
    contributions = drawn(chance, size, length, dtype)
    expected = run_reference(
        program, contributions, dtype=name, reduction=reduction, weights=weights
    )
    with windows(window, window, window if seed % 2 else 0):
        outcome = simulate(
            AllReduce(program),
            [each.copy() for each in contributions],
            dtype=name,
            reduction=reduction,
            weights=weights,
            seed=seed,
            in_place=in_place,
            run_ahead=run_ahead,
            network=Network(frame_elements=(1, 1 + length // 3)),
        )
    for result, wanted in zip(outcome.results, expected, strict=True):
        assert_same_bits(result, wanted, dtype)
        assert_same_bits(result, outcome.results[0], dtype)


def test_a_send_that_lags_behind_what_overwrites_it() -> None:
    """Each rank's receive lies far ahead of the send of the same move: a window would block."""
    whole = 40

    def moves(rank: int) -> tuple[Any, ...]:
        return ((Send(1 - rank, Region(0, 30)), Recv(1 - rank, Region(10, whole))),)

    program = Program(whole, (), (moves(0), moves(1)))
    given_ = [pattern(rank, whole) for rank in range(2)]
    expected = run_reference(program, given_, reduction=Reduction.NONE)
    for in_place in (False, True):
        for run_ahead in (False, True):
            with windows(4, 4, 0):
                outcome = simulate(
                    Scripted(program),
                    [each.copy() for each in given_],
                    reduction=Reduction.NONE,
                    in_place=in_place,
                    run_ahead=run_ahead,
                )
            for result, wanted in zip(outcome.results, expected, strict=True):
                np.testing.assert_array_equal(result, wanted)


def test_equal_seeds_give_equal_runs() -> None:
    def run(seed: int) -> list[Any]:
        given_ = [pattern(rank, 100) for rank in range(4)]
        outcome = simulate(Ring(), given_, seed=seed, network=Network(frame_elements=(1, 30)))
        return [
            [each.tobytes() for each in outcome.results],
            outcome.errors,
            outcome.seconds,
            outcome.bytes_sent,
            outcome.messages_sent,
            outcome.frames_sent,
        ]

    assert run(3) == run(3)
    first, other = run(3), run(4)
    assert first[0] == other[0]
    assert first[2] != other[2]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_ring_takes_the_time_of_the_formula(size: int) -> None:
    """2 (n - 1) messages of 1 / n of the bucket, each alpha + bytes * beta."""
    length, alpha, bandwidth = 240, 1e-3, 1e6
    outcome = simulate(
        Ring(),
        [pattern(rank, length) for rank in range(size)],
        network=Network(
            latency_s=(alpha, alpha), bandwidth=bandwidth, frame_elements=(length, length)
        ),
    )
    nbytes = length // size * 4 + HEADER
    assert outcome.seconds == pytest.approx(2 * (size - 1) * (alpha + nbytes / bandwidth))
    assert outcome.bytes_sent == [2 * (size - 1) * nbytes] * size
    assert outcome.messages_sent == [2 * (size - 1)] * size
    assert outcome.frames_sent == 2 * (size - 1) * size


@pytest.mark.parametrize("size", [2, 3, 8])
def test_mapreduce_takes_two_latencies(size: int) -> None:
    outcome = simulate(
        MapReduce(),
        [pattern(rank, 240) for rank in range(size)],
        network=Network(latency_s=(1e-3, 1e-3), frame_elements=(240, 240)),
    )
    assert outcome.seconds == pytest.approx(2e-3)
    assert outcome.bytes_sent == [2 * (size - 1) * (240 // size * 4 + HEADER)] * size


@pytest.mark.parametrize("topology", [Ring(), MapReduce()])
def test_whenever_a_node_dies_survivors_end_with_the_result_or_its_name(topology: Topology) -> None:
    given_ = [pattern(rank, 60) for rank in range(3)]
    expected = np.sum(given_, axis=0, dtype=np.float64) / 3
    network = {"frame_elements": (1, 15), "detect_s": 1e-3}
    whole = simulate(topology, given_, seed=5, network=Network(**network)).seconds  # type: ignore[arg-type]
    found: dict[str, int] = {}
    for step in range(120):
        killed = step % 3
        outcome = simulate(
            topology,
            given_,
            seed=5,
            network=Network(kill={killed: whole * 1.05 * step / 119}, **network),  # type: ignore[arg-type]
        )
        for rank, (result, error) in enumerate(zip(outcome.results, outcome.errors, strict=True)):
            if rank == killed and result is None:
                assert error is None
                continue
            if error is None:
                np.testing.assert_allclose(result, expected, rtol=1e-6)
            else:
                assert result is None
                assert str(error).startswith(
                    f"peer rank {killed} at simulated failed during exchange"
                )
            kind = "whole" if error is None else "named"
            found[kind] = found.get(kind, 0) + 1
    assert min(found["whole"], found["named"]) > 10


def test_every_lost_frame_is_a_deadlock_and_not_a_hang() -> None:
    given_ = [pattern(rank, 20) for rank in range(2)]
    frames = simulate(Ring(), given_, seed=1, network=Network(frame_elements=(1, 4))).frames_sent
    assert frames > 12
    for number in range(frames):
        with pytest.raises(DeadlockError, match=r"[12] of 2 ranks wait for ever"):
            simulate(
                Ring(),
                given_,
                seed=1,
                network=Network(frame_elements=(1, 4), drop=frozenset({number})),
            )


class Mutual(Topology):
    """Both receive before they send."""

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        await links.move(Recv(1 - links.rank, Region(0, 3)))
        await links.move(Send(1 - links.rank, Region(3, 6)))


class Silent(Topology):
    """Expects a message that never comes."""

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        await links.move(Recv(ANY))


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (
            Mutual(),
            "2 of 2 ranks wait for ever:\n"
            "  rank 0: move 1: receive (copy) into elements 0..3: rank 1 sent 0 of 3 elements\n"
            "  rank 1: move 1: receive (copy) into elements 0..3: rank 0 sent 0 of 3 elements",
        ),
        (
            Silent(),
            "2 of 2 ranks wait for ever:\n"
            "  rank 0: move 1: Recv(sources=ANY, region=Region(start=0, stop=0, space=0), "
            "combine=<Combine.COPY: 0>)\n"
            "  rank 1: move 1: Recv(sources=ANY, region=Region(start=0, stop=0, space=0), "
            "combine=<Combine.COPY: 0>)",
        ),
    ],
)
def test_a_deadlock_lists_the_stuck_operations_of_each_node(topology: Topology, text: str) -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate(topology, [pattern(rank, 6) for rank in range(2)])
    assert str(caught.value) == text


def test_a_partition_heals() -> None:
    given_ = [pattern(rank, 30) for rank in range(4)]
    sides = (frozenset({0, 1}), frozenset({2, 3}))
    outcome = simulate(Ring(), given_, network=Network(partition=sides, partitioned_s=(1e-4, 60.0)))
    assert outcome.seconds > 60.0
    late = Network(partition=sides, partitioned_s=(1.0, 60.0))
    assert simulate(Ring(), given_, network=late).seconds < 1.0


@pytest.mark.parametrize("topology", [Ring(), MapReduce()])
def test_64_nodes(topology: Topology) -> None:
    given_ = [np.full(130, rank, "float32") for rank in range(64)]
    outcome = simulate(topology, given_, reduction=Reduction.SUM)
    for result in outcome.results:
        np.testing.assert_array_equal(result, np.full(130, 64 * 63 / 2))


def test_contributions_are_changed_only_in_place() -> None:
    given_ = [np.full(4, rank, "float32") for rank in range(2)]
    simulate(Ring(), given_)
    assert [each[0] for each in given_] == [0.0, 1.0]
    outcome = simulate(Ring(), given_, in_place=True)
    assert [each[0] for each in given_] == [0.5, 0.5]
    assert outcome.results[0] is not None


def test_contributions_must_fit_each_other() -> None:
    for wrong in (np.zeros(3, "float32"), np.zeros(4, "float64")):
        with pytest.raises(TopologyError, match="differ in length or type"):
            simulate(Ring(), [np.zeros(4, "float32"), wrong])
    with pytest.raises(TopologyError, match="differ in length or type"):
        simulate(Ring(), [np.zeros(4, "float32")] * 2, dtype="bfloat16")


def test_each_rank_may_run_its_own_topology() -> None:
    given_ = [pattern(rank, 5) for rank in range(2)]
    with pytest.raises((DeadlockError, MismatchError)):
        simulate([Ring(), MapReduce(reducer=0)], given_)
    outcome = simulate([Ring(), Ring()], given_)
    np.testing.assert_array_equal(outcome.results[0], (given_[0] + given_[1]) / 2)


def test_only_a_finished_static_round_is_replayed() -> None:
    given_ = [pattern(rank, 5) for rank in range(2)]
    simulation = Simulation(Ring(), given_)
    with pytest.raises(TopologyError, match="rank 0 has no finished static round"):
        simulation.replay(given_)

    class Dynamic(Ring):
        static: ClassVar[bool] = False

    simulation = Simulation(Dynamic(), given_)
    simulation.run()
    with pytest.raises(TopologyError, match="rank 0 has no finished static round"):
        simulation.replay(given_)


def test_a_replay_of_a_killed_node_is_named_too() -> None:
    given_ = [pattern(rank, 500) for rank in range(3)]
    simulation = Simulation(Ring(), [each.copy() for each in given_])
    simulation.run()
    simulation._network = Network(kill={1: 1e-4})
    outcome = simulation.replay(given_)
    assert [str(error)[:11] for error in outcome.errors if error] == ["peer rank 1"] * 2


class Collecting(Topology):
    """Every rank sends rank 0 messages of several regions; it applies them as they come."""

    agreement: ClassVar = "eventual"

    def __init__(self, messages: int) -> None:
        self.messages = messages

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        if links.rank:
            for number in range(self.messages):
                parts = tuple(bucket.chunks(number % 3))
                await links.move(Send(0, Message("push", number, parts)))
            return
        for _ in range(self.messages * (links.size - 1)):
            (message,) = await links.move(Recv(ANY))
            await links.apply(message.source, message)


class Ledger:
    """A store that writes down what it is given."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, list[bytes]]] = []

    def apply(self, shard: int, message: Message, data: list[memoryview]) -> None:
        self.entries.append((shard, message.clock, [bytes(each) for each in data]))


def test_messages_are_applied_once_whole_and_in_order() -> None:
    for seed in range(8):
        store = Ledger()
        given_ = [pattern(rank, 7) for rank in range(4)]
        simulate(
            Collecting(5),
            given_,
            seed=seed,
            store=store,  # type: ignore[arg-type]
            reduction=Reduction.NONE,
            network=Network(frame_elements=(1, 3)),
        )
        for rank in (1, 2, 3):
            entries = [entry for entry in store.entries if entry[0] == rank]
            assert [clock for _, clock, _ in entries] == [0, 1, 2, 3, 4]
            for _, clock, data in entries:
                parts = Region(0, 7).chunks(clock % 3)
                assert data == [given_[rank][p.start : p.stop].tobytes() for p in parts]
    with pytest.raises(TopologyError, match="no store to apply a message to"):
        simulate(Collecting(1), [pattern(rank, 7) for rank in range(2)])


def test_a_message_that_comes_when_nobody_wants_it_any_more() -> None:
    """The server posts two receives and ends with one of them open: a message was too many."""

    class Leaving(Topology):
        agreement: ClassVar = "eventual"

        async def exchange(self, links: Links, bucket: Bucket) -> None:
            if links.rank:
                await links.move(Send(0, Message("push", links.rank)))
            else:
                await links.wait(links.post(Recv(ANY), Recv(ANY)), count=1)

    missed = 0
    for seed in range(20):
        try:
            simulate(Leaving(), [pattern(rank, 3) for rank in range(3)], seed=seed)
        except MismatchError:
            missed += 1
    # Where both had come before the server began, both were received.
    assert 5 < missed < 20
    # With one sender nothing is missed, though the second receive stays open.
    simulate(Leaving(), [pattern(rank, 3) for rank in range(2)])


def test_copies_and_folds_of_one_region_follow_each_other() -> None:
    """COPY over a region that an ADD wrote and a send still reads, through three ranks."""
    whole = Region(0, 30)
    program = Program(
        30,
        (),
        (
            ((Recv((1, 0), whole, ADD), Send(1, whole)), (Send(2, whole), Recv(2, whole, COPY))),
            ((Recv(0, whole), Send(0, whole)), (Send(2, Region(0, 10)),)),
            (
                (Recv((0, 2), whole, ADD), Send(0, whole)),
                (Recv(1, Region(20, 30)),),
            ),
        ),
    )
    given_ = [pattern(rank, 30) for rank in range(3)]
    expected = run_reference(program, given_, reduction=Reduction.NONE)
    for seed in range(10):
        for window in (2, 4, 64):
            with windows(window, 4, window if seed % 2 else 0):
                outcome = simulate(
                    Scripted(program),
                    [each.copy() for each in given_],
                    reduction=Reduction.NONE,
                    seed=seed,
                    in_place=seed % 3 == 0,
                    run_ahead=seed % 5 > 0,
                    network=Network(frame_elements=(1, 7)),
                )
            for result, wanted in zip(outcome.results, expected, strict=True):
                np.testing.assert_array_equal(result, wanted)
