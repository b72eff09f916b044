from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.protocol.formation import Formation, order_members
from p2pdpt.protocol.messages import Control, Decide, MemberEntry, Status

LOST = "lost"


def node_id(number: int) -> str:
    return f"{number:016x}"


def status(name: str = "node", min_nodes: int = 1, seed: int = 0, host: str = "h") -> Status:
    return Status(0, name, f"{name}:1", host, min_nodes, "ring", seed, (), False)


class Network:
    """Nodes that start, scan, dial and crash in a random order, over ordered links with delays.

    As with discovery on one host, a node can be found from before its own first scan.
    """

    def __init__(self, rng: random.Random, needs: list[int], blocked: set[frozenset[int]]) -> None:
        self.rng = rng
        self.needs = needs
        self.blocked = blocked
        self.nodes: dict[int, Formation] = {}
        self.crashed: set[int] = set()
        self.scanned: set[int] = set()
        self.todo: dict[int, set[int]] = {}
        self.tried: dict[int, set[int]] = {}
        self.links: dict[tuple[int, int], deque[Control | tuple[int, ...] | str]] = {}
        self.ids = {node_id(each): each for each in range(len(needs))}

    def alive(self) -> list[int]:
        return [each for each in self.nodes if each not in self.crashed]

    def start(self, each: int) -> None:
        self.nodes[each] = Formation(node_id(each), status(f"n{each}", self.needs[each], each))
        self.todo[each], self.tried[each] = set(), {each}

    def sight(self, each: int, others: set[int]) -> None:
        self.todo[each] |= others - self.tried[each]
        self.update(each)

    def update(self, each: int) -> None:
        node = self.nodes[each]
        node.settle(each in self.scanned and not self.todo[each])
        for peer, message in node.messages():
            link = self.links.get((each, self.ids[peer]))
            if link is not None:
                link.append(message)

    def scan(self, each: int) -> None:
        self.scanned.add(each)
        self.sight(each, set(self.alive()))

    def dial(self, one: int, two: int) -> None:
        self.todo[one].discard(two)
        self.tried[one].add(two)
        late = self.nodes[one].late or self.nodes[two].late
        if two in self.crashed or frozenset((one, two)) in self.blocked or late:
            self.update(one)
            return
        if (one, two) not in self.links:
            for here, there in ((one, two), (two, one)):
                self.todo[here].discard(there)
                self.tried[here].add(there)
                known = tuple(b for a, b in self.links if a == here)
                self.links[here, there] = deque([known])
                for other in known:
                    self.links[here, other].append((there,))
            self.nodes[one].connected(node_id(two))
            self.nodes[two].connected(node_id(one))
        self.update(one)
        self.update(two)

    def deliver(self, source: int, target: int) -> None:
        message = self.links[source, target].popleft()
        if target in self.crashed:
            return
        if message == LOST:
            del self.links[source, target]
            self.nodes[target].lost(node_id(source))
        elif isinstance(message, tuple):
            self.sight(target, set(message))
        else:
            assert isinstance(message, Control)
            self.nodes[target].receive(node_id(source), message)
        self.update(target)

    def crash(self, each: int) -> None:
        self.crashed.add(each)
        for (source, _), link in self.links.items():
            if source == each:
                # What it sent last may still arrive, or not.
                for _ in range(self.rng.randrange(len(link) + 1)):
                    link.pop()
                link.append(LOST)

    def run(self, crashes: int = 0) -> None:
        for _ in range(200_000):
            actions: list[tuple[str, int, int]] = []
            for each in range(len(self.needs)):
                if each not in self.nodes:
                    actions.append(("start", each, 0))
                elif each not in self.crashed:
                    if each not in self.scanned:
                        actions.append(("scan", each, 0))
                    actions += [("dial", each, other) for other in self.todo[each]]
            actions += [("deliver", *pair) for pair, link in self.links.items() if link]
            if crashes and self.alive():
                actions.append(("crash", self.rng.choice(self.alive()), 0))
            if not actions:
                return
            what, one, two = self.rng.choice(actions)
            if what == "crash":
                # Rarely, so that crashes fall anywhere in the course of things.
                if self.rng.random() < 0.1:
                    crashes -= 1
                    self.crash(one)
            elif what in ("dial", "deliver"):
                getattr(self, what)(one, two)
            else:
                getattr(self, what)(one)
        raise AssertionError("the nodes never come to rest")

    def views(self) -> dict[int, Decide]:
        return {each: view for each in self.alive() if (view := self.nodes[each].view) is not None}

    def members(self, view: Decide) -> set[int]:
        return {self.ids[each.node_id] for each in view.members}


def members_of(net: Network) -> list[set[int]]:
    return [net.members(view) for view in net.views().values()]


@given(st.integers(0, 2**32), st.integers(1, 7))
def test_a_simultaneous_start_forms_one_view_of_all(seed: int, size: int) -> None:
    net = Network(random.Random(seed), [size] * size, set())
    net.run()
    views = net.views()
    assert len(views) == size
    assert len({msgspec.msgpack.encode(view) for view in views.values()}) == 1
    assert net.members(views[0]) == set(range(size))
    assert [each.node_id for each in views[0].members] == [node_id(n) for n in range(size)]


