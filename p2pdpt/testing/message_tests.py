"""The part of the transport kit about messages: sizes, grants, order and memory."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import TYPE_CHECKING

from p2pdpt.channel import EAGER_BYTES, FRAME_BYTES, Meta
from p2pdpt.testing.transport_bench import (
    RecordingLanding,
    Sending,
    TransportBench,
    pattern,
    tag,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.channel import Channel

__all__ = ["MessageTests"]


class MessageTests(TransportBench):
    """How messages travel; a part of ``TransportKit``."""

    # Sizes and shapes.

    async def test_sizes(self) -> None:
        """Messages of any size arrive, from one element to several frames."""
        sizes = [1, 2, 255, 4096, EAGER_BYTES - 1, EAGER_BYTES, EAGER_BYTES + 1]
        sizes += [FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES + 12345]
        async with self.pair() as (here, there):
            for number, size in enumerate(sizes):
                await self.carry(here, there, tag(number), size, 1)
                await self.carry(there, here, tag(number), size, 1)

    async def test_element_widths(self) -> None:
        """Elements of 1, 2, 4 and 8 bytes arrive whole."""
        async with self.pair() as (here, there):
            number = 0
            for width in (1, 2, 4, 8):
                for length in (3, 16384, 16385, FRAME_BYTES // width + 1):
                    number += 1
                    await self.carry(here, there, tag(number), length * width, width)

    async def test_element_width_that_does_not_divide_a_frame(self) -> None:
        """No element is cut at the end of a frame."""
        async with self.pair() as (here, there):
            await self.carry(here, there, tag(1), 12 * 200_000, 12)

    async def test_empty_message(self) -> None:
        """An empty message completes on both sides at once, with no call of its landing."""
        async with self.pair() as (here, there):
            early = Sending(here, tag(1), 0)
            assert early.drained == [0]
            await self.settle(here, there)
            landing, _ = self.expect(there, tag(1), RecordingLanding(0))
            late, _ = self.expect(there, tag(2), RecordingLanding(0))
            assert Sending(here, tag(2), 0).drained == [0]
            await self.settle(here, there)
            for empty in (landing, late):
                assert not empty.arrivals
                assert empty.error is None

    async def test_width_may_change_within_a_message(self) -> None:
        """Partial sums may be wider than the elements that follow them."""
        data = pattern(3000)
        async with self.pair() as (here, there):
            landing, _ = self.expect(there, tag(1), RecordingLanding(600, 8))
            sending = Sending(here, tag(1), 600)
            sending.outgoing.push(memoryview(data)[:800], 200, Meta())
            sending.outgoing.push(memoryview(data)[800:1200], 200, Meta())
            sending.outgoing.push(memoryview(data)[1200:2800], 200, Meta())
            await landing.done.wait()
            assert landing.widths == [4, 2, 8]
            assert landing.memory[:800] == data[:800]
            assert landing.memory[1600:2000] == data[800:1200]
            assert landing.memory[3200:] == data[1200:2800]
            await sending.done.wait()

    async def test_metas_arrive_with_their_elements(self) -> None:
        """Each element arrives with the meta that it was pushed with."""
        async with self.pair() as (here, there):
            for number, length in enumerate((40, 400_000)):
                landing, _ = self.expect(there, tag(number), RecordingLanding(length))
                sending = Sending(here, tag(number), length)
                quarter = length // 4
                metas = [Meta(0.5 + k, 3.25 * k, k) for k in range(4)]
                data = memoryview(pattern(length))
                for meta in metas:
                    sending.outgoing.push(data, quarter, meta)
                await landing.done.wait()
                for start, count, meta in landing.arrivals:
                    assert start // quarter == (start + count - 1) // quarter
                    assert meta == metas[start // quarter]
                    assert isinstance(meta, Meta)
                await sending.done.wait()

    async def test_landing_may_take_pieces(self) -> None:
        """A landing may give memory for fewer elements than there are."""
        async with self.pair() as (here, there):
            for number, (length, piece) in enumerate(((50, 1), (16384, 1000), (600_000, 65537))):
                data = pattern(length * 4, number)
                landing = RecordingLanding(length, piece=piece)
                self.expect(there, tag(number), landing)
                sending = self.send(here, tag(number), data)
                await landing.done.wait()
                assert landing.memory == data
                assert max(count for _, count, _ in landing.arrivals) <= piece
                await sending.done.wait()

    async def test_push_as_elements_become_ready(self) -> None:
        """Elements pushed bit by bit make one message."""
        data = pattern(1_000_000)
        async with self.pair() as (here, there):
            landing, _ = self.expect(there, tag(1), RecordingLanding(250_000))
            sending = Sending(here, tag(1), 250_000)
            for start in range(0, 250_000, 12_500):
                sending.outgoing.push(
                    memoryview(data)[start * 4 : (start + 12_500) * 4], 12_500, Meta()
                )
                await asyncio.sleep(0)
            await landing.done.wait()
            assert landing.memory == data
            await sending.done.wait()

    async def test_typed_memoryviews(self) -> None:
        """What is pushed may be a memoryview of any element type."""
        data = pattern(8000)
        async with self.pair() as (here, there):
            landing, _ = self.expect(there, tag(1), RecordingLanding(2000))
            sending = Sending(here, tag(1), 2000)
            sending.outgoing.push(memoryview(data).cast("I"), 2000, Meta())
            await landing.done.wait()
            assert landing.memory == data
            await sending.done.wait()

    # Grants and what goes ahead of them.

    async def test_bulk_waits_for_its_grant(self) -> None:
        """Nothing of a long message is placed or drained beyond its grant."""
        length, window = 300_000, 50_000
        data = pattern(length * 4)
        async with self.pair() as (here, there):
            sending = self.send(here, tag(1), data)
            await self.settle(here, there)
            assert sending.drained == []
            landing = RecordingLanding(length)
            incoming = there.receive(tag(1), length, landing)
            await self.settle(here, there)
            assert landing.got == 0
            for upto in range(window, length + 1, window):
                incoming.grant(upto)
                incoming.grant(upto - 1)  # never shrinks
                await landing.reach(upto)
                await self.settle(here, there)
                assert landing.got == upto
                assert sending.drained[-1] == upto
            assert landing.memory == data

    async def test_grants_may_come_long_before_the_message(self) -> None:
        """Grants given ahead hold until the message is opened."""
        async with self.pair() as (here, there):
            landings = [
                self.expect(there, tag(number), RecordingLanding(100_000))[0]
                for number in range(20)
            ]
            await self.settle(here, there)
            for number in reversed(range(20)):
                await self.send(here, tag(number), pattern(400_000, number)).done.wait()
            for number, landing in enumerate(landings):
                await landing.done.wait()
                assert landing.memory == pattern(400_000, number)

    async def test_short_message_ahead_of_its_receive(self) -> None:
        """A short message needs no receive to leave, and is placed when one is posted."""
        data = pattern(EAGER_BYTES // 2)
        async with self.pair() as (here, there):
            sending = self.send(here, tag(1), data)
            await sending.done.wait()
            await self.settle(here, there)
            landing = RecordingLanding(len(data) // 4)
            there.receive(tag(1), landing.length, landing)
            assert landing.got == landing.length, "placed before receive returns"
            assert landing.memory == data

    async def test_more_short_messages_than_any_pool_holds(self) -> None:
        """Short messages that nobody asks for wait, and all arrive in any order."""
        async with self.pair() as (here, there):
            sent = [
                self.send(here, tag(number), pattern(32 << 10, number)) for number in range(150)
            ]
            await asyncio.sleep(0.01)
            order = list(range(150))
            random.Random(1).shuffle(order)
            for number in order:
                landing, _ = self.expect(there, tag(number), RecordingLanding(8 << 10))
                await landing.done.wait()
                assert landing.memory == pattern(32 << 10, number)
            for sending in sent:
                await sending.done.wait()
            await self.carry(here, there, tag(1000))

    async def test_credit_of_the_pool_comes_back(self) -> None:
        """Rounds of unexpected messages do not use anything up."""
        async with self.pair() as (here, there):
            for turn in range(6):
                numbers = range(turn * 30, turn * 30 + 30)
                for number in numbers:
                    self.send(here, tag(number), pattern(20_000, number))
                await self.settle(here, there)
                for number in numbers:
                    landing, _ = self.expect(there, tag(number), RecordingLanding(5000))
                    await landing.done.wait()
                    assert landing.memory == pattern(20_000, number)

    # Many at once.

    async def test_many_messages_at_once(self) -> None:
        """Messages of all sizes in both directions, posted in any order, all arrive."""
        chance = random.Random(5)
        async with self.pair() as (here, there):
            ends: list[asyncio.Event] = []
            checks = []
            posts: list[Callable[[], object]] = []
            for number in range(60):
                size = 4 * chance.choice((1, 300, 16384, 16385, 100_000, 300_000))
                for sender, receiver in ((here, there), (there, here)):
                    data = pattern(size, number)
                    landing = RecordingLanding(size // 4, piece=chance.choice((None, 7000)))
                    checks.append((landing, data))
                    ends.append(landing.done)

                    def post_send(
                        sender: Channel = sender, n: int = number, data: bytearray = data
                    ) -> None:
                        ends.append(self.send(sender, tag(n), data).done)

                    def post_receive(
                        receiver: Channel = receiver,
                        n: int = number,
                        landing: RecordingLanding = landing,
                    ) -> None:
                        self.expect(receiver, tag(n), landing)

                    posts += [post_send, post_receive]
            chance.shuffle(posts)
            for number, post in enumerate(posts):
                post()
                if number % 7 == 0:
                    await asyncio.sleep(0)
            for end in ends:
                await end.wait()
            for landing, data in checks:
                assert landing.memory == data

    async def test_short_message_overtakes_a_long_one(self) -> None:
        """A long message does not hold up a short one that was sent after it."""
        async with self.pair() as (here, there):
            long, _ = self.expect(there, tag(1), RecordingLanding(16 << 20, 1))
            seen: list[int] = []
            short, _ = self.expect(
                there,
                tag(2),
                RecordingLanding(1000, 1, then=lambda landing: seen.append(long.got)),
            )
            self.send(here, tag(1), bytes(16 << 20), 1)
            self.send(here, tag(2), pattern(1000), 1)
            await short.done.wait()
            assert seen[-1] < long.length
            await long.done.wait()

    async def test_both_directions_at_once(self) -> None:
        """Long messages pass each other, under equal tags."""
        size = 6 << 20
        async with self.pair() as (here, there):
            await asyncio.gather(
                self.carry(here, there, tag(1), size), self.carry(there, here, tag(1), size)
            )

    async def test_two_channels_between_two_nodes(self) -> None:
        """Channels of the same nodes do not mix."""
        async with self.pair() as (here, there), self.pair() as (here2, there2):
            data, data2 = pattern(200_000, 1), pattern(200_000, 2)
            landing, _ = self.expect(there, tag(1), RecordingLanding(50_000))
            landing2, _ = self.expect(there2, tag(1), RecordingLanding(50_000))
            self.send(here2, tag(1), data2)
            self.send(here, tag(1), data)
            await landing.done.wait()
            await landing2.done.wait()
            assert landing.memory == data
            assert landing2.memory == data2

    async def test_counters(self) -> None:
        """Both ends count bytes, headers included, and frames."""
        async with self.pair() as (here, there):
            before = dataclasses.replace(here.counters), dataclasses.replace(there.counters)
            await self.carry(here, there, tag(1), 3 << 20)
            assert here.counters.bytes_sent - before[0].bytes_sent >= 3 << 20
            assert there.counters.bytes_received - before[1].bytes_received >= 3 << 20
            assert here.counters.frames_sent - before[0].frames_sent >= 3
            assert there.counters.frames_received - before[1].frames_received >= 3
