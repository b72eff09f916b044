"""A conformance kit for topologies: subclass it in your tests and name your class.

::

    class TestGossip(TopologyKit):
        def topology(self, size):
            return Gossip()

Every method whose name begins with ``test_`` is a property that users rely on, checked in the
simulator over node counts, bucket lengths, element types, delivery orders and weights. It needs
no network, and pytest only to collect it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from p2pdpt import kernels as kernel_module
from p2pdpt.dtypes import DTYPES, dtype_named
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.testing.simulator import Network, Simulation, simulate
from p2pdpt.topology import ADD, MAX, MIN, PROD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from p2pdpt.testing.simulator import Outcome
    from p2pdpt.topology import Topology

__all__ = ["TopologyKit", "pattern"]


def pattern(rank: int, length: int) -> Any:
    """Return a contribution, float32 of shape ``(length,)``, that no other mix of ranks equals.

    Element ``i`` is ``3000 * 2**rank + i % 997``: whole numbers whose sums over any set of up to
    9 ranks are exact in float32 in any order, and differ from set to set, so that a missing,
    doubled, stale or shifted contribution shows.
    """
    return (3000.0 * 2**rank + np.arange(length) % 997).astype(np.float32)


class TopologyKit(ABC):
    """What every topology must do. Override ``topology``; narrow the class attributes if needed.

    Attributes:
        sizes: node counts that are tried.
        lengths: bucket lengths in elements; some are shorter than the number of nodes.
        seeds: how many delivery orders of each case.
    """

    sizes: ClassVar[tuple[int, ...]] = (1, 2, 3, 4, 5, 7, 8)
    lengths: ClassVar[tuple[int, ...]] = (0, 1, 3, 8, 1000)
    seeds: ClassVar[int] = 3

    @abstractmethod
    def topology(self, size: int) -> Topology:
        """Return the topology under test, for `size` nodes."""

    def test_every_member_ends_with_the_mean(self) -> None:
        """Exact: the mean of all contributions. Eventual: something between them."""
        for size, length, seed in self._cases():
            given = [pattern(rank, length) for rank in range(size)]
            outcome = self._run(size, given, seed)
            low, high = np.min(given, axis=0), np.max(given, axis=0)
            for result in outcome.results:
                if self._exact(size):
                    expected = np.sum(given, axis=0, dtype=np.float64) / size
                    np.testing.assert_allclose(result, expected, rtol=1e-6)
                else:
                    assert np.all(result >= low * (1 - 1e-6)), "below every contribution"
                    assert np.all(result <= high * (1 + 1e-6)), "above every contribution"

    def test_a_sum_holds_every_contribution_once(self) -> None:
        """Sums of whole numbers are exact, so one missing or doubled contribution shows."""
        for size, length, seed in self._cases():
            if not self._exact(size):
                continue
            given = [pattern(rank, length) for rank in range(size)]
            outcome = self._run(size, given, seed, reduction=Reduction.SUM)
            expected = np.sum(given, axis=0, dtype=np.float64).astype(np.float32)
            for result in outcome.results:
                np.testing.assert_array_equal(result, expected)

    def test_members_agree_to_the_bit(self) -> None:
        """With random floats every rank has the same bits, in every delivery order."""
        for size, length, _ in self._cases():
            if not self._exact(size):
                continue
            given = self._random(size, length)
            first = None
            for seed in range(self.seeds):
                for result in self._run(size, given, seed).results:
                    first = result if first is None else first
                    np.testing.assert_array_equal(result.view(np.uint32), first.view(np.uint32))

    def test_contributions_are_untouched(self) -> None:
        """`mine` is written by no round, so that it can be retried."""
        for size, length, seed in self._cases():
            given = self._random(size, length)
            kept = [each.copy() for each in given]
            self._run(size, given, seed)
            for each, copy in zip(given, kept, strict=True):
                np.testing.assert_array_equal(each, copy)

    def test_in_place_gives_the_same_bits(self) -> None:
        """One area for both, for those who lack the memory."""
        for size, length, seed in self._cases():
            given = self._random(size, length)
            apart = self._run(size, given, seed)
            together = self._run(size, [each.copy() for each in given], seed + 1, in_place=True)
            if self._exact(size):
                for one, other in zip(apart.results, together.results, strict=True):
                    np.testing.assert_array_equal(one, other)

    def test_running_ahead_gives_the_same_bits(self) -> None:
        """A static topology runs ahead on real nodes; waiting at each move changes nothing."""
        for size, length, seed in self._cases():
            if not self._exact(size):
                continue
            given = self._random(size, length)
            ahead = self._run(size, given, seed)
            waiting = self._run(size, given, seed, run_ahead=False)
            for one, other in zip(ahead.results, waiting.results, strict=True):
                np.testing.assert_array_equal(one, other)

    def test_a_later_step_gives_the_bits_of_a_fresh_round(self) -> None:
        """A static topology is recorded, and replayed with other contributions and weights."""
        for size in self.sizes:
            if not (self.topology(size).static and self._exact(size)):
                continue
            length = self.lengths[-1]
            given = self._random(size, length)
            recorded = Simulation(self.topology(size), [each.copy() for each in given], seed=size)
            recorded.run()
            for step in (1, 2):
                given = [each * (2 + step) for each in reversed(given)]
                weights = [float((rank + step) % 3 + 1) for rank in range(size)]
                fresh = self._run(size, given, step, weights=weights)
                again = recorded.replay(given, weights)
                for one, other in zip(fresh.results, again.results, strict=True):
                    np.testing.assert_array_equal(one, other)

    def test_contributions_are_weighted(self) -> None:
        """The mean is weighted by samples; a weight of 0 takes part without counting."""
        for size, length, seed in self._cases():
            if not self._exact(size):
                continue
            given = [pattern(rank, length) for rank in range(size)]
            weights = [float((3 * rank + 1) % 4) for rank in range(size)]
            outcome = self._run(size, given, seed, weights=weights)
            total = sum(weights)
            expected = np.sum(
                [each * (weight / total) for each, weight in zip(given, weights, strict=True)],
                axis=0,
                dtype=np.float64,
            )
            for result in outcome.results:
                np.testing.assert_allclose(result, expected, rtol=1e-5)
                np.testing.assert_array_equal(result, outcome.results[0])

    def test_equal_weights_multiply_nothing(self) -> None:
        """Equal weights give the bits of no weights at all."""
        for size, length, seed in self._cases():
            if not self._exact(size):
                continue
            given = self._random(size, length)
            plain = self._run(size, given, seed)
            weighted = self._run(size, given, seed, weights=[8.0] * size)
            for one, other in zip(plain.results, weighted.results, strict=True):
                np.testing.assert_array_equal(one, other)

    def test_half_precision_rounds_once(self) -> None:
        """256 + 1 + 1 + ... is exact in float32 and rounded at the end, not at every hop."""
        for name in ("bfloat16", "float16"):
            dtype = dtype_named(name)
            for size in self.sizes:
                if not self._exact(size):
                    continue
                big = 256.0 if name == "bfloat16" else 2048.0
                wide = [
                    np.where(np.arange(40) % size == rank, big, 1.0).astype(np.float32)
                    for rank in range(size)
                ]
                given = [_narrow(each, dtype) for each in wide]
                outcome = simulate(
                    self.topology(size), given, dtype=name, reduction=Reduction.SUM, seed=size
                )
                expected = _narrow(np.sum(wide, axis=0, dtype=np.float32), dtype)
                for result in outcome.results:
                    np.testing.assert_array_equal(result, expected)

    def test_every_element_type(self) -> None:
        """Sums of small whole numbers are exact in every type."""
        for dtype in DTYPES.values():
            for size in self.sizes[:4]:
                if not self._exact(size):
                    continue
                wide = [(np.arange(50) + rank) % 5 for rank in range(size)]
                expected = _store(np.sum(wide, axis=0), dtype)
                outcome = simulate(
                    self.topology(size),
                    [_store(each, dtype) for each in wide],
                    dtype=dtype.name,
                    reduction=Reduction.SUM,
                    seed=dtype.code,
                )
                for result in outcome.results:
                    np.testing.assert_array_equal(result, expected)

    def test_other_ways_to_combine(self) -> None:
        """Topologies that use ``bucket.combine`` find minima, maxima and products too."""
        for combine, numpy in ((MIN, np.min), (MAX, np.max), (PROD, np.prod), (ADD, np.sum)):
            for size in self.sizes[:4]:
                if not self._exact(size):
                    continue
                given = [
                    ((np.arange(30) * 7 + rank * 5) % 11 - 3).astype(np.float64)
                    for rank in range(size)
                ]
                outcome = simulate(
                    self.topology(size),
                    given,
                    combine=combine,
                    reduction=Reduction.SUM,
                    seed=size,
                )
                for result in outcome.results:
                    np.testing.assert_array_equal(result, numpy(given, axis=0))

    def test_a_dead_member_is_named_by_all(self) -> None:
        """Whenever a member dies, the others end with the result or its name; nobody hangs."""
        for size in [size for size in self.sizes if size > 1][:3]:
            for seed in range(8 * self.seeds):
                given = [pattern(rank, 500) for rank in range(size)]
                network = Network(frame_elements=(1, 100), kill={size - 1: 1e-4 * seed})
                outcome = self._run(size, given, seed, network=network)
                for error, result in zip(outcome.errors[:-1], outcome.results[:-1], strict=True):
                    if error is not None:
                        assert f"rank {size - 1}" in str(error)
                    elif self._exact(size):
                        expected = np.sum(given, axis=0, dtype=np.float64) / size
                        np.testing.assert_allclose(result, expected, rtol=1e-6)

    def test_it_describes_itself(self) -> None:
        """The description is one line that a user can read in a log."""
        text = self.topology(2).describe()
        assert text
        assert "\n" not in text

    def _cases(self) -> Iterator[tuple[int, int, int]]:
        for size in self.sizes:
            for length in self.lengths:
                for seed in range(self.seeds):
                    yield size, length, seed

    def _exact(self, size: int) -> bool:
        return self.topology(size).agreement == "exact"

    def _run(self, size: int, given: list[Any], seed: int, **options: Any) -> Outcome:
        if "network" not in options:
            length = len(given[0])
            options["network"] = Network(frame_elements=(1 + length // 9, 1 + length))
        return simulate(self.topology(size), given, seed=seed, **options)

    @staticmethod
    def _random(size: int, length: int) -> list[Any]:
        rng = np.random.default_rng(size * 1009 + length)
        return [rng.standard_normal(length).astype(np.float32) for _ in range(size)]


def _narrow(wide: Any, dtype: Any) -> Any:
    narrow = np.empty(wide.shape, dtype.storage)
    kernel_module.load("off").copy(narrow, wide, dtype)
    return narrow


def _store(whole: Any, dtype: Any) -> Any:
    if dtype.half:
        return _narrow(whole.astype(np.float32), dtype)
    return whole.astype(dtype.storage)
