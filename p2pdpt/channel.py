"""How a transport carries messages: the contract of Door, Transport, Listener and Channel.

Messages, not streams. A message has a tag that is *built* (view, step, bucket, ordinal of the
operation), never chosen, and a length in elements. The receiver names the memory: a
:class:`Landing` is asked, frame by frame, where the next elements go, so bytes travel from the
socket straight into a bucket, or into a staging buffer that is folded at once. The sender pushes
elements in order as they become ready. Bulk moves only against a posted receive's grant;
messages of at most 64 KiB may go ahead of it into a bounded pool.

A transport is proved by subclassing :class:`p2pdpt.testing.TransportKit`. This module contains
no asyncio; everything here runs on, and is called from, one event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

__all__ = [
    "EAGER_BYTES",
    "FRAME_BYTES",
    "Availability",
    "Channel",
    "ChannelCounters",
    "Door",
    "Incoming",
    "Landing",
    "Listener",
    "Meta",
    "Outgoing",
    "PeerInfo",
    "Stream",
    "Tag",
    "Transport",
]

FRAME_BYTES: Final = 1 << 20
"""The most payload bytes of one frame."""
EAGER_BYTES: Final = 64 << 10
"""The longest message, in bytes, that may be sent before it is granted."""


class Tag(NamedTuple):
    """What a message is; built by drivers, equal on both sides.

    Attributes:
        view: number of the view, 32 bits.
        stream: which sequence of rounds: 0 for training, else a digest of the collective's
            name, 32 bits.
        step: step of training, or how many collectives of that name came before, 64 bits.
        attempt: which repetition of the step, 16 bits.
        bucket: number of the bucket in its step, 32 bits.
        ordinal: the k-th operation of this ordered pair of ranks in the round, 32 bits.
    """

    view: int
    stream: int
    step: int
    attempt: int
    bucket: int
    ordinal: int


class Meta(NamedTuple):
    """What the elements of a frame are worth; carried in its header.

    A *leaf* is one member's unfolded contribution: ``(weight, weight, 1)``. A fold of sources
    of equal scale only adds them and keeps the scale; otherwise it multiplies each by its scale
    and the sum has scale 1. The weighted mean is ``elements * scale / total``. A *finished*
    element (every contribution is in, and it has been divided) has 0 contributions.

    Attributes:
        scale: factor that turns the elements into the weighted sum.
        total: sum of the weights of the contributions inside.
        contributions: how many are inside; 0 once finished.
    """

    scale: float = 1.0
    total: float = 1.0
    contributions: int = 1


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Who is at the other end of a connection, as proved by the handshake.

    Attributes:
        node_id: 16 hexadecimal digits, new for each incarnation.
        name: what people call the node.
        addresses: ``host:port`` where it accepts connections, best first.
        transports: for each transport that it offers, by name, the endpoint a peer connects to.
    """

    node_id: str
    name: str = ""
    addresses: tuple[str, ...] = ()
    transports: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name or self.node_id}"


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether something can be used on this machine, and why (not)."""

    ok: bool
    reason: str


class Landing(ABC):
    """Where an incoming message goes; implemented by whoever posts the receive.

    Called by the channel on the event loop, and must not block or raise.
    """

    @abstractmethod
    def buffer(self, start: int, count: int, width: int, meta: Meta) -> memoryview:
        """Return writable bytes for elements from `start`, at least one and at most `count`.

        Called before bytes are read, with the rest of a frame; called again after ``arrived``
        while the frame has more.

        Args:
            start: offset in elements from the start of the message.
            count: elements of this frame that have not been placed yet.
            width: bytes of one element as sent (partial sums of half precision are wider).
            meta: the frame's meta.
        """

    @abstractmethod
    def arrived(self, start: int, count: int, meta: Meta) -> None:
        """Note that elements `start` to ``start + count`` are complete in the buffer given."""

    @abstractmethod
    def failed(self, error: Exception) -> None:
        """Note that the message will never complete; called at most once, nothing follows.

        The error is ``MismatchError`` if the sender's message has another length, else
        ``ChannelClosedError``.
        """


class Incoming(ABC):
    """A posted receive."""

    @abstractmethod
    def grant(self, upto: int) -> None:
        """Allow the sender to send elements below `upto`; never shrinks."""

    @abstractmethod
    def cancel(self) -> None:
        """Forget the receive: nothing is placed any more once this returns.

        Bytes of this message that still arrive are read and thrown away.
        """


class Outgoing(ABC):
    """A message being sent."""

    @abstractmethod
    def push(self, data: memoryview, count: int, meta: Meta) -> None:
        """Append the next `count` elements, ``len(data) // count`` bytes each, in order.

        The bytes are not copied; they must not change until ``on_drained`` covers them. Cut
        into frames by the channel.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Send nothing more of this message than the frame already begun.

        The data pushed stays referenced until ``Channel.quiesce`` returns.
        """


@dataclass(slots=True)
class ChannelCounters:
    """What a channel has carried, in bytes (headers included) and frames."""

    bytes_sent: int = 0
    bytes_received: int = 0
    frames_sent: int = 0
    frames_received: int = 0


class Channel(ABC):
    """An authenticated connection for bulk to one peer.

    Attributes:
        peer: who is at the other end.
        address: where, for people.
        transport: name of the transport.
        counters: bytes and frames so far.
    """

    peer: PeerInfo
    address: str
    transport: str
    counters: ChannelCounters

    @abstractmethod
    def send(self, tag: Tag, length: int, on_drained: Callable[[int], None]) -> Outgoing:
        """Open an outgoing message of `length` elements.

        `on_drained` is called with how many elements have left the sender's memory, rising to
        `length`; for an empty message it is called with 0 before this returns. It is not called
        any more when the channel has closed: ``on_closed`` tells.

        Raises:
            ChannelClosedError: the channel has closed.
        """

    @abstractmethod
    def receive(self, tag: Tag, length: int, landing: Landing) -> Incoming:
        """Post a receive for a message of `length` elements; nothing is granted yet.

        An empty message completes without a call to `landing`. A message that came ahead of
        this call is placed before it returns, as far as it has come.

        Raises:
            ChannelClosedError: the channel has closed.
        """

    @abstractmethod
    def on_closed(self, callback: Callable[[Exception | None], None]) -> None:
        """Call `callback` once when the channel closes: None if by ``close`` here."""

    @abstractmethod
    async def quiesce(self) -> None:
        """Return when no cancelled message's memory is referenced any more.

        Cancellation leaves the channel usable.
        """

    @abstractmethod
    def abort(self) -> None:
        """Close at once, dropping what has not been sent. May be called twice."""

    @abstractmethod
    async def close(self) -> None:
        """Send what was pushed and granted, then close. May be called twice.

        A cancelled close still closes (as ``abort``). Never raises if the peer has gone.
        """


class Stream(ABC):
    """An authenticated byte stream, made by a node's door, for a transport to build on.

    Attributes:
        peer: who is at the other end, as proved.
        address: where, for people.
    """

    peer: PeerInfo
    address: str

    @abstractmethod
    async def attach(self, protocol: asyncio.BufferedProtocol) -> asyncio.Transport:
        """Hand the stream to a protocol, once; bytes already received are fed to it first."""

    @abstractmethod
    def abort(self) -> None:
        """Close without using it."""


class Door(ABC):
    """Makes authenticated streams between nodes; implemented by the node and by test kits.

    Attributes:
        me: this node, as its peers know it.
    """

    me: PeerInfo

    @abstractmethod
    def serve(self, kind: str, accept: Callable[[Stream], Awaitable[None]]) -> None:
        """Call `accept` with each stream that a peer opened for `kind`.

        An exception of `accept` closes the stream and is logged.
        """

    @abstractmethod
    def close(self, kind: str) -> None:
        """Refuse further streams of `kind`."""

    @abstractmethod
    async def open(self, peer: PeerInfo, kind: str) -> Stream:
        """Open an authenticated stream of `kind` to `peer`.

        Raises:
            HandshakeError: the peer refused, or is somebody else.
            ChannelClosedError: none of its addresses could be reached; the text lists each
                with its reason.
        Cancellation closes what was half open.
        """


class Listener(ABC):
    """A transport that accepts channels.

    Attributes:
        endpoint: what a peer needs to connect, published in ``PeerInfo.transports``; may be
            empty where the door suffices.
    """

    endpoint: str

    @abstractmethod
    async def close(self) -> None:
        """Accept no more. Channels that are open stay. May be called twice."""


class Transport(ABC):
    """A way to carry bulk between two nodes; registered in ``p2pdpt.transports``.

    One instance per node, made with the node's door.

    Attributes:
        name: what people choose it by.
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, door: Door) -> None: ...

    @classmethod
    @abstractmethod
    def availability(cls) -> Availability:
        """Tell whether this machine can use it, and why (not); never raises, opens nothing."""

    @abstractmethod
    async def listen(self, accept: Callable[[Channel], None]) -> Listener:
        """Accept channels from peers; `accept` is called on the event loop with each.

        Raises:
            UnavailableError: this machine cannot use the transport after all.
        """

    @abstractmethod
    async def connect(self, peer: PeerInfo) -> Channel:
        """Open a channel to a peer that listens.

        Raises:
            ChannelClosedError: it could not be reached.
            HandshakeError: it refused.
        Cancellation closes what was half open.
        """
