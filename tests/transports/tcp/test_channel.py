from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from p2pdpt.channel import FRAME_BYTES, Channel, Meta, PeerInfo
from p2pdpt.errors import ChannelClosedError
from p2pdpt.protocol import frames
from p2pdpt.testing.loopback_door import LoopbackDoor
from p2pdpt.testing.transport_bench import (
    Ends,
    RecordingLanding,
    Sending,
    TransportBench,
    pattern,
    tag,
)
from p2pdpt_transports.tcp import TcpTransport, channel
from p2pdpt_transports.tcp.channel import TcpChannel


class FakeWire(asyncio.Transport):
    """A transport of asyncio that takes everything and sends it when told."""

    def __init__(self, channel: TcpChannel) -> None:
        super().__init__()
        self.channel = channel
        self.writes: list[bytes] = []
        self.blocked = False
        self.aborted = self.ended = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.ended
        self.writes.append(bytes(data))
        if self.blocked:
            self.channel.pause_writing()

    def abort(self) -> None:
        if not self.aborted:
            self.aborted = True
            asyncio.get_running_loop().call_soon(self.channel.connection_lost, None)

    def is_closing(self) -> bool:
        return self.aborted

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True


def faked() -> tuple[TcpChannel, FakeWire]:
    made = TcpChannel(PeerInfo("0" * 16, "bob"), "10.0.0.7:5000", asyncio.get_running_loop())
    wire = FakeWire(made)
    made.connection_made(wire)
    return made, wire


@asynccontextmanager
async def against_raw_bytes() -> AsyncIterator[tuple[Channel, asyncio.Transport, asyncio.Event]]:
    """Yield a channel, the bare stream at its other end, and the event of that one's end."""
    lost = asyncio.Event()

    class Raw(asyncio.BufferedProtocol):
        def get_buffer(self, sizehint: int) -> bytearray:
            return bytearray(65536)

        def buffer_updated(self, nbytes: int) -> None:
            pass

        def connection_lost(self, exc: Exception | None) -> None:
            lost.set()

    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        accepted: asyncio.Queue[Channel] = asyncio.Queue()
        listener = await TcpTransport(other).listen(accepted.put_nowait)
        stream = await door.open(other.me, "tcp")
        wire = await stream.attach(Raw())
        made = await accepted.get()
        try:
            yield made, wire, lost
        finally:
            made.abort()
            wire.abort()
            await listener.close()


async def ended(made: Channel) -> Exception | None:
    future: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    made.on_closed(future.set_result)
    async with asyncio.timeout(10):
        return await future


async def test_at_most_one_batch_is_in_the_sockets_hands() -> None:
    made, wire = faked()
    wire.blocked = True
    sending = Sending(made, tag(1), 3 * FRAME_BYTES)
    sending.outgoing.push(memoryview(bytes(3 * FRAME_BYTES)), 3 * FRAME_BYTES, Meta())
    await asyncio.sleep(0)
    made.get_buffer(-1)[:44] = frames.pack_notes(
        [frames.pack_note(frames.GRANT, frames.pack_tag(tag(1)), 3 * FRAME_BYTES)]
    )
    made.buffer_updated(44)
    for turn in range(4):
        assert sum(map(len, wire.writes)) == 44 + turn * (FRAME_BYTES + 72)
        assert sending.drained == [k * FRAME_BYTES for k in range(1, turn)]
        made.resume_writing()
    assert sending.drained == [FRAME_BYTES, 2 * FRAME_BYTES, 3 * FRAME_BYTES]
    made.abort()
    await ended(made)


async def test_posts_of_one_turn_leave_in_one_write() -> None:
    made, wire = faked()
    for number in range(10):
        landing = RecordingLanding(100_000)
        made.receive(tag(number), 100_000, landing).grant(100_000)
        Sending(made, tag(number), 100).outgoing.push(memoryview(bytes(400)), 100, Meta())
    assert wire.writes == []
    await asyncio.sleep(0)
    assert list(map(len, wire.writes)) == [8 + 10 * 36 + 10 * 472]
    made.abort()
    await ended(made)


async def test_quiesce_waits_until_the_batch_has_left() -> None:
    made, wire = faked()
    wire.blocked = True
    sending = Sending(made, tag(1), 1000)
    sending.outgoing.push(memoryview(bytes(4000)), 1000, Meta())
    await asyncio.sleep(0)
    sending.outgoing.cancel()
    quiet = asyncio.ensure_future(made.quiesce())
    await asyncio.sleep(0.01)
    assert not quiet.done()
    made.resume_writing()
    await quiet
    assert sending.drained == []
    made.abort()
    await ended(made)


async def test_a_turn_of_the_loop_is_given_between_many_frames() -> None:
    made, _ = faked()
    size = 20 * FRAME_BYTES
    sending = Sending(made, tag(1), size)
    sending.outgoing.push(memoryview(bytes(size)), size, Meta())
    await asyncio.sleep(0)
    made.get_buffer(-1)[:44] = frames.pack_notes(
        [frames.pack_note(frames.GRANT, frames.pack_tag(tag(1)), size)]
    )
    made.buffer_updated(44)
    assert sending.drained[-1] == 4 * FRAME_BYTES
    await asyncio.sleep(0)
    assert sending.drained[-1] == 8 * FRAME_BYTES
    await sending.done.wait()
    made.abort()
    await ended(made)


async def test_a_close_in_which_nothing_moves_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "STALL_S", 0.02)
    made, wire = faked()
    wire.blocked = True
    Sending(made, tag(1), 10).outgoing.push(memoryview(bytes(40)), 10, Meta())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await made.close()
    assert wire.aborted
    assert await ended(made) is None


