"""One control connection to one peer: messages in, messages out."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final, cast

from p2pdpt.errors import FrameError
from p2pdpt.protocol.messages import Control, MessageReader, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.channel import PeerInfo
    from p2pdpt.runtime.door import NodeStream

__all__ = ["ControlLink"]

_READ_BYTES: Final = 64 << 10


class ControlLink(asyncio.BufferedProtocol):
    """Speaks messages on a stream.

    Attributes:
        peer: who is at the other end.
        address: where, for people.
        local: whether the peer was reached over loopback.
        dialed: whether this node opened the connection.
        reason: why it closed, once it has.
        taken: set once the connection is adopted or closed.
        closed: done once the connection is closed.
    """

    def __init__(
        self,
        stream: NodeStream,
        *,
        dialed: bool,
        on_message: Callable[[ControlLink, Control], None],
        on_bytes: Callable[[ControlLink], None],
        on_closed: Callable[[ControlLink], None],
    ) -> None:
        self.peer: PeerInfo = stream.peer
        self.identity = stream.identity
        self.address, self.local, self.dialed = stream.address, stream.local, dialed
        self.reason = ""
        self.bytes_sent = self.bytes_received = 0
        self.messages_sent = self.messages_received = 0
        self.taken = asyncio.Event()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_message, self._on_bytes, self._on_closed = on_message, on_bytes, on_closed
        self._reader = MessageReader()
        self._buffer = bytearray(_READ_BYTES)
        self._transport: asyncio.Transport | None = None
        self._finishing = self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an instance of it on every event loop.
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.bytes_received += nbytes
        self._on_bytes(self)
        try:
            messages = self._reader.receive(memoryview(self._buffer)[:nbytes])
        except FrameError as error:
            self.abort(str(error))
            return
        for message in messages:
            self.messages_received += 1
            if self.reason:
                return
            self._on_message(self, message)

    def eof_received(self) -> bool:
        self._note("the connection was closed")
        # At once: the transport would only tell in the loop's next turn.
        self._end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._note("the connection was closed")
        else:
            code = exc.errno if isinstance(exc, OSError) else None
            self._note(f"connection lost: {os.strerror(code) if code else exc}")
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)
        self._end()

    def send(self, message: Control) -> None:
        """Send a message; nothing happens once the connection has closed."""
        if self._transport is None or self._transport.is_closing() or self._finishing:
            return
        data = encode(message)
        self._transport.write(data)
        self.bytes_sent += len(data)
        self.messages_sent += 1

    def finish(self) -> None:
        """Send what is left and no more; the peer closes when it has read it.

        Closing at once could make the kernel throw away what the peer has not read yet.
        """
        if self._transport is None or self._finishing:
            return
        self._finishing = True
        self._note("closed by this node")
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close at once."""
        self._note(reason)
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self.taken.set()
            self._on_closed(self)

    def _note(self, reason: str) -> None:
        self.reason = self.reason or reason
