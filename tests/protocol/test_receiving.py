from __future__ import annotations

import pytest

from p2pdpt.channel import ChannelCounters, Landing, Meta, Tag
from p2pdpt.errors import FrameError, MismatchError
from p2pdpt.protocol import frames
from p2pdpt.protocol.receiving import CREDIT_BATCH, SCRATCH_BYTES, Receiving
from p2pdpt.protocol.sending import POOL_BYTES, STALE, Sending


def tag(number: int) -> Tag:
    return Tag(1, 0, 2, 0, 3, number)


def key(number: int) -> bytes:
    return frames.pack_tag(tag(number))


def data(
    number: int,
    length: int,
    start: int = 0,
    count: int | None = None,
    *,
    eager: bool = False,
    fill: int = 7,
    width: int = 4,
) -> bytes:
    count = length - start if count is None else count
    return frames.pack_data(key(number), length, start, count, width, Meta(), eager) + bytes(
        [fill]
    ) * (count * width)


def note(what: int, number: int, value: int = 0) -> bytes:
    return frames.pack_notes([frames.pack_note(what, key(number), value)])


class Land(Landing):
    def __init__(self, length: int, piece: int = 1 << 40) -> None:
        self.memory = bytearray(length * 4)
        self.piece = piece
        self.events: list[tuple[object, ...]] = []

    def buffer(self, start: int, count: int, width: int, meta: Meta) -> memoryview:
        self.events.append(("buffer", start, count))
        count = min(count, self.piece)
        return memoryview(self.memory)[start * width : (start + count) * width]

    def arrived(self, start: int, count: int, meta: Meta) -> None:
        self.events.append(("arrived", start, count))

    def failed(self, error: Exception) -> None:
        self.events.append(("failed", type(error)))


class Inlet:
    """A receiving half, fed with whole frames, and the notes that it makes the other half send."""

    def __init__(self) -> None:
        self.counters = ChannelCounters()
        self.sending = Sending(lambda: None, ChannelCounters())
        self.receiving = Receiving(self.sending, self.counters)

    def feed(self, frame: bytes, split: int = 1 << 30) -> None:
        rest = memoryview(frame)
        while rest:
            buffer = self.receiving.get_buffer()
            count = min(len(buffer), len(rest), split)
            buffer[:count] = rest[:count]
            rest = rest[count:]
            self.receiving.received(count)

    def notes(self) -> list[tuple[int, int, int]]:
        output = self.sending.next_output()
        self.sending.output_drained()
        if not output:
            return []
        frame = memoryview(output[0])
        return [
            (what, frames.unpack_tag(name).ordinal, value)
            for what, name, value in (
                frames.parse_note(frame, place)
                for place in range(frames.PREFIX_BYTES, len(frame), frames.NOTE_BYTES)
            )
        ]


def test_bulk_goes_straight_into_the_landing() -> None:
    inlet, land = Inlet(), Land(100_000)
    inlet.receiving.open(tag(1), 100_000, land).grant(100_000)
    assert inlet.notes() == [(frames.GRANT, 1, 100_000)]
    frame = data(1, 100_000)
    inlet.feed(frame[:72])
    assert land.events == [("buffer", 0, 100_000)]
    assert inlet.receiving.get_buffer().obj is land.memory
    inlet.feed(frame[72:])
    assert land.events == [("buffer", 0, 100_000), ("arrived", 0, 100_000)]
    assert land.memory == frame[72:]
    assert inlet.counters == ChannelCounters(bytes_received=400_072, frames_received=1)
    assert inlet.receiving.between_frames


def test_after_bulk_only_a_header_is_read_ahead() -> None:
    inlet, land = Inlet(), Land(200_000)
    inlet.receiving.open(tag(1), 200_000, land).grant(200_000)
    frame = data(1, 200_000, 0, 100_000)
    inlet.feed(frame[:72])
    inlet.feed(frame[72:])
    assert len(inlet.receiving.get_buffer()) == frames.HEADER_BYTES
    inlet.feed(data(1, 200_000, 100_000)[:72])
    assert len(inlet.receiving.get_buffer()) == 400_000


