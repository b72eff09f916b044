from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdpt.channel import EAGER_BYTES, FRAME_BYTES, Incoming, Landing, Meta, Outgoing, Tag
from p2pdpt.errors import ChannelClosedError, MismatchError
from p2pdpt.protocol.flow import Flow


def tag(number: int) -> Tag:
    return Tag(1, 0, 2, 0, 3, number)


class Land(Landing):
    """A landing that gives out at most `piece` elements at once."""

    def __init__(self, length: int, width: int, piece: int | None = None) -> None:
        self.length, self.width = length, width
        self.piece = piece or max(length, 1)
        self.memory = bytearray(length * width)
        self.metas: list[Meta] = []
        self.got = 0
        self.error: Exception | None = None
        self.frozen = False

    def buffer(self, start: int, count: int, width: int, meta: Meta) -> memoryview:
        assert not self.frozen
        assert start == self.got
        assert width == self.width
        count = min(count, self.piece)
        return memoryview(self.memory)[start * width : (start + count) * width]

    def arrived(self, start: int, count: int, meta: Meta) -> None:
        assert not self.frozen
        assert start == self.got
        self.got += count
        self.metas += [meta] * count

    def failed(self, error: Exception) -> None:
        assert not self.frozen
        assert self.error is None
        self.error = error


class Line:
    """Two flows, and the bytes on their way between them."""

    def __init__(self) -> None:
        self.woken = 0
        self.flows = (Flow(self._wake), Flow(self._wake))
        self.wires: tuple[deque[memoryview], deque[memoryview]] = (deque(), deque())

    def _wake(self) -> None:
        self.woken += 1

    def take(self, side: int) -> bool:
        """Put the next output of one side on its wire, if the last has left."""
        if self.wires[side]:
            return False
        output = self.flows[side].next_output()
        self.wires[side].extend(memoryview(buffer).toreadonly() for buffer in output)
        return bool(output)

    def deliver(self, side: int, limit: int) -> bool:
        """Move up to `limit` bytes from one side to the other."""
        wire, there = self.wires[side], self.flows[1 - side]
        if not wire:
            return False
        buffer = there.get_buffer()
        assert len(buffer)
        count = min(limit, len(buffer), len(wire[0]))
        buffer[:count] = wire[0][:count]
        if count < len(wire[0]):
            wire[0] = wire[0][count:]
        else:
            wire.popleft()
        there.received(count)
        if not wire:
            self.flows[side].output_drained()
        return True

    def run(self, limit: int = 1 << 30) -> None:
        """Move everything that can move."""
        while any([self.take(0), self.take(1), self.deliver(0, limit), self.deliver(1, limit)]):
            pass

    def idle(self) -> bool:
        """Whether nothing at all is remembered on either side."""
        return all(
            not flow._sending._open
            and not flow._sending._early
            and not flow._sending._batch
            and not flow._receiving._messages
            and not flow._receiving._discards
            and not flow._receiving._pool
            and not flow._receiving._announced
            and flow.between_frames
            for flow in self.flows
        )


