from __future__ import annotations

import numpy as np
import pytest

from p2pdpt.registry import create_topology
from p2pdpt.testing.simulator import simulate
from p2pdpt.testing.topology_kit import TopologyKit, pattern
from p2pdpt.topology import Topology
from p2pdpt_plugins.ring import Ring

HEADER = 72


class TestRing(TopologyKit):
    def topology(self, size: int) -> Topology:
        return Ring()


def test_the_registry_knows_it() -> None:
    assert create_topology("ring") == Ring()


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_bytes_are_the_least_possible(size: int) -> None:
    """Each rank sends 2 (n - 1) / n of the bucket, in 2 (n - 1) messages."""
    length = 840
    outcome = simulate(Ring(), [pattern(rank, length) for rank in range(size)])
    for rank in range(size):
        assert outcome.messages_sent[rank] == 2 * (size - 1)
    payload = sum(outcome.bytes_sent) - HEADER * outcome.frames_sent
    assert payload == size * 2 * (size - 1) * length * 4 // size


def test_order_of_the_fold_is_that_of_the_ring() -> None:
    """Chunk c is summed from rank c on around the ring, whatever arrives first."""
    rng = np.random.default_rng(3)
    given = [rng.standard_normal(3).astype(np.float32) for _ in range(3)]
    outcome = simulate(Ring(), given, seed=5)
    for chunk in range(3):
        total = given[chunk][chunk]
        for hop in (1, 2):
            total = np.float32(total + given[(chunk + hop) % 3][chunk])
        assert outcome.results[0][chunk] == np.float32(total / np.float32(3))