def test_pieces_of_a_landing_are_asked_for_one_by_one() -> None:
    inlet, land = Inlet(), Land(25, piece=10)
    inlet.receiving.open(tag(1), 25, land)
    inlet.feed(data(1, 25, eager=True), 3)
    assert land.events == [
        *(("buffer", 0, 25), ("arrived", 0, 10)),
        *(("buffer", 10, 15), ("arrived", 10, 10)),
        *(("buffer", 20, 5), ("arrived", 20, 5)),
    ]
    assert land.memory == bytes([7]) * 100


def test_many_small_frames_of_one_read() -> None:
    inlet = Inlet()
    lands = [Land(10) for _ in range(50)]
    for number, land in enumerate(lands):
        inlet.receiving.open(tag(number), 10, land)
    inlet.feed(b"".join(data(number, 10, eager=True, fill=number) for number in range(50)))
    for number, land in enumerate(lands):
        assert land.memory == bytes([number]) * 40


def test_short_receives_grant_only_when_asked() -> None:
    inlet, land = Inlet(), Land(10)
    incoming = inlet.receiving.open(tag(1), 10, land)
    incoming.grant(4)
    assert inlet.notes() == []
    inlet.feed(note(frames.ANNOUNCE, 1, 10))
    assert inlet.notes() == [(frames.GRANT, 1, 4)]
    inlet.feed(note(frames.ANNOUNCE, 1, 10))
    assert inlet.notes() == []
    incoming.grant(99)
    assert inlet.notes() == [(frames.GRANT, 1, 10)]


def test_an_announced_message_is_granted_when_it_is_asked_for() -> None:
    inlet, land = Inlet(), Land(10)
    inlet.feed(note(frames.ANNOUNCE, 1, 10))
    incoming = inlet.receiving.open(tag(1), 10, land)
    assert inlet.notes() == []
    incoming.grant(10)
    assert inlet.notes() == [(frames.GRANT, 1, 10)]


def test_what_comes_ahead_is_kept_and_placed_at_once() -> None:
    inlet, land = Inlet(), Land(30, piece=7)
    inlet.feed(data(1, 30, 0, 10, eager=True, fill=1))
    inlet.feed(data(1, 30, 10, 10, eager=True, fill=2))
    frame = data(1, 30, 20, 10, eager=True, fill=3)
    inlet.feed(frame[:90])
    inlet.receiving.open(tag(1), 30, land)
    assert [event for event in land.events if event[0] == "arrived"] == [
        ("arrived", 0, 7),
        ("arrived", 7, 3),
        ("arrived", 10, 7),
        ("arrived", 17, 3),
    ]
    inlet.feed(frame[90:])
    assert land.events[-1] == ("arrived", 27, 3)
    assert land.memory == bytes([1]) * 40 + bytes([2]) * 40 + bytes([3]) * 40
    assert not inlet.receiving._messages


