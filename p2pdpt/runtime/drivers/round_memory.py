"""The arrays behind one round's slices, and the folds over them.

Shared by every driver in Python, the simulator included: with the same kernels they cannot
differ in a bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from p2pdpt.protocol.round_io import MINE, RESULT, WIDE, WINDOW, Slice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from p2pdpt.dtypes import DType
    from p2pdpt.kernels import Kernels
    from p2pdpt.memory import BucketMemory
    from p2pdpt.topology import Combine, Kernel

__all__ = ["RoundMemory", "StagingPool"]

_FIRST_STAGING = 1 << 32


class StagingPool:
    """Staging arrays that outlive the rounds which borrow them."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, int], list[tuple[Any, Any]]] = {}

    def take(self, dtype: DType, length: int) -> tuple[Any, Any]:
        """Return an array in the stored type and one in the wide type, perhaps the same.

        They have at least `length` elements: a power of two, so that few sizes exist.
        """
        length = 1 << (length - 1).bit_length() if length > 1 else 1
        free = self._free.get((dtype.name, length))
        if free:
            return free.pop()
        narrow = np.empty(length, dtype.storage)
        return narrow, (np.empty(length, dtype.wide) if dtype.half else narrow)

    def give(self, dtype: DType, pair: tuple[Any, Any]) -> None:
        """Take arrays back; the few that are longer than a window are not kept."""
        length = len(pair[0])
        if length <= WINDOW:
            self._free.setdefault((dtype.name, length), []).append(pair)


class RoundMemory:
    """Maps the areas of one round to flat arrays."""

    def __init__(self, memory: BucketMemory, kernels: Kernels, pool: StagingPool) -> None:
        self.dtype = memory.dtype
        self._kernels = kernels
        self._pool = pool
        self._arrays: dict[int, Any] = {RESULT: memory.result, MINE: memory.mine}
        self._length = memory.length
        self._lent: dict[int, tuple[Any, Any]] = {}
        self._next = _FIRST_STAGING

    def view(self, data: Slice) -> Any:
        """Return the array of a slice, shape ``(stop - start,)``, without a copy."""
        area, start, stop = data
        array = self._arrays.get(area)
        if array is None:
            # Partial sums of half precision: made when the first one appears.
            assert area == WIDE, f"no area {area}"
            array = self._arrays[WIDE] = np.empty(self._length, self.dtype.wide)
        return array[start:stop]

    def buffer(self, data: Slice) -> memoryview:
        """Return the bytes of a slice."""
        return memoryview(self.view(data)).cast("B")

    def fold(
        self,
        out: Slice,
        sources: Sequence[Slice],
        combine: Combine,
        scales: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        """Fold slices of equal length."""
        view = self.view
        self._kernels.fold(
            view(out), [view(each) for each in sources], self.dtype, combine, scales, divisor
        )

    def run(self, kernel: Kernel, src: Sequence[Slice], dst: Slice) -> None:
        """Run a plugin's kernel; half precision is shown to it as float32."""
        wide = self.dtype.wide
        parts = []
        for each in src:
            part = self.view(each)
            if part.dtype != wide:
                widened = np.empty(part.shape, wide)
                self._kernels.copy(widened, part, self.dtype)
                part = widened
            parts.append(part)
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        out = self.view(dst)
        if out.dtype == wide:
            kernel(out, joined)
            return
        shown = np.empty(out.shape, wide)
        self._kernels.copy(shown, out, self.dtype)
        kernel(shown, joined)
        self._kernels.copy(out, shown, self.dtype)

    def scratch(self, area: int, length: int) -> None:
        """Make an area of `length` elements in the wide type."""
        self._arrays[area] = np.zeros(length, self.dtype.wide)

    def drop(self, area: int) -> None:
        """Forget an area of ``scratch``."""
        del self._arrays[area]

    def staging(self, length: int) -> tuple[int, int]:
        """Borrow staging arrays of at least `length` elements; return their areas."""
        pair = self._pool.take(self.dtype, length)
        narrow, self._next = self._next, self._next + 2
        self._arrays[narrow] = pair[0]
        self._arrays[narrow + 1] = pair[1]
        self._lent[narrow] = pair
        return narrow, (narrow + 1 if self.dtype.half else narrow)

    def release(self, areas: tuple[int, int]) -> None:
        """Give staging arrays back."""
        narrow = areas[0]
        self._pool.give(self.dtype, self._lent.pop(narrow))
        del self._arrays[narrow], self._arrays[narrow + 1]

    def close(self) -> None:
        """Give staging back; views of it must not be used any more."""
        for narrow, pair in self._lent.items():
            self._pool.give(self.dtype, pair)
            del self._arrays[narrow], self._arrays[narrow + 1]
        self._lent.clear()
