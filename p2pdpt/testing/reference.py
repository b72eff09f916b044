"""What a program must compute, as the contract reads: no windows, no overlap, rank by rank."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from p2pdpt.dtypes import dtype_named
from p2pdpt.errors import DeadlockError, HazardError
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.testing.programs import Local, thrice
from p2pdpt.topology import ADD, COPY, MIN, PROD, Recv, Region, Send

if TYPE_CHECKING:
    from collections.abc import Sequence

    from p2pdpt.dtypes import DType
    from p2pdpt.testing.programs import Move, Program
    from p2pdpt.topology import Combine

__all__ = ["narrowed", "run_reference", "widened"]


@dataclass(frozen=True)
class _Values:
    """Elements in the wide type, and for each its scale, total weight and contributions."""

    data: Any
    worth: Any

    def part(self, region: Region) -> _Values:
        """Return a copy of a region."""
        cut = slice(region.start, region.stop)
        return _Values(self.data[cut].copy(), self.worth[cut].copy())

    def write(self, region: Region, values: _Values) -> None:
        """Overwrite a region."""
        self.data[region.start : region.stop] = values.data
        self.worth[region.start : region.stop] = values.worth


def run_reference(
    program: Program,
    contributions: Sequence[Any],
    *,
    dtype: str | None = None,
    reduction: Reduction = Reduction.MEAN,
    weights: Sequence[float] | None = None,
) -> list[Any]:
    """Return what every rank must end with.

    Sends read the state before their move, and so do own contributions; folds go in the listed
    order; half precision is summed in float32 and rounded at the end.

    Args:
        program: which keeps the rules.
        contributions: for each rank, shape ``(length,)``, in the storage of `dtype`.
        dtype: the element type, if numpy's name does not tell.
        reduction: what becomes of the result.
        weights: of the contributions, for ``MEAN``.

    Raises:
        HazardError: a kernel reads elements that hold different contributions.
        DeadlockError: no rank can go on, however much is kept of what was sent.
    """
    element = dtype_named(dtype or str(contributions[0].dtype))
    ranks = []
    for rank, mine in enumerate(contributions):
        weight = 1.0 if weights is None or reduction is not Reduction.MEAN else weights[rank]
        worth = np.tile([weight, weight, 1.0], (len(mine), 1))
        spaces = [_Values(widened(mine, element), worth)]
        for length in program.scratch:
            spaces.append(_Values(np.zeros(length, element.wide), np.zeros((length, 3))))
        ranks.append(_Rank(rank, program.moves[rank], spaces))
    sent: dict[tuple[int, int], deque[_Values]] = {}
    with np.errstate(all="ignore"):
        while any(not rank.ended for rank in ranks):
            if not any([rank.go_on(sent) for rank in ranks]):
                raise DeadlockError("no rank can go on")
        return [_finished(rank.spaces[0], element, reduction) for rank in ranks]


class _Rank:
    """One rank's place in its program."""

    def __init__(self, rank: int, moves: tuple[Move, ...], spaces: list[_Values]) -> None:
        self.rank, self.moves, self.spaces = rank, moves, spaces
        self.next = 0
        self._own: list[_Values] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.next == len(self.moves)

    def go_on(self, sent: dict[tuple[int, int], deque[_Values]]) -> bool:
        """Issue the next move, or complete it; return whether anything was done."""
        if self.ended:
            return False
        move = self.moves[self.next]
        if isinstance(move, Local):
            self._compute(move)
            self.next += 1
            return True
        receives = [each for each in move if isinstance(each, Recv)]
        if self._own is None:
            self._own = [self._part(each.region) for each in receives]
            for each in move:
                if isinstance(each, Send):
                    assert isinstance(each.what, Region)
                    for peer in each.to:
                        queue = sent.setdefault((self.rank, peer), deque())
                        queue.append(self._part(each.what))
            return True
        needed: dict[int, int] = {}
        for receive in receives:
            for peer in self._sources(receive):
                needed[peer] = needed.get(peer, 0) + (peer != self.rank)
        if any(len(sent.get((peer, self.rank), ())) < count for peer, count in needed.items()):
            return False
        for receive, own in zip(receives, self._own, strict=True):
            values = [
                own if peer == self.rank else sent[peer, self.rank].popleft()
                for peer in self._sources(receive)
            ]
            self.spaces[receive.region.space].write(
                receive.region, _folded(values, receive.combine)
            )
        self._own = None
        self.next += 1
        return True

    def _sources(self, receive: Recv) -> tuple[int, ...]:
        assert isinstance(receive.sources, tuple)
        return receive.sources

    def _part(self, region: Region) -> _Values:
        return self.spaces[region.space].part(region)

    def _compute(self, move: Local) -> None:
        values = self._part(move.src)
        if len(np.unique(values.worth, axis=0)) > 1:
            raise HazardError(f"a kernel reads {move.src}, whose elements differ in worth")
        thrice(values.data, values.data)
        self.spaces[move.dst.space].write(move.dst, values)


def _folded(sources: Sequence[_Values], combine: Combine) -> _Values:
    if combine is COPY:
        return sources[0]
    data = np.empty_like(sources[0].data)
    worth = np.empty_like(sources[0].worth)
    every = np.concatenate([source.worth for source in sources], axis=1)
    # Elements whose sources are worth the same are computed together.
    start = 0
    for stop in range(1, len(data) + 1):
        if stop == len(data) or (every[stop] != every[start]).any():
            terms = [source.data[start:stop] for source in sources]
            metas = [source.worth[start] for source in sources]
            data[start:stop], scale = _joined(terms, [meta[0] for meta in metas], combine)
            total = sum(float(meta[1]) for meta in metas)
            worth[start:stop] = (scale, total, sum(meta[2] for meta in metas))
            start = stop
    return _Values(data, worth)


def _joined(terms: list[Any], scales: list[float], combine: Combine) -> tuple[Any, float]:
    scale = scales[0] if combine is ADD else 1.0
    if combine is ADD and any(each != scale for each in scales):
        scale = 1.0
        # What counts nothing is not read: it may be anything.
        terms = [
            term * term.dtype.type(factor)
            for term, factor in zip(terms, scales, strict=True)
            if factor
        ]
    result = terms[0].copy()
    for term in terms[1:]:
        if combine is ADD:
            result = result + term
        elif combine is PROD:
            result = result * term
        else:
            less = term < result if combine is MIN else term > result
            result = np.where(less | (term != term), term, result)
    return result, scale


def _finished(values: _Values, element: DType, reduction: Reduction) -> Any:
    data = values.data.copy()
    if reduction is Reduction.MEAN:
        for index, (scale, total, _) in enumerate(values.worth):
            if total == 0.0:
                data[index] = 0
            elif total / scale != 1.0:
                data[index : index + 1] /= data.dtype.type(total / scale)
    return narrowed(data, element)


def widened(stored: Any, element: DType) -> Any:
    """Return stored elements in the type in which they are summed."""
    if element.name == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(element.wide)


def narrowed(wide: Any, element: DType) -> Any:
    """Round to nearest, ties to even; what is not a number stays so."""
    if element.name != "bfloat16":
        return wide.astype(element.storage)
    bits = wide.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), 0x7FC0, rounded).astype(np.uint16)
