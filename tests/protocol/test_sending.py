from __future__ import annotations

import pytest

from p2pdpt.channel import EAGER_BYTES, FRAME_BYTES, ChannelCounters, Meta, Tag
from p2pdpt.errors import FrameError, MismatchError
from p2pdpt.protocol import frames
from p2pdpt.protocol.sending import BATCH_BYTES, EAGER_LENGTH, POOL_BYTES, STALE, Send, Sending


def tag(number: int) -> Tag:
    return Tag(1, 0, 2, 0, 3, number)


def key(number: int) -> bytes:
    return frames.pack_tag(tag(number))


class Outlet:
    """A sending half, what it drained, and what it handed out, parsed."""

    def __init__(self) -> None:
        self.wakes = 0
        self.drained: list[tuple[int, int]] = []
        self.counters = ChannelCounters()
        self.sending = Sending(self._wake, self.counters)

    def _wake(self) -> None:
        self.wakes += 1

    def open(self, number: int, length: int) -> Send:
        return self.sending.open(
            tag(number), length, lambda upto: self.drained.append((number, upto))
        )

    def send(self, number: int, length: int, width: int = 4) -> Send:
        send = self.open(number, length)
        send.push(memoryview(bytes(length * width)), length, Meta())
        return send

    def output(self) -> list[tuple[object, ...]]:
        """Return what leaves next: (ordinal, start, count, eager) or (note, ordinal, value)."""
        data = memoryview(b"".join(self.sending.next_output()))
        found: list[tuple[object, ...]] = []
        place = 0
        while place < len(data):
            if frames.parse_kind(data, place) == frames.DATA:
                eager, width, name, _, start, count, _ = frames.parse_data(data, place)
                found.append((frames.unpack_tag(name).ordinal, start, count, eager))
                place += frames.HEADER_BYTES + count * width
            else:
                number = frames.parse_notes(data, place)
                place += frames.PREFIX_BYTES
                for _ in range(number):
                    what, name, value = frames.parse_note(data, place)
                    found.append((what, frames.unpack_tag(name).ordinal, value))
                    place += frames.NOTE_BYTES
        return found

    def leave(self) -> list[tuple[object, ...]]:
        """Return what leaves next, and let it leave."""
        output = self.output()
        self.sending.output_drained()
        return output


def test_a_short_message_goes_at_once() -> None:
    outlet = Outlet()
    outlet.send(1, 1000)
    assert outlet.wakes == 1
    assert outlet.output() == [(1, 0, 1000, True)]
    assert outlet.drained == []
    outlet.sending.output_drained()
    assert outlet.drained == [(1, 1000)]
    assert outlet.output() == []
    assert outlet.counters == ChannelCounters(bytes_sent=4072, frames_sent=1)


def test_a_long_message_is_announced_once_and_waits() -> None:
    outlet = Outlet()
    send = outlet.send(1, 50_000)
    assert outlet.leave() == [(frames.ANNOUNCE, 1, 50_000)]
    assert outlet.leave() == []
    outlet.sending.granted(key(1), 20_000)
    assert outlet.leave() == [(1, 0, 20_000, False)]
    outlet.sending.granted(key(1), 20_000)
    outlet.sending.granted(key(1), 10_000)
    assert outlet.leave() == []
    outlet.sending.granted(key(1), 10**9)
    assert send.granted == 50_000
    assert outlet.leave() == [(1, 20_000, 30_000, False)]
    assert outlet.drained == [(1, 20_000), (1, 50_000)]


def test_a_granted_message_is_not_announced() -> None:
    outlet = Outlet()
    outlet.sending.granted(key(1), 1)
    send = outlet.open(1, 50_000)
    send.push(memoryview(bytes(8)), 2, Meta())
    assert outlet.leave() == [(1, 0, 1, False)]
    send.push(memoryview(bytes(8)), 2, Meta())
    assert outlet.leave() == []


