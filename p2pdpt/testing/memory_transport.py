"""A transport without sockets: channels between nodes of one event loop.

Driven by the same :class:`p2pdpt.protocol.flow.Flow` as tcp, so it keeps the same contract, but
deterministic: bytes move by the loop's turns alone. A batch leaves in the turn after it was
taken, so that, as with a socket, there is a time in which memory is on its way.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from p2pdpt.channel import Availability, Channel, Listener, Transport
from p2pdpt.errors import ChannelClosedError, TransportError
from p2pdpt.protocol.flow import Flow

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.channel import Door, Incoming, Landing, Outgoing, PeerInfo, Tag

__all__ = ["MemoryChannel", "MemoryTransport"]

log = logging.getLogger(__name__)

# Endpoints are found by name, as a real one's address would be; they live as long as listeners.
_listeners: WeakValueDictionary[str, MemoryListener] = WeakValueDictionary()
_numbers = itertools.count(1)


class MemoryTransport(Transport):
    """Connects nodes of one event loop."""

    name = "memory"

    def __init__(self, door: Door) -> None:
        """Serve the node that `door` belongs to; the door itself is not used."""
        self._door = door

    @classmethod
    def availability(cls) -> Availability:
        """Tell that it can always be used."""
        return Availability(True, "within one event loop")

    async def listen(self, accept: Callable[[Channel], None]) -> Listener:
        """Accept channels from peers of this event loop."""
        return MemoryListener(self._door, accept)

    async def connect(self, peer: PeerInfo) -> Channel:
        """Open a channel to a peer that listens.

        Raises:
            ChannelClosedError: it does not listen.
        """
        await asyncio.sleep(0)
        endpoint = peer.transports.get(self.name, "")
        listener = _listeners.get(endpoint)
        if listener is None or listener.door.me.node_id != peer.node_id:
            raise ChannelClosedError(f"cannot reach {peer}: nobody listens at {endpoint!r}")
        loop = asyncio.get_running_loop()
        here = MemoryChannel(listener.door.me, endpoint, loop)
        there = MemoryChannel(self._door.me, f"{endpoint} (accepted)", loop)
        here.other, there.other = there, here
        loop.call_soon(listener.accepted, there)
        return here


class MemoryListener(Listener):
    """Accepts channels until it is closed."""

    def __init__(self, door: Door, accept: Callable[[Channel], None]) -> None:
        """Publish an endpoint and give each channel that comes to `accept`."""
        self.door = door
        self.endpoint = f"memory:{next(_numbers)}"
        self._accept = accept
        _listeners[self.endpoint] = self

    def accepted(self, channel: MemoryChannel) -> None:
        """Pass on a channel, unless closed in the meantime."""
        if self.endpoint not in _listeners:
            channel.abort()
            return
        try:
            self._accept(channel)
        except BaseException:
            channel.abort()
            raise

    async def close(self) -> None:
        """Accept no more; channels that are open stay. May be called twice."""
        _listeners.pop(self.endpoint, None)


class MemoryChannel(Channel):
    """One end of a connection in memory.

    Attributes:
        other: the other end, until either has closed.
    """

    def __init__(self, peer: PeerInfo, address: str, loop: asyncio.AbstractEventLoop) -> None:
        """Make one end; the transport joins it to its `other`."""
        self.peer = peer
        self.address = address
        self.transport = "memory"
        self.other: MemoryChannel | None = None
        self._loop = loop
        self._flow = Flow(self._wake)
        self.counters = self._flow.counters
        self._awake = False
        self._under_way: list[bytes | memoryview] = []  # taken, and not yet at the other end
        self._closing = False
        self._lost = False
        self._error: Exception | None = None
        self._callbacks: list[Callable[[Exception | None], None]] = []
        self._waiters: list[asyncio.Future[None]] = []

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
        self._end("it was aborted here", "the peer aborted it")

    async def close(self) -> None:
        """Send what was pushed and granted, then close. May be called twice."""
        if not self._lost and not self._closing:
            self._closing = True
            self._flow.refuse(self._closed("it was closed here"))
            self._wake()
        try:
            while not self._lost:
                await self._wait()
        except asyncio.CancelledError:
            self.abort()
            raise

    async def _wait(self) -> None:
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
        return ChannelClosedError(
            f"memory channel to {self.peer} at {self.address} ended: {reason}"
        )

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Deliver what was taken in the turn before, and take more."""
        self._awake = False
        other = self.other
        if other is None:
            return
        if self._under_way:
            buffers, self._under_way = self._under_way, []
            for buffer in buffers:
                other.deliver(memoryview(buffer))
        if self.other is None:
            return
        try:
            self._flow.output_drained()
            self._notify()
            self._under_way = self._flow.next_output()
        except Exception as error:
            self._broken("on_drained", error)
        if self._under_way:
            self._wake()
        elif self._closing:
            self._end("it was closed here", "the peer closed it")

    def deliver(self, data: memoryview) -> None:
        """Take bytes from the other end."""
        flow = self._flow
        try:
            while data and self.other is not None:
                buffer = flow.get_buffer()
                count = min(len(buffer), len(data))
                buffer[:count] = data[:count]
                data = data[count:]
                flow.received(count)
        except TransportError as error:
            self._end(str(error), "the peer aborted it")
        except Exception as error:
            self._broken("a landing", error)

    def _broken(self, where: str, error: Exception) -> None:
        """End because a callback raised, which it must not: others would wait for ever."""
        log.error("channel.failed peer=%s in=%s", self.peer, where, exc_info=error)
        self._end(f"{type(error).__name__} in {where}: {error}", "the peer aborted it")

    def _end(self, reason: str, there: str) -> None:
        """Close both ends, soon."""
        other, self.other = self.other, None
        if other is not None:
            other.other = None
            for end, why in ((self, reason), (other, there)):
                error = end._closed(why)
                end._flow.halt(error)
                self._loop.call_soon(end._gone, error)

    def _gone(self, error: Exception) -> None:
        self._lost = True
        self._under_way.clear()
        if not self._closing:
            self._error = error
        self._flow.close(error)
        self._notify()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._loop.call_soon(callback, self._error)
