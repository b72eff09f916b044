"""The outgoing half of a bulk connection: which bytes leave next, and when a send is over.

Sans-io: no socket, no task, no clock. A shell asks :meth:`Sending.next_output` for buffers,
hands them to its socket and says :meth:`Sending.output_drained` once they have left; only then
do senders learn about it, for "all received" is not "all sent".

A message goes when it is granted. One of at most ``EAGER_BYTES`` and ``EAGER_LENGTH`` elements
goes at once, as long as the peer's pool has credit, and its receiver sends no grants. A message
that can do neither is announced, once; from then on it waits for grants, which its receiver
then sends. So a message's last grant always reaches it before its last element is sent, and no
grant is ever left over from a message that ran to its end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from p2pdpt.channel import EAGER_BYTES, FRAME_BYTES, Outgoing
from p2pdpt.errors import FrameError, MismatchError
from p2pdpt.protocol import frames
from p2pdpt.protocol.frames import HEADER_BYTES, MAX_LENGTH, MAX_NOTES, MAX_WIDTH

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.channel import ChannelCounters, Meta, Tag

__all__ = ["EAGER_LENGTH", "POOL_BYTES", "Send", "Sending"]

EAGER_LENGTH: Final = EAGER_BYTES // 4
"""The longest message, in elements, that may go before it is granted."""
POOL_BYTES: Final = 1 << 20
"""What a receiver keeps of messages that nobody has asked for yet: payload and headers."""
COPY_BYTES: Final = 32 << 10
"""Payloads up to this are joined with their header, so that they leave in one write."""
BATCH_BYTES: Final = 128 << 10
"""Small frames that are ready together leave together, up to about this."""
STALE: Final = 1 << 14
"""Grants for messages that were never opened are forgotten beyond this number."""

_REFUSED: Final = -1


class Send(Outgoing):
    """A message being sent; made by :meth:`Sending.open`."""

    __slots__ = (
        "announced",
        "data_bytes",
        "granted",
        "length",
        "on_drained",
        "over",
        "pieces",
        "pushed",
        "queued",
        "sending",
        "sent",
        "tag",
        "unwanted",
    )

    def __init__(
        self, sending: Sending, tag: bytes, length: int, on_drained: Callable[[int], None]
    ) -> None:
        self.sending = sending
        self.tag = tag
        self.length = length
        self.on_drained = on_drained
        self.pieces: deque[tuple[memoryview, int, int, int, Meta]] = deque()
        self.pushed = self.sent = self.granted = self.data_bytes = 0
        self.queued = False  # whether it stands in the line of those with something to do
        self.announced = False  # whether the receiver knows that grants are waited for
        self.unwanted = False  # whether the receiver cancelled: pieces are dropped as if sent
        self.over = False  # cancelled, or the connection closed

    def push(self, data: memoryview, count: int, meta: Meta) -> None:
        """Append the next elements.

        Raises:
            MismatchError: more elements than the message has, or bytes that are no multiple.
        """
        if self.over:
            return
        if data.format != "B" or data.ndim != 1:
            data = data.cast("B")
        size = len(data)
        if count <= 0:
            if size or count:
                raise MismatchError(f"{size} bytes cannot be {count} elements")
            return
        width, rest = divmod(size, count)
        if rest or not 0 < width <= MAX_WIDTH:
            raise MismatchError(f"{size} bytes cannot be {count} elements")
        start = self.pushed
        self.pushed = stop = start + count
        if stop > self.length:
            self.pushed = start
            raise MismatchError(
                f"{stop} elements pushed for {frames.describe(self.tag)}, which has {self.length}"
            )
        self.pieces.append((data, start, stop, width, meta))
        if not self.queued:
            self.sending.queue(self)

    def cancel(self) -> None:
        """Send nothing more."""
        if self.over:
            return
        self.over = True  # also when all of it is on its way: ``quiet`` has to wait for that
        self.pieces.clear()
        self.sending.cancelled(self)


class Sending:
    """Everything that leaves through one connection."""

    def __init__(self, wake: Callable[[], None], counters: ChannelCounters) -> None:
        """Begin with nothing to send.

        Args:
            wake: called whenever ``next_output`` may have something; must not call back.
            counters: where bytes and frames are counted.
        """
        self._wake = wake
        self._counters = counters
        self._open: dict[bytes, Send] = {}
        self._ready: deque[Send] = deque()
        self._early: dict[bytes, int] = {}  # grants and refusals that came before the message
        self._grants: dict[bytes, int] = {}  # grants to give, gathered until the next output
        self._notes: list[bytes] = []
        self._credit = POOL_BYTES
        self._batch: list[tuple[Send, int]] = []
        self._closed = False

    # What is to be sent.

    def open(self, tag: Tag, length: int, on_drained: Callable[[int], None]) -> Send:
        """Open a message of `length` elements; see ``Channel.send``.

        Raises:
            MismatchError: the tag is in use, or the tag or length is out of bounds.
        """
        key = frames.pack_tag(tag)
        if key in self._open:
            raise MismatchError(f"{frames.describe(key)} is being sent already")
        if not 0 <= length <= MAX_LENGTH:
            raise MismatchError(f"{frames.describe(key)} cannot have {length} elements")
        send = Send(self, key, length, on_drained)
        if not length:
            # Costs a note, so that a receive of another length fails instead of waiting.
            self.note(frames.ANNOUNCE, key, 0)
            on_drained(0)
            return send
        self._open[key] = send
        if self._early:
            self.granted(key, self._early.pop(key, 0))
        return send

    def note(self, what: int, tag: bytes, value: int) -> None:
        """Tell the peer something with the next output."""
        if not self._closed:
            self._notes.append(frames.pack_note(what, tag, value))
            self._wake()

    def grant(self, tag: bytes, upto: int) -> None:
        """Grant the peer's message `tag` with the next output."""
        if not self._closed:
            self._grants[tag] = upto
            self._wake()

    def revoke(self, tag: bytes) -> None:
        """Forget a grant that has not left yet."""
        self._grants.pop(tag, None)

    def queue(self, send: Send) -> None:
        """Put a message into the line of those with something to do."""
        send.queued = True
        self._ready.append(send)
        self._wake()

    def cancelled(self, send: Send) -> None:
        """Note that `send` was cancelled by its owner."""
        if self._open.get(send.tag) is send:
            del self._open[send.tag]
            if (send.sent or send.announced) and not send.unwanted:
                self.note(frames.WITHDRAWN, send.tag, 0)

    # What the peer says.

    def granted(self, tag: bytes, upto: int) -> None:
        """Take a grant from the peer, or its refusal."""
        send = self._open.get(tag)
        if send is None:
            if upto > 0 or upto == _REFUSED:
                self._remember(tag, upto)
        elif upto == _REFUSED:
            send.unwanted = True
            if send.sent < send.length:
                self.note(frames.WITHDRAWN, tag, 0)
            if send.pieces and not send.queued:
                self.queue(send)
        elif upto > send.granted:
            send.granted = min(upto, send.length)
            if send.pieces and not send.queued:
                self.queue(send)

    def refused(self, tag: bytes) -> None:
        """Take the peer's word that it does not want the message any more."""
        self.granted(tag, _REFUSED)

    def credited(self, amount: int) -> None:
        """Take back credit for the peer's pool.

        Raises:
            FrameError: more than was ever spent.
        """
        if self._credit + amount > POOL_BYTES:
            raise FrameError(f"credit {amount} exceeds what is outstanding")
        self._credit += amount

    def _remember(self, tag: bytes, upto: int) -> None:
        early = self._early
        if early.get(tag, 0) == _REFUSED:
            return
        early[tag] = upto
        if len(early) > STALE:
            # Left by messages that both sides gave up before they were opened here.
            del early[next(iter(early))]

    # What leaves.

    def next_output(self) -> list[bytes | memoryview]:
        """Return the next buffers to write, in order; empty if nothing may leave now.

        Notes go first, then one frame of each message in turn, in the order in which they
        became ready. At most one payload is longer than ``COPY_BYTES``; it is not copied.
        ``output_drained`` must be called before the next call.
        """
        ready = self._ready
        while True:
            batch = self._batch
            parts: list[bytes | memoryview] = []
            bulk: memoryview | None = None
            room = BATCH_BYTES
            sent = 0
            while ready and room > 0:
                send = ready.popleft()
                send.queued = False
                pieces = send.pieces
                if not pieces:
                    continue
                if send.unwanted:
                    pieces.clear()
                    send.sent = send.pushed
                    batch.append((send, send.sent))
                    if send.sent == send.length:
                        del self._open[send.tag]
                    continue
                data, start, stop, width, meta = pieces[0]
                first = send.sent
                eager = False
                if send.granted > first:
                    count = (stop if stop < send.granted else send.granted) - first
                    size = count * width
                    if size > FRAME_BYTES:
                        count = FRAME_BYTES // width
                        size = count * width
                else:
                    count = stop - first
                    size = count * width
                    if not self._may_go(send, size, width):
                        continue
                    eager = True
                if count == stop - start:
                    payload = data
                    pieces.popleft()
                else:
                    offset = (first - start) * width
                    payload = data[offset : offset + size]
                    if first + count == stop:
                        pieces.popleft()
                parts.append(
                    frames.pack_data(send.tag, send.length, first, count, width, meta, eager)
                )
                send.sent = first + count
                send.data_bytes += size
                sent += 1
                batch.append((send, first + count))
                if first + count == send.length:
                    del self._open[send.tag]
                elif pieces:
                    send.queued = True
                    ready.append(send)
                if size > COPY_BYTES:
                    bulk = payload
                    break
                parts.append(payload)
                room -= size + HEADER_BYTES
            if self._notes or self._grants:
                parts.insert(0, self._take_notes())
                sent += 1
            if parts:
                small = b"".join(parts)
                self._counters.frames_sent += sent
                if bulk is None:
                    self._counters.bytes_sent += len(small)
                    return [small]
                self._counters.bytes_sent += len(small) + len(bulk)
                return [small, bulk]
            if not batch:
                return []
            # Nothing but pieces that were dropped unsent: they are done with at once, and
            # whoever is told so may have more.
            self.output_drained()

    def _may_go(self, send: Send, size: int, width: int) -> bool:
        """Decide whether `size` bytes may go ahead of their grant; announce them if not."""
        if send.announced:
            return False
        if send.length <= EAGER_LENGTH:
            rest = (send.length - send.sent) * width
            cost = size + HEADER_BYTES
            if send.data_bytes + rest <= EAGER_BYTES and self._credit >= cost:
                self._credit -= cost
                return True
        elif send.granted:
            return False  # the receiver is there, and grants without being asked
        send.announced = True
        self._notes.append(frames.pack_note(frames.ANNOUNCE, send.tag, send.length))
        return False

    def _take_notes(self) -> bytes:
        grants = self._grants
        if grants:
            self._notes += [
                frames.pack_note(frames.GRANT, tag, upto) for tag, upto in grants.items()
            ]
            grants.clear()
        notes = self._notes
        if len(notes) <= MAX_NOTES:
            self._notes = []
            return frames.pack_notes(notes)
        self._notes = notes[MAX_NOTES:]
        return frames.pack_notes(notes[:MAX_NOTES])

    def output_drained(self) -> None:
        """Note that all buffers of the last ``next_output`` have left this process."""
        batch = self._batch
        if batch:
            self._batch = []
            for send, upto in batch:
                if not send.over:
                    send.on_drained(upto)

    @property
    def quiet(self) -> bool:
        """Whether no buffer that was handed out belongs to a cancelled message."""
        return not any(send.over for send, _ in self._batch)

    def close(self) -> None:
        """Forget everything; nothing leaves and nobody is called any more."""
        self._closed = True
        for send in [*self._open.values(), *(send for send, _ in self._batch)]:
            send.over = True
            send.pieces.clear()
        self._open.clear()
        self._ready.clear()
        self._early.clear()
        self._grants.clear()
        self._notes.clear()
        self._batch.clear()
