"""Plans with addresses, in the form that the C executor replays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from p2pdpt.protocol.round_io import WIDE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from p2pdpt.dtypes import DType
    from p2pdpt.protocol.plan import Plan

__all__ = ["MOST_SOURCES", "Program", "compile_plan"]

MOST_SOURCES: Final = 256
"""The most sources of one fold; see ``executor.c``."""


@dataclass(eq=False)
class Program:
    """A plan with addresses, ready for the executor.

    Attributes:
        steps, count, totals: what a ``p2pdpt_round`` points to.
        weights: of the ranks, for which the steps multiply and divide.
        bytes_read: what this rank reads of others' memory in a round.
        bytes_lent: what others read of its memory.
    """

    plan: Plan
    rank: int
    steps: Any
    count: int
    totals: Any
    weights: list[float]
    bytes_read: int
    bytes_lent: int
    _null: Any
    _keep: list[tuple[Any, Any, Any, Any]]

    def weigh(self, weights: Sequence[float]) -> None:
        """Set what the folds multiply and divide by; all equal if the plan is fused."""
        folds = self.plan.weigh(weights)
        for step, fold, (_, _, scales, _) in zip(
            self.steps, self.plan.folds[self.rank], self._keep, strict=False
        ):
            each = folds[fold.number]
            step.divide = each.divisor is not None
            step.divisor = each.divisor or 0.0
            if each.scales is None:
                step.scales = self._null
            else:
                for index, scale in enumerate(each.scales):
                    scales[index] = scale
                step.scales = scales
        self.weights = list(weights)


def compile_plan(
    plan: Plan, rank: int, addresses: Sequence[Mapping[int, int]], dtype: DType, ffi: Any
) -> Program:
    """Return the folds of one rank with addresses, for weights of 1.

    Args:
        plan: of all ranks; no fold may have more than MOST_SOURCES sources.
        rank: whose folds.
        addresses: for each rank, where each of its areas begins.
        dtype: the element type.
        ffi: of the compiled module.
    """
    folds = plan.folds[rank]
    steps = ffi.new("p2pdpt_step[]", max(len(folds), 1))
    keep: list[tuple[Any, Any, Any, Any]] = []

    def locate(owner: int, area: int, start: int) -> Any:
        width = 4 if area == WIDE else dtype.itemsize
        return ffi.cast("void *", addresses[owner][area] + start * width)

    for step, fold in zip(steps, folds, strict=False):
        sources = ffi.new("void *[]", [locate(*source) for source in fold.sources])
        wide = ffi.new("char[]", [bytes([source.area == WIDE]) for source in fold.sources])
        scales = ffi.new("double[]", len(fold.sources))
        waits = ffi.new("p2pdpt_wait[]", max(len(fold.waits), 1))
        for wait, each in zip(waits, fold.waits, strict=False):
            wait.rank, wait.slope, wait.need = each.rank, each.slope, each.need
        keep.append((sources, wide, scales, waits))
        step.out = locate(rank, fold.area, fold.start)
        step.sources = ffi.cast("void const *const *", sources)
        step.wide = wide if dtype.half else ffi.NULL
        step.waits, step.wait_count = waits, len(fold.waits)
        step.length, step.source_count = fold.length, len(fold.sources)
        step.combine, step.out_wide = int(fold.combine), fold.area == WIDE
        step.shared = fold.shared
    totals = ffi.new("uint64_t[]", list(plan.totals))
    read, lent = _traffic(plan, rank, dtype)
    program = Program(plan, rank, steps, len(folds), totals, [], read, lent, ffi.NULL, keep)
    program.weigh([1.0] * len(plan.folds))
    return program


def _traffic(plan: Plan, rank: int, dtype: DType) -> tuple[int, int]:
    """Return how many bytes one rank reads of others' memory in a round, and they of its."""
    read = lent = 0
    for reader, folds in enumerate(plan.folds):
        for fold in folds:
            for source in fold.sources:
                width = 4 if source.area == WIDE else dtype.itemsize
                if reader == rank != source.rank:
                    read += fold.length * width
                elif source.rank == rank != reader:
                    lent += fold.length * width
    return read, lent
