"""A view: who computes the next step, and what they agreed about each other.

Views do not change yet: a run forms view 1 and ends with it. The number, the incarnations and
the facts are already carried everywhere, so that successors can be agreed later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pdpt.topology import Facts

__all__ = ["Member", "View"]


@dataclass(frozen=True, slots=True)
class Member:
    """One incarnation of a node, as a member of a view.

    Attributes:
        node_id: 16 hexadecimal digits, new for each incarnation.
        name: what people call the node, unique in a run.
        address: ``host:port`` where it is reached.
    """

    node_id: str
    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} ({self.node_id[:6]})"


@dataclass(frozen=True, slots=True)
class View:
    """Who computes a step.

    Attributes:
        number: 1 for the first view of a run.
        members: in rank order, the same on every member.
        facts: what was measured and agreed.
    """

    number: int
    members: tuple[Member, ...]
    facts: Facts = field(default_factory=Facts)

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.members)

    def rank_of(self, node_id: str) -> int:
        """Return the place of a member, or -1 if it is none."""
        for rank, member in enumerate(self.members):
            if member.node_id == node_id:
                return rank
        return -1
