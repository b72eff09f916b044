"""What a topology plugin sees: regions of a bucket, and links to move them over.

A topology is a class with one coroutine, ``exchange``. It names *regions* of a *bucket*, never
bytes, sockets or tensors, and awaits only ``links``. The same lines run in the simulator
(:mod:`p2pdpt.testing`), on asyncio over any transport, and (``static`` ones) as a recorded plan;
all three give the same bits. This module imports neither torch nor asyncio, and neither may a
plugin.

Glossary
    bucket    what is exchanged at once: one flat array of elements of one type.
    area      ``mine``, this node's contribution, which no round writes; ``result``, what the
              round produces. A plugin sees one copy-on-write array: ``result`` where this round
              has written, ``mine`` elsewhere.
    region    a half-open range of elements of a bucket, or of extra memory from ``scratch``.
    chunk     the part of a bucket that one rank owns in a round.
    segment   the part of an operation in flight; cut by drivers, never by plugins.
    move      one awaited set of operations.
    round     one exchange of one bucket in one view.
    rank      a member's place in the view, from 0 to ``links.size - 1``.
    view      who computes this step: a number, the members, and facts agreed by all of them.

A topology in full, all-reduce by sending everything to everybody::

    class Flat(Topology):
        static = True

        async def exchange(self, links, bucket):
            everyone = range(links.size)
            others = [rank for rank in everyone if rank != links.rank]
            await links.move(
                Send(others, bucket.region),
                Recv(everyone, bucket.region, bucket.combine),
            )
"""

from __future__ import annotations

import dataclasses
import enum
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from p2pdpt.errors import TopologyError

if TYPE_CHECKING:
    import random

    import numpy.typing as npt

__all__ = [
    "ADD",
    "ANY",
    "COPY",
    "MAX",
    "MIN",
    "PROD",
    "Bucket",
    "Combine",
    "Facts",
    "Handle",
    "Kernel",
    "Links",
    "Message",
    "Operation",
    "Recv",
    "Region",
    "Send",
    "Store",
    "Topology",
]


class Combine(enum.IntEnum):
    """How a receive joins what arrives; the numbers are those of the C kernels."""

    COPY = 0
    ADD = 1
    MIN = 2
    MAX = 3
    PROD = 4


COPY: Final = Combine.COPY
ADD: Final = Combine.ADD
MIN: Final = Combine.MIN
MAX: Final = Combine.MAX
PROD: Final = Combine.PROD


