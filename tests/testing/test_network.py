from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest

from p2pdpt.channel import Meta
from p2pdpt.errors import MismatchError
from p2pdpt.protocol.round_io import Slice
from p2pdpt.testing.network import HEADER_BYTES, Host, Network, Schedule, Wire

META = Meta(1.0, 1.0, 1)


class FakeHost(Host):
    """Memory of one area, and a log of what the network tells."""

    def __init__(self, schedule: Schedule, length: int) -> None:
        super().__init__()
        self.schedule = schedule
        self.array = np.zeros(length, "float32")
        self.header = bytearray(128)
        self.log: list[tuple[Any, ...]] = []
        self.memory = self  # type: ignore[assignment]
        self.round = self  # type: ignore[assignment]
        self.most = length

    def view(self, data: Slice) -> Any:
        return self.array[data.start : data.stop]

    def land(
        self, peer: int, ordinal: int, start: int, count: int, width: int, meta: Meta
    ) -> Slice | memoryview:
        if width == 1:
            return memoryview(self.header)[start : start + count]
        return Slice(0, start, start + min(count, self.most))

    def arrived(self, peer: int, ordinal: int, count: int, meta: Meta) -> None:
        self.log.append(("arrived", peer, ordinal, count, round(self.schedule.clock, 9)))

    def drained(self, peer: int, ordinal: int, upto: int) -> None:
        self.log.append(("drained", peer, ordinal, upto, round(self.schedule.clock, 9)))


class World:
    """Two hosts and the wire between them."""

    def __init__(self, length: int = 100, seed: int = 0, **network: Any) -> None:
        chance = random.Random(seed)
        self.schedule = Schedule(chance)
        self.hosts = [FakeHost(self.schedule, length) for _ in range(2)]
        network.setdefault("latency_s", (1.0, 1.0))
        network.setdefault("frame_elements", (1 << 20, 1 << 20))
        self.wire = Wire(Network(**network), self.hosts, self.schedule, chance)

    def run(self) -> None:
        while (event := self.schedule.next()) is not None:
            rank, action = event
            if rank < 0 or not self.hosts[rank].dead:
                action()

    def arrivals(self) -> list[tuple[int, float]]:
        return [(each[3], each[4]) for each in self.hosts[1].log if each[0] == "arrived"]


def test_events_come_in_order_of_time_and_chance() -> None:
    orders = set()
    for seed in range(20):
        schedule = Schedule(random.Random(seed))
        order: list[str] = []
        for name, delay in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
            schedule.later(delay, 3, functools.partial(order.append, name))
        while (event := schedule.next()) is not None:
            assert event[0] == 3
            event[1]()
        assert schedule.clock == 2.0
        orders.add("".join(order))
    assert orders == {"abc", "bac"}


def test_a_frame_takes_its_bytes_and_the_latency() -> None:
    world = World(bandwidth=100.0)
    world.hosts[0].array[:10] = range(10)
    world.wire.open_receive(0, 1, 5, 10)
    world.wire.open_send(0, 1, 5, 10)
    world.wire.push(0, 1, 5, Slice(0, 0, 10), META)
    world.run()
    took = (40 + HEADER_BYTES) / 100.0 + 1.0
    assert world.arrivals() == [(10, took)]
    np.testing.assert_array_equal(world.hosts[1].array[:10], range(10))
    assert world.hosts[0].bytes_sent == 40 + HEADER_BYTES
    assert world.hosts[0].messages_sent == 1
    assert world.wire.frames == 1
    (drained,) = world.hosts[0].log
    assert drained[:4] == ("drained", 1, 5, 10)
    assert took - 1.0 <= drained[4] <= took


def test_frames_of_a_host_share_its_link_and_overlap_in_the_air() -> None:
    world = World(bandwidth=100.0, frame_elements=(5, 5))
    world.wire.open_receive(0, 1, 0, 10)
    world.wire.open_send(0, 1, 0, 10)
    world.wire.push(0, 1, 0, Slice(0, 0, 10), META)
    world.run()
    one = (20 + HEADER_BYTES) / 100.0
    assert world.arrivals() == [(5, one + 1.0), (5, 2 * one + 1.0)]


def test_memory_is_read_late() -> None:
    """What is written before a frame has left is what arrives."""
    world = World()
    world.wire.open_receive(0, 1, 0, 1)
    world.wire.open_send(0, 1, 0, 1)
    world.wire.push(0, 1, 0, Slice(0, 0, 1), META)
    world.hosts[0].array[0] = 7.0
    world.run()
    assert world.hosts[1].array[0] == 7.0


