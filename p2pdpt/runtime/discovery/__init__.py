"""How nodes find each other: the contract of a discovery source.

A source only says where a peer may be reached; whether it belongs to the run is found out by
the handshake. Registered in the entry-point group ``p2pdpt.discovery``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.channel import Availability, PeerInfo
    from p2pdpt.config import NodeConfig

__all__ = ["Discovery", "Sighting"]


@dataclass(frozen=True, slots=True)
class Sighting:
    """Where a peer may be reached.

    Attributes:
        addresses: ``host:port``, best first.
        node_id: who it is said to be; empty if only the address is known.
        lasting: whether to go on trying when it cannot be reached.
    """

    addresses: tuple[str, ...]
    node_id: str = ""
    lasting: bool = False


class Discovery(ABC):
    """A way to find the peers of a run.

    Attributes:
        name: what people choose it by.
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, config: NodeConfig, me: PeerInfo, run: str) -> None: ...

    @classmethod
    @abstractmethod
    def availability(cls) -> Availability:
        """Tell whether this machine can use it, and why (not); never raises, opens nothing."""

    @abstractmethod
    async def start(self) -> None:
        """Make this node findable.

        Raises:
            UnavailableError: this machine cannot use the source after all.
        """

    @abstractmethod
    async def search(self, found: Callable[[Sighting], None], swept: Callable[[], None]) -> None:
        """Call `found` for each peer, and `swept` after each full look, until cancelled.

        A peer may be reported again and again. Cancelled when the run has begun; the node stays
        findable until ``close``.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return in one line where it looked and what it found, for people."""

    @abstractmethod
    async def close(self) -> None:
        """Stop being findable; leave nothing behind. May be called twice."""
