"""A transport that misbehaves as far as it may: delays, reorders and cuts, by a seed.

Wraps any transport. What one message is made of stays in order; what different messages are
made of, and grants, are held back for a random number of the loop's turns, so they overtake
each other. Nothing waits for a clock, and over the memory transport everything is repeatable.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import TYPE_CHECKING, ClassVar

from p2pdpt.channel import Channel, Incoming, Outgoing, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.channel import Availability, Door, Landing, Listener, Meta, PeerInfo, Tag

__all__ = ["ChaosTransport"]


class ChaosTransport(Transport):
    """Wraps a transport; made by :meth:`around`.

    Attributes:
        inner: the class that is wrapped.
        seed: of everything random.
        delay: the most turns of the loop for which one action is held back.
        cut: payload bytes pushed after which a channel is aborted, or None.
    """

    name = "chaos"
    inner: ClassVar[type[Transport]]
    seed: ClassVar[int] = 0
    delay: ClassVar[int] = 0
    cut: ClassVar[int | None] = None

    @staticmethod
    def around(
        transport: type[Transport], *, seed: int = 0, delay: int = 5, cut: int | None = None
    ) -> type[ChaosTransport]:
        """Return `transport` with chaos, under the same name.

        Args:
            transport: the class to wrap.
            seed: of everything random.
            delay: the most turns of the loop for which one action is held back.
            cut: payload bytes pushed through one channel after which it is aborted.
        """
        return type(
            f"Chaos{transport.__name__}",
            (ChaosTransport,),
            {"name": transport.name, "inner": transport, "seed": seed, "delay": delay, "cut": cut},
        )

    def __init__(self, door: Door) -> None:
        """Make the transport that is wrapped, on `door`."""
        self._inner = self.inner(door)
        self._random = random.Random(self.seed)

    @classmethod
    def availability(cls) -> Availability:
        """Tell whether what is wrapped can be used."""
        return cls.inner.availability()

    async def listen(self, accept: Callable[[Channel], None]) -> Listener:
        """Accept channels, with chaos."""
        return await self._inner.listen(lambda channel: accept(self._wrap(channel)))

    async def connect(self, peer: PeerInfo) -> Channel:
        """Open a channel, with chaos."""
        return self._wrap(await self._inner.connect(peer))

    def _wrap(self, channel: Channel) -> Channel:
        chance = random.Random(self._random.random())
        return _ChaosChannel(channel, chance, self.delay, self.cut)


class _Queue:
    """Actions of one message, done in order, each held back for some turns of the loop."""

    def __init__(self, channel: _ChaosChannel) -> None:
        self._channel = channel
        self._actions: deque[Callable[[], None]] = deque()
        self._running = False

    def put(self, action: Callable[[], None]) -> None:
        if not self._channel.delay:
            action()
            return
        self._actions.append(action)
        self._channel.queues.add(self)
        if not self._running:
            self._running = True
            self._wait(self._channel.turns())

    def _wait(self, turns: int) -> None:
        if turns > 0:
            self._channel.loop.call_soon(self._wait, turns - 1)
        elif self._actions:
            self._actions.popleft()()
            self._channel.loop.call_soon(self._wait, self._channel.turns())
        else:
            self._running = False
            self._channel.queues.discard(self)

    def flush(self) -> None:
        while self._actions:
            self._actions.popleft()()

    def clear(self) -> None:
        self._actions.clear()


class _ChaosOutgoing(Outgoing):
    def __init__(self, channel: _ChaosChannel, inner: Outgoing, length: int) -> None:
        self._channel = channel
        self._inner = inner
        self._length = length
        self._queue = _Queue(channel)
        self._pushed = 0
        self.last: int | None = None  # the element after which the channel is cut

    def push(self, data: memoryview, count: int, meta: Meta) -> None:
        channel = self._channel
        if self._pushed + count > self._length or not count:
            self._inner.push(data, count, meta)  # which says what is wrong with it
            return
        if channel.left is not None:
            data = data.cast("B")
            width = len(data) // count
            fit = min(count, channel.left // width)
            channel.left -= fit * width
            if fit < count:
                channel.left = 0
                self.last = self._pushed + fit
                if not self.last:
                    self._queue.put(channel.abort)
                count = fit
                data = data[: fit * width]
                if not fit:
                    return
        self._pushed += count
        self._queue.put(lambda: self._inner.push(data, count, meta))

    def cancel(self) -> None:
        self._queue.clear()
        self._inner.cancel()


class _ChaosIncoming(Incoming):
    def __init__(self, channel: _ChaosChannel, inner: Incoming) -> None:
        self._inner = inner
        self._queue = _Queue(channel)

    def grant(self, upto: int) -> None:
        self._queue.put(lambda: self._inner.grant(upto))

    def cancel(self) -> None:
        self._queue.clear()
        self._inner.cancel()


class _ChaosChannel(Channel):
    def __init__(self, inner: Channel, chance: random.Random, delay: int, cut: int | None) -> None:
        self.peer = inner.peer
        self.address = inner.address
        self.transport = inner.transport
        self.counters = inner.counters
        self.loop = asyncio.get_running_loop()
        self.delay = delay
        self.left = cut
        self.queues: set[_Queue] = set()
        self._inner = inner
        self._chance = chance
        inner.on_closed(self._closed)

    def turns(self) -> int:
        return self._chance.randint(0, self.delay)

    def send(self, tag: Tag, length: int, on_drained: Callable[[int], None]) -> Outgoing:
        outgoing: _ChaosOutgoing | None = None

        def drained(upto: int) -> None:
            on_drained(upto)
            if outgoing is not None and outgoing.last is not None and upto >= outgoing.last:
                self.abort()

        outgoing = _ChaosOutgoing(self, self._inner.send(tag, length, drained), length)
        return outgoing

    def receive(self, tag: Tag, length: int, landing: Landing) -> Incoming:
        return _ChaosIncoming(self, self._inner.receive(tag, length, landing))

    def on_closed(self, callback: Callable[[Exception | None], None]) -> None:
        self._inner.on_closed(callback)

    async def quiesce(self) -> None:
        await self._inner.quiesce()

    def abort(self) -> None:
        self._inner.abort()

    async def close(self) -> None:
        for queue in list(self.queues):
            queue.flush()
        await self._inner.close()

    def _closed(self, error: Exception | None) -> None:
        for queue in self.queues:
            queue.clear()
        self.queues.clear()
