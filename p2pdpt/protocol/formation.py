"""How the nodes of a run, all equal, agree on its first view.

Every node tells all nodes that it is connected to what it sees (:class:`Status`, with a version
that counts the changes). The node with the smallest id among those that could gather enough
mutually connected nodes proposes them; each of these votes for it, is bound by its vote, and
votes for no other until the proposer withdraws or is lost. With all votes the proposer decides.

Exactly one view comes of a simultaneous start, in any order of messages, because

- nobody proposes or votes before it is settled: it has tried to reach every node that it heard of;
- a proposal names the version of each member's status that it builds on, and a member whose
  status has changed since does not vote: so no member is connected to a node that the proposer
  has not tried to include;
- of two proposals that share a member, the one with the larger proposer's id is withdrawn.

A node that learns of a decided view which has no place for it came too late. No time, no
randomness: the seed is part of the status.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from p2pdpt.protocol.messages import (
    Control,
    Decide,
    MemberEntry,
    Propose,
    Started,
    Status,
    Vote,
    Withdraw,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Formation", "order_members"]


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which ``node2`` comes before ``node10``."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    ]


def order_members(statuses: Mapping[str, Status]) -> tuple[MemberEntry, ...]:
    """Return the members in rank order, by name and then id, with unique names and host numbers."""
    names: set[str] = set()
    hosts: dict[str, int] = {}
    members = []
    for node_id in sorted(statuses, key=lambda each: (natural(statuses[each].name), each)):
        status = statuses[node_id]
        name, count = status.name, 1
        while name in names:
            count += 1
            name = f"{status.name}-{count}"
        names.add(name)
        host = hosts.setdefault(status.host, len(hosts))
        members.append(MemberEntry(node_id, name, status.address, host))
    return tuple(members)


@dataclass
class _Proposal:
    number: int
    members: tuple[str, ...]
    versions: tuple[int, ...]
    votes: set[str] = field(default_factory=set)

    def version_of(self, member: str) -> int:
        return self.versions[self.members.index(member)]


class Formation:
    """One node's part in the forming of a view.

    Tell it what happens; then send what ``messages`` gives, in order.

    Attributes:
        view: the view, once decided; this node is a member.
        late: a view that was decided without this node, once known.
    """

    def __init__(self, node_id: str, status: Status) -> None:
        """Begin with `status`: what this node brings; it sees nobody and is not settled."""
        self.node_id = node_id
        self.view: Decide | None = None
        self.late: Decide | None = None
        self._me = msgspec.structs.replace(status, sees=(), settled=False, bound="", version=0)
        self._peers: dict[str, Status | None] = {}
        self._pending: dict[str, Propose] = {}
        self._mine: _Proposal | None = None
        self._number = 0
        self._told: Status | None = None
        self._out: list[tuple[str, Control]] = []

    @property
    def status(self) -> Status:
        """What this node says of itself now."""
        return self._me

    @property
    def peers(self) -> Mapping[str, Status | None]:
        """What each connected node last said."""
        return self._peers

    def connected(self, peer: str) -> None:
        """Note a connection to `peer`, which is ready for messages."""
        self._peers[peer] = None
        if self.view is not None:
            self._out.append((peer, Started(self.view)))
            return
        self._see()
        self._out.append((peer, self._me))
        self._act()

    def lost(self, peer: str) -> None:
        """Note that the connection to `peer` has ended."""
        if self._peers.pop(peer, None) is None and peer not in self._me.sees:
            return
        self._pending.pop(peer, None)
        if self.view is not None:
            return
        if self._me.bound == peer:
            self._bind("")
        if self._mine is not None and peer in self._mine.members:
            self._withdraw()
        self._see()
        self._act()

    def settle(self, settled: bool) -> None:
        """Note whether all nodes known so far have been tried."""
        if self.view is None and settled != self._me.settled:
            self._me = msgspec.structs.replace(
                self._me, settled=settled, version=self._me.version + 1
            )
            self._act()

    def receive(self, peer: str, message: Control) -> None:
        """Take a message of a connected node; those of other kinds are ignored."""
        if peer not in self._peers:
            return
        if isinstance(message, Status):
            self._peers[peer] = message
        if self.view is not None:
            self._answer(peer, message)
            return
        match message:
            case Status():
                self._check_mine(peer, message)
            case Propose():
                self._pending[peer] = message
            case Vote():
                self._count(peer, message)
            case Withdraw():
                pending = self._pending.get(peer)
                if pending is not None and pending.number == message.number:
                    del self._pending[peer]
                    if self._me.bound == peer:
                        self._bind("")
            case Decide():
                if self._me.bound == peer:
                    self._decided(message)
            case Started():
                if any(each.node_id == self.node_id for each in message.view.members):
                    # Its proposer died after it had decided.
                    self._decided(message.view)
                elif self.late is None:
                    self.late = message.view
            case _:
                return
        self._act()

    def messages(self) -> list[tuple[str, Control]]:
        """Return, once, what is to be sent to whom."""
        if self.view is None and self._told != self._me:
            self._told = self._me
            self._out.extend((peer, self._me) for peer in self._peers)
        out, self._out = self._out, []
        return out

    def _see(self) -> None:
        self._me = msgspec.structs.replace(
            self._me, sees=tuple(sorted(self._peers)), version=self._me.version + 1
        )

    def _bind(self, proposer: str) -> None:
        self._me = msgspec.structs.replace(self._me, bound=proposer)

    def _act(self) -> None:
        mine = self._mine
        if mine is not None and self._me.version != mine.version_of(self.node_id):
            self._withdraw()
        if self.view is None and self.late is None and self._me.settled:
            self._vote()
            self._propose()

    def _answer(self, peer: str, message: Control) -> None:
        """Tell a node that has missed the decision; one that waits for it gets it anyway."""
        assert self.view is not None
        member = any(each.node_id == peer for each in self.view.members)
        if isinstance(message, Status) and not (member and message.bound):
            self._out.append((peer, Started(self.view)))

    def _vote(self) -> None:
        bound = self._me.bound
        if bound and bound != self.node_id:
            return
        for proposer in sorted(self._pending):
            if bound and proposer > self.node_id:
                return
            proposal = self._pending[proposer]
            if not self._agrees(proposer, proposal):
                continue
            if self._mine is not None:
                self._withdraw()
            self._bind(proposer)
            self._out.append((proposer, Vote(proposal.number)))
            return

    def _agrees(self, proposer: str, proposal: Propose) -> bool:
        versions = dict(zip(proposal.members, proposal.versions, strict=False))
        return (
            proposer in versions
            and versions.get(self.node_id) == self._me.version
            and all(each == self.node_id or each in self._peers for each in proposal.members)
        )

    def _propose(self) -> None:
        if self._me.bound or self._mine is not None:
            return
        known: dict[str, Status] = {self.node_id: self._me}
        for peer, status in self._peers.items():
            if status is None or not status.settled:
                return
            known[peer] = status
        for leader in sorted(known):
            members = _best(leader, known)
            if len(members) < max(known[each].min_nodes for each in members):
                continue
            if leader != self.node_id or any(known[each].bound for each in members):
                return
            self._number += 1
            versions = tuple(known[each].version for each in members)
            self._mine = _Proposal(self._number, members, versions, {self.node_id})
            self._bind(self.node_id)
            for member in members:
                if member != self.node_id:
                    self._out.append((member, Propose(self._number, members, versions)))
            self._decide()
            return

    def _check_mine(self, peer: str, status: Status) -> None:
        """Withdraw the own proposal if it no longer builds on what its members say."""
        mine = self._mine
        if mine is None or peer not in mine.members:
            return
        changed = status.version != mine.version_of(peer)
        # Of two proposals for one member the smaller id's goes on; it may have been decided.
        overtaken = status.bound and status.bound < self.node_id
        if changed or overtaken:
            self._withdraw()

    def _withdraw(self) -> None:
        mine, self._mine = self._mine, None
        assert mine is not None
        self._bind("")
        for member in mine.members:
            if member != self.node_id and member in self._peers:
                self._out.append((member, Withdraw(mine.number)))

    def _count(self, peer: str, vote: Vote) -> None:
        mine = self._mine
        if mine is not None and vote.number == mine.number and peer in mine.members:
            mine.votes.add(peer)
            self._decide()

    def _decide(self) -> None:
        mine = self._mine
        if mine is None or mine.votes != set(mine.members):
            return
        statuses = {self.node_id: self._me}
        for member in mine.members:
            status = self._peers.get(member)
            if status is not None:
                statuses[member] = status
        entries = order_members(statuses)
        first = statuses[entries[0].node_id]
        view = Decide(1, entries, first.seed, first.topology)
        for member in mine.members:
            if member != self.node_id:
                self._out.append((member, view))
        self._decided(view)

    def _decided(self, view: Decide) -> None:
        self.view = view
        self._mine = None
        members = {each.node_id for each in view.members}
        self._out.extend((peer, Started(view)) for peer in self._peers if peer not in members)


def _best(leader: str, known: Mapping[str, Status]) -> tuple[str, ...]:
    """Return a largest set of mutually connected nodes around `leader` that is quick to find."""

    def mutual(one: str, two: str) -> bool:
        return two in seen[one] and one in seen[two]

    def grow(first: Iterable[str]) -> list[str]:
        found = list(first)
        for each in near:
            if each not in found and all(mutual(each, other) for other in found):
                found.append(each)
        return found

    seen = {each: frozenset(status.sees) for each, status in known.items()}
    near = [each for each in sorted(known) if mutual(leader, each)]
    best = grow([leader])
    if len(best) <= len(near):
        for second in near:
            best = max(best, grow([leader, second]), key=len)
    return tuple(sorted(best))