class _Any(enum.Enum):
    ANY = "ANY"

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = _Any.ANY


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """The elements ``start`` to ``stop`` (exclusive) of a space.

    ``space`` is 0 for the bucket itself; other numbers are handed out by ``links.scratch`` and
    by messages.
    """

    start: int
    stop: int
    space: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise TopologyError(f"region {self.start}..{self.stop} is not a range of elements")

    def __len__(self) -> int:
        return self.stop - self.start

    def chunk(self, index: int, count: int) -> Region:
        """Return part `index` of `count` nearly equal parts, which may be empty.

        Parts differ by at most one element and are the same on every rank.
        """
        length = len(self)
        return Region(
            self.start + length * index // count,
            self.start + length * (index + 1) // count,
            self.space,
        )

    def chunks(self, count: int) -> list[Region]:
        """Return all `count` parts in order."""
        return [self.chunk(index, count) for index in range(count)]


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a plugin may know of the bucket it exchanges.

    Attributes:
        length: elements.
        dtype: name of the element type, for instance ``float32``.
        combine: how contributions are joined: ``ADD`` for gradients (the driver then divides by
            the total weight), or what a user's collective asked for.
        index: number of the bucket in its step.
    """

    length: int
    dtype: str = "float32"
    combine: Combine = ADD
    index: int = 0

    @property
    def region(self) -> Region:
        """The whole bucket."""
        return Region(0, self.length)

    def chunks(self, count: int) -> list[Region]:
        """Return the bucket in `count` nearly equal parts, the same on every rank."""
        return self.region.chunks(count)


@dataclass(frozen=True, slots=True)
class Facts:
    """What was measured and then agreed by all members, as part of the view.

    Attributes:
        hosts: for each rank, the number of the host it runs on.
        latency_s: for each ordered pair of ranks, seconds, where measured.
        bandwidth: for each ordered pair of ranks, bytes per second, where measured.
    """

    hosts: tuple[int, ...] = ()
    latency_s: tuple[tuple[float, ...], ...] = ()
    bandwidth: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Message:
    """Any-source traffic: pushes, pulls and their like, bounded and leased.

    Sent with ``Send(to, Message(...))``, received with ``Recv(ANY)``. At the receiver
    ``regions`` lie in leased memory, complete to the last byte, which is returned when the
    plugin calls ``links.release(message)`` or the round ends.

    Attributes:
        kind: what it is, for instance ``push``; at most 32 ASCII characters.
        clock: the sender's clock, or any whole number that fits 63 bits.
        regions: the data that goes along; may be empty.
        source: the rank it came from; set by the driver.
    """

    kind: str
    clock: int = 0
    regions: tuple[Region, ...] = ()
    source: int = -1

    def __post_init__(self) -> None:
        if not (self.kind.isascii() and 0 < len(self.kind) <= 32):
            raise TopologyError(f"message kind {self.kind!r} is not 1 to 32 ASCII characters")
        if not -(2**63) <= self.clock < 2**63:
            raise TopologyError(f"message clock {self.clock} does not fit 64 bits")


@dataclass(frozen=True, slots=True)
class Send:
    """Publish a region to one or several ranks, as it was before the move.

    The region is read-only until the operation completes. The k-th send from a to b in a round
    meets the k-th receive from a at b; their lengths must be equal.
    """

    to: tuple[int, ...]
    what: Region | Message

    def __init__(self, to: int | Iterable[int], what: Region | Message) -> None:
        object.__setattr__(self, "to", (to,) if isinstance(to, int) else tuple(to))
        object.__setattr__(self, "what", what)


@dataclass(frozen=True, slots=True)
class Recv:
    """Fold what the listed ranks sent into a region, in the listed order.

    The own rank may be listed: the node's own data then takes part at that place. ``COPY`` has
    exactly one source. Arrival order never affects bits. ``Recv(ANY)`` takes no region and
    yields the next :class:`Message` of any rank.
    """

    sources: tuple[int, ...] | Literal[_Any.ANY]
    region: Region = field(default_factory=lambda: Region(0, 0))
    combine: Combine = COPY

    def __init__(
        self,
        sources: int | Iterable[int] | Literal[_Any.ANY],
        region: Region | None = None,
        combine: Combine = COPY,
    ) -> None:
        if sources is ANY:
            listed: tuple[int, ...] | Literal[_Any.ANY] = ANY
        else:
            listed = (sources,) if isinstance(sources, int) else tuple(sources)
            if region is None:
                raise TopologyError("a receive from listed ranks needs a region")
            if combine is COPY and len(listed) != 1:
                raise TopologyError(f"COPY takes one source, not {len(listed)}")
            if not listed or len(set(listed)) != len(listed):
                raise TopologyError(f"a receive needs distinct sources, not {listed}")
        object.__setattr__(self, "sources", listed)
        object.__setattr__(self, "region", region if region is not None else Region(0, 0))
        object.__setattr__(self, "combine", combine)


Operation = Send | Recv
if TYPE_CHECKING:
    Kernel = Callable[[npt.NDArray[Any], npt.NDArray[Any]], object]
else:
    Kernel = Callable[..., object]
"""Called as ``kernel(dst, src)`` with arrays; half precision is shown as float32."""


class Handle(ABC):
    """One posted operation; see ``Links.post``."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the operation has completed."""

    @property
    @abstractmethod
    def message(self) -> Message | None:
        """What a completed ``Recv(ANY)`` yielded."""