def send(flow: Flow, number: int, data: bytes, width: int = 4) -> list[int]:
    drained: list[int] = []
    outgoing = flow.send(tag(number), len(data) // width, drained.append)
    if data:
        outgoing.push(memoryview(data), len(data) // width, Meta())
    return drained


def receive(flow: Flow, number: int, land: Land) -> Incoming:
    incoming = flow.receive(tag(number), land.length, land)
    incoming.grant(land.length)
    return incoming


SIZES = [4, 400, EAGER_BYTES, EAGER_BYTES + 4, FRAME_BYTES, FRAME_BYTES + 4, 5 << 20]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("order", ["send first", "receive first", "both", "grant last"])
def test_every_size_in_every_order(size: int, order: str) -> None:
    line = Line()
    a, b = line.flows
    data = random.Random(size).randbytes(size)
    land = Land(size // 4, 4)
    if order == "send first":
        drained = send(a, 1, data)
        line.run()
        receive(b, 1, land)
    elif order == "receive first":
        receive(b, 1, land)
        line.run()
        drained = send(a, 1, data)
    elif order == "both":
        drained = send(a, 1, data)
        receive(b, 1, land)
    else:
        incoming = b.receive(tag(1), land.length, land)
        drained = send(a, 1, data)
        line.run()
        incoming.grant(land.length)
    line.run()
    assert land.memory == data
    assert drained[-1] == land.length == land.got
    assert line.idle()


@pytest.mark.parametrize("split", [1, 2, 3, 7, 71, 72, 73, 4096])
def test_any_fixed_split_of_the_bytes(split: int) -> None:
    line = Line()
    lands = []
    for number, size in enumerate((4, 100, 4000, 70_000, 4)):
        data = random.Random(number).randbytes(size)
        lands.append((Land(size // 4, 4, piece=333), data))
        receive(line.flows[1], number, lands[-1][0])
        send(line.flows[0], number, data)
        line.run(split)
    for land, data in lands:
        assert land.memory == data
    assert line.idle()


def test_grants_of_one_turn_leave_as_one_frame() -> None:
    line = Line()
    a, b = line.flows
    for number in range(50):
        incoming = b.receive(tag(number), 100_000, Land(100_000, 4))
        for upto in range(1000, 100_000, 1000):
            incoming.grant(upto)
    line.run()
    assert b.counters.frames_sent == 1
    assert b.counters.bytes_sent == 8 + 50 * 36
    assert a.counters.frames_received == 1


def test_short_messages_need_no_grants() -> None:
    line = Line()
    a, b = line.flows
    for number in range(50):
        receive(b, number, Land(1000, 4))
        send(a, number, bytes(4000))
    line.run()
    assert b.counters.bytes_sent == 0
    assert a.counters.bytes_sent == 50 * (72 + 4000)


def test_beyond_4_gib() -> None:
    """Offsets past 2**32 travel; the elements before them are not moved in this test."""
    line = Line()
    a, b = line.flows
    length, first = 3 << 32, (3 << 32) - 1000
    seen: list[tuple[int, int]] = []

    class Far(Landing):
        memory = bytearray(4000)

        def buffer(self, start: int, count: int, width: int, meta: Meta) -> memoryview:
            place = (start - first) * width
            return memoryview(self.memory)[place : place + count * width]

        def arrived(self, start: int, count: int, meta: Meta) -> None:
            seen.append((start, count))

        def failed(self, error: Exception) -> None:
            raise AssertionError(error)

    drained: list[int] = []
    incoming = b.receive(tag(1), length, Far())
    outgoing = a.send(tag(1), length, drained.append)
    # As if everything up to `first` had been carried.
    outgoing.pushed = outgoing.sent = first
    b._receiving._messages[outgoing.tag].placed = first
    incoming.grant(length - 500)
    data = random.Random(1).randbytes(4000)
    outgoing.push(memoryview(data), 1000, Meta())
    line.run()
    assert seen == [(first, 500)]
    incoming.grant(length)
    line.run()
    assert seen == [(first, 500), (first + 500, 500)]
    assert drained == [length - 500, length]
    assert Far.memory == data
    assert line.idle()


def test_cancelled_receive_lets_its_sender_finish() -> None:
    line = Line()
    a, b = line.flows
    for number, size in enumerate((4000, 400_000, 4_000_000)):
        for when in ("before", "announced", "amid"):
            line = Line()
            a, b = line.flows
            land = Land(size // 4, 4, piece=1000)
            incoming = b.receive(tag(number), land.length, land)
            if when == "amid":
                incoming.grant(land.length // 2)
            elif when == "before":
                incoming.cancel()
                line.run()
            drained = send(a, number, bytes(size))
            line.run()
            incoming.cancel()
            land.frozen = True
            line.run()
            assert drained[-1] == size // 4, (size, when)
            assert line.idle(), (size, when)


def test_cancelled_on_both_sides_leaves_the_flow_usable() -> None:
    for size in (4000, 400_000):
        for split in (1, 2000):
            line = Line()
            a, b = line.flows
            land = Land(size // 4, 4)
            incoming = receive(b, 1, land)
            line.run()
            drained: list[int] = []
            outgoing = a.send(tag(1), size // 4, drained.append)
            outgoing.push(memoryview(bytes(size)), size // 4, Meta())
            line.take(0)
            line.deliver(0, split)
            outgoing.cancel()
            assert not a.quiet
            incoming.cancel()
            land.frozen = True
            line.run()
            assert a.quiet
            assert drained == []
            after = Land(1000, 4)
            receive(b, 2, after)
            send(a, 2, bytes(4000))
            line.run()
            assert after.got == 1000
            # The two cancellations crossed: the sender keeps the refusal, up to a bound.
            assert list(a._sending._early.values()) == [-1]
            a._sending._early.clear()
            assert line.idle()


def test_closing_fails_what_is_incomplete_once() -> None:
    line = Line()
    a, b = line.flows
    done, half, never, empty, gone = (Land(n, 4) for n in (100, 100, 100, 0, 100))
    for number, land in enumerate((done, half, never, empty, gone)):
        incoming = receive(b, number, land)
    incoming.cancel()
    gone.frozen = True
    send(a, 0, bytes(400))
    drained: list[int] = []
    outgoing = a.send(tag(1), 100, drained.append)
    outgoing.push(memoryview(bytes(200)), 50, Meta())
    line.run()
    error = ChannelClosedError("over")
    for flow in line.flows:
        flow.close(error)
        flow.close(error)
    assert [land.error for land in (done, half, never, empty)] == [None, error, error, None]
    assert (done.got, half.got) == (100, 50)
    outgoing.push(memoryview(bytes(200)), 50, Meta())
    outgoing.cancel()
    incoming.grant(7)
    incoming.cancel()
    assert a.next_output() == b.next_output() == []
    assert drained == [50]
    for flow in line.flows:
        with pytest.raises(ChannelClosedError, match="over"):
            flow.send(tag(9), 1, drained.append)
        with pytest.raises(ChannelClosedError, match="over"):
            flow.receive(tag(9), 1, Land(1, 4))


def test_refusing_lets_open_messages_go_on() -> None:
    line = Line()
    a, b = line.flows
    land = Land(100_000, 4)
    incoming = b.receive(tag(1), 100_000, land)
    drained = send(a, 1, bytes(400_000))
    a.refuse(ChannelClosedError("closing"))
    a.refuse(ChannelClosedError("not this"))
    with pytest.raises(ChannelClosedError, match="closing"):
        a.send(tag(2), 1, drained.append)
    incoming.grant(100_000)
    line.run()
    assert drained == [100_000]


def test_halting_places_nothing_more() -> None:
    for size in (400, 400_000):
        line = Line()
        a, b = line.flows
        land = Land(size // 4, 4)
        receive(b, 1, land)
        line.run()
        send(a, 1, bytes([7]) * size)
        line.take(0)
        line.deliver(0, 100)
        before = bytes(land.memory)
        b.halt(ChannelClosedError("aborted"))
        line.run()
        assert land.memory == before
        assert land.got == 0
        b.close(ChannelClosedError("aborted"))
        assert isinstance(land.error, ChannelClosedError)


class Message:
    """One message of the random runs below, from both sides."""

    def __init__(self, chance: random.Random, number: int) -> None:
        self.number = number
        self.side = chance.randrange(2)
        self.width = chance.choice((1, 2, 4, 8, 12))
        self.length = chance.choice((0, 1, 5, 700, 16384, 16385, 40_000, 300_000))
        self.data = random.Random(number).randbytes(self.length * self.width)
        self.land = Land(
            self.length, self.width, chance.choice((None, 1 + self.length // 7, 65_536))
        )
        self.metas: list[Meta] = []
        self.drained: list[int] = []
        self.outgoing: Outgoing | None = None
        self.incoming: Incoming | None = None
        self.pushed = self.granted = 0
        self.cancelled = False

    def steps(self, line: Line, chance: random.Random) -> list[Callable[[], None]]:
        """Return what both sides do, as two lists of actions in order, one after the other."""
        here, there = line.flows[self.side], line.flows[1 - self.side]

        def open_send() -> None:
            self.outgoing = here.send(tag(self.number), self.length, self.drained.append)

        def push() -> None:
            assert self.outgoing is not None
            count = min(self.length - self.pushed, chance.randint(1, 1 + self.length // 2))
            if count:
                meta = Meta(1.0, float(self.pushed), 1)
                place = self.pushed * self.width
                self.outgoing.push(
                    memoryview(self.data)[place : place + count * self.width], count, meta
                )
                self.metas += [meta] * count
                self.pushed += count

        def post() -> None:
            self.incoming = there.receive(tag(self.number), self.length, self.land)

        def grant() -> None:
            assert self.incoming is not None
            self.granted = min(self.length, self.granted + chance.randint(1, 1 + self.length // 2))
            self.incoming.grant(self.granted)

        return [open_send, *[push] * 3, post, *[grant] * 3]

    def finish(self) -> None:
        """Push and grant all that is left."""
        assert self.outgoing is not None
        assert self.incoming is not None
        if not self.cancelled:
            count = self.length - self.pushed
            if count:
                self.metas += [Meta()] * count
                self.outgoing.push(memoryview(self.data)[self.pushed * self.width :], count, Meta())
            self.incoming.grant(self.length)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(1, 30),
    st.sampled_from((0.0, 0.0, 0.1, 0.4)),
    st.sampled_from((3, 100, 5000, 1 << 20)),
)
def test_any_interleaving_and_any_split(seed: int, number: int, cancels: float, split: int) -> None:
    chance = random.Random(seed)
    line = Line()
    messages = [Message(chance, k) for k in range(number)]
    pending: list[list[Callable[[], None]]] = []
    for message in messages:
        steps = message.steps(line, chance)
        pending += [steps[:4], steps[4:]]
    budget = 300 * number  # of tiny deliveries; then all that can move does
    while pending:
        line_steps = chance.choice(pending)
        line_steps.pop(0)()
        if not line_steps:
            pending.remove(line_steps)
        if chance.random() < cancels:
            message = chance.choice(messages)
            if chance.random() < 0.5 and message.outgoing is not None:
                message.outgoing.cancel()
                message.cancelled = True
            elif message.incoming is not None and message.land.got < message.length:
                message.incoming.cancel()
                message.cancelled = message.land.frozen = True
        for _ in range(chance.randrange(4)):
            line.take(chance.randrange(2))
            if budget > 0:
                budget -= 1
                line.deliver(chance.randrange(2), chance.randint(1, split))
    for message in messages:
        message.finish()
    line.run()
    for message in messages:
        assert message.land.error is None
        assert message.drained == sorted(set(message.drained))
        if not message.cancelled:
            assert message.land.got == message.length
            assert message.land.memory == message.data
            assert message.land.metas == message.metas
            assert message.drained[-1] == message.length
    if not any(message.cancelled for message in messages):
        assert line.idle()
    assert all(flow.quiet for flow in line.flows)
    # Whatever was cancelled, the next messages pass, in both directions, and more than a pool.
    for k in range(80):
        for side in (0, 1):
            send(line.flows[side], 1000 + k, bytes(32_000))
    line.run()
    for k in range(80):
        for side in (0, 1):
            land = Land(8000, 4)
            receive(line.flows[1 - side], 1000 + k, land)
            line.run()
            assert land.got == 8000


def test_lengths_that_differ_leave_nothing_behind() -> None:
    for sent in (0, 5, 20_000, 400_000):
        for expected in (0, 6, 20_001, 400_000):
            for receive_first in (True, False):
                if sent == expected:
                    continue
                line = Line()
                a, b = line.flows
                land = Land(expected, 4)
                if receive_first:
                    receive(b, 1, land)
                    line.run()
                drained = send(a, 1, bytes(sent * 4))
                line.run()
                if not receive_first:
                    receive(b, 1, land)
                line.run()
                assert isinstance(land.error, MismatchError)
                assert land.got == 0
                assert drained[-1] == sent
                assert not b._receiving._messages
                assert not b._receiving._pool
