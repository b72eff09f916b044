"""The engine of a round, driven by the simulator with topologies that are unlike the built-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdpt.errors import (
    DeadlockError,
    HazardError,
    IncompleteError,
    MismatchError,
    TopologyError,
)
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.testing.simulator import Network, simulate
from p2pdpt.testing.topology_kit import TopologyKit, pattern
from p2pdpt.topology import (
    ADD,
    ANY,
    COPY,
    Bucket,
    Links,
    Message,
    Recv,
    Region,
    Send,
    Topology,
)

Exchange = Callable[[Links, Bucket], Any]


def made(
    exchange: Exchange,
    *,
    is_static: bool = True,
    agrees: str = "exact",
) -> Topology:
    """Return a topology around one coroutine function."""

    class Made(Topology):
        static: ClassVar[bool] = is_static
        agreement = agrees  # type: ignore[assignment]

        async def exchange(self, links: Links, bucket: Bucket) -> None:
            await exchange(links, bucket)

    return Made()


class RecursiveDoubling(Topology):
    """Pairs exchange all they have, at distances 1, 2, 4 ...: each move reads what it writes."""

    static = True

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        distance = 1
        while distance < links.size:
            partner = links.rank ^ distance
            await links.move(
                Send(partner, bucket.region),
                Recv(sorted((partner, links.rank)), bucket.region, bucket.combine),
            )
            distance *= 2


class HalvingDoubling(Topology):
    """Rabenseifner: halve the vector while the distance doubles, then the way back."""

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


class Hierarchical(Topology):
    """Pairs fold by chunk, the pairs exchange each chunk, and the pairs share it again."""

    static = True

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        rank = links.rank
        buddy, other = rank ^ 1, rank ^ 2
        mine, theirs = bucket.region.chunk(rank % 2, 2), bucket.region.chunk(buddy % 2, 2)
        await links.move(Send(buddy, theirs), Recv(sorted((rank, buddy)), mine, bucket.combine))
        await links.move(Send(other, mine), Recv(sorted((rank, other)), mine, bucket.combine))
        await links.move(Send(buddy, mine), Recv(buddy, theirs))


class Server(Topology):
    """A parameter server on rank 0, with any-source pushes and pulls."""

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        whole = bucket.region
        if links.rank:
            await links.move(Send(0, Message("push", links.rank, (whole,))))
            await links.move(Recv(0, whole))
            return
        space = links.scratch(len(whole))
        total = links.scratch(len(whole))
        await links.local(lambda dst, src: np.copyto(dst, src), whole, total)
        for _ in range(links.size - 1):
            (message,) = await links.move(Recv(ANY))
            assert message.clock == message.source
            (pushed,) = message.regions

            await links.local(lambda dst, src: np.copyto(dst, src), total, space)
            if len(whole):
                joined = links.scratch(len(whole))
                await links.local(lambda dst, src: np.copyto(dst, src), pushed, joined)
                await links.local(lambda dst, src: np.add(dst, src, out=dst), joined, total)
            links.release(message)
        scale = links.size
        await links.local(lambda dst, src: np.divide(src, scale, out=dst), total, whole)
        await links.move(Send(range(1, links.size), whole))


class TestRecursiveDoubling(TopologyKit):
    sizes: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)

    def topology(self, size: int) -> Topology:
        return RecursiveDoubling()


class TestHalvingDoubling(TopologyKit):
    sizes: ClassVar[tuple[int, ...]] = (1, 2, 4, 8)

    def topology(self, size: int) -> Topology:
        return HalvingDoubling()


class TestTree(TopologyKit):
    def topology(self, size: int) -> Topology:
        return Tree()


class TestHierarchical(TopologyKit):
    sizes: ClassVar[tuple[int, ...]] = (4,)

    def topology(self, size: int) -> Topology:
        return Hierarchical()


def test_windows_are_folded_in_order_however_long_the_bucket() -> None:
    """Several windows of staging, in pieces of any size, with three sources."""
    length = 200_001
    given_ = [pattern(rank, length) for rank in range(4)]
    for topology in (Tree(), RecursiveDoubling(), HalvingDoubling()):
        outcome = simulate(topology, given_, network=Network(frame_elements=(1000, 70_000)), seed=1)
        expected = np.sum(given_, axis=0, dtype=np.float64) / 4
        for result in outcome.results:
            np.testing.assert_array_equal(result, expected.astype(np.float32))


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([2, 4, 8]),
    length=st.integers(0, 300),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int32"]),
    in_place=st.booleans(),
    weights=st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=8, max_size=8),
)
def test_bits_do_not_depend_on_the_schedule(
    size: int, length: int, seed: int, dtype: str, in_place: bool, weights: list[float]
) -> None:
    rng = np.random.default_rng(length)
    if dtype == "int32":
        given_: list[Any] = [rng.integers(-9, 9, length, dtype=np.int32) for _ in range(size)]
        reduction = Reduction.SUM
    else:
        floats = [rng.standard_normal(length).astype(np.float32) for _ in range(size)]
        reduction = Reduction.MEAN
        given_ = [
            each
            if dtype == "float32"
            else each.astype(np.float16)
            if dtype == "float16"
            else (each.view(np.uint32) >> 16).astype(np.uint16)
            for each in floats
        ]
    for topology in (RecursiveDoubling(), HalvingDoubling(), Tree()):
        outcomes = [
            simulate(
                topology,
                [each.copy() for each in given_],
                dtype=dtype,
                reduction=reduction,
                weights=weights[:size],
                seed=order,
                in_place=in_place and order == seed,
                run_ahead=order == seed,
                network=Network(frame_elements=(1, 1 + length // 3)),
            )
            for order in (seed, seed + 1)
        ]
        first = outcomes[0].results[0]
        for outcome in outcomes:
            for result in outcome.results:
                np.testing.assert_array_equal(
                    result.view(np.uint8), first.view(np.uint8), err_msg=topology.describe()
                )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_any_source_messages_reach_a_server(size: int) -> None:
    given_ = [pattern(rank, 50) for rank in range(size)]
    for seed in range(5):

        class Eventual(Server):
            agreement = "eventual"

        outcome = simulate(Eventual(), given_, seed=seed, reduction=Reduction.SUM)
        expected = np.sum(given_, axis=0) / np.float32(size)
        for result in outcome.results:
            np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_half_posted_operations_finish_when_waited_for() -> None:
    """post and wait: the first `count` of several, then the rest."""
    order: list[int] = []

    async def exchange(links: Links, bucket: Bucket) -> None:
        others = [r for r in range(links.size) if r != links.rank]
        spaces = {other: links.scratch(bucket.length) for other in others}
        links.post(Send(others, bucket.region))
        handles = {o: links.post(Recv(o, spaces[o]))[0] for o in others}
        first = await links.wait(handles.values(), count=1)
        assert len(first) >= 1 and all(handle.done for handle in first)
        every = await links.wait(handles.values())
        order.append(len(every))

    topology = made(exchange, is_static=False, agrees="eventual")
    simulate(topology, [pattern(rank, 9) for rank in range(3)])
    assert order == [2, 2, 2]


def test_a_deadline_ends_a_wait() -> None:
    found: dict[int, int] = {}

    async def exchange(links: Links, bucket: Bucket) -> None:
        if links.rank == 0:
            (handle,) = links.post(Recv(1, bucket.region))
            late = await links.wait([handle], deadline=links.now + 0.5)
            found[0] = len(late)
            await links.wait([handle])
            found[1] = int(links.now)
        else:
            # A wait for nothing with a deadline is a pause.
            await links.wait([], count=0)
            space = links.scratch(1)
            del space
            (never,) = links.post(Recv(ANY))
            await links.wait([never], deadline=links.now + 2.0)
            await links.move(Send(0, bucket.region))

    topology = made(exchange, is_static=False, agrees="eventual")
    simulate(topology, [pattern(rank, 4) for rank in range(2)])
    assert found == {0: 0, 1: 2}


def run_pair(exchange: Exchange, **options: Any) -> Any:
    return simulate(made(exchange, **options), [pattern(rank, 10) for rank in range(2)])


def test_two_writes_in_one_move_are_refused() -> None:
    async def exchange(links: Links, bucket: Bucket) -> None:
        other = 1 - links.rank
        await links.move(
            Send(other, Region(0, 6)),
            Send(other, Region(0, 6)),
            Recv(other, Region(0, 6)),
            Recv(other, Region(4, 10)),
        )

    with pytest.raises(HazardError, match="write elements"):
        run_pair(exchange)


def test_a_write_to_a_region_in_flight_is_refused() -> None:
    async def exchange(links: Links, bucket: Bucket) -> None:
        other = 1 - links.rank
        links.post(Send(other, Region(0, 5)))
        await links.move(Recv(other, Region(4, 9)))

    with pytest.raises(HazardError, match="in flight"):
        run_pair(exchange)


def test_scratch_that_was_never_written_is_refused() -> None:
    async def exchange(links: Links, bucket: Bucket) -> None:
        await links.move(Send(1 - links.rank, links.scratch(3)))

    with pytest.raises(HazardError, match="nothing has been written"):
        run_pair(exchange)


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (lambda bucket: Send(7, bucket.region), "ranks 0..1"),
        (lambda bucket: Send(0, Region(0, 11)), "outside the 10 elements"),
        (lambda bucket: Recv(0, Region(0, 1, 9)), "does not exist"),
        (lambda bucket: "nonsense", "neither a Send nor a Recv"),
    ],
)
def test_operations_outside_the_world_are_refused(operation: Any, text: str) -> None:
    async def exchange(links: Links, bucket: Bucket) -> None:
        if links.rank == 1:
            await links.move(operation(bucket))

    with pytest.raises(TopologyError, match=text):
        run_pair(exchange)


def test_sending_to_itself_is_refused() -> None:
    async def exchange(links: Links, bucket: Bucket) -> None:
        await links.move(Send(links.rank, bucket.region))

    with pytest.raises(TopologyError, match="itself"):
        run_pair(exchange)


def test_different_lengths_are_a_mismatch() -> None:
    async def exchange(links: Links, bucket: Bucket) -> None:
        if links.rank:
            await links.move(Send(0, Region(0, 4)))
        else:
            await links.move(Recv(1, Region(0, 5)))

    with pytest.raises(MismatchError, match="4 elements are sent, 5 are expected"):
        run_pair(exchange, agrees="eventual")


def test_a_deadlock_lists_the_stuck_operations() -> None:
    async def exchange(links: Links, bucket: Bucket) -> None:
        await links.move(Recv(1 - links.rank, Region(0, 3)))
        await links.move(Send(1 - links.rank, Region(3, 6)))

    with pytest.raises(DeadlockError) as caught:
        run_pair(exchange, is_static=False)
    text = str(caught.value)
    assert "2 of 2 ranks wait for ever" in text
    assert "rank 0: move 1: receive (copy) into elements 0..3: rank 1 sent 0 of 3" in text
    assert "rank 1: move 1: receive (copy) into elements 0..3: rank 0 sent 0 of 3" in text


def test_a_lost_frame_is_a_deadlock_with_its_operation() -> None:
    with pytest.raises(DeadlockError, match=r"rank 1: move 2: .* rank 0 sent 0 of 10"):
        simulate(Tree(), [pattern(r, 10) for r in range(2)], network=Network(drop=frozenset({1})))


def test_an_incomplete_result_is_refused() -> None:
    async def exchange(links: Links, bucket: Bucket) -> None:
        half = Region(0, 5)
        other = 1 - links.rank
        await links.move(Send(other, half), Recv((0, 1), half, ADD))

    with pytest.raises(IncompleteError, match=r"elements 5..10 of rank \d held 1 of 2"):
        run_pair(exchange)


def test_a_contribution_counted_twice_is_refused() -> None:
    async def exchange(links: Links, bucket: Bucket) -> None:
        other = 1 - links.rank
        for _ in range(2):
            await links.move(
                Send(other, bucket.region), Recv((0, 1), bucket.region, bucket.combine)
            )

    with pytest.raises(HazardError, match="already holds every contribution"):
        run_pair(exchange)


def test_awaiting_something_else_is_refused() -> None:
    class Foreign:
        def __await__(self) -> Any:
            yield "a foreign future"

    async def exchange(links: Links, bucket: Bucket) -> None:
        await Foreign()

    with pytest.raises(TopologyError, match="awaits only links"):
        run_pair(exchange)


def test_a_plugin_s_own_error_comes_through() -> None:
    async def exchange(links: Links, bucket: Bucket) -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        run_pair(exchange)


def test_random_numbers_are_the_same_on_all_ranks() -> None:
    drawn: list[float] = []

    async def exchange(links: Links, bucket: Bucket) -> None:
        drawn.append(links.rng.random())

    run_pair(exchange, agrees="eventual")
    assert drawn[0] == drawn[1]


def test_gossip_divides_by_what_it_holds() -> None:
    """With eventual agreement a pair's fold ends as the mean of the pair."""

    async def exchange(links: Links, bucket: Bucket) -> None:
        partner = links.rank ^ 1
        await links.move(
            Send(partner, bucket.region), Recv(sorted((partner, links.rank)), bucket.region, ADD)
        )

    outcome = simulate(made(exchange, agrees="eventual"), [pattern(rank, 6) for rank in range(4)])
    low = (pattern(0, 6) + pattern(1, 6)) / 2
    high = (pattern(2, 6) + pattern(3, 6)) / 2
    for result, expected in zip(outcome.results, (low, low, high, high), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_swapping_regions_within_a_move() -> None:
    """A region may be sent and overwritten in one move: the send reads the state before."""

    async def exchange(links: Links, bucket: Bucket) -> None:
        other = 1 - links.rank
        for _ in range(3):
            await links.move(Send(other, bucket.region), Recv(other, bucket.region, COPY))

    for length in (5, 100_000):
        given_ = [pattern(rank, length) for rank in range(2)]
        for in_place in (False, True):
            outcome = simulate(
                made(exchange, agrees="eventual"),
                [each.copy() for each in given_],
                reduction=Reduction.NONE,
                in_place=in_place,
                network=Network(frame_elements=(1 + length // 50, 1 + length // 10)),
            )
            np.testing.assert_array_equal(outcome.results[0], given_[1])
            np.testing.assert_array_equal(outcome.results[1], given_[0])


def test_a_partition_is_waited_out() -> None:
    network = Network(partition=(frozenset({0}), frozenset({1, 2})), partitioned_s=(0.0, 5.0))
    outcome = simulate(Tree(), [pattern(rank, 7) for rank in range(3)], network=network)
    assert outcome.seconds > 5.0
    np.testing.assert_array_equal(
        outcome.results[0], np.sum([pattern(r, 7) for r in range(3)], axis=0) / np.float32(3)
    )


def test_more_regions_than_a_message_carries_are_refused() -> None:
    async def exchange(links: Links, bucket: Bucket) -> None:
        message = Message("many", 0, tuple(bucket.chunks(11)))
        await links.move(Send(1 - links.rank, message))

    with pytest.raises(TopologyError, match="10 regions at most"):
        run_pair(exchange)


def test_a_message_nobody_receives_is_a_mismatch() -> None:
    async def exchange(links: Links, bucket: Bucket) -> None:
        if links.rank:
            await links.move(Send(0, Message("push", 1, ())))
            await links.move(Send(0, Message("push", 2, ())))
        else:
            await links.move(Recv(ANY))

    with pytest.raises((MismatchError, DeadlockError)):
        run_pair(exchange, is_static=False, agrees="eventual")
