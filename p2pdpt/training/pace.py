"""How fast training goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Pace"]


class Pace:
    """Rates of steps and samples, since the last look and since the beginning."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin now.

        Args:
            clock: seconds.
        """
        self._clock = clock
        self._began = self._then = clock()
        self._steps, self._samples = 0, 0.0

    def recent(self, steps: int, samples: float) -> dict[str, float]:
        """Return rates since the last call, given the totals so far."""
        now = self._clock()
        rates = _rates(now - self._then, steps - self._steps, samples - self._samples)
        self._then, self._steps, self._samples = now, steps, samples
        return rates

    def overall(self, steps: int, samples: float) -> dict[str, float]:
        """Return rates since the beginning, given the totals, and the seconds since then."""
        seconds = self._clock() - self._began
        return {**_rates(seconds, steps, samples), "seconds": seconds}


def _rates(seconds: float, steps: int, samples: float) -> dict[str, float]:
    if seconds <= 0:
        return {"samples_per_s": 0.0, "steps_per_s": 0.0}
    return {"samples_per_s": samples / seconds, "steps_per_s": steps / seconds}
