from __future__ import annotations

import asyncio
import logging

import pytest

from p2pdpt.channel import Channel
from p2pdpt.errors import HandshakeError
from p2pdpt.testing.loopback_door import LoopbackDoor
from p2pdpt_transports.tcp import TcpTransport


async def test_a_second_listener_may_follow_a_closed_one() -> None:
    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        transport = TcpTransport(other)
        for _ in range(2):
            accepted: asyncio.Queue[Channel] = asyncio.Queue()
            listener = await transport.listen(accepted.put_nowait)
            here = await TcpTransport(door).connect(other.me)
            there = await accepted.get()
            await asyncio.gather(here.close(), there.close())
            await listener.close()
            with pytest.raises(HandshakeError, match="bob serves no tcp"):
                await TcpTransport(door).connect(other.me)


async def test_closing_twice_leaves_a_later_listener_alone() -> None:
    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        first = await TcpTransport(other).listen(lambda channel: None)
        await first.close()
        accepted: asyncio.Queue[Channel] = asyncio.Queue()
        second = await TcpTransport(other).listen(accepted.put_nowait)
        await first.close()
        here = await TcpTransport(door).connect(other.me)
        await asyncio.gather(here.close(), (await accepted.get()).close())
        await second.close()


async def test_an_accept_that_raises_closes_the_channel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def accept(channel: Channel) -> None:
        raise KeyError("boom")

    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        listener = await TcpTransport(other).listen(accept)
        with caplog.at_level(logging.ERROR):
            here = await TcpTransport(door).connect(other.me)
            closed = asyncio.Event()
            here.on_closed(lambda error: closed.set())
            async with asyncio.timeout(10):
                await closed.wait()
        assert "door.accept.failed kind=tcp peer=alice" in caplog.text
        await listener.close()
