"""Randomized gossip as a topology: every node averages with one partner a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from p2pdpt.topology import Recv, Send, Topology

if TYPE_CHECKING:
    from p2pdpt.topology import Bucket, Links

__all__ = ["Gossip"]


@dataclass(frozen=True)
class Gossip(Topology):
    """Average with one random partner a round; with an odd number of nodes one sits out.

    What a node sends does not grow with the number of nodes. The mean over all nodes never
    changes, and their distance from it shrinks with every round.

    Boyd, Ghosh, Prabhakar & Shah, "Randomized gossip algorithms", IEEE Transactions on
    Information Theory 52 (2006).
    """

    agreement: ClassVar[Literal["exact", "eventual"]] = "eventual"

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        """Swap the bucket with the partner, and join both."""
        order = list(range(links.size))
        links.rng.shuffle(order)  # the same on all nodes, another one each round
        place = order.index(links.rank) ^ 1
        if place < links.size:
            partner = order[place]
            pair = sorted((links.rank, partner))  # one order for both, so they get the same bits
            await links.move(
                Send(partner, bucket.region),
                Recv(pair, bucket.region, bucket.combine),
            )
