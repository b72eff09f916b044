"""A channel over one byte stream: the shell of :class:`p2pdpt.protocol.flow.Flow` on asyncio.

It decides nothing about messages. Reads go straight into the memory that the flow names, and
at most one batch of the flow is in the socket's hands at a time, so that the loop's telling
that its buffer is empty tells that the batch has left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING, Final, cast

from p2pdpt.channel import FRAME_BYTES, Channel
from p2pdpt.errors import ChannelClosedError, TransportError
from p2pdpt.protocol.flow import Flow

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.channel import Incoming, Landing, Outgoing, PeerInfo, Tag

__all__ = ["TcpChannel"]

log = logging.getLogger(__name__)

TURN_BYTES: Final = 4 * FRAME_BYTES
"""How much may be written before the loop gets its turn."""
STALL_S: Final = 5.0
"""A close that moves no byte for this long gives up, as if aborted."""


class TcpChannel(Channel, asyncio.BufferedProtocol):
    """Tagged messages over one stream; also the asyncio protocol of that stream."""

    def __init__(self, peer: PeerInfo, address: str, loop: asyncio.AbstractEventLoop) -> None:
        """Make a channel that begins to work when it is attached to a stream."""
        self.peer = peer
        self.address = address
        self.transport = "tcp"
        self._loop = loop
        self._flow = Flow(self._wake)
        self.counters = self._flow.counters
        self._wire: asyncio.Transport | None = None
        self._gather = True  # whether asyncio would copy what writelines is given
        self._awake = False  # whether a call of _pump is due
        self._pumping = False
        self._paused = False  # whether the last batch has not left yet
        self._closing = False  # whether close() was called
        self._ended = False  # whether our last byte was handed out, in closing
        self._lost = False
        self._reason = ""
        self._error: Exception | None = None
        self._callbacks: list[Callable[[Exception | None], None]] = []
        self._waiters: list[asyncio.Future[None]] = []  # of close and quiesce
        self._watchdog: asyncio.TimerHandle | None = None

    # What users call.

    def send(self, tag: Tag, length: int, on_drained: Callable[[int], None]) -> Outgoing:
        """Open an outgoing message of `length` elements."""
        return self._flow.send(tag, length, on_drained)

    def receive(self, tag: Tag, length: int, landing: Landing) -> Incoming:
        """Post a receive for a message of `length` elements."""
        return self._flow.receive(tag, length, landing)

    def on_closed(self, callback: Callable[[Exception | None], None]) -> None:
        """Call `callback` once when the channel closes, soon if it has closed already."""
        if self._lost:
            self._loop.call_soon(callback, self._error)
        else:
            self._callbacks.append(callback)

    async def quiesce(self) -> None:
        """Return when no cancelled message's memory is referenced any more."""
        while not self._lost and not self._flow.quiet:
            await self._wait()

    def abort(self) -> None:
        """Close at once, dropping what has not been sent. May be called twice."""
        self._fail("it was aborted here")

    async def close(self) -> None:
        """Send what was pushed and granted, then close. May be called twice.

        Gives up after five seconds in which nothing moves. A cancelled close still closes, as
        ``abort``. Never raises if the peer has gone.
        """
        if not self._lost and not self._closing:
            self._closing = True
            self._flow.refuse(self._closed("it was closed here"))
            self._watch(-1)
            self._wake()
        try:
            while not self._lost:
                await self._wait()
        except asyncio.CancelledError:
            self.abort()
            raise

    async def _wait(self) -> None:
        """Wait until a batch has left or the stream has ended."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _closed(self, reason: str) -> ChannelClosedError:
        return ChannelClosedError(f"tcp channel to {self.peer} at {self.address} ended: {reason}")

    def _fail(self, reason: str) -> None:
        """End at once; `reason` says why, if nothing said so before."""
        if self._lost:
            return
        if not self._reason:
            self._reason = reason
            self._flow.halt(self._closed(reason))
        if self._wire is not None:
            self._wire.abort()
        else:
            self._loop.call_soon(self.connection_lost, None)

    def _broken(self, where: str, error: Exception) -> None:
        """End because a callback raised, which it must not: others would wait for ever."""
        log.error("channel.failed peer=%s in=%s", self.peer, where, exc_info=error)
        self._fail(f"{type(error).__name__} in {where}: {error}")

    def _watch(self, before: int) -> None:
        """Abort a close in which nothing has moved since the last look."""
        counters = self.counters
        moved = counters.bytes_sent + counters.bytes_received
        if moved == before:
            self._fail(f"the peer took nothing for {STALL_S:g} seconds")
        else:
            self._watchdog = self._loop.call_later(STALL_S, self._watch, moved)

    # What the flow and the loop call.

    def _wake(self) -> None:
        # Output leaves at the end of this turn of the loop, so that what several calls posted
        # leaves together, and callbacks are never made from inside the calls of users.
        if not self._awake:
            self._awake = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Write what the flow has, until the socket takes no more."""
        self._awake = False
        wire, flow = self._wire, self._flow
        if self._pumping or self._paused or wire is None or wire.is_closing() or self._ended:
            return
        self._pumping = True
        turn = TURN_BYTES
        try:
            while buffers := flow.next_output():
                if len(buffers) == 1 or not self._gather:
                    for buffer in buffers:
                        wire.write(buffer)
                else:
                    wire.writelines(buffers)
                if self._paused or wire.is_closing():
                    return  # resume_writing goes on
                flow.output_drained()
                self._notify()
                turn -= len(buffers[-1])
                if turn <= 0:
                    self._wake()
                    return
            if self._closing:
                self._end(wire)
        except Exception as error:
            self._broken("on_drained", error)
        finally:
            self._pumping = False

    def _end(self, wire: asyncio.Transport) -> None:
        """Tell the peer that nothing more comes; it answers by closing."""
        self._ended = True
        # Closing a socket in which bytes lie unread resets it, and the peer may then lose the
        # last that was sent. So half of it is closed, and the other half read to its end.
        if wire.can_write_eof():
            wire.write_eof()
        else:
            wire.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over the stream."""
        wire = cast("asyncio.Transport", transport)  # uvloop's are of no class of asyncio
        self._wire = wire
        wire.set_write_buffer_limits(high=0)
        # Before 3.12 asyncio's own writelines joins the buffers, payload and all.
        self._gather = sys.version_info >= (3, 12) or type(wire).__module__.startswith("uvloop")
        self._wake()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes belong."""
        return self._flow.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what was read, and write what that led to."""
        awake, self._awake = self._awake, True
        try:
            self._flow.received(nbytes)
        except TransportError as error:
            self._fail(str(error))
        except Exception as error:
            self._broken("a landing", error)
        if awake:
            return  # a call of _pump is on its way
        self._pump()

    def eof_received(self) -> bool:
        """End the channel: a peer that says nothing more does not listen any more either."""
        between = self._flow.between_frames
        self._fail("the peer closed it" if between else "the peer closed it amid a frame")
        return True  # closing is under way

    def pause_writing(self) -> None:
        """Wait with the next batch."""
        self._paused = True

    def resume_writing(self) -> None:
        """Note that the batch has left, and go on."""
        self._paused = False
        try:
            self._flow.output_drained()
        except Exception as error:
            self._broken("on_drained", error)
        self._notify()
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everybody that it is over."""
        if self._lost:
            return
        self._lost = True
        self._wire = None
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        error = self._closed(self._reason or _in_words(exc))
        error.__cause__ = exc
        if not self._closing:
            self._error = error
        self._flow.close(error)
        self._notify()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            # Through the loop, so that one that raises takes nothing down with it.
            self._loop.call_soon(callback, self._error)


def _in_words(exc: Exception | None) -> str:
    if exc is None:
        return "the peer closed it"
    if isinstance(exc, OSError) and exc.errno:
        return os.strerror(exc.errno).lower()
    return str(exc) or type(exc).__name__