def test_a_short_message_goes_ahead_and_is_placed_when_posted() -> None:
    world = World()
    world.hosts[0].array[:4] = 3.0
    world.wire.open_send(0, 1, 0, 4)
    world.wire.push(0, 1, 0, Slice(0, 0, 4), META)
    world.run()
    assert world.hosts[1].log == []
    world.wire.open_receive(0, 1, 0, 4)
    assert world.arrivals() == [(4, 1.0)]
    assert world.hosts[1].array[3] == 3.0


def test_a_long_message_waits_for_grants() -> None:
    world = World(length=20_000)
    world.wire.open_send(0, 1, 0, 20_000)
    world.wire.push(0, 1, 0, Slice(0, 0, 20_000), META)
    world.wire.open_receive(0, 1, 0, 20_000)
    world.run()
    assert world.arrivals() == []
    world.wire.grant(0, 1, 0, 5)
    world.wire.grant(0, 1, 0, 3)
    world.run()
    world.wire.grant(0, 1, 0, 20_000)
    world.run()
    assert [count for count, _ in world.arrivals()] == [5, 19_995]


def test_a_frame_is_placed_in_as_many_pieces_as_asked() -> None:
    world = World()
    world.hosts[1].most = 4
    world.hosts[0].array[:10] = range(10)
    world.wire.open_receive(0, 1, 0, 10)
    world.wire.open_send(0, 1, 0, 10)
    world.wire.push(0, 1, 0, Slice(0, 0, 10), META)
    world.run()
    assert [count for count, _ in world.arrivals()] == [4, 4, 2]
    np.testing.assert_array_equal(world.hosts[1].array[:10], range(10))


def test_bytes_of_a_header_travel_as_elements() -> None:
    world = World(frame_elements=(50, 50))
    world.wire.open_send(0, 1, 0, 128)
    world.wire.push(0, 1, 0, bytes(range(128)), META)
    world.wire.open_receive(0, 1, 0, 128)
    world.run()
    assert [count for count, _ in world.arrivals()] == [50, 50, 28]
    assert bytes(world.hosts[1].header) == bytes(range(128))
    assert world.hosts[0].log == [], "bytes are nobody's memory"


def test_nothing_follows_a_lost_frame() -> None:
    world = World(frame_elements=(2, 2), drop=frozenset({1}))
    world.wire.open_receive(0, 1, 0, 10)
    world.wire.open_send(0, 1, 0, 10)
    world.wire.push(0, 1, 0, Slice(0, 0, 10), META)
    world.run()
    assert [count for count, _ in world.arrivals()] == [2]
    assert world.hosts[0].log[-1][3] == 10


def test_a_partition_delays_what_leaves_while_it_lasts() -> None:
    world = World(partition=(frozenset({0}),), partitioned_s=(0.0, 9.0))
    world.wire.open_receive(0, 1, 0, 1)
    world.wire.open_send(0, 1, 0, 1)
    world.wire.push(0, 1, 0, Slice(0, 0, 1), META)
    world.run()
    assert world.arrivals() == [(1, 10.0)]
    together = World(partition=(frozenset({0, 1}),), partitioned_s=(0.0, 9.0))
    together.wire.open_receive(0, 1, 0, 1)
    together.wire.open_send(0, 1, 0, 1)
    together.wire.push(0, 1, 0, Slice(0, 0, 1), META)
    together.run()
    assert together.arrivals() == [(1, 1.0)]


def test_the_dead_send_nothing() -> None:
    world = World()
    world.wire.open_receive(0, 1, 0, 1)
    world.wire.open_send(0, 1, 0, 1)
    world.hosts[0].dead = True
    world.wire.push(0, 1, 0, Slice(0, 0, 1), META)
    world.run()
    assert world.arrivals() == []
    assert world.wire.frames == 0


def test_lengths_must_be_equal_whoever_comes_first() -> None:
    text = "operation 2 from rank 0 to rank 1: 3 elements are sent, 4 are expected"
    world = World()
    world.wire.open_send(0, 1, 2, 3)
    with pytest.raises(MismatchError, match=text):
        world.wire.open_receive(0, 1, 2, 4)
    world = World()
    world.wire.open_receive(0, 1, 2, 4)
    with pytest.raises(MismatchError, match=text):
        world.wire.open_send(0, 1, 2, 3)


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_message_that_nobody_received_is_found_at_the_end(withdrawn: bool) -> None:
    world = World()
    if withdrawn:
        world.wire.open_receive(0, 1, 2, 3)
        world.wire.withdraw(0, 1, 2)
    world.wire.check_end([True, True])
    world.wire.open_send(0, 1, 2, 3)
    world.wire.push(0, 1, 2, Slice(0, 0, 3), META)
    world.run()
    assert world.arrivals() == [], "nothing is placed"
    world.wire.check_end([True, False])
    with pytest.raises(MismatchError, match="operation 2 from rank 0 to rank 1 was sent, but"):
        world.wire.check_end([True, True])
