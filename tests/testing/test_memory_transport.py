from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest

from p2pdpt.channel import Channel, Meta
from p2pdpt.errors import ChannelClosedError
from p2pdpt.testing.loopback_door import LoopbackDoor
from p2pdpt.testing.memory_transport import MemoryTransport
from p2pdpt.testing.transport_bench import Ends, TransportBench, pattern, tag
from p2pdpt.testing.transport_kit import RecordingLanding, TransportKit


class TestMemory(TransportKit):
    transport = MemoryTransport


class Bench(TransportBench):
    transport = MemoryTransport


async def test_a_batch_is_under_way_for_one_turn() -> None:
    async with Bench().pair() as (here, there):
        landing, _ = Bench().expect(there, tag(1), RecordingLanding(10))
        sending = Bench().send(here, tag(1), pattern(40))
        await asyncio.sleep(0)
        sending.outgoing.cancel()
        quiet = asyncio.ensure_future(here.quiesce())
        assert landing.got == 0
        await asyncio.sleep(0)
        assert landing.got == 10
        await quiet
        assert sending.drained == []


async def test_two_runs_are_alike() -> None:
    async def run() -> list[tuple[int, int, Meta]]:
        async with Bench().pair() as (here, there):
            landing, _ = Bench().expect(there, tag(1), RecordingLanding(800_000, piece=99_999))
            Bench().send(here, tag(1), pattern(3_200_000))
            await landing.done.wait()
            return landing.arrivals

    assert await run() == await run()


@pytest.mark.parametrize("where", ["a landing", "on_drained"])
async def test_a_callback_that_raises_ends_both(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    def boom(argument: object) -> None:
        raise KeyError("boom")

    async with Bench().pair() as (here, there):
        ends = Ends(here, there)
        if where == "a landing":
            Bench().expect(there, tag(1), RecordingLanding(10, then=boom))
            Bench().send(here, tag(1), pattern(40))
        else:
            there.send(tag(1), 10, boom).push(memoryview(pattern(40)), 10, Meta())
        with caplog.at_level(logging.ERROR):
            await ends.wait()
        assert f"KeyError in {where}: 'boom'" in str(ends.reasons[1])
        assert "the peer aborted it" in str(ends.reasons[0])
        assert f"channel.failed peer=alice in={where}" in caplog.text


async def test_somebody_elses_endpoint() -> None:
    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        listener = await MemoryTransport(other).listen(lambda channel: None)
        for peer in (
            dataclasses.replace(door.me, transports={"memory": listener.endpoint}),
            other.me,
            dataclasses.replace(other.me, transports={"memory": "memory:0"}),
        ):
            with pytest.raises(ChannelClosedError, match=f"cannot reach {peer}"):
                await MemoryTransport(door).connect(peer)
        await listener.close()


async def test_an_accept_that_raises_closes_the_channel() -> None:
    seen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: seen.append(str(context["exception"]))
    )

    def accept(channel: Channel) -> None:
        raise KeyError("boom")

    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        listener = await MemoryTransport(other).listen(accept)
        peer = dataclasses.replace(other.me, transports={"memory": listener.endpoint})
        here = await MemoryTransport(door).connect(peer)
        closed = asyncio.Event()
        here.on_closed(lambda error: closed.set())
        await closed.wait()
        assert seen == ["'boom'"]
        await listener.close()


async def test_a_listener_that_closes_while_a_channel_comes() -> None:
    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        accepted: list[Channel] = []
        listener = await MemoryTransport(other).listen(accepted.append)
        peer = dataclasses.replace(other.me, transports={"memory": listener.endpoint})
        here = await MemoryTransport(door).connect(peer)
        await listener.close()
        closed = asyncio.Event()
        here.on_closed(lambda error: closed.set())
        await closed.wait()
        assert accepted == []