class Store(ABC):
    """Server-side parameters with optimizer state, for topologies with ``serve``.

    A store changes only in ``apply``, after the last byte of a message has arrived.
    """

    @abstractmethod
    def apply(self, shard: int, message: Message, data: Sequence[memoryview]) -> None:
        """Take a message's data into a shard; runs off the event loop."""


class Links(ABC):
    """What a topology awaits: its links to the other members, in one round.

    Attributes:
        rank: this member's place in the view.
        size: how many members the view has.
        facts: what was measured and agreed.
    """

    rank: int
    size: int
    facts: Facts

    @abstractmethod
    def move(self, *operations: Operation) -> Awaitable[list[Message]]:
        """Run operations concurrently; return when all are done, with the messages received.

        They are done together: where a receive overwrites what the same move sends, it waits
        until that has left, so the rank that takes it must not need this receive's sender to
        have gone on first.

        Raises:
            HazardError: two of them write one element, or one writes a region in flight.
            MismatchError: a send met a receive of another length.
            ViewChangedError: the view ended; the exchange is started again by the driver.
        Cancelling the exchange abandons the round: the contributions are unharmed, the result
        is undefined.
        """

    @abstractmethod
    def post(self, *operations: Operation) -> tuple[Handle, ...]:
        """Start operations and return a handle for each; the first half of ``move``."""

    @abstractmethod
    def wait(
        self,
        handles: Iterable[Handle],
        *,
        count: int | None = None,
        deadline: float | None = None,
    ) -> Awaitable[list[Handle]]:
        """Wait until `count` (default: all) are done or ``now`` reaches `deadline` seconds.

        Returns those that are done, in the order given.
        """

    @abstractmethod
    def local(self, kernel: Kernel, src: Region, dst: Region) -> Awaitable[None]:
        """Run ``kernel(dst, src)`` on two regions, off the event loop."""

    @abstractmethod
    def scratch(self, length: int) -> Region:
        """Return extra memory of `length` elements for this round, not initialised."""

    @abstractmethod
    def apply(self, shard: int, message: Message) -> Awaitable[None]:
        """Hand a received message to the store, off the event loop, and release it."""

    @abstractmethod
    def release(self, message: Message) -> None:
        """Give back the memory of a received message."""

    @property
    @abstractmethod
    def now(self) -> float:
        """Seconds on the driver's monotonic clock; makes a topology dynamic."""

    @property
    @abstractmethod
    def rng(self) -> random.Random:
        """A random generator seeded alike on all members for this round."""


class Topology(ABC):
    """How the members of a view exchange buckets. Subclass it, and register an entry point.

    A plugin is a class, usually a frozen dataclass whose fields are its options. Register it in
    the group ``p2pdpt.topologies`` of your distribution; users then name it with
    ``--topology NAME`` or ``--topology NAME:option=value``.

    Attributes:
        static: the operations depend on nothing but rank, size, bucket, options and facts, so
            that drivers may run ahead, and record and replay them.
        agreement: ``exact`` if every member ends with the same bits, each holding every
            contribution once (checked); ``eventual`` for gossip and its like.
    """

    static: ClassVar[bool] = False
    agreement: ClassVar[Literal["exact", "eventual"]] = "exact"

    @abstractmethod
    async def exchange(self, links: Links, bucket: Bucket) -> None:
        """Turn everybody's contributions into everybody's result.

        Called once a round on every member. With ``exact`` agreement each element of the bucket
        must be written from all members' contributions, joined by ``bucket.combine``.
        """

    async def serve(self, links: Links, store: Store) -> None:  # noqa: B027 - optional
        """Run a role that outlives a step, until the run ends; the default has none."""

    def describe(self) -> str:
        """Return the name and the options that are not the default, as a person writes them."""
        listed: list[str] = []
        if dataclasses.is_dataclass(self):
            for each in dataclasses.fields(self):
                value = getattr(self, each.name)
                made = each.default_factory
                default = each.default if made is dataclasses.MISSING else made()
                if value != default:
                    listed.append(f"{each.name}={value}")
        return type(self).__name__.lower() + (f":{','.join(listed)}" if listed else "")