@given(st.integers(0, 2**32), st.integers(2, 7), st.integers(1, 7))
def test_never_two_views_however_few_are_needed(seed: int, size: int, need: int) -> None:
    need = min(need, size)
    net = Network(random.Random(seed), [need] * size, set())
    net.run()
    views = net.views()
    assert len({msgspec.msgpack.encode(view) for view in views.values()}) == 1
    chosen = net.members(next(iter(views.values())))
    assert len(chosen) >= need and set(views) == chosen
    for each in range(size):
        late = net.nodes[each].late
        assert (late is None) == (each in chosen)


@given(st.integers(0, 2**32), st.integers(3, 6), st.data())
def test_pairs_that_cannot_reach_each_other(seed: int, size: int, data: st.DataObject) -> None:
    pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))
    blocked = {frozenset(pair) for pair in data.draw(st.lists(pairs, max_size=3))}
    net = Network(random.Random(seed), [size // 2 + 1] * size, blocked)
    net.run()
    distinct = {frozenset(members) for members in members_of(net)}
    # Two majorities share a member, which has voted once.
    assert len(distinct) <= 1
    for members in distinct:
        assert len(members) > size // 2
        assert not any({one, two} <= members for one, two in map(sorted, _pairs(blocked)))


def _pairs(blocked: set[frozenset[int]]) -> list[frozenset[int]]:
    return [pair for pair in blocked if len(pair) == 2]


@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(1, 3), st.integers(1, 6))
def test_with_crashes_at_most_one_view_can_work(
    seed: int, size: int, crashes: int, need: int
) -> None:
    net = Network(random.Random(seed), [min(need, size)] * size, set())
    net.run(min(crashes, size - 1))
    working = {
        frozenset(net.members(view))
        for view in net.views().values()
        if all(
            each not in net.crashed and net.nodes[each].view == view for each in net.members(view)
        )
    }
    assert len(working) <= 1
    for each in net.alive():
        node = net.nodes[each]
        # Nobody stays bound to a proposer that has gone.
        assert node.view or node.late or net.ids.get(node.status.bound, each) not in net.crashed


def pair(needs: tuple[int, int] = (2, 2)) -> tuple[Formation, Formation]:
    one = Formation(node_id(1), status("one", needs[0], seed=11))
    two = Formation(node_id(2), status("two", needs[1], seed=22))
    return one, two


def pump(*nodes: Formation) -> None:
    known = {node.node_id: node for node in nodes}
    for _ in range(20):
        for node in nodes:
            for peer, message in node.messages():
                known[peer].receive(node.node_id, message)


def test_alone_at_once() -> None:
    one, _ = pair((1, 1))
    assert one.view is None
    one.settle(True)
    assert one.view is not None
    assert one.view.members == (MemberEntry(node_id(1), "one", "one:1", 0),)
    assert one.view.seed == 11


def test_waits_for_the_most_that_any_member_waits_for() -> None:
    one, two = pair((2, 3))
    one.connected(two.node_id)
    two.connected(one.node_id)
    one.settle(True)
    two.settle(True)
    pump(one, two)
    assert one.view is None and two.view is None


def test_who_comes_late_is_told() -> None:
    one, two = pair((1, 1))
    one.settle(True)
    one.connected(two.node_id)
    two.connected(one.node_id)
    pump(one, two)
    assert two.late == one.view and two.view is None


def test_a_decision_is_learned_from_any_member() -> None:
    nodes = [Formation(node_id(n), status(f"n{n}", 3)) for n in range(3)]
    for node in nodes:
        for other in nodes:
            if other is not node:
                node.connected(other.node_id)
    for node in nodes:
        node.settle(True)
    # Deliver all but the decision for the last node, then lose the proposer.
    queue = [(n.node_id, *each) for n in nodes for each in n.messages()]
    known = {node.node_id: node for node in nodes}
    while queue:
        source, target, message = queue.pop(0)
        if isinstance(message, Decide) and target == node_id(2):
            continue
        known[target].receive(source, message)
        queue += [(target, *each) for each in known[target].messages()]
    assert nodes[1].view is not None and nodes[2].view is None
    for node in nodes[1:]:
        node.lost(node_id(0))
    pump(nodes[1], nodes[2])
    assert nodes[2].view == nodes[1].view


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_rank_order_names_and_hosts(order: tuple[int, ...]) -> None:
    given_names = [(3, "node10", "x"), (2, "node2", "y"), (1, "node10", "x")]
    statuses = {
        node_id(given_names[each][0]): status(given_names[each][1], host=given_names[each][2])
        for each in order
    }
    assert order_members(statuses) == (
        MemberEntry(node_id(2), "node2", "node2:1", 0),
        MemberEntry(node_id(1), "node10", "node10:1", 1),
        MemberEntry(node_id(3), "node10-2", "node10:1", 1),
    )