@pytest.mark.parametrize(
    ("exc", "words"),
    [
        (None, "the peer closed it"),
        (ConnectionResetError(errno.ECONNRESET, "x"), "connection reset by peer"),
        (TimeoutError(errno.ETIMEDOUT, "x"), "connection timed out"),
        (ConnectionAbortedError(), "ConnectionAbortedError"),
        (RuntimeError("certificate expired"), "certificate expired"),
    ],
)
async def test_reasons_in_words(exc: Exception | None, words: str) -> None:
    made, _ = faked()
    made.connection_lost(exc)
    error = await ended(made)
    assert isinstance(error, ChannelClosedError)
    assert str(error) == f"tcp channel to bob at 10.0.0.7:5000 ended: {words}"
    assert error.__cause__ is exc


async def test_abort_before_it_is_attached() -> None:
    made = TcpChannel(PeerInfo("0" * 16, "bob"), "10.0.0.7:5000", asyncio.get_running_loop())
    made.abort()
    error = await ended(made)
    assert str(error) == "tcp channel to bob at 10.0.0.7:5000 ended: it was aborted here"
    await made.close()
    await made.quiesce()


async def test_bytes_that_are_not_ours_end_the_channel_with_the_reason() -> None:
    async with against_raw_bytes() as (made, wire, lost):
        wire.write(b"GET / HTTP/1.1\r\n\r\n")
        error = await ended(made)
        assert isinstance(error, ChannelClosedError)
        assert "alice" in str(error)
        assert "bad magic 4745" in str(error)
        async with asyncio.timeout(10):
            await lost.wait()


async def test_peer_ends_between_and_amid_frames() -> None:
    header = frames.pack_data(frames.pack_tag(tag(1)), 10, 0, 10, 4, Meta(), True)
    for said, words in ((b"", "the peer closed it"), (header, "the peer closed it amid a frame")):
        async with against_raw_bytes() as (made, wire, _):
            landing = RecordingLanding(10)
            made.receive(tag(1), 10, landing).grant(10)
            wire.write(said)
            wire.close()
            error = await ended(made)
            assert str(error).endswith(f"ended: {words}")
            assert str(landing.error) == str(error)


async def test_a_landing_that_raises_ends_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    def boom(landing: RecordingLanding) -> None:
        raise KeyError("boom")

    bench = TransportBench()
    bench.transport = TcpTransport  # type: ignore[misc]
    async with bench.pair() as (here, there):
        ends = Ends(here, there)
        bench.expect(there, tag(1), RecordingLanding(10, then=boom))
        with caplog.at_level(logging.ERROR):
            bench.send(here, tag(1), pattern(40))
            await ends.wait()
        assert "KeyError in a landing: 'boom'" in str(ends.reasons[1])
        assert "channel.failed peer=alice in=a landing" in caplog.text


@pytest.mark.parametrize("blocked", [True, False])
async def test_an_on_drained_that_raises_ends_the_channel(
    blocked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def boom(upto: int) -> None:
        raise KeyError("boom")

    made, wire = faked()
    wire.blocked = blocked
    landing = RecordingLanding(10)
    made.receive(tag(1), 10, landing).grant(10)
    made.send(tag(1), 10, boom).push(memoryview(bytes(40)), 10, Meta())
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(0)
        if blocked:
            made.resume_writing()
        error = await ended(made)
    assert "KeyError in on_drained: 'boom'" in str(error)
    assert str(landing.error) == str(error)
    assert "channel.failed peer=bob in=on_drained" in caplog.text


async def test_a_callback_that_raises_takes_nothing_down() -> None:
    seen: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: seen.append(str(context["exception"])))
    made, _ = faked()

    def boom(error: Exception | None) -> None:
        raise KeyError("boom")

    made.on_closed(boom)
    made.abort()
    await ended(made)
    assert seen == ["'boom'"]


async def test_counters_agree_at_both_ends() -> None:
    bench = TransportBench()
    bench.transport = TcpTransport  # type: ignore[misc]
    async with bench.pair() as (here, there):
        await bench.carry(here, there, tag(1), 5_000_000)
        await bench.settle(here, there)
        assert here.counters.bytes_sent == there.counters.bytes_received
        assert here.counters.frames_sent == there.counters.frames_received
        assert there.counters.bytes_sent == here.counters.bytes_received
        assert there.counters.frames_sent == here.counters.frames_received


async def test_nothing_is_buffered_when_a_send_is_drained() -> None:
    bench = TransportBench()
    bench.transport = TcpTransport  # type: ignore[misc]
    async with bench.pair() as (here, there):
        assert isinstance(here, TcpChannel)
        sizes: list[int] = []
        length = 3_000_000

        def drained(upto: int) -> None:
            assert here._wire is not None
            sizes.append(here._wire.get_write_buffer_size())

        landing, _ = bench.expect(there, tag(1), RecordingLanding(length))
        here.send(tag(1), length, drained).push(memoryview(pattern(length * 4)), length, Meta())
        await landing.done.wait()
        await bench.settle(here, there)
        assert sizes == [0] * 12


async def test_info_is_that_of_the_stream() -> None:
    async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
        accepted: asyncio.Queue[Channel] = asyncio.Queue()
        listener = await TcpTransport(other).listen(accepted.put_nowait)
        assert listener.endpoint == ""
        made = await TcpTransport(door).connect(dataclasses.replace(other.me, name="unknown"))
        assert made.peer == other.me
        assert made.address == other.me.addresses[0]
        assert made.transport == "tcp"
        await made.close()
        await (await accepted.get()).close()
        await listener.close()
