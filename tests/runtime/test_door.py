from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from p2pdpt.channel import PeerInfo, Stream
from p2pdpt.errors import (
    AddressInUseError,
    AuthenticationError,
    ChannelClosedError,
    ConfigError,
    HandshakeError,
    P2PError,
    VersionError,
    WrongRunError,
)
from p2pdpt.protocol import handshake
from p2pdpt.protocol.handshake import Identity
from p2pdpt.runtime import door as door_module
from p2pdpt.runtime.background import Background
from p2pdpt.runtime.door import NodeDoor, NodeStream

Make = Callable[..., Awaitable[NodeDoor]]


class Echo(asyncio.BufferedProtocol):
    """Keeps what it reads, and sends it back if asked."""

    def __init__(self, *, echo: bool) -> None:
        self.echo = echo
        self.data = b""
        self.more = asyncio.Event()
        self.closed = asyncio.Event()
        self._buffer = bytearray(7)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        part = bytes(self._buffer[:nbytes])
        self.data += part
        self.more.set()
        if self.echo:
            self.transport.write(part)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    async def until(self, length: int) -> bytes:
        while len(self.data) < length:
            self.more.clear()
            await asyncio.wait_for(self.more.wait(), 5)
        return self.data


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    doors: list[tuple[NodeDoor, Background]] = []
    failed: list[str] = []

    async def build(
        number: int = 1,
        *,
        run: str = "r",
        cluster: str = "c",
        secret: bytes | None = None,
        listen: str = "127.0.0.1:0",
    ) -> NodeDoor:
        background = Background(lambda what, error: failed.append(f"{what}: {error!r}"))
        identity = Identity(cluster=cluster, node_id=f"{number:016x}", name=f"n{number}")
        door = NodeDoor(
            identity, secret, background, lambda what, error: failed.append(f"{what}: {error!r}")
        )
        doors.append((door, background))
        await door.start(listen)
        door.run = run
        door.failed = failed  # type: ignore[attr-defined]
        return door

    yield build
    for door, background in doors:
        door.shut()
        await background.close()


def serve(door: NodeDoor, kind: str = "control", *, echo: bool = True) -> list[Stream]:
    streams: list[Stream] = []

    async def accept(stream: Stream) -> None:
        streams.append(stream)
        await stream.attach(Echo(echo=echo))

    door.serve(kind, accept)
    return streams


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
async def test_a_stream_knows_its_peer_and_loses_no_byte(make: Make, listen: str) -> None:
    one, two = await make(1), await make(2, listen=listen)
    two.publish({"tcp": "here"})
    streams = serve(two)
    stream = await one.dial(two.address, "control")
    assert stream.peer == PeerInfo("2".zfill(16), "n2", two.me.addresses, {"tcp": "here"})
    assert stream.address == two.address and stream.local
    protocol = Echo(echo=False)
    transport = await stream.attach(protocol)
    # Sent at once: the other side may not have handed its stream over yet.
    transport.write(b"first bytes" * 100)
    assert await protocol.until(1100) == b"first bytes" * 100
    assert streams[0].peer.node_id == one.me.node_id
    with pytest.raises(ChannelClosedError, match="has been used"):
        await stream.attach(protocol)
    transport.close()
    await protocol.closed.wait()


async def test_open_tries_all_addresses(make: Make) -> None:
    one, two = await make(1), await make(2)
    serve(two)
    peer = PeerInfo(two.me.node_id, "n2", ("127.0.0.1:1", two.address))
    stream = await one.open(peer, "control")
    stream.abort()
    stream.abort()
    with pytest.raises(ChannelClosedError, match=r"127\.0\.0\.1:1: .*refused"):
        await one.open(PeerInfo(two.me.node_id, "n2", ("127.0.0.1:1",)), "control")
    with pytest.raises(ChannelClosedError, match="it has no address"):
        await one.open(PeerInfo(two.me.node_id, "n2"), "control")
    with pytest.raises(HandshakeError, match="not the one that was expected"):
        await one.open(PeerInfo("f" * 16, "gone", (two.address,)), "control")


async def test_kinds_and_runs(make: Make) -> None:
    one, two = await make(1), await make(2)
    with pytest.raises(HandshakeError, match="takes no 'tcp' streams now"):
        await one.dial(two.address, "tcp")
    serve(two, "tcp")
    (await one.dial(two.address, "tcp")).abort()
    two.close("tcp")
    with pytest.raises(HandshakeError, match="takes no 'tcp' streams now"):
        await one.dial(two.address, "tcp")
    for change in ({"run": "other"}, {"cluster": "other"}):
        other = await make(3, **change)
        serve(other)
        with pytest.raises(WrongRunError, match="other"):
            await one.dial(other.address, "control")