@pytest.mark.parametrize(
    ("length", "width", "goes"),
    [
        (EAGER_LENGTH, 4, True),
        (EAGER_LENGTH, 1, True),
        (EAGER_LENGTH + 1, 1, False),
        (EAGER_BYTES // 8, 8, True),
        (EAGER_BYTES // 8 + 1, 8, False),
    ],
)
def test_what_goes_ahead_of_its_grant(length: int, width: int, goes: bool) -> None:
    outlet = Outlet()
    outlet.send(1, length, width)
    note = [(frames.ANNOUNCE, 1, length)]
    assert outlet.leave() == ([(1, 0, length, True)] if goes else note)


def test_a_message_that_grows_wider_than_eager_waits_for_the_rest() -> None:
    outlet = Outlet()
    send = outlet.open(1, EAGER_LENGTH)
    send.push(memoryview(bytes(2 * 10_000)), 10_000, Meta())
    send.push(memoryview(bytes(8 * 6384)), 6384, Meta())
    assert outlet.leave() == [(frames.ANNOUNCE, 1, EAGER_LENGTH), (1, 0, 10_000, True)]
    outlet.sending.granted(key(1), EAGER_LENGTH)
    assert outlet.leave() == [(1, 10_000, 6384, False)]


def test_credit_runs_out_and_comes_back() -> None:
    outlet = Outlet()
    cost = EAGER_BYTES + frames.HEADER_BYTES
    fit = POOL_BYTES // cost
    for number in range(fit + 2):
        outlet.send(number, EAGER_LENGTH)
    seen = []
    while output := outlet.leave():
        seen += output
    assert sorted(entry for entry in seen if len(entry) == 4) == [
        (number, 0, EAGER_LENGTH, True) for number in range(fit)
    ]
    assert [entry for entry in seen if len(entry) == 3] == [
        (frames.ANNOUNCE, number, EAGER_LENGTH) for number in (fit, fit + 1)
    ]
    outlet.sending.credited(2 * cost)
    assert outlet.leave() == []  # what was announced waits for its grant now
    outlet.sending.granted(key(fit + 1), EAGER_LENGTH)
    assert outlet.leave() == [(fit + 1, 0, EAGER_LENGTH, False)]
    outlet.send(99, EAGER_LENGTH)
    assert outlet.leave() == [(99, 0, EAGER_LENGTH, True)]


def test_credit_that_was_never_spent() -> None:
    with pytest.raises(FrameError, match="credit 1 exceeds"):
        Outlet().sending.credited(1)


def test_messages_take_turns_by_frame() -> None:
    outlet = Outlet()
    frame = FRAME_BYTES // 4
    for number in (1, 2, 3):
        outlet.sending.granted(key(number), 3 * frame)
        outlet.send(number, number * frame)
    assert [outlet.leave() for _ in range(7)] == [
        [(1, 0, frame, False)],
        [(2, 0, frame, False)],
        [(3, 0, frame, False)],
        [(2, frame, frame, False)],
        [(3, frame, frame, False)],
        [(3, 2 * frame, frame, False)],
        [],
    ]


def test_small_frames_leave_together_and_bulk_uncopied() -> None:
    outlet = Outlet()
    for number in range(4):
        outlet.send(number, 100)
    data = bytearray(400_000)
    outlet.sending.granted(key(9), 100_000)
    outlet.open(9, 100_000).push(memoryview(data), 100_000, Meta())
    outlet.send(10, 100)
    outlet.sending.grant(key(7), 5)
    small, bulk = outlet.sending.next_output()
    assert len(small) == 8 + 36 + 4 * 472 + 72
    assert isinstance(bulk, memoryview)
    assert bulk.obj is data
    outlet.sending.output_drained()
    assert outlet.leave() == [(10, 0, 100, True)]


def test_a_batch_of_small_frames_is_bounded() -> None:
    outlet = Outlet()
    for number in range(100):
        outlet.send(number, 2000)
    sizes = []
    while output := outlet.sending.next_output():
        (small,) = output
        sizes.append(len(small))
        outlet.sending.output_drained()
    assert len(sizes) == 6
    assert max(sizes) <= BATCH_BYTES + 8072
    assert sum(sizes) == 100 * 8072


def test_more_notes_than_one_frame_holds() -> None:
    outlet = Outlet()
    for number in range(3000):
        outlet.sending.grant(key(number), 1)
    counts = []
    while output := outlet.leave():
        counts.append(len(output))
    assert counts == [1024, 1024, 952]


def test_a_grant_may_be_revoked_and_raised() -> None:
    outlet = Outlet()
    outlet.sending.grant(key(1), 5)
    outlet.sending.grant(key(2), 5)
    outlet.sending.grant(key(2), 6)
    outlet.sending.revoke(key(1))
    outlet.sending.revoke(key(3))
    assert outlet.leave() == [(frames.GRANT, 2, 6)]


def test_an_empty_message_is_told_and_over() -> None:
    outlet = Outlet()
    outlet.open(1, 0)
    assert outlet.drained == [(1, 0)]
    outlet.open(1, 0)
    assert outlet.leave() == [(frames.ANNOUNCE, 1, 0)] * 2


def test_cancel_before_anything_left_is_silent() -> None:
    outlet = Outlet()
    outlet.send(1, 1000).cancel()
    assert outlet.leave() == []
    assert outlet.drained == []


def test_cancel_after_something_left_is_told() -> None:
    outlet = Outlet()
    send = outlet.open(1, 1000)
    send.push(memoryview(bytes(400)), 100, Meta())
    outlet.output()
    assert outlet.sending.quiet
    send.cancel()
    send.cancel()
    assert not outlet.sending.quiet
    outlet.sending.output_drained()
    assert outlet.sending.quiet
    assert outlet.drained == []
    assert outlet.leave() == [(frames.WITHDRAWN, 1, 0)]
    announced = outlet.send(2, 50_000)
    outlet.leave()
    announced.cancel()
    assert outlet.leave() == [(frames.WITHDRAWN, 2, 0)]


def test_cancel_when_all_of_it_is_on_its_way() -> None:
    outlet = Outlet()
    send = outlet.send(1, 1000)
    outlet.output()
    send.cancel()
    assert not outlet.sending.quiet
    outlet.sending.output_drained()
    assert outlet.sending.quiet
    assert outlet.drained == []
    assert outlet.leave() == []


def test_a_refused_message_drains_without_being_sent() -> None:
    outlet = Outlet()
    send = outlet.open(1, 300_000)
    send.push(memoryview(bytes(400_000)), 100_000, Meta())
    outlet.leave()
    outlet.sending.refused(key(1))
    assert outlet.leave() == [(frames.WITHDRAWN, 1, 0)]
    assert outlet.drained == [(1, 100_000)]
    send.push(memoryview(bytes(800_000)), 200_000, Meta())
    assert outlet.drained == [(1, 100_000)], "nobody is called from within push"
    assert outlet.leave() == []
    assert outlet.drained == [(1, 100_000), (1, 300_000)]


def test_a_refusal_may_come_before_the_message() -> None:
    outlet = Outlet()
    outlet.sending.refused(key(1))
    outlet.sending.granted(key(1), 10)  # overtaken, and forgotten
    outlet.send(1, 1000)
    assert outlet.leave() == [(frames.WITHDRAWN, 1, 0)]
    assert outlet.drained == [(1, 1000)]


def test_whoever_hears_of_a_refusal_may_push_more() -> None:
    outlet = Outlet()
    outlet.sending.refused(key(1))
    outlet.sending.granted(key(2), 10)
    calls: list[int] = []

    def drained(upto: int) -> None:
        calls.append(upto)
        if upto < 30:
            send.push(memoryview(bytes(40)), 10, Meta())
        else:
            outlet.send(2, 10)

    send = outlet.sending.open(tag(1), 30, drained)
    send.push(memoryview(bytes(40)), 10, Meta())
    assert outlet.leave() == [(frames.WITHDRAWN, 1, 0)]
    assert outlet.leave() == [(2, 0, 10, False)]
    assert calls == [10, 20, 30]


def test_grants_of_messages_that_never_come_are_bounded() -> None:
    outlet = Outlet()
    for number in range(STALE + 10):
        outlet.sending.granted(key(number), 1)
    assert len(outlet.sending._early) == STALE
    assert outlet.open(9, 100_000).granted == 0
    assert outlet.open(10, 100_000).granted == 1


@pytest.mark.parametrize(
    ("size", "count", "text"),
    [
        (4004, 1001, "1001 elements pushed for operation 1 of bucket 3"),
        (10, 3, "10 bytes cannot be 3 elements"),
        (10, 0, "10 bytes cannot be 0 elements"),
        (0, 3, "0 bytes cannot be 3 elements"),
        (0, -1, "0 bytes cannot be -1 elements"),
        (65, 1, "65 bytes cannot be 1 elements"),
    ],
)
def test_pushes_that_do_not_fit(size: int, count: int, text: str) -> None:
    outlet = Outlet()
    send = outlet.open(1, 1000)
    with pytest.raises(MismatchError, match=text):
        send.push(memoryview(bytes(size)), count, Meta())
    send.push(memoryview(b""), 0, Meta())
    send.push(memoryview(bytes(4000)), 1000, Meta())
    assert outlet.leave() == [(1, 0, 1000, True)]


def test_messages_that_cannot_be() -> None:
    outlet = Outlet()
    outlet.open(1, 1000)
    with pytest.raises(MismatchError, match=r"operation 1 of bucket 3 .* is being sent already"):
        outlet.open(1, 1000)
    with pytest.raises(MismatchError, match="cannot have -1 elements"):
        outlet.open(2, -1)
    with pytest.raises(MismatchError, match="cannot have 1152921504606846977 elements"):
        outlet.open(2, 2**60 + 1)
    with pytest.raises(MismatchError, match="does not fit"):
        outlet.open(2**32, 1)
