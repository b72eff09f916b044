"""A node's handle on a run: what training and embedding programs need of the network.

Implemented by :mod:`p2pdpt.runtime`; a program gets one from ``await node.join("run")``. All
coroutines run on the node's event loop. When a member fails, every operation that waits, and
every later one, raises the same :class:`~p2pdpt.errors.PeerFailedError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2pdpt.dtypes import DType
    from p2pdpt.errors import P2PError
    from p2pdpt.memory import BucketMemory
    from p2pdpt.protocol.view import Member, View
    from p2pdpt.topology import Combine

__all__ = ["Group", "GroupCounters"]


@dataclass(frozen=True, slots=True)
class GroupCounters:
    """What a group has carried so far: over all links, bulk and control, headers included.

    In shared memory nothing is sent: what this member has read of the others' memory counts as
    received, and what they have read of its memory, as the plans say, as sent.
    """

    bytes_sent: int
    bytes_received: int
    messages_sent: int
    messages_received: int


class Group(ABC):
    """One node's membership in one run.

    Attributes:
        run: the run's name.
        view: the members, in rank order, and the facts.
        rank: this member's place.
        topology: as a person would write it, for instance ``ring``.
        started: the step that the group is in, for messages; set by ``exchange``.
    """

    run: str
    view: View
    rank: int
    topology: str

    @property
    @abstractmethod
    def transport(self) -> str:
        """What carries the buckets, ``shm`` or for instance ``tcp``; empty for a lone member."""

    @property
    def size(self) -> int:
        """How many members there are."""
        return self.view.size

    @property
    def me(self) -> Member:
        """This member."""
        return self.view.members[self.rank]

    @property
    @abstractmethod
    def counters(self) -> GroupCounters:
        """What has been carried so far."""

    @property
    @abstractmethod
    def failure(self) -> P2PError | None:
        """Why the group cannot go on, if so."""

    @abstractmethod
    def allocate(self, dtype: DType, length: int) -> BucketMemory:
        """Allocate a bucket once, known to the transports, given back when the group ends.

        Raises:
            MemoryError: the system has not got it.
        """

    @abstractmethod
    async def exchange(
        self,
        memory: BucketMemory,
        *,
        step: int,
        bucket: int,
        attempt: int = 0,
        weight: float = 1.0,
    ) -> None:
        """Turn all members' ``mine`` into the weighted mean in every ``result``.

        All members call it for the same buckets of the same step; different buckets may be
        exchanged at once and in any order.

        Args:
            memory: a bucket of a floating type, of equal type and length on all members.
            step: the step that is open.
            bucket: its number in the step.
            attempt: which repetition of the step.
            weight: of this node's contribution: 0, or from 1e-12 to 1e12; all zero gives zeros.

        Raises:
            ConfigError: the type, the number of the bucket or the weight cannot be.
            PeerFailedError: a member failed or left; `mine` is unharmed.
            TopologyError: the topology broke a rule.
        Cancellation abandons the round: `mine` is unharmed, nothing is written any more.
        """

    @abstractmethod
    async def seal(self, step: int, attempt: int = 0) -> None:
        """Return when all members are known to hold the step's complete result.

        Call it when every exchange of the step has returned.

        Raises:
            PeerFailedError: a member failed before it was known to hold the result.
        """

    @abstractmethod
    async def all_reduce(
        self, memory: BucketMemory, combine: Combine, *, name: str, mean: bool = False
    ) -> None:
        """Join all members' ``mine`` into every ``result`` with the group's topology.

        Args:
            memory: equal type and length on all members.
            combine: ``ADD``, ``MIN``, ``MAX`` or ``PROD``.
            name: collectives of one name are matched in the order of their calls.
            mean: divide by the number of members (floating types only).
        """

    @abstractmethod
    async def broadcast(self, memory: BucketMemory, *, root: int = 0, name: str) -> None:
        """Copy the root's ``mine`` into every member's ``result``, bit by bit."""

    @abstractmethod
    async def all_gather(self, payload: bytes, *, name: str) -> list[bytes]:
        """Return every member's payload in rank order; for small things, up to 8 MiB each."""

    @abstractmethod
    async def leave(self, error: str | None = None) -> None:
        """Say farewell to the members and close the links.

        Args:
            error: why, if this node failed: members that still need it report this text.
        Never raises; may be called twice; a cancelled leave still closes.
        """
