"""Numbers that all members bring together: sums and means, in float64, equal on all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from p2pdpt.errors import SessionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from p2pdpt.training.agreement import Agreement

__all__ = ["common_mean", "common_sum", "plain_number"]


class _Figures(msgspec.Struct, array_like=True):
    """Numbers of one member, and its weight."""

    values: list[float]
    weight: float


def plain_number(value: float | torch.Tensor) -> float:
    """Return a number, also of a tensor of one element that has a graph."""
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


def _gather(
    agreement: Agreement, call: str, values: Mapping[str, float | torch.Tensor], weight: float
) -> list[_Figures]:
    mine = _Figures([plain_number(value) for value in values.values()], weight)
    return agreement.gather(f"{call}({', '.join(values)})", mine, _Figures)


def common_sum(
    agreement: Agreement, values: Mapping[str, float | torch.Tensor]
) -> dict[str, float]:
    """Return the sums over all members, added in rank order.

    Raises:
        SessionError: members called different things, or gave other names.
    """
    heard = _gather(agreement, "s.sum", values, 1.0)
    return {
        name: float(sum(each.values[place] for each in heard)) for place, name in enumerate(values)
    }


def common_mean(
    agreement: Agreement, values: Mapping[str, float | torch.Tensor], weight: float | None = None
) -> dict[str, float]:
    """Return the means over all members, by their weights; NaN where all weigh nothing.

    Raises:
        SessionError: members called different things, gave other names, or `weight` is negative.
    """
    own = 1.0 if weight is None else float(weight)
    if not own >= 0:
        raise SessionError(f"s.mean: a weight must be 0 or more, not {own}")
    heard = _gather(agreement, "s.mean", values, own)
    total = float(sum(each.weight for each in heard))
    means = {}
    for place, name in enumerate(values):
        # What counts nothing must not spoil the rest, be it NaN.
        added = sum(each.weight * each.values[place] for each in heard if each.weight)
        means[name] = added / total if total else float("nan")
    return means
