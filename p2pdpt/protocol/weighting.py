"""How contributions of different weight are joined: the algebra of :class:`Meta`.

The result of a step is the sum of all contributions times their weights, divided by the sum of
the weights. Each range of elements carries its :class:`~p2pdpt.channel.Meta`; where all scales
are equal nothing is multiplied, so that equal batches cost nothing and round like a plain sum.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NamedTuple

from p2pdpt.channel import Meta
from p2pdpt.errors import HazardError
from p2pdpt.topology import ADD, COPY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from p2pdpt.topology import Combine

__all__ = ["HEAVIEST", "LIGHTEST", "Fold", "Reduction", "finish", "is_weight", "join", "leaf"]

LIGHTEST: Final = 1e-12
HEAVIEST: Final = 1e12
"""What a contribution may weigh: elements times weights must neither overflow nor vanish in
float32, nor the sum of weights."""


class Reduction(enum.Enum):
    """What becomes of a complete fold."""

    MEAN = "mean"
    """Divide by the total weight."""
    SUM = "sum"
    """Leave it."""
    NONE = "none"
    """Nothing is folded: data is only moved, and nobody's contribution is missed."""


class Fold(NamedTuple):
    """How to compute one range of a fold.

    Attributes:
        meta: what the output is worth.
        scales: a factor for each source, or None to multiply nothing.
        divisor: what to divide by at the end, or None.
    """

    meta: Meta
    scales: tuple[float, ...] | None
    divisor: float | None


FINISHED = Meta(1.0, 1.0, 0)


def is_weight(weight: float) -> bool:
    """Return whether a contribution may weigh so much: 0, or from LIGHTEST to HEAVIEST."""
    return weight == 0 or LIGHTEST <= weight <= HEAVIEST


def leaf(weight: float) -> Meta:
    """Return what an unfolded contribution of `weight` is worth."""
    return Meta(weight, weight, 1)


def join(
    sources: Sequence[Meta], combine: Combine, reduction: Reduction, size: int, exact: bool
) -> Fold:
    """Return how to fold ranges worth `sources` into one.

    Args:
        sources: in the listed order.
        combine: how elements are joined.
        reduction: what becomes of a fold that holds every contribution.
        size: how many contributions there are.
        exact: whether each contribution must be in the result exactly once. If so, a fold that
            reaches `size` contributions is finished on the spot (divided, and rounded once).

    Raises:
        HazardError: a contribution would be counted twice.
    """
    if combine is COPY:
        return Fold(sources[0], None, None)
    count = 0
    total = 0.0
    for meta in sources:
        if exact and meta.contributions == 0:
            raise HazardError("a fold adds a result that already holds every contribution")
        count += meta.contributions
        total += meta.total
    if exact and count > size:
        raise HazardError(f"a fold holds {count} contributions of {size} members")
    if combine is not ADD:
        return Fold(FINISHED if exact and count == size else Meta(1.0, total, count), None, None)
    scale = sources[0].scale
    scales: tuple[float, ...] | None = None
    if any(meta.scale != scale for meta in sources):
        scales = tuple(meta.scale for meta in sources)
        scale = 1.0
    if not (exact and count == size):
        return Fold(Meta(scale, total, count), scales, None)
    if reduction is not Reduction.MEAN:
        return Fold(FINISHED, scales, None)
    if total == 0.0:
        return Fold(FINISHED, (0.0,) * len(sources), None)
    divisor = total / scale
    return Fold(FINISHED, scales, None if divisor == 1.0 else divisor)


def finish(meta: Meta, reduction: Reduction) -> tuple[tuple[float, ...] | None, float | None]:
    """Return the scales and the divisor that finish a range worth `meta` at a round's end."""
    if meta.contributions == 0 or reduction is not Reduction.MEAN:
        return None, None
    if meta.total == 0.0:
        return (0.0,), None
    divisor = meta.total / meta.scale
    return None, None if divisor == 1.0 else divisor
