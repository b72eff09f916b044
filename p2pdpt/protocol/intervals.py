"""A map from the elements of a space to whatever was last assigned to them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Generic, TypeVar

__all__ = ["IntervalMap"]

V = TypeVar("V")


class IntervalMap(Generic[V]):
    """Values over the elements ``0`` to ``length``, cut where assignments ended."""

    __slots__ = ("_starts", "_values", "length")

    def __init__(self, length: int, initial: V) -> None:
        """Give every element the value `initial`."""
        self.length = length
        self._starts = [0]
        self._values = [initial]

    def lookup(self, start: int, stop: int) -> list[tuple[int, int, V]]:
        """Return the pieces that cover ``start`` to ``stop``, in order, cut to that range."""
        pieces: list[tuple[int, int, V]] = []
        if start >= stop:
            return pieces
        starts, values = self._starts, self._values
        index = bisect_right(starts, start) - 1
        while start < stop:
            end = starts[index + 1] if index + 1 < len(starts) else self.length
            end = min(end, stop)
            pieces.append((start, end, values[index]))
            start = end
            index += 1
        return pieces

    def assign(self, start: int, stop: int, value: V) -> None:
        """Give the elements ``start`` to ``stop`` another value."""
        if start >= stop:
            return
        starts, values = self._starts, self._values
        first = bisect_left(starts, start)
        last = bisect_right(starts, stop) - 1
        after = values[last]
        new_starts, new_values = [start], [value]
        if stop < self.length:
            new_starts.append(stop)
            new_values.append(after)
        # Everything that began inside the range is replaced; a piece beginning exactly at
        # `stop` keeps its value through `after`.
        beyond = bisect_right(starts, stop)
        starts[first:beyond] = new_starts
        values[first:beyond] = new_values

    def pieces(self) -> list[tuple[int, int, V]]:
        """Return all pieces in order."""
        return self.lookup(0, self.length)
