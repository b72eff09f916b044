"""What transport tests are written with: a connected pair, and ends that record what they see.

Needs no pytest. Everything here checks the contract of :mod:`p2pdpt.channel` as it goes, and
raises ``AssertionError`` where it is broken.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

from p2pdpt.channel import Landing, Meta, Tag
from p2pdpt.testing.loopback_door import LoopbackDoor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from p2pdpt.channel import Channel, Door, Incoming, Outgoing, Transport

__all__ = ["Ends", "RecordingLanding", "Sending", "TransportBench", "pattern", "tag"]


def tag(number: int, view: int = 1) -> Tag:
    """Return a tag for the `number`-th message of a test."""
    return Tag(view, 0, 7, 0, 3, number)


def pattern(size: int, seed: int = 0) -> bytearray:
    """Return `size` bytes in which every place is told from its neighbours."""
    return bytearray(random.Random(seed).randbytes(size))


class RecordingLanding(Landing):
    """A landing in memory of its own, for tests; checks what it is told.

    Attributes:
        memory: where elements are placed, element k at ``k * width`` and, if narrower, packed
            from the first of its piece on.
        arrivals: start, count and meta of each call of ``arrived``, in order.
        got: elements that have arrived, in order from 0.
        error: what ``failed`` was called with.
        done: completes when all have arrived, or it failed.
    """

    def __init__(
        self,
        length: int,
        width: int = 4,
        *,
        piece: int | None = None,
        then: Callable[[RecordingLanding], None] | None = None,
    ) -> None:
        """Make room for `length` elements of `width` bytes.

        Args:
            length: elements of the message.
            width: bytes of the widest element.
            piece: the most elements that one call of ``buffer`` gives out.
            then: called after each arrival.
        """
        self.length = length
        self.width = width
        self.memory = bytearray(length * width)
        self.arrivals: list[tuple[int, int, Meta]] = []
        self.widths: list[int] = []
        self.got = 0
        self.error: Exception | None = None
        self.done = asyncio.Event()
        self._changed = asyncio.Event()
        self._piece = piece
        self._then = then
        self._given: tuple[int, int] | None = None

    def buffer(self, start: int, count: int, width: int, meta: Meta) -> memoryview:
        """Return the place of the elements from `start`."""
        assert self.error is None, "buffer after failed"
        assert start == self.got, f"element {start} instead of {self.got}"
        assert 0 < count <= self.length - start, f"{count} elements from {start}"
        if self._piece is not None:
            count = min(count, self._piece)
        self._given = (start, count)
        self.widths.append(width)
        place = start * self.width
        return memoryview(self.memory)[place : place + count * width]

    def arrived(self, start: int, count: int, meta: Meta) -> None:
        """Record the arrival."""
        assert self.error is None, "arrived after failed"
        assert self._given == (start, count), f"{start}, {count} arrived in {self._given}"
        self._given = None
        self.arrivals.append((start, count, meta))
        self.got += count
        self._changed.set()
        if self.got == self.length:
            self.done.set()
        if self._then is not None:
            self._then(self)

    def failed(self, error: Exception) -> None:
        """Record the failure."""
        assert self.error is None, "failed twice"
        self.error = error
        self.done.set()
        self._changed.set()

    async def reach(self, upto: int) -> None:
        """Wait until `upto` elements have arrived, or it failed."""
        while self.got < upto and self.error is None:
            self._changed.clear()
            await self._changed.wait()


class Sending:
    """A message being sent by a test."""

    def __init__(self, channel: Channel, tag: Tag, length: int) -> None:
        self.length = length
        self.drained: list[int] = []
        self.done = asyncio.Event()
        self.outgoing: Outgoing = channel.send(tag, length, self._drained)

    def _drained(self, upto: int) -> None:
        assert not self.drained or upto > self.drained[-1], "on_drained must rise"
        assert upto <= self.length
        self.drained.append(upto)
        if upto == self.length:
            self.done.set()


class Ends:
    """How both ends of a channel were told that it closed."""

    def __init__(self, here: Channel, there: Channel) -> None:
        self.reasons: list[Exception | None] = [None, None]
        self.calls = 0
        self._told = [asyncio.Event(), asyncio.Event()]
        for index, channel in enumerate((here, there)):
            channel.on_closed(lambda reason, index=index: self._closed(index, reason))  # type: ignore[misc]

    def _closed(self, index: int, reason: Exception | None) -> None:
        self.calls += 1
        self.reasons[index] = reason
        self._told[index].set()

    async def wait(self) -> None:
        for told in self._told:
            await told.wait()


class TransportBench:
    """Connected pairs of a transport, and messages across them.

    Attributes:
        transport: the class under test.
        patience: seconds after which a test fails instead of waiting on.
    """

    transport: ClassVar[type[Transport]]
    patience: ClassVar[float] = 20.0

    def make_transport(self, door: Door) -> Transport:
        """Return a transport on `door`; override where the class needs more."""
        return self.transport(door)

    @asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[Channel, Channel]]:
        """Connect two nodes and yield both ends of a channel, the connecting one first."""
        async with LoopbackDoor("alice") as door, LoopbackDoor("bob") as other:
            accepted: asyncio.Queue[Channel] = asyncio.Queue()
            listener = await self.make_transport(other).listen(accepted.put_nowait)
            peer = dataclasses.replace(
                other.me, transports={self.transport.name: listener.endpoint}
            )
            try:
                async with asyncio.timeout(self.patience):
                    here = await self.make_transport(door).connect(peer)
                    there = await accepted.get()
                    yield here, there
            finally:
                await listener.close()
            async with asyncio.timeout(self.patience):
                await asyncio.gather(here.close(), there.close())

    def send(self, channel: Channel, tag: Tag, data: bytes | bytearray, width: int = 4) -> Sending:
        """Send `data` as one message, pushed at once."""
        length = len(data) // width
        sending = Sending(channel, tag, length)
        if length:
            sending.outgoing.push(memoryview(data), length, Meta())
        return sending

    def expect(
        self, channel: Channel, tag: Tag, landing: RecordingLanding
    ) -> tuple[RecordingLanding, Incoming]:
        """Post a receive into `landing` and grant all of it."""
        incoming = channel.receive(tag, landing.length, landing)
        incoming.grant(landing.length)
        return landing, incoming

    async def carry(
        self, sender: Channel, receiver: Channel, tag: Tag, size: int = 4096, width: int = 4
    ) -> None:
        """Carry one message and compare: the channel works."""
        data = pattern(size, tag.ordinal)
        landing, _ = self.expect(receiver, tag, RecordingLanding(size // width, width))
        sending = self.send(sender, tag, data, width)
        if size:
            await landing.done.wait()
        assert landing.error is None
        assert landing.memory == data
        await sending.done.wait()

    async def settle(self, *channels: Channel) -> None:
        """Wait until what was posted before has certainly been dealt with by both ends."""
        here, there = channels
        for _ in range(3):
            self._settled = getattr(self, "_settled", 0) + 1
            await self.carry(here, there, tag(self._settled, view=2**32 - 1))
            await self.carry(there, here, tag(self._settled, view=2**32 - 1))
