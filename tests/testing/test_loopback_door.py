from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest

from p2pdpt.channel import PeerInfo, Stream
from p2pdpt.errors import ChannelClosedError, HandshakeError
from p2pdpt.testing.loopback_door import LoopbackDoor, feed


class Recorder(asyncio.BufferedProtocol):
    def __init__(self, room: int = 4) -> None:
        self.memory = bytearray(room)
        self.data = b""
        self.changed = asyncio.Event()
        self.lost = False

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.memory)

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.memory[:nbytes]
        self.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.changed.set()

    async def until(self, data: bytes) -> None:
        async with asyncio.timeout(10):
            while self.data != data:
                self.changed.clear()
                await self.changed.wait()


async def test_streams_know_their_ends_and_carry_bytes() -> None:
    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        streams: asyncio.Queue[Stream] = asyncio.Queue()
        other.serve("x", streams.put)
        here = await door.open(other.me, "x")
        there = await streams.get()
        assert here.peer == other.me
        assert here.address == other.me.addresses[0]
        assert there.peer == door.me
        assert there.address.startswith("127.0.0.1:")
        mine, theirs = Recorder(), Recorder()
        wire = await here.attach(mine)
        wire.write(b"before it is attached")
        await asyncio.sleep(0.01)
        back = await there.attach(theirs)
        wire.write(b", and after")
        await theirs.until(b"before it is attached, and after")
        back.write(b"back")
        await mine.until(b"back")


async def test_bytes_that_follow_the_greeting_at_once_are_kept() -> None:
    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        recorder = Recorder()

        async def accept(stream: Stream) -> None:
            await asyncio.sleep(0.01)
            await stream.attach(recorder)

        other.serve("x", accept)
        stream = await door.open(other.me, "x")
        (await stream.attach(Recorder())).write(b"early")
        await recorder.until(b"early")


def test_feed_fills_buffers_of_any_size() -> None:
    async def check() -> None:
        recorder = Recorder(3)
        feed(recorder, b"0123456789")
        assert recorder.data == b"0123456789"
        feed(recorder, b"")
        assert recorder.data == b"0123456789"

    asyncio.run(check())


async def test_a_kind_that_nobody_serves_is_refused() -> None:
    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        with pytest.raises(HandshakeError, match="bob serves no x"):
            await door.open(other.me, "x")
        other.serve("x", lambda stream: asyncio.sleep(0))
        (await door.open(other.me, "x")).abort()
        other.close("x")
        other.close("x")
        with pytest.raises(HandshakeError, match="bob serves no x"):
            await door.open(other.me, "x")


async def test_somebody_else_is_refused() -> None:
    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        other.serve("x", lambda stream: asyncio.sleep(0))
        stranger = dataclasses.replace(other.me, node_id="f" * 16, name="carol")
        with pytest.raises(HandshakeError, match="is bob, not carol"):
            await door.open(stranger, "x")


async def test_unreachable_peers_are_told_with_each_address() -> None:
    async with LoopbackDoor("alice") as door:
        async with LoopbackDoor("bob") as other:
            gone = other.me
        with pytest.raises(ChannelClosedError, match=r"cannot reach bob: 127\.0\.0\.1:\d+: "):
            await door.open(gone, "x")
        with pytest.raises(ChannelClosedError, match="cannot reach carol: no address"):
            await door.open(PeerInfo("f" * 16, "carol"), "x")


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff", b"\x03\0\0\0abc", b""])
async def test_what_is_no_greeting_is_cut_off(said: bytes) -> None:
    async with LoopbackDoor("bob") as door:
        host, port = door.me.addresses[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        writer.write_eof()
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_an_exception_of_accept_closes_the_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def accept(stream: Stream) -> None:
        raise KeyError("boom")

    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        other.serve("x", accept)
        recorder = Recorder()
        with caplog.at_level(logging.ERROR):
            try:
                await (await door.open(other.me, "x")).attach(recorder)
            except ChannelClosedError:
                return  # it was cut off before it was attached
            async with asyncio.timeout(10):
                while not recorder.lost:
                    recorder.changed.clear()
                    await recorder.changed.wait()
        assert "door.accept.failed kind=x peer=alice" in caplog.text
