from __future__ import annotations

import numpy as np
import pytest

from p2pdpt.protocol.weighting import Reduction
from p2pdpt.runtime.drivers.collectives import Broadcast
from p2pdpt.testing.simulator import Network, simulate
from p2pdpt.testing.topology_kit import pattern


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9])
def test_everybody_ends_with_the_root_s_contribution(size: int) -> None:
    for root in {0, size - 1, size // 2}:
        for in_place in (False, True):
            given_ = [pattern(rank, 50) for rank in range(size)]
            outcome = simulate(
                Broadcast(root),
                given_,
                reduction=Reduction.NONE,
                seed=root,
                in_place=in_place,
                network=Network(frame_elements=(1, 20)),
            )
            for result in outcome.results:
                np.testing.assert_array_equal(result, pattern(root, 50))
            assert sum(outcome.messages_sent) == size - 1, "each but the root receives once"


@pytest.mark.parametrize(
    ("size", "moves"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (8, 3), (9, 3)]
)
def test_it_takes_as_many_latencies_as_the_tree_is_deep(size: int, moves: int) -> None:
    outcome = simulate(
        Broadcast(),
        [pattern(rank, 8) for rank in range(size)],
        reduction=Reduction.NONE,
        network=Network(latency_s=(1e-3, 1e-3), frame_elements=(8, 8)),
    )
    assert outcome.seconds == pytest.approx(moves * 1e-3)


def test_any_type_is_only_moved() -> None:
    given_ = [np.full(5, 3 + rank, "int8") for rank in range(3)]
    outcome = simulate(Broadcast(2), given_, reduction=Reduction.NONE)
    np.testing.assert_array_equal(outcome.results[0], np.full(5, 5, "int8"))
    bits = [np.full(5, 0x7FC1 + rank, "uint16") for rank in range(3)]
    outcome = simulate(Broadcast(1), bits, dtype="bfloat16", reduction=Reduction.NONE)
    np.testing.assert_array_equal(outcome.results[0], np.full(5, 0x7FC2, "uint16"))


def test_it_describes_itself() -> None:
    assert Broadcast().describe() == "broadcast"
    assert Broadcast(2).describe() == "broadcast:root=2"
