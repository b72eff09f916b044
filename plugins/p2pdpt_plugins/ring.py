"""Ring all-reduce: every node talks only to its two neighbours, and sends the least possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from p2pdpt.topology import Recv, Send, Topology

if TYPE_CHECKING:
    from p2pdpt.topology import Bucket, Links

__all__ = ["Ring"]


@dataclass(frozen=True)
class Ring(Topology):
    """All-reduce in a ring, for large buckets and many nodes.

    The bucket is cut into one chunk per rank. Each chunk travels once around the ring and
    gathers every contribution (reduce-scatter), then once more as the result (all-gather).
    Every rank sends ``2 (n - 1) / n`` times the bucket in ``2 (n - 1)`` moves.

    Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69 (2009).
    """

    static: ClassVar[bool] = True

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        """Reduce-scatter, then all-gather."""
        rank, size = links.rank, links.size
        after, before = (rank + 1) % size, (rank - 1) % size
        chunks = bucket.chunks(size)
        for step in range(size - 1):
            await links.move(
                Send(after, chunks[(rank - step) % size]),
                Recv((before, rank), chunks[(rank - step - 1) % size], bucket.combine),
            )
        for step in range(size - 1):
            await links.move(
                Send(after, chunks[(rank - step + 1) % size]),
                Recv(before, chunks[(rank - step) % size]),
            )
