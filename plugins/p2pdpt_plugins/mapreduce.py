"""MapReduce: each chunk of the gradients goes to its reducer, and the result to everybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from p2pdpt.errors import TopologyError
from p2pdpt.topology import Recv, Send, Topology

if TYPE_CHECKING:
    from p2pdpt.topology import Bucket, Links

__all__ = ["MapReduce"]


@dataclass(frozen=True)
class MapReduce(Topology):
    """All-reduce in two moves, for few nodes and small buckets.

    Map: the local gradients. Shuffle: each chunk goes to the rank that reduces it. Reduce: in
    rank order. Then every reducer sends its result to all.

    Dean & Ghemawat, "MapReduce: simplified data processing on large clusters", OSDI 2004.

    Args:
        reducer: rank of one single reducer, or -1 (the default) for one chunk on every rank.
    """

    static: ClassVar[bool] = True
    reducer: int = -1

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        """Shuffle and reduce, then send the results to all."""
        rank, everyone = links.rank, range(links.size)
        if self.reducer >= links.size:
            raise TopologyError(f"reducer {self.reducer} is not one of {links.size} ranks")
        others = [other for other in everyone if other != rank]
        if self.reducer >= 0:
            owned = {self.reducer: bucket.region}
        else:
            owned = dict(enumerate(bucket.chunks(links.size)))
        shuffle = [Send(owner, owned[owner]) for owner in owned if owner != rank]
        reduce = [Recv(everyone, owned[rank], bucket.combine)] if rank in owned else []
        await links.move(*shuffle, *reduce)
        publish = [Send(others, owned[rank])] if rank in owned else []
        gather = [Recv(owner, owned[owner]) for owner in owned if owner != rank]
        await links.move(*publish, *gather)
