"""The kit finds what it is there to find: each broken topology fails the property it breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
import pytest

from p2pdpt.errors import DeadlockError, HazardError, IncompleteError
from p2pdpt.testing import TopologyKit, pattern
from p2pdpt.topology import ADD, ANY, Bucket, Links, Message, Recv, Region, Send, Topology


class Flat(Topology):
    """Everybody sends everything to everybody."""

    static: ClassVar[bool] = True

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        everyone = range(links.size)
        others = [rank for rank in everyone if rank != links.rank]
        await links.move(Send(others, bucket.region), Recv(everyone, bucket.region, bucket.combine))


class Pairs(Topology):
    """Gossip: neighbours share their mean, whoever is left over keeps its own."""

    agreement: ClassVar[Literal["exact", "eventual"]] = "eventual"

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        partner = links.rank ^ 1
        if partner < links.size:
            both = sorted((partner, links.rank))
            await links.move(Send(partner, bucket.region), Recv(both, bucket.region, ADD))


class TestFlat(TopologyKit):
    sizes: ClassVar[tuple[int, ...]] = (1, 2, 5)

    def topology(self, size: int) -> Topology:
        return Flat()


class TestPairs(TopologyKit):
    sizes: ClassVar[tuple[int, ...]] = (1, 2, 5)

    def topology(self, size: int) -> Topology:
        return Pairs()


class OwnOrder(Flat):
    """Each rank adds its own contribution first: nearly the same sum."""

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        others = [rank for rank in range(links.size) if rank != links.rank]
        await links.move(
            Send(others, bucket.region),
            Recv((links.rank, *others), bucket.region, bucket.combine),
        )


class Forgetful(Flat):
    """Leaves the last element as it was."""

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        part = Region(0, max(0, bucket.length - 1))
        everyone = range(links.size)
        others = [rank for rank in everyone if rank != links.rank]
        await links.move(Send(others, part), Recv(everyone, part, bucket.combine))


class FirstCome(Flat):
    """Adds in the order of arrival."""

    static: ClassVar[bool] = False
    agreement: ClassVar[Literal["exact", "eventual"]] = "exact"

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        whole = bucket.region
        others = [rank for rank in range(links.size) if rank != links.rank]
        messages = [links.post(Send(others, Message("all", 0, (whole,))))[0]]
        order = []
        held = []
        for _ in others:
            (message,) = await links.move(Recv(ANY))
            order.append(message.source)
            held.append(message)
        await links.wait(messages)
        for message in held:
            links.release(message)
        # Whoever came first is first.
        await links.move(Send(others, whole), Recv((*order, links.rank), whole, bucket.combine))


class Twice(Flat):
    """Adds everything twice."""

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        await super().exchange(links, bucket)
        await super().exchange(links, bucket)


class Waiting(Flat):
    """Receives before it sends, like everybody."""

    static: ClassVar[bool] = False

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        others = [rank for rank in range(links.size) if rank != links.rank]
        space = links.scratch(len(others) * bucket.length).chunks(max(1, len(others)))
        await links.move(*(Recv(o, space[i]) for i, o in enumerate(others)))
        await links.move(Send(others, bucket.region))


class Adding(Flat):
    """Always adds, whatever the bucket asks for."""

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        await super().exchange(links, Bucket(bucket.length, bucket.dtype, ADD))


def kit(made: Callable[[], Topology]) -> TopologyKit:
    class Kit(TopologyKit):
        sizes: ClassVar[tuple[int, ...]] = (1, 2, 4)

        def topology(self, size: int) -> Topology:
            return made()

    return Kit()


@pytest.mark.parametrize(
    ("made", "prop", "error"),
    [
        (OwnOrder, "test_members_agree_to_the_bit", AssertionError),
        (FirstCome, "test_members_agree_to_the_bit", AssertionError),
        (Forgetful, "test_every_member_ends_with_the_mean", IncompleteError),
        (Twice, "test_a_sum_holds_every_contribution_once", HazardError),
        (Waiting, "test_every_member_ends_with_the_mean", DeadlockError),
        (Adding, "test_other_ways_to_combine", AssertionError),
    ],
)
def test_a_broken_topology_fails(made: type[Topology], prop: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        getattr(kit(made), prop)()


def test_patterns_tell_every_set_of_ranks_apart() -> None:
    sums = {}
    for chosen in range(1, 1 << 8):
        ranks = [rank for rank in range(8) if chosen >> rank & 1]
        total = np.array(np.sum([pattern(rank, 3) for rank in ranks], axis=0, dtype=np.float32))
        exact = np.sum([pattern(rank, 3) for rank in ranks], axis=0, dtype=np.float64)
        np.testing.assert_array_equal(total, exact)
        sums[total.tobytes()] = chosen
    assert len(sums) == 255
    assert pattern(1, 3).tolist() == [6000.0, 6001.0, 6002.0]
    assert pattern(0, 0).dtype == np.float32
