"""The incoming half of a bulk connection: where the next bytes go, and what they were.

Sans-io. A shell reads into :meth:`Receiving.get_buffer` and says :meth:`Receiving.received`.
Headers, notes and small payloads pass through a scratch buffer, so that many of them come with
one read; longer payloads are read straight into the memory that their landing names. Any split
of the byte stream gives the same calls of the landings.

What arrives ahead of its receive is kept in a pool whose size the sender knows. A cancelled
receive is remembered until the sender has ended the message too, so that late bytes are told
from those of a message that nobody has asked for yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from p2pdpt.channel import Incoming
from p2pdpt.errors import FrameError, MismatchError
from p2pdpt.protocol import frames
from p2pdpt.protocol.frames import (
    DATA,
    HEADER_BYTES,
    MAX_LENGTH,
    NOTE_BYTES,
    PREFIX_BYTES,
)
from p2pdpt.protocol.sending import EAGER_LENGTH, POOL_BYTES, STALE

if TYPE_CHECKING:
    from p2pdpt.channel import ChannelCounters, Landing, Meta, Tag
    from p2pdpt.protocol.frames import DataHeader
    from p2pdpt.protocol.sending import Sending

__all__ = ["Receive", "Receiving"]

SCRATCH_BYTES: Final = 128 << 10
"""How much is read ahead."""
STRAIGHT_BYTES: Final = 32 << 10
"""A payload with at least this much to come is read straight into its landing."""
BULK_BYTES: Final = 256 << 10
"""After a piece this long probably comes another: only its header is read ahead."""
CREDIT_BATCH: Final = POOL_BYTES // 4
"""Credit is returned in amounts of at least this."""
MAX_ANNOUNCED: Final = 1 << 16
"""The most messages that may be announced and not yet asked for."""

_OPEN: Final = 0
_LEFT: Final = 1  # the sender withdrew it: nothing more will come
_DISCARD: Final = 2  # cancelled or mismatched here: what comes is thrown away
_OVER: Final = 3  # complete, failed or closed


class Receive(Incoming):
    """A message being received, asked for or not; made by :class:`Receiving`."""

    __slots__ = (
        "asked",
        "granted",
        "kept",
        "landing",
        "length",
        "placed",
        "receiving",
        "state",
        "tag",
    )

    def __init__(
        self, receiving: Receiving, tag: bytes, length: int, landing: Landing | None
    ) -> None:
        self.receiving = receiving
        self.tag = tag
        self.length = length
        self.landing = landing
        self.granted = 0
        self.placed = 0  # elements that came so far, in the landing or kept
        self.asked = False  # whether the sender waits for grants of a short message
        self.state = _OPEN
        self.kept: list[tuple[int, int, int, Meta, memoryview]] | None = None

    def grant(self, upto: int) -> None:
        """Allow the sender to send elements below `upto`."""
        if upto > self.length:
            upto = self.length
        if upto > self.granted and self.state == _OPEN:
            self.granted = upto
            if self.length > EAGER_LENGTH or self.asked:
                self.receiving.sending.grant(self.tag, upto)

    def cancel(self) -> None:
        """Forget the receive."""
        if self.state <= _LEFT:
            self.receiving.cancelled(self)


class Receiving:
    """Everything that comes in through one connection."""

    def __init__(self, sending: Sending, counters: ChannelCounters) -> None:
        """Begin with nothing received.

        Args:
            sending: the other half, which carries grants and hears the peer's notes.
            counters: where bytes and frames are counted.
        """
        self.sending = sending
        self._counters = counters
        self._messages: dict[bytes, Receive] = {}
        self._discards: dict[bytes, Receive] = {}  # those in _messages that are thrown away
        self._announced = 0  # messages that are announced and not asked for
        self._pool = 0  # bytes kept, headers included
        self._freed = 0  # credit to be returned
        self._closed = False
        # What was read ahead is scratch[pos:end]; the next read may go up to `want`.
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._pos = self._end = 0
        self._want = SCRATCH_BYTES
        # The frame that is being read: notes, or elements from `start`, of which `rest` have no
        # memory yet, while into[at:size] waits for bytes; or bytes to be thrown away.
        self._notes_left = 0
        self._current: Receive | None = None
        self._into: memoryview | None = None
        self._at = self._size = 0
        self._start = self._rest = self._width = self._skip = 0
        self._meta: Meta
        self._keeping = False  # whether the frame goes into the pool
        self._straight = False  # whether the last buffer given out was a landing's

    # What is to be received.

    def open(self, tag: Tag, length: int, landing: Landing) -> Receive:
        """Post a receive; see ``Channel.receive``.

        Raises:
            MismatchError: the tag is in use, or the tag or length is out of bounds.
        """
        key = frames.pack_tag(tag)
        if not 0 <= length <= MAX_LENGTH:
            raise MismatchError(f"{frames.describe(key)} cannot have {length} elements")
        receive = self._messages.get(key)
        if receive is None:
            receive = self._messages[key] = Receive(self, key, length, landing)
            return receive
        if receive.landing is not None or receive.state == _DISCARD:
            raise MismatchError(f"{frames.describe(key)} is or was being received already")
        receive.landing = landing
        if receive.asked:
            self._announced -= 1
        if receive.length != length:
            sender, receive.length = receive.length, length
            self._mismatch(receive, sender)
        elif not length:
            self._finish(receive)
        else:
            kept, receive.kept = receive.kept or (), None
            for index, (start, count, width, meta, data) in enumerate(kept):
                if receive.state != _OPEN:
                    for *_, unused in kept[index:]:
                        self._unkeep(len(unused))
                    break
                self._unkeep(len(data))
                self._place(receive, start, count, width, meta, data)
            if receive.placed == length and self._current is not receive:
                self._finish(receive)
        return receive

    def cancelled(self, receive: Receive) -> None:
        """Note that `receive` was cancelled by its owner."""
        self.sending.revoke(receive.tag)
        if receive.state == _LEFT:
            receive.state = _OVER
            del self._messages[receive.tag]
            return
        self._discard(receive)

    def _discard(self, receive: Receive) -> None:
        """Throw away what still comes of `receive`, and tell its sender."""
        receive.state = _DISCARD
        receive.landing = None
        if receive.kept:
            for *_, data in receive.kept:
                self._unkeep(len(data))
        receive.kept = None
        if self._current is receive and not self._keeping:
            self._skip = self._rest * self._width
            if self._into is not None:
                self._skip += self._size - self._at
            self._into = None
            self._rest = 0
        if receive.placed == receive.length and self._current is not receive and receive.length:
            self._finish(receive)
            return
        discards = self._discards
        discards[receive.tag] = receive
        if len(discards) > STALE:
            # Left by messages that both sides gave up before the sender opened them.
            oldest = next(iter(discards))
            del discards[oldest]
            del self._messages[oldest]
        if receive.length:
            self.sending.note(frames.UNWANTED, receive.tag, 0)

    def _finish(self, receive: Receive) -> None:
        if receive.state == _DISCARD:
            self._discards.pop(receive.tag, None)
        receive.state = _OVER
        receive.landing = None
        if self._messages.get(receive.tag) is receive:
            del self._messages[receive.tag]

    def _mismatch(self, receive: Receive, sender: int) -> None:
        error = MismatchError(
            f"{frames.describe(receive.tag)} has {sender} elements at its sender and"
            f" {receive.length} here; the members' plans differ"
        )
        landing = receive.landing
        receive.length = sender  # when that many have come, it can be forgotten
        self.sending.revoke(receive.tag)
        self._discard(receive)
        if not sender:
            self._finish(receive)
        if landing is not None:
            landing.failed(error)

    # What arrives.

    def get_buffer(self) -> memoryview:
        """Return where the next bytes belong; never empty, and replaced by ``received``."""
        into = self._into
        if into is not None and self._size - self._at >= STRAIGHT_BYTES:
            # Nothing is left in the scratch buffer, or it would have been used up.
            self._straight = True
            return into[self._at :] if self._at else into
        self._straight = False
        return self._scratch[self._end : self._want]

    def received(self, count: int) -> None:
        """Note that `count` bytes have been put into the last buffer.

        Raises:
            FrameError: they are not our protocol; the connection is to be closed.
        """
        self._counters.bytes_received += count
        if self._closed:
            return
        if not self._straight:
            self._end += count
            self._want = SCRATCH_BYTES
            self._parse()
        elif self._into is None:
            # Cancelled while the shell held the landing's memory.
            self._straight = False
            self._skip -= count
            if not self._skip:
                self._frame_end()
        else:
            self._at += count
            if self._at == self._size:
                if self._size >= BULK_BYTES:
                    self._want = HEADER_BYTES
                self._filled()

    def _parse(self) -> None:
        scratch = self._scratch
        while not self._closed:
            pos = self._pos
            have = self._end - pos
            if not have:
                self._pos = self._end = 0
                return
            into = self._into
            if into is not None:
                at = self._at
                take = self._size - at
                if take <= have:
                    if at:
                        into[at:] = scratch[pos : pos + take]
                    else:
                        into[:] = scratch[pos : pos + take]
                    self._pos = pos + take
                    self._filled()
                    continue
                into[at : at + have] = scratch[pos : self._end]
                self._at = at + have
                self._pos = self._end = 0
                return
            if self._skip:
                take = min(have, self._skip)
                self._skip -= take
                self._pos = pos + take
                if not self._skip:
                    self._frame_end()
                continue
            if self._notes_left:
                if have < NOTE_BYTES:
                    break
                self._pos = pos + NOTE_BYTES
                self._notes_left -= 1
                self._note(*frames.parse_note(scratch, pos))
                continue
            if have < PREFIX_BYTES:
                break
            if frames.parse_kind(scratch, pos) == DATA:
                if have < HEADER_BYTES:
                    break
                self._pos = pos + HEADER_BYTES
                self._data(frames.parse_data(scratch, pos))
            else:
                self._notes_left = frames.parse_notes(scratch, pos)
                self._pos = pos + PREFIX_BYTES
                self._counters.frames_received += 1
        if self._pos:
            # The beginning of a header or note: less than one of them, moved to the front.
            have = self._end - self._pos
            scratch[:have] = bytes(scratch[self._pos : self._end])
            self._pos, self._end = 0, have

    def _data(self, header: DataHeader) -> None:
        eager, width, tag, length, start, count, meta = header
        size = count * width
        receive = self._messages.get(tag)
        if receive is None:
            if not eager:
                # Of a receive that was cancelled so long ago that it has been forgotten.
                self._skip = size
                return
            receive = self._messages[tag] = Receive(self, tag, length, None)
        self._current = receive
        self._start = start
        self._width = width
        self._meta = meta
        if receive.state:
            receive.placed = start + count
            receive.length = length
            if eager:
                self._free(size + HEADER_BYTES)
            self._skip = size
            return
        if start != receive.placed:
            raise FrameError(
                f"start {start} of a frame of {frames.describe(tag)} instead of {receive.placed}"
            )
        if length != receive.length:
            receive.placed = start + count
            if eager:
                self._free(size + HEADER_BYTES)
            if receive.landing is None:
                raise FrameError(
                    f"length of {frames.describe(tag)} changed from {receive.length} to {length}"
                )
            self._skip = size
            self._keeping = True  # the frame is dealt with: nothing to take back
            self._mismatch(receive, length)
            self._keeping = False
            return
        if not eager and start + count > receive.granted:
            raise FrameError(
                f"start {start} and count {count} of a frame of {frames.describe(tag)} exceed"
                f" its grant {receive.granted}"
            )
        receive.placed = start + count
        if receive.landing is None:
            self._pool += size + HEADER_BYTES
            if self._pool > POOL_BYTES:
                raise FrameError(f"frames sent ahead exceed {POOL_BYTES} bytes")
            self._keeping = True
            self._into = memoryview(bytearray(size))
            self._at, self._size, self._rest = 0, size, 0
            return
        if eager:
            self._free(size + HEADER_BYTES)
        self._rest = count
        self._ask(receive)

    def _ask(self, receive: Receive) -> None:
        """Ask the landing for memory for the rest of the frame."""
        landing = receive.landing
        if landing is None:
            return
        rest, width = self._rest, self._width
        into = landing.buffer(self._start, rest, width, self._meta)
        if receive.state or self._closed:
            return  # cancelled by the landing itself: the rest is thrown away
        self._into = into = _checked(into, rest, width)
        self._at = 0
        self._size = size = len(into)
        self._rest = rest - size // width

    def _filled(self) -> None:
        """Pass on the buffer that is full, and begin the next."""
        receive = self._current
        into = self._into
        if receive is None or into is None:
            return
        start, meta, width = self._start, self._meta, self._width
        count = self._size // width
        self._into = None
        if self._keeping:
            self._keeping = False
            self._frame_end()
            if receive.landing is None and receive.state == _OPEN:
                if receive.kept is None:
                    receive.kept = []
                receive.kept.append((start, count, width, meta, into))
                return
            self._unkeep(len(into))
            if receive.state == _OPEN:
                self._place(receive, start, count, width, meta, into)
            if receive.placed == receive.length:
                self._finish(receive)
            return
        self._start = start + count
        landing = receive.landing
        if self._rest:
            if landing is not None:
                landing.arrived(start, count, meta)
                # Still the same frame, unless that call cancelled the receive or closed.
                if self._rest and not self._closed:
                    self._ask(receive)
            return
        self._frame_end()
        if receive.placed == receive.length:
            self._finish(receive)
        if landing is not None:
            landing.arrived(start, count, meta)

    def _frame_end(self) -> None:
        self._counters.frames_received += 1
        receive, self._current = self._current, None
        if receive is not None and receive.state >= _DISCARD and receive.placed == receive.length:
            self._finish(receive)

    def _place(
        self, receive: Receive, start: int, count: int, width: int, meta: Meta, data: memoryview
    ) -> None:
        """Copy elements that were kept to where the landing wants them."""
        offset = 0
        while count:
            landing = receive.landing
            if landing is None or self._closed:
                return
            into = landing.buffer(start, count, width, meta)
            if receive.state:
                return
            into = _checked(into, count, width)
            size = len(into)
            into[:] = data[offset : offset + size]
            offset += size
            done = size // width
            landing.arrived(start, done, meta)
            start += done
            count -= done

    def _note(self, what: int, tag: bytes, value: int) -> None:
        sending = self.sending
        if what == frames.GRANT:
            sending.granted(tag, value)
        elif what == frames.CREDIT:
            sending.credited(value)
        elif what == frames.UNWANTED:
            sending.refused(tag)
        elif what == frames.WITHDRAWN:
            self._withdrawn(tag)
        else:
            self._announce(tag, value)

    def _announce(self, tag: bytes, length: int) -> None:
        receive = self._messages.get(tag)
        if receive is None:
            receive = self._messages[tag] = Receive(self, tag, length, None)
        elif receive.state:
            if not length:
                self._finish(receive)
            return
        if receive.length != length:
            if receive.landing is None:
                raise FrameError(
                    f"length of {frames.describe(tag)} changed from {receive.length} to {length}"
                )
            self._mismatch(receive, length)
            return
        if receive.asked:
            return
        receive.asked = True
        if receive.landing is None:
            self._announced += 1
            if self._announced > MAX_ANNOUNCED:
                raise FrameError(f"more than {MAX_ANNOUNCED} messages announced")
        elif not length:
            self._finish(receive)
        elif receive.granted and length <= EAGER_LENGTH:
            self.sending.grant(tag, receive.granted)

    def _withdrawn(self, tag: bytes) -> None:
        receive = self._messages.get(tag)
        if receive is None:
            return
        if receive.state == _DISCARD:
            self._finish(receive)
        elif receive.landing is not None:
            receive.state = _LEFT
            self.sending.revoke(tag)
        else:
            if receive.asked:
                self._announced -= 1
            for *_, data in receive.kept or ():
                self._unkeep(len(data))
            receive.kept = None
            self._finish(receive)

    def _unkeep(self, size: int) -> None:
        self._pool -= size + HEADER_BYTES
        self._free(size + HEADER_BYTES)

    def _free(self, amount: int) -> None:
        self._freed += amount
        if self._freed >= CREDIT_BATCH:
            self.sending.note(frames.CREDIT, bytes(frames.TAG_BYTES), self._freed)
            self._freed = 0

    @property
    def between_frames(self) -> bool:
        """Whether the peer has ended every frame that it began."""
        return (
            not self._end - self._pos
            and self._current is None
            and not self._notes_left
            and not self._skip
        )

    def halt(self) -> None:
        """Place nothing any more; bytes that still come are thrown away."""
        self._closed = True
        self._into = None
        self._pos = self._end = 0
        self._want = SCRATCH_BYTES

    def close(self, error: Exception) -> None:
        """Fail every receive that is not complete with `error`, and forget everything."""
        self.halt()
        messages = list(self._messages.values())
        self._messages.clear()
        self._discards.clear()
        for receive in messages:
            landing = receive.landing
            receive.state = _OVER
            receive.landing = None
            receive.kept = None
            if landing is not None and receive.length:
                landing.failed(error)


def _checked(into: memoryview, count: int, width: int) -> memoryview:
    """Return a landing's buffer as bytes.

    Raises:
        ValueError: it is read-only, or not one to `count` elements.
    """
    if into.format != "B" or into.ndim != 1:
        into = into.cast("B")
    size = len(into)
    if not 0 < size <= count * width or size % width or into.readonly:
        raise ValueError(
            f"a landing gave {'read-only ' if into.readonly else ''}{size} bytes for 1 to {count}"
            f" elements of {width} bytes"
        )
    return into