async def test_secrets(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    one, two = await make(1), await make(2, secret=b"x" * 16)
    serve(two)
    for _ in range(3):
        with pytest.raises(AuthenticationError):
            await one.dial(two.address, "control")
    assert caplog.text.count("a connection was closed") == 1


async def test_only_loopback_without_a_secret(make: Make) -> None:
    with pytest.raises(ConfigError) as caught:
        await make(listen="0.0.0.0:0")
    assert "openssl rand -hex 32" in str(caught.value)
    door = await make(listen="0.0.0.0:0", secret=b"x" * 16)
    assert not door.address.startswith("0.0.0.0")
    other = await make(2, secret=b"x" * 16)
    serve(door)
    port = door.address.rpartition(":")[2]
    stream = await other.dial(f"127.0.0.1:{port}", "control")
    # A peer on this machine is told the address that it used itself, first of all.
    assert stream.peer.addresses[0] == f"127.0.0.1:{port}"
    stream.abort()


async def test_a_taken_port(make: Make) -> None:
    door = await make()
    with pytest.raises(AddressInUseError, match="is in use by pid"):
        await make(2, listen=door.address)
    with pytest.raises(ConfigError, match=r"listen 'no\.such\.host\.invalid:1'"):
        await make(3, listen="no.such.host.invalid:1")


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", pickle.dumps({"a": 1}) * 9, b"\x16\x03\x01" + b"\0" * 90]
)
async def test_strangers_get_nothing(
    make: Make, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    door = await make()
    streams = serve(door)
    reader, writer = await asyncio.open_connection(*door.address.split(":"))
    writer.write(data)
    # Closed at once, without a word; what was not read makes the kernel reset it.
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert streams == []
    assert "does not speak p2pdpt" in caplog.text


async def test_another_version_is_named_on_both_sides(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    door = await make()
    hello = handshake._HELLO.pack(handshake.MAGIC, 2, 0, b"9.9", bytes(32))
    reader, writer = await asyncio.open_connection(*door.address.split(":"))
    writer.write(hello)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert handshake._HELLO.unpack(answer)[:2] == (handshake.MAGIC, handshake.PROTOCOL)
    assert "protocol 2 (p2pdpt 9.9) at 127.0.0.1:" in caplog.text

    async def newer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(hello)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(newer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(VersionError, match=r"protocol 2 \(p2pdpt 9\.9\) at 127"):
            await door.dial(f"{host}:{port}", "control")


async def test_whoever_says_nothing_is_closed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "HANDSHAKE_S", 0.1)
    door = await make()
    reader, writer = await asyncio.open_connection(*door.address.split(":"))
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(P2PError, match=r"did not send its hello within 0\.1 s"):
            await door.dial(address, "control")


async def test_half_open_connections_are_bounded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "HALF_OPEN", 2)
    monkeypatch.setattr(door_module, "HANDSHAKE_S", 0.3)
    door = await make(1)
    serve(door)
    idle = [await asyncio.open_connection(*door.address.split(":")) for _ in range(2)]
    monkeypatch.setattr(door_module, "HANDSHAKE_S", 5.0)
    other = await make(2)
    # Served when the silent ones have run out of time.
    (await other.dial(door.address, "control")).abort()
    for _, writer in idle:
        writer.close()


async def test_what_accept_raises_closes_the_stream_and_is_told(make: Make) -> None:
    one, two = await make(1), await make(2)

    async def accept(stream: Stream) -> None:
        raise RuntimeError("boom")

    two.serve("control", accept)
    stream = await one.dial(two.address, "control")
    protocol = Echo(echo=False)
    await stream.attach(protocol)
    await asyncio.wait_for(protocol.closed.wait(), 5)
    assert two.failed == ["accepting control of n1: RuntimeError('boom')"]  # type: ignore[attr-defined]


async def test_cancelled_dialing_closes(make: Make) -> None:
    one = await make(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dialing = asyncio.create_task(one.dial(f"127.0.0.1:{silent.getsockname()[1]}", "control"))
        await asyncio.sleep(0.05)
        dialing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialing
        sock, _ = silent.accept()
        with sock:
            sock.settimeout(5)
            while sock.recv(100):
                pass


async def test_a_shut_door_refuses(make: Make) -> None:
    one, two = await make(1), await make(2)
    address = two.address
    two.shut()
    two.shut()
    await asyncio.sleep(0)
    with pytest.raises(ChannelClosedError, match="refused"):
        await one.dial(address, "control")


async def test_streams_are_streams(make: Make) -> None:
    one, two = await make(1), await make(2)
    serve(two)
    stream = await one.dial(two.address, "control")
    assert isinstance(stream, NodeStream) and stream.identity.cluster == "c"
    stream.abort()
    with pytest.raises(ChannelClosedError):
        await stream.attach(Echo(echo=False))
