"""What a round asks of its driver, and how the two name memory: areas, and slices of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from p2pdpt.channel import Meta
    from p2pdpt.topology import Combine, Kernel, Message

__all__ = ["MINE", "RESULT", "SEGMENT", "WIDE", "WINDOW", "RoundIO", "Slice"]

RESULT: Final = 0
MINE: Final = -1
WIDE: Final = -2
"""Area of the float32 partial sums of a half-precision bucket."""
WINDOW: Final = 1 << 16
"""Elements that a staged receive takes from each source before they are folded: 256 KiB of
float32, which stays in the L2 cache."""
SEGMENT: Final = 1 << 17
"""Elements that a send waits for before it passes them on, unless they are its last."""


class Slice(NamedTuple):
    """Elements ``start`` to ``stop`` of an area: RESULT, MINE, WIDE, scratch or staging."""

    area: int
    start: int
    stop: int


class RoundIO(ABC):
    """What a round asks of its driver. Calls return at once and may call the round back."""

    @abstractmethod
    def open_send(self, peer: int, ordinal: int, length: int) -> None:
        """Open the outgoing message `ordinal` to `peer`, of `length` elements."""

    @abstractmethod
    def push(self, peer: int, ordinal: int, data: Slice, meta: Meta) -> None:
        """Append a slice to an outgoing message; answered by ``Round.drained``."""

    @abstractmethod
    def push_bytes(self, peer: int, ordinal: int, payload: bytes) -> None:
        """Append bytes to an outgoing message, one element each; not answered."""

    @abstractmethod
    def open_receive(self, peer: int, ordinal: int, length: int) -> None:
        """Post a receive; its bytes are placed by ``Round.land`` and ``Round.arrived``."""

    @abstractmethod
    def cancel_receive(self, peer: int, ordinal: int) -> None:
        """Forget a posted receive."""

    @abstractmethod
    def grant(self, peer: int, ordinal: int, upto: int) -> None:
        """Allow `peer` to send the elements of a message below `upto`."""

    @abstractmethod
    def fold(
        self,
        out: Slice,
        sources: Sequence[Slice],
        combine: Combine,
        scales: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        """Fold slices of equal length, now."""

    @abstractmethod
    def local(
        self, kernel: Kernel, src: Sequence[Slice], dst: Slice, done: Callable[[], None]
    ) -> None:
        """Run a kernel off the loop, then call `done`."""

    @abstractmethod
    def apply(
        self, shard: int, message: Message, data: Sequence[Slice], done: Callable[[], None]
    ) -> None:
        """Hand a message to the store off the loop, then call `done`."""

    @abstractmethod
    def scratch(self, area: int, length: int) -> None:
        """Provide an area of `length` elements, in the wide type."""

    @abstractmethod
    def drop(self, area: int) -> None:
        """Give back an area of ``scratch``."""

    @abstractmethod
    def staging(self, length: int) -> tuple[int, int]:
        """Lend two areas of `length` elements: one in the stored type, one in the wide type.

        They may be the same area where the types are.
        """

    @abstractmethod
    def release(self, areas: tuple[int, int]) -> None:
        """Take back what ``staging`` lent."""

    @abstractmethod
    def now(self) -> float:
        """Return seconds on the driver's monotonic clock."""

    @abstractmethod
    def wake_at(self, when: float) -> None:
        """Call ``Round.tick`` at `when` seconds or a little later."""
