"""How many samples a node's gradient stands for: the weight of its contribution.

Batches are handed out with their sizes; a backward *touches* what was handed out, and an
exchange takes what was touched since the last exchange. A further exchange without a new batch
(two losses of one batch, a second optimizer) repeats the last weight.
"""

from __future__ import annotations

from p2pdpt.errors import SessionError
from p2pdpt.protocol.weighting import HEAVIEST, LIGHTEST, is_weight

__all__ = ["SampleLedger"]


class SampleLedger:
    """Count samples between exchanges.

    Attributes:
        samples: all samples of batches that a backward used, in total.
    """

    def __init__(self) -> None:
        self.samples = 0.0
        self._handed: float | None = None
        self._size = 0.0
        self._repeated = False
        self._pending: float | None = None
        self._last = 1.0

    def hand(self, samples: float) -> None:
        """Note that a batch was handed out; 0 for a repeated one that must not count."""
        self._handed = self._size = float(samples)
        self._repeated = samples == 0

    def override(self, weight: float) -> None:
        """Let the current batch count as `weight` instead of its samples.

        A batch that was handed out with 0 keeps 0: it is a repetition.

        Raises:
            SessionError: `weight` is negative, not finite, or too large or small to count with.
        """
        if not is_weight(weight):
            raise SessionError(
                f"a weight must be 0, or a number from {LIGHTEST:g} to {HEAVIEST:g}, not {weight!r}"
            )
        if self._repeated:
            return
        if self._handed is None:
            self._size = 0.0
        self._handed = float(weight)

    def touch(self) -> None:
        """Note that a backward began, which uses the batch handed out last."""
        if self._handed is None:
            return
        self._pending = (self._pending or 0.0) + self._handed
        self.samples += self._size
        self._handed = None

    def take(self) -> float:
        """Return the weight of the exchange that begins now."""
        self.touch()
        if self._pending is not None:
            self._last = self._pending
            self._pending = None
        return self._last
