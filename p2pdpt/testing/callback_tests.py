"""The part of the transport kit about cancellation, callbacks and mistakes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from p2pdpt.channel import FRAME_BYTES, Meta
from p2pdpt.errors import ChannelClosedError, MismatchError
from p2pdpt.testing.transport_bench import (
    Ends,
    RecordingLanding,
    Sending,
    TransportBench,
    pattern,
    tag,
)

if TYPE_CHECKING:
    from p2pdpt.channel import Channel, Incoming, Outgoing

__all__ = ["CallbackTests"]


class CallbackTests(TransportBench):
    """What may be done when, and what it leaves behind; a part of ``TransportKit``."""

    # Memory.

    async def test_memory_is_free_once_drained(self) -> None:
        """What ``on_drained`` covers may be overwritten, and the peer gets what it was."""
        length = 500_000
        async with self.pair() as (here, there):
            for number, size in enumerate((40, 4000, length)):
                data = pattern(size * 4, number)
                kept = bytes(data)
                landing, _ = self.expect(there, tag(number), RecordingLanding(size))
                done = asyncio.Event()

                def drained(
                    upto: int,
                    data: bytearray = data,
                    size: int = size,
                    done: asyncio.Event = done,
                ) -> None:
                    data[: upto * 4] = bytes(upto * 4)
                    if upto == size:
                        done.set()

                here.send(tag(number), size, drained).push(memoryview(data), size, Meta())
                await landing.done.wait()
                await done.wait()
                assert landing.memory == kept

    async def test_cancelled_receive_places_nothing_more(self) -> None:
        """After ``cancel`` returns the memory stays as it is, and the channel is usable."""
        length = 800_000
        async with self.pair() as (here, there):
            for number, when in enumerate((0, 1, 300_000, length - 1)):
                landing, incoming = self.expect(there, tag(number), RecordingLanding(length))
                self.send(here, tag(number), pattern(length * 4))
                await landing.reach(when)
                incoming.cancel()
                incoming.cancel()
                frozen, calls = bytes(landing.memory), len(landing.arrivals)
                incoming.grant(length)
                await there.quiesce()
                await self.settle(here, there)
                assert landing.memory == frozen
                assert len(landing.arrivals) == calls
                assert landing.error is None

    async def test_receive_cancelled_before_a_short_message(self) -> None:
        """Short messages of cancelled receives are thrown away, however many."""
        async with self.pair() as (here, there):
            for number in range(100):
                landing, incoming = self.expect(there, tag(number), RecordingLanding(8000))
                incoming.cancel()
                self.send(here, tag(number), pattern(32_000))
                if number % 10 == 0:
                    await self.settle(here, there)
                assert landing.got == 0
            await self.settle(here, there)

    async def test_landing_may_cancel_its_receive(self) -> None:
        """A receive may be cancelled from within its landing's own calls."""
        async with self.pair() as (here, there):
            for number, length in enumerate((1000, 16384, 900_000)):
                incomings: list[Incoming] = []

                def then(landing: RecordingLanding, to: list[Incoming] = incomings) -> None:
                    to[0].cancel()

                landing = RecordingLanding(length, piece=length // 3, then=then)
                incomings.append(there.receive(tag(number), length, landing))
                incomings[0].grant(length)
                self.send(here, tag(number), pattern(length * 4))
                await landing.reach(1)
                await self.settle(here, there)
                assert len(landing.arrivals) == 1

    async def test_cancelled_send_sends_nothing_more(self) -> None:
        """After ``cancel`` and ``quiesce`` the memory is free, and the channel is usable."""
        length = 2_000_000
        async with self.pair() as (here, there):
            for number, when in enumerate((0, 1, 500_000)):
                data = pattern(length * 4, number)
                kept = bytes(data)
                landing, incoming = self.expect(there, tag(number), RecordingLanding(length))
                sending = Sending(here, tag(number), length)
                # Not all of it, or it might be complete before it is cancelled.
                sending.outgoing.push(memoryview(data)[: length * 3], length * 3 // 4, Meta())
                await landing.reach(when)
                sending.outgoing.cancel()
                calls = len(sending.drained)
                await here.quiesce()
                data[:] = bytes(len(data))
                sending.outgoing.push(memoryview(data)[:4], 1, Meta())  # falls on deaf ears
                await self.settle(here, there)
                assert landing.got < length
                if not when:
                    assert landing.got * 4 <= FRAME_BYTES, "at most the frame already begun"
                assert landing.memory[: landing.got * 4] == kept[: landing.got * 4]
                assert len(sending.drained) == calls, "no call after cancel"
                assert landing.error is None
                incoming.cancel()

    async def test_cancel_what_is_complete(self) -> None:
        """Cancelling a message that is complete changes nothing."""
        async with self.pair() as (here, there):
            for number, size in enumerate((400, 400_000)):
                landing, incoming = self.expect(there, tag(number), RecordingLanding(size))
                sending = self.send(here, tag(number), pattern(size * 4))
                await landing.done.wait()
                await sending.done.wait()
                sending.outgoing.cancel()
                incoming.cancel()
                await asyncio.gather(here.quiesce(), there.quiesce())
                await self.settle(here, there)

    async def test_quiesce_with_nothing_cancelled(self) -> None:
        """``quiesce`` returns at once, also amid a message and after the end."""
        async with self.pair() as (here, there):
            await here.quiesce()
            self.send(here, tag(1), pattern(4_000_000))
            await here.quiesce()
            here.abort()
            await here.quiesce()
            await there.quiesce()

    # Mistakes.

    async def test_lengths_that_differ(self) -> None:
        """A receive of another length than the message fails with ``MismatchError``."""
        lengths = [(10, 11), (11, 10), (10, 100_000), (100_000, 10), (100_000, 100_001)]
        lengths += [(0, 5), (0, 100_000), (200_000, 100_000)]
        async with self.pair() as (here, there):
            number = 0
            for sent, expected in lengths:
                for receive_first in (True, False):
                    number += 1
                    landing = RecordingLanding(expected)
                    if receive_first:
                        self.expect(there, tag(number), landing)
                        await self.settle(here, there)
                    self.send(here, tag(number), pattern(sent * 4))
                    if not receive_first:
                        await self.settle(here, there)
                        self.expect(there, tag(number), landing)
                    await landing.done.wait()
                    assert isinstance(landing.error, MismatchError), (sent, expected)
                    assert str(sent) in str(landing.error)
                    assert str(expected) in str(landing.error)
                    assert landing.got == 0
            await self.settle(here, there)

    # Callbacks.

    async def test_callbacks_may_post(self) -> None:
        """Landings and ``on_drained`` may send, receive, push and grant."""
        rounds = 60
        async with self.pair() as (here, there):
            done = asyncio.Event()
            for length in (100, 40_000):
                data = pattern(length * 4)
                done.clear()

                def post(
                    number: int,
                    ends: tuple[Channel, Channel] = (here, there),
                    length: int = length,
                    data: bytearray = data,
                ) -> None:
                    if number == rounds:
                        done.set()
                        return

                    def then(landing: RecordingLanding) -> None:
                        if landing.got == length:
                            assert landing.memory == data
                            post(number + 1, (ends[1], ends[0]))

                    landing = RecordingLanding(length, then=then)
                    name = tag(number, view=length)
                    ends[1].receive(name, length, landing).grant(length)
                    ends[0].send(name, length, lambda upto: None).push(
                        memoryview(data), length, Meta()
                    )

                post(0)
                await done.wait()

    async def test_on_drained_may_push(self) -> None:
        """A sender may push the next elements from ``on_drained``."""
        length, step = 200_000, 20_000
        data = pattern(length * 4)
        async with self.pair() as (here, there):
            landing, _ = self.expect(there, tag(1), RecordingLanding(length))
            outgoings: list[Outgoing] = []
            done = asyncio.Event()

            def push(upto: int) -> None:
                if upto == length:
                    done.set()
                if upto < length and upto % step == 0:
                    outgoings[0].push(memoryview(data)[upto * 4 : (upto + step) * 4], step, Meta())

            outgoings.append(here.send(tag(1), length, push))
            push(0)
            await landing.done.wait()
            assert landing.memory == data
            await done.wait()

    async def test_push_calls_nobody(self) -> None:
        """``push`` and ``grant`` return before anything is called back."""
        async with self.pair() as (here, there):
            inside = False

            def drained(upto: int) -> None:
                assert not inside

            def then(landing: RecordingLanding) -> None:
                assert not inside

            landing = RecordingLanding(1000, then=then)
            incoming = there.receive(tag(1), 1000, landing)
            outgoing = here.send(tag(1), 1000, drained)
            inside = True
            incoming.grant(1000)
            outgoing.push(memoryview(pattern(4000)), 1000, Meta())
            inside = False
            await landing.done.wait()
            assert landing.error is None

    async def test_landing_may_abort(self) -> None:
        """A channel may be aborted from within a callback; nothing is placed after it."""
        async with self.pair() as (here, there):
            ends = Ends(here, there)
            landing = RecordingLanding(900_000, piece=1000, then=lambda landing: there.abort())
            self.expect(there, tag(1), landing)
            self.send(here, tag(1), pattern(3_600_000))
            await ends.wait()
            await landing.done.wait()
            assert landing.got == 1000
            assert isinstance(landing.error, ChannelClosedError)
