"""Clocks for code that takes time as an argument."""

from __future__ import annotations

__all__ = ["ManualClock"]


class ManualClock:
    """A monotonic clock that moves only when told to.

    Call it for the time in seconds::

        clock = ManualClock()
        liveness.heard("node1", now=clock())
        clock.advance(10.0)
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move on by `seconds`, 0 or more, and return the new time."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now += seconds
        return self._now
