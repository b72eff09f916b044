"""Collectives that move data without joining it, as topologies of the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from p2pdpt.topology import Recv, Send, Topology

if TYPE_CHECKING:
    from p2pdpt.topology import Bucket, Links, Operation

__all__ = ["Broadcast"]


@dataclass(frozen=True)
class Broadcast(Topology):
    """Copy one rank's contribution to all, along a binomial tree.

    Use it with ``Reduction.NONE``. Takes ``ceil(log2 n)`` moves; long buckets are passed on
    while they arrive.
    """

    static: ClassVar[bool] = True
    root: int = 0

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        """Receive from the parent, then send to the children, the farthest first."""
        size = links.size
        place = (links.rank - self.root) % size
        # The lowest set bit of a place tells its parent; smaller bits tell its children.
        low = place & -place if place else 1 << (size - 1).bit_length()
        if place:
            await links.move(Recv((place - low + self.root) % size, bucket.region))
        sends: list[Operation] = []
        while low > 1:
            low >>= 1
            if place + low < size:
                sends.append(Send((place + low + self.root) % size, bucket.region))
        await links.move(*sends)
