"""Any-source traffic of one rank in one round: messages without a posted receive for each.

A message travels as a header of fixed size and, for each of its regions, one ordinary message.
A rank takes one message from each peer at a time: the next header is asked for when the message
before it has been released, so a slow receiver slows its senders and its memory is bounded.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Final

from p2pdpt.errors import FrameError, MismatchError, TopologyError
from p2pdpt.protocol.round_io import WINDOW, RoundIO
from p2pdpt.protocol.tasks import Source, Task
from p2pdpt.topology import Message, Region

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from p2pdpt.protocol.round import Round

__all__ = ["HEADER_BYTES", "MAX_REGIONS", "Mailbox", "is_mail", "region_ordinal"]

MAX_REGIONS: Final = 10
_MAIL: Final = 1 << 31
_STRIDE: Final = 16
_HEADER: Final = struct.Struct("<32sqB10Q")
HEADER_BYTES: Final = 128


def is_mail(ordinal: int) -> bool:
    """Tell whether a message is the header of any-source traffic."""
    return ordinal >= _MAIL and ordinal % _STRIDE == 0


def region_ordinal(number: int, index: int) -> int:
    """Return the ordinal of region `index` of the `number`-th message of an ordered pair."""
    return _MAIL + number * _STRIDE + 1 + index


def encode(message: Message) -> bytes:
    """Return the header of a message, HEADER_BYTES long.

    Raises:
        TopologyError: it has more than MAX_REGIONS regions.
    """
    lengths = [len(region) for region in message.regions]
    if len(lengths) > MAX_REGIONS:
        raise TopologyError(f"a message carries {MAX_REGIONS} regions at most, not {len(lengths)}")
    lengths += [0] * (MAX_REGIONS - len(lengths))
    packed = _HEADER.pack(
        message.kind.encode("ascii"), message.clock, len(message.regions), *lengths
    )
    return packed.ljust(HEADER_BYTES, b"\0")


def decode(header: bytes | bytearray) -> tuple[str, int, list[int]]:
    """Return kind, clock and region lengths of a header.

    Raises:
        FrameError: it is not one.
    """
    kind, clock, regions, *lengths = _HEADER.unpack_from(header)
    name = kind.rstrip(b"\0")
    if regions > MAX_REGIONS or not name or not name.isascii():
        raise FrameError(f"a message header names {regions} regions and the kind {name!r}")
    return name.decode("ascii"), clock, lengths[:regions]


class _Watch(Task):
    """Follows the regions of one message and reports when all have come."""

    __slots__ = ("_report", "_tasks")

    def __init__(self, tasks: Sequence[Task], report: Callable[[], None], move: int) -> None:
        super().__init__(Region(0, 0), move)
        self._tasks = tasks
        self._report: Callable[[], None] | None = report

    def advance(self, io: RoundIO) -> bool:
        if self._report is not None and all(task.complete for task in self._tasks):
            report, self._report = self._report, None
            report()
        return False


class _Inbox:
    """What is under way from one peer.

    Attributes:
        number: of the message, counted from 0.
        header: its header, as far as ``arrived`` bytes.
        held: the message, once delivered and until it is released.
    """

    __slots__ = ("arrived", "header", "held", "number")

    def __init__(self) -> None:
        self.number = 0
        self.header = bytearray(HEADER_BYTES)
        self.arrived = 0
        self.held: Message | None = None


class Mailbox:
    """Sends and receives the any-source messages of one round."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._sent: dict[int, int] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._ready: deque[Message] = deque()
        self._expected: deque[Callable[[Message], None]] = deque()

    def send(self, to: Sequence[int], message: Message) -> list[Task]:
        """Send a message to each rank of `to`; return the tasks that carry its regions."""
        header = encode(message)
        tasks: list[Task] = []
        numbers = []
        for peer in to:
            number = self._sent.get(peer, 0)
            self._sent[peer] = number + 1
            numbers.append((peer, number))
            ordinal = _MAIL + number * _STRIDE
            self._round.io.open_send(peer, ordinal, HEADER_BYTES)
            self._round.io.push_bytes(peer, ordinal, header)
        for index, region in enumerate(message.regions):
            if numbers and len(region):
                addressed = [(peer, region_ordinal(number, index)) for peer, number in numbers]
                tasks.append(self._round.send_region(region, addressed))
        return tasks

    def expect(self, deliver: Callable[[Message], None]) -> None:
        """Call `deliver` with the next message that has not been delivered."""
        for peer in range(self._round.size):
            if peer != self._round.rank and peer not in self._inboxes:
                self._inboxes[peer] = _Inbox()
                self._ask(peer)
        self._expected.append(deliver)
        self._deliver()

    def release(self, message: Message) -> None:
        """Give the memory of a delivered message back and take the next from its sender.

        Raises:
            TopologyError: it is not held.
        """
        inbox = self.check_held(message)
        for region in message.regions:
            self._round.drop_space(region.space)
        inbox.number += 1
        inbox.arrived = 0
        inbox.held = None
        self._ask(message.source)

    def check_held(self, message: Message) -> _Inbox:
        """Refuse a message whose memory was given back.

        Raises:
            TopologyError: it is not held.
        """
        inbox = self._inboxes.get(message.source)
        if inbox is None or inbox.held is not message:
            raise TopologyError(
                f"message {message.kind!r} from rank {message.source} is not held: "
                "it was released or applied already"
            )
        return inbox

    def land(self, peer: int, start: int, count: int) -> memoryview:
        """Return where the next bytes of a header go."""
        return memoryview(self._inboxes[peer].header)[start : start + count]

    def arrived(self, peer: int, count: int) -> None:
        """Note bytes of a header; ask for its regions when it is whole."""
        inbox = self._inboxes[peer]
        inbox.arrived += count
        if inbox.arrived < HEADER_BYTES:
            return
        kind, clock, lengths = decode(inbox.header)
        limit = max(self._round.length, WINDOW)
        if sum(lengths) > limit:
            raise MismatchError(
                f"message {kind!r} from rank {peer} has {sum(lengths)} elements; "
                f"a round of this bucket takes {limit}"
            )
        regions = []
        tasks = []
        for index, length in enumerate(lengths):
            space = self._round.next_space()
            self._round.add_space(space, length)
            region = Region(0, length, space)
            regions.append(region)
            if length:
                source = Source(peer, region_ordinal(inbox.number, index))
                tasks.append(self._round.receive_region(region, source))
        message = Message(kind, clock, tuple(regions), peer)

        def whole() -> None:
            self._ready.append(message)
            self._deliver()

        watch = _Watch(tasks, whole, 0)
        for task in tasks:
            task.followers.append(watch)
        watch.advance(self._round.io)

    def close(self) -> None:
        """Withdraw what was asked for and has not come.

        Raises:
            MismatchError: a message came and the topology ended without receiving it.
        """
        if self._ready:
            message = self._ready[0]
            raise MismatchError(
                f"message {message.kind!r} from rank {message.source} was never received"
            )
        for peer, inbox in self._inboxes.items():
            if inbox.arrived < HEADER_BYTES:
                self._round.io.cancel_receive(peer, _MAIL + inbox.number * _STRIDE)

    def _ask(self, peer: int) -> None:
        ordinal = _MAIL + self._inboxes[peer].number * _STRIDE
        self._round.io.open_receive(peer, ordinal, HEADER_BYTES)
        self._round.io.grant(peer, ordinal, HEADER_BYTES)

    def _deliver(self) -> None:
        while self._ready and self._expected:
            message = self._ready.popleft()
            self._inboxes[message.source].held = message
            self._expected.popleft()(message)
