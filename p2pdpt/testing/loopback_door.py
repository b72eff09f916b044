"""A door without locks: streams over real loopback sockets, for kits and tests only.

It proves nothing about who is at the other end, so it binds 127.0.0.1 and is never made by a
node. Each side says its name and the kind of stream in one message of at most 4 KiB.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, cast

import msgspec

from p2pdpt.channel import Door, PeerInfo, Stream
from p2pdpt.errors import ChannelClosedError, FrameError, HandshakeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType
    from typing import Self

__all__ = ["LoopbackDoor", "feed"]

log = logging.getLogger(__name__)

_LIMIT: Final = 4096
_PATIENCE_S: Final = 10.0


class _Hello(msgspec.Struct):
    me: PeerInfo
    kind: str
    refusal: str = ""


def feed(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    """Give `data` to a protocol as if it had just been read."""
    rest = memoryview(data)
    while rest:
        buffer = memoryview(protocol.get_buffer(len(rest)))
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        protocol.buffer_updated(count)
        rest = rest[count:]


class _Threshold(asyncio.Protocol):
    """Reads the first message of a connection, then holds it until it is handed over."""

    def __init__(self, arrived: Callable[[_Threshold], None] | None = None) -> None:
        self.hello: asyncio.Future[_Hello] = asyncio.get_running_loop().create_future()
        self.rest = b""
        self.lost = False
        self.wire: asyncio.Transport
        self._arrived = arrived
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.wire = cast("asyncio.Transport", transport)  # uvloop's are of no class of asyncio
        if self._arrived is not None:
            self._arrived(self)

    def say(self, hello: _Hello) -> None:
        data = msgspec.msgpack.encode(hello)
        self.wire.write(len(data).to_bytes(4, "little") + data)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self.hello.done() or len(self._data) < 4:
            return
        size = int.from_bytes(self._data[:4], "little")
        if size > _LIMIT:
            self.hello.set_exception(FrameError(f"a greeting of {size} bytes"))
        elif len(self._data) >= 4 + size:
            try:
                hello = msgspec.msgpack.decode(self._data[4 : 4 + size], type=_Hello)
            except msgspec.MsgspecError as error:
                self.hello.set_exception(FrameError(f"not a greeting: {error}"))
                return
            self.wire.pause_reading()
            self.rest = bytes(self._data[4 + size :])
            self.hello.set_result(hello)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.hello.done():
            self.hello.set_exception(ChannelClosedError("the peer closed it before greeting"))


class _LoopbackStream(Stream):
    def __init__(self, peer: PeerInfo, address: str, threshold: _Threshold) -> None:
        self.peer = peer
        self.address = address
        self._threshold = threshold
        self.attached = False

    async def attach(self, protocol: asyncio.BufferedProtocol) -> asyncio.Transport:
        threshold = self._threshold
        wire = threshold.wire
        if threshold.lost:
            raise ChannelClosedError(f"{self.peer} closed the stream before it was used")
        self.attached = True
        protocol.connection_made(wire)
        feed(protocol, threshold.rest)
        wire.set_protocol(protocol)
        if not wire.is_closing():
            wire.resume_reading()
        return wire

    def abort(self) -> None:
        self._threshold.wire.abort()


class LoopbackDoor(Door):
    """A node's door at 127.0.0.1; use as ``async with LoopbackDoor("name") as door``."""

    def __init__(self, name: str) -> None:
        """Make a door, closed until it is entered; `name` is also the base of the node id."""
        self.me = PeerInfo(name.encode().hex()[:16].zfill(16), name)
        self._kinds: dict[str, Callable[[Stream], Awaitable[None]]] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._wires: set[asyncio.Transport] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Threshold(self._arrived), "127.0.0.1", 0
        )
        host, port = self._server.sockets[0].getsockname()[:2]
        self.me = PeerInfo(self.me.node_id, self.me.name, (f"{host}:{port}",), self.me.transports)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Whatever a test left open ends here, so that nothing outlives its loop.
        for wire in self._wires:
            wire.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def serve(self, kind: str, accept: Callable[[Stream], Awaitable[None]]) -> None:
        """Call `accept` with each stream that a peer opened for `kind`."""
        self._kinds[kind] = accept

    def close(self, kind: str) -> None:
        """Refuse further streams of `kind`."""
        self._kinds.pop(kind, None)

    def _arrived(self, threshold: _Threshold) -> None:
        task = asyncio.get_running_loop().create_task(self._welcome(threshold))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _welcome(self, threshold: _Threshold) -> None:
        self._wires.add(threshold.wire)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                hello = await threshold.hello
        except (TimeoutError, FrameError, ChannelClosedError) as error:
            log.debug("door.refused reason=%s", error)
            threshold.wire.abort()
            return
        accept = self._kinds.get(hello.kind)
        if accept is None:
            threshold.say(_Hello(self.me, hello.kind, f"{self.me} serves no {hello.kind}"))
            threshold.wire.close()
            return
        threshold.say(_Hello(self.me, hello.kind))
        stream = _LoopbackStream(hello.me, _address(threshold.wire), threshold)
        try:
            await accept(stream)
        except Exception:
            log.exception("door.accept.failed kind=%s peer=%s", hello.kind, hello.me)
            stream.abort()

    async def open(self, peer: PeerInfo, kind: str) -> Stream:
        """Open a stream of `kind` to `peer`.

        Raises:
            HandshakeError: the peer refused, or is somebody else.
            ChannelClosedError: none of its addresses could be reached.
        Cancellation closes what was half open.
        """
        reasons = []
        for address in peer.addresses:
            host, _, port = address.rpartition(":")
            threshold = _Threshold()
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await asyncio.get_running_loop().create_connection(
                        lambda threshold=threshold: threshold,  # type: ignore[misc]
                        host,
                        int(port),
                    )
            except OSError as error:  # a TimeoutError is one
                reasons.append(f"{address}: {error}")
                continue
            self._wires.add(threshold.wire)
            try:
                threshold.say(_Hello(self.me, kind))
                async with asyncio.timeout(_PATIENCE_S):
                    hello = await threshold.hello
                if hello.refusal:
                    raise HandshakeError(hello.refusal)
                if hello.me.node_id != peer.node_id:
                    raise HandshakeError(f"{address} is {hello.me}, not {peer}")
            except (TimeoutError, FrameError, ChannelClosedError) as error:
                threshold.wire.abort()
                reasons.append(f"{address}: {error}")
                continue
            except BaseException:
                threshold.wire.abort()
                raise
            return _LoopbackStream(hello.me, _address(threshold.wire), threshold)
        raise ChannelClosedError(f"cannot reach {peer}: {'; '.join(reasons) or 'no address'}")


def _address(wire: asyncio.Transport) -> str:
    host, port = wire.get_extra_info("peername")[:2]
    return f"{host}:{port}"
