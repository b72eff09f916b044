"""Plans: what a static topology does, as folds over the shared memory of all ranks.

A plan is a list of folds for each rank: each reads slices of any rank's areas and writes the own
``result`` (or the wide partial sums of half precision), and waits for what it reads and for
those who still read what it overwrites. Ranks run their folds in order; the order comes from one
topological sort over all ranks (:mod:`p2pdpt.protocol.recorder`), so that it cannot block.

Nothing here knows how a plan is run; a driver maps areas to addresses and waits to counters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from p2pdpt.protocol.weighting import Fold, Reduction, join, leaf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from p2pdpt.channel import Meta
    from p2pdpt.topology import Combine

__all__ = ["Plan", "PlanFold", "PlanSource", "PlanWait", "Worth"]


class PlanSource(NamedTuple):
    """A slice that a fold reads.

    Attributes:
        rank: whose memory it lies in.
        area: MINE, RESULT or WIDE.
        start: its first element.
    """

    rank: int
    area: int
    start: int


class PlanWait(NamedTuple):
    """What a fold waits for before it touches its first elements.

    Attributes:
        rank: whose progress.
        need: elements that this rank must have finished in its plan.
        slope: whether one more element is needed for each element that is folded.
    """

    rank: int
    need: int
    slope: bool


@dataclass(frozen=True, slots=True)
class PlanFold:
    """One fold of a rank's plan.

    Attributes:
        area: RESULT or WIDE, of the own rank.
        start: first element written.
        length: elements.
        combine: how the sources are joined.
        sources: in order.
        waits: at most one for each rank.
        number: its place in ``Plan.worth``.
        shared: whether another rank reads what it writes.
    """

    area: int
    start: int
    length: int
    combine: Combine
    sources: tuple[PlanSource, ...]
    waits: tuple[PlanWait, ...]
    number: int
    shared: bool


class Worth(NamedTuple):
    """How to find the meta of one fold: leaves of ranks, or other folds, in order."""

    combine: Combine
    sources: tuple[tuple[bool, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The plans of all ranks for one kind of round.

    Attributes:
        folds: for each rank, its folds in order.
        totals: for each rank, the elements of all its folds together.
        fused: whether it is only right where all weights are equal.
    """

    folds: tuple[tuple[PlanFold, ...], ...]
    totals: tuple[int, ...]
    fused: bool
    reduction: Reduction
    exact: bool
    worth: tuple[Worth, ...] = field(repr=False)

    def weigh(self, weights: Sequence[float]) -> list[Fold]:
        """Return how each fold of each rank multiplies and divides, by ``PlanFold.number``.

        Args:
            weights: of the contributions, by rank; all equal if the plan is fused.
        """
        size = len(self.folds)
        mean = self.reduction is Reduction.MEAN
        leaves = [leaf(each if mean else 1.0) for each in weights]
        metas: list[Fold] = []
        for combine, sources in self.worth:
            given: list[Meta] = [
                leaves[index] if is_leaf else metas[index].meta for is_leaf, index in sources
            ]
            metas.append(join(given, combine, self.reduction, size, self.exact))
        return metas