def test_credit_comes_back_in_batches() -> None:
    inlet = Inlet()
    size = 16_000
    for number in range(20):
        inlet.receiving.open(tag(number), size // 4, Land(size // 4))
        inlet.feed(data(number, size // 4, eager=True))
    returned = [value for what, _, value in inlet.notes() if what == frames.CREDIT]
    per_batch = -(-CREDIT_BATCH // (size + 72))
    assert returned == [per_batch * (size + 72)]


def test_the_pool_is_bounded() -> None:
    inlet = Inlet()
    fit = POOL_BYTES // (64_000 + 72)
    for number in range(fit):
        inlet.feed(data(number, 16_000, eager=True))
    with pytest.raises(FrameError, match=f"ahead exceed {POOL_BYTES} bytes"):
        inlet.feed(data(fit, 16_000, eager=True))


def test_announcements_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pdpt.protocol.receiving.MAX_ANNOUNCED", 3)
    inlet = Inlet()
    for number in range(3):
        inlet.feed(note(frames.ANNOUNCE, number, 10))
    inlet.receiving.open(tag(0), 10, Land(10))
    inlet.feed(note(frames.WITHDRAWN, 1))
    for number in range(3, 5):
        inlet.feed(note(frames.ANNOUNCE, number, 10))
    with pytest.raises(FrameError, match="more than 3 messages announced"):
        inlet.feed(note(frames.ANNOUNCE, 5, 10))


def test_cancel_amid_a_frame() -> None:
    inlet, land = Inlet(), Land(100_000)
    incoming = inlet.receiving.open(tag(1), 100_000, land)
    incoming.grant(100_000)
    inlet.notes()
    frame = data(1, 100_000, 0, 50_000)
    inlet.feed(frame[:100_000])
    incoming.cancel()
    before = bytes(land.memory)
    assert inlet.notes() == [(frames.UNWANTED, 1, 0)]
    inlet.feed(frame[100_000:])
    inlet.feed(data(1, 100_000, 50_000, 10_000))
    assert land.memory == before
    assert land.events == [("buffer", 0, 50_000)]
    assert inlet.receiving.between_frames
    assert key(1) in inlet.receiving._messages
    inlet.feed(note(frames.WITHDRAWN, 1))
    assert not inlet.receiving._messages


def test_cancel_while_the_shell_holds_the_landings_memory() -> None:
    inlet, land = Inlet(), Land(100_000)
    incoming = inlet.receiving.open(tag(1), 100_000, land)
    incoming.grant(100_000)
    frame = data(1, 100_000)
    inlet.feed(frame[:72])
    held = inlet.receiving.get_buffer()
    incoming.cancel()
    held[:] = frame[72:]
    inlet.receiving.received(len(held))
    assert land.events == [("buffer", 0, 100_000)]
    assert inlet.receiving.between_frames
    assert not inlet.receiving._messages


def test_a_grant_that_has_not_left_is_revoked_by_cancel() -> None:
    inlet = Inlet()
    incoming = inlet.receiving.open(tag(1), 100_000, Land(100_000))
    incoming.grant(100_000)
    incoming.cancel()
    assert inlet.notes() == [(frames.UNWANTED, 1, 0)]


def test_withdrawn_messages() -> None:
    inlet, land = Inlet(), Land(10)
    incoming = inlet.receiving.open(tag(1), 10, land)
    inlet.feed(data(1, 10, 0, 5, eager=True))
    inlet.feed(note(frames.WITHDRAWN, 1))
    incoming.grant(10)
    incoming.cancel()
    inlet.feed(data(2, 10, 0, 5, eager=True))
    inlet.feed(note(frames.WITHDRAWN, 2))
    inlet.feed(note(frames.WITHDRAWN, 3))
    assert inlet.notes() == []
    assert not inlet.receiving._messages
    assert inlet.receiving._pool == 0
    assert land.events == [("buffer", 0, 5), ("arrived", 0, 5)]


def test_cancelled_receives_are_remembered_up_to_a_bound() -> None:
    inlet = Inlet()
    for number in range(STALE + 10):
        inlet.receiving.open(tag(number), 10, Land(10)).cancel()
    assert len(inlet.receiving._messages) == STALE
    # The oldest is taken for new; the others are thrown away.
    inlet.feed(data(9, 10, eager=True))
    inlet.feed(data(10, 10, eager=True))
    assert inlet.receiving._pool == 40 + 72


def test_granted_bytes_of_a_forgotten_receive_are_thrown_away() -> None:
    inlet = Inlet()
    inlet.feed(data(1, 100_000))
    assert inlet.receiving.between_frames
    assert not inlet.receiving._messages


@pytest.mark.parametrize("sender", [0, 5, 11, 20_000])
@pytest.mark.parametrize("how", ["announced", "sent"])
@pytest.mark.parametrize("receive_first", [True, False])
def test_lengths_that_differ(sender: int, how: str, receive_first: bool) -> None:
    inlet, land = Inlet(), Land(10)
    if not sender and how == "sent":
        return
    frame = (
        note(frames.ANNOUNCE, 1, sender)
        if how == "announced"
        else data(1, sender, 0, min(sender, 16_000), eager=True)
    )
    if receive_first:
        inlet.receiving.open(tag(1), 10, land).grant(10)
    inlet.feed(frame)
    if not receive_first:
        inlet.receiving.open(tag(1), 10, land).grant(10)
    assert land.events == [("failed", MismatchError)]
    over = not sender or (how == "sent" and sender < 16_000)
    assert bool(inlet.receiving._messages) is not over
    assert inlet.receiving._pool == 0
    assert (frames.UNWANTED, 1, 0) in inlet.notes() or over


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (data(1, 100_000, 0, 60_000), "count 60000 .* exceed its grant 50000"),
        (data(1, 100_000, 10, 10), "start 10 of a frame .* instead of 0"),
        (note(frames.CREDIT, 1, 1), "credit 1 exceeds"),
        (b"\0" * 8, "bad magic 0000"),
    ],
)
def test_frames_that_break_the_rules(frame: bytes, text: str) -> None:
    inlet = Inlet()
    inlet.receiving.open(tag(1), 100_000, Land(100_000)).grant(50_000)
    with pytest.raises(FrameError, match=text):
        inlet.feed(frame)


def test_lengths_that_change() -> None:
    for first in (note(frames.ANNOUNCE, 1, 10), data(1, 10, 0, 5, eager=True)):
        for second in (note(frames.ANNOUNCE, 1, 11), data(1, 11, 5, 5, eager=True)):
            inlet = Inlet()
            inlet.feed(first)
            with pytest.raises(FrameError, match=r"changed from 10 to 11|start 5"):
                inlet.feed(second)


def test_receives_that_cannot_be() -> None:
    inlet = Inlet()
    inlet.receiving.open(tag(1), 10, Land(10))
    with pytest.raises(MismatchError, match="is or was being received"):
        inlet.receiving.open(tag(1), 10, Land(10))
    inlet.receiving.open(tag(2), 10, Land(10)).cancel()
    with pytest.raises(MismatchError, match="is or was being received"):
        inlet.receiving.open(tag(2), 10, Land(10))
    with pytest.raises(MismatchError, match="cannot have -1 elements"):
        inlet.receiving.open(tag(3), -1, Land(10))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (memoryview(bytearray(0)), "gave 0 bytes for 1 to 10 elements of 4"),
        (memoryview(bytearray(3)), "gave 3 bytes"),
        (memoryview(bytearray(44)), "gave 44 bytes"),
        (memoryview(bytes(40)), "gave read-only 40 bytes"),
    ],
)
@pytest.mark.parametrize("ahead", [True, False])
def test_landings_that_give_no_memory(given: memoryview, text: str, ahead: bool) -> None:
    class Wrong(Land):
        def buffer(self, start: int, count: int, width: int, meta: Meta) -> memoryview:
            return given

    inlet = Inlet()
    if ahead:
        inlet.feed(data(1, 10, eager=True))
        with pytest.raises(ValueError, match=text):
            inlet.receiving.open(tag(1), 10, Wrong(10))
    else:
        inlet.receiving.open(tag(1), 10, Wrong(10))
        with pytest.raises(ValueError, match=text):
            inlet.feed(data(1, 10, eager=True))


def test_a_landing_may_give_typed_memory() -> None:
    class Typed(Land):
        def buffer(self, start: int, count: int, width: int, meta: Meta) -> memoryview:
            return super().buffer(start, count, width, meta).cast("I")

    inlet, land = Inlet(), Typed(10)
    inlet.receiving.open(tag(1), 10, land)
    inlet.feed(data(1, 10, eager=True))
    assert land.memory == bytes([7]) * 40


def test_the_buffer_is_never_empty() -> None:
    inlet = Inlet()
    inlet.receiving.open(tag(1), 10, Land(10))
    frame = data(1, 10, eager=True)
    for place in range(len(frame)):
        assert 0 < len(inlet.receiving.get_buffer()) <= SCRATCH_BYTES
        assert inlet.receiving.between_frames is (place == 0)
        inlet.feed(frame[place : place + 1])
