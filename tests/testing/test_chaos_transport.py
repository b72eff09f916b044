from __future__ import annotations

import asyncio
import dataclasses

from p2pdpt.channel import Channel, Meta
from p2pdpt.errors import ChannelClosedError
from p2pdpt.testing.chaos_transport import ChaosTransport
from p2pdpt.testing.loopback_door import LoopbackDoor
from p2pdpt.testing.memory_transport import MemoryTransport
from p2pdpt.testing.transport_bench import Ends, TransportBench, pattern, tag
from p2pdpt.testing.transport_kit import RecordingLanding, TransportKit
from p2pdpt_transports.tcp import TcpTransport


class TestDelayed(TransportKit):
    """A transport may hold messages back: the contract allows all that chaos does."""

    transport = ChaosTransport.around(MemoryTransport, seed=1, delay=9)


class Chaotic(TransportBench):
    async def order_of_arrival(self) -> list[int]:
        order: list[int] = []
        async with self.pair() as (here, there):
            landings = []
            for number in range(20):

                def then(landing: RecordingLanding, number: int = number) -> None:
                    order.append(number)

                landing = RecordingLanding(100, then=then)
                self.expect(there, tag(number), landing)
                landings.append(landing)
                self.send(here, tag(number), pattern(400, number))
            for number, landing in enumerate(landings):
                await landing.done.wait()
                assert landing.memory == pattern(400, number)
        return order


async def test_messages_overtake_each_other_repeatably() -> None:
    orders = []
    for seed in (3, 3, 4):
        bench = Chaotic()
        bench.transport = ChaosTransport.around(MemoryTransport, seed=seed)  # type: ignore[misc]
        orders.append(await bench.order_of_arrival())
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(20)) != orders[0]


async def test_without_delay_order_is_kept() -> None:
    bench = Chaotic()
    bench.transport = ChaosTransport.around(MemoryTransport, delay=0)  # type: ignore[misc]
    assert await bench.order_of_arrival() == list(range(20))


async def cut_after(inner: type[MemoryTransport] | type[TcpTransport], cut: int) -> int:
    """Return how many of 1000 elements of 4 bytes arrive when the channel is cut."""
    bench = TransportBench()
    bench.transport = ChaosTransport.around(inner, cut=cut)  # type: ignore[misc]
    async with bench.pair() as (here, there):
        ends = Ends(here, there)
        first, _ = bench.expect(there, tag(0), RecordingLanding(100))
        second, _ = bench.expect(there, tag(1), RecordingLanding(900))
        bench.send(here, tag(0), pattern(400))
        await first.reach(100)
        if cut >= 400:
            bench.send(here, tag(1), pattern(3600))
        await ends.wait()
        for landing in (first, second):
            if landing.got < landing.length:
                await landing.done.wait()
                assert isinstance(landing.error, ChannelClosedError)
        return first.got + second.got


async def test_cut_at_a_byte() -> None:
    for transport in (MemoryTransport, TcpTransport):
        for cut, got in ((0, 0), (3, 0), (4, 1), (399, 99), (400, 100), (1999, 499), (3999, 999)):
            arrived = await cut_after(transport, cut)
            if transport is MemoryTransport:
                assert arrived == got
            else:
                # An abort may overtake what is in the sockets' buffers.
                assert arrived <= got


async def test_uncut_when_nothing_reaches_the_cut() -> None:
    bench = TransportBench()
    bench.transport = ChaosTransport.around(MemoryTransport, cut=4000)  # type: ignore[misc]
    async with bench.pair() as (here, there):
        await bench.carry(here, there, tag(1), 4000)
        landing, _ = bench.expect(there, tag(2), RecordingLanding(1))
        bench.send(here, tag(2), pattern(4))
        await landing.done.wait()
        assert isinstance(landing.error, ChannelClosedError)


async def test_keeps_the_name_and_wraps_both_ends() -> None:
    chaos = ChaosTransport.around(MemoryTransport, delay=2)
    assert chaos.name == "memory"
    assert chaos.availability() == MemoryTransport.availability()
    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        accepted: asyncio.Queue[Channel] = asyncio.Queue()
        listener = await chaos(other).listen(accepted.put_nowait)
        peer = dataclasses.replace(other.me, transports={"memory": listener.endpoint})
        here = await chaos(door).connect(peer)
        there = await accepted.get()
        landing = RecordingLanding(1000)
        there.receive(tag(1), 1000, landing).grant(1000)
        here.send(tag(1), 1000, lambda upto: None).push(memoryview(pattern(4000)), 1000, Meta())
        await here.close()
        assert landing.memory == pattern(4000)
        await there.close()
        await listener.close()
