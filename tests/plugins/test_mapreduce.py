from __future__ import annotations

import numpy as np
import pytest

from p2pdpt.errors import ConfigError, TopologyError
from p2pdpt.registry import create_topology
from p2pdpt.testing.simulator import simulate
from p2pdpt.testing.topology_kit import TopologyKit, pattern
from p2pdpt.topology import Topology
from p2pdpt_plugins.mapreduce import MapReduce


class TestMapReduce(TopologyKit):
    def topology(self, size: int) -> Topology:
        return MapReduce()


class TestSingleReducer(TopologyKit):
    def topology(self, size: int) -> Topology:
        return MapReduce(reducer=size - 1)


def test_the_registry_knows_it_and_its_option() -> None:
    assert create_topology("mapreduce") == MapReduce()
    assert create_topology("mapreduce:reducer=2") == MapReduce(reducer=2)
    with pytest.raises(ConfigError, match="reducer"):
        create_topology("mapreduce:reducers=2")


def test_reduces_in_rank_order() -> None:
    rng = np.random.default_rng(4)
    given = [rng.standard_normal(16).astype(np.float32) for _ in range(4)]
    outcome = simulate(MapReduce(), given, seed=9)
    total = given[0]
    for each in given[1:]:
        total = total + each
    np.testing.assert_array_equal(outcome.results[2], total / np.float32(4))


def test_a_reducer_that_is_no_member_is_refused() -> None:
    with pytest.raises(TopologyError, match="reducer 3 is not one of 2 ranks"):
        simulate(MapReduce(reducer=3), [pattern(rank, 5) for rank in range(2)])
