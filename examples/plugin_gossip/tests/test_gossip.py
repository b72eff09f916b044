"""The gossip topology against p2pdpt's kit, and the two properties that make it gossip."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gossip_topology import Gossip

from p2pdpt.registry import create_topology
from p2pdpt.testing.simulator import simulate
from p2pdpt.testing.topology_kit import TopologyKit
from p2pdpt.topology import Topology


class TestConformance(TopologyKit):
    """What p2pdpt asks of every topology."""

    def topology(self, size: int) -> Topology:
        return Gossip()


def gossip(values: list[Any], rounds: int) -> list[list[Any]]:
    """Return the values of all nodes before the first and after each of several rounds."""
    history = [values]
    for seed in range(rounds):
        outcome = simulate(Gossip(), history[-1], seed=seed)
        assert outcome.errors == [None] * len(values)
        history.append(outcome.results)
    return history


def start(nodes: int) -> list[Any]:
    rng = np.random.default_rng(nodes)
    return [rng.integers(-1000, 1000, 50).astype(np.float64) for _ in range(nodes)]


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16])
def test_the_mean_over_all_nodes_never_changes(nodes: int) -> None:
    history = gossip(start(nodes), rounds=12)
    for values in history[1:]:
        np.testing.assert_allclose(np.mean(values, axis=0), np.mean(history[0], axis=0), atol=1e-9)


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 16])
def test_the_nodes_approach_the_mean(nodes: int) -> None:
    history = gossip(start(nodes), rounds=40)
    distances = [float(np.var(values, axis=0).sum()) for values in history]
    rises = [after - before for before, after in pairwise(distances)]
    assert max(rises) <= 1e-9
    assert distances[-1] < 1e-4 * distances[0]


@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_partners_end_with_the_same_bits(nodes: int) -> None:
    results = simulate(Gossip(), start(nodes), seed=5).results
    assert len({result.tobytes() for result in results}) == (nodes + 1) // 2


def test_a_node_sends_its_bucket_once_however_many_nodes_there_are() -> None:
    for nodes in (2, 4, 16):
        outcome = simulate(Gossip(), start(nodes))
        assert outcome.messages_sent == [1] * nodes


def test_users_choose_it_by_name() -> None:
    assert create_topology("gossip") == Gossip()
    assert create_topology("gossip-topology:gossip") == Gossip()
