"""What a session tells the one who started it: one JSON object a line, or a line of text.

A launcher names a file descriptor in ``P2PDPT_REPORT_FD``. Without one, what the program reports
is shown as text by the first node.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["Reporter"]

PROGRESS_INTERVAL_S: Final = 0.2
READER_PATIENCE_S: Final = 5.0


class Reporter:
    """Write events to a descriptor that somebody reads, or reports to stderr."""

    def __init__(
        self,
        fd: int | None,
        clock: Callable[[], float],
        show: Callable[[str], object] | None = None,
    ) -> None:
        """Take the descriptor, which stays the caller's.

        Args:
            fd: where events go, or None.
            clock: seconds.
            show: takes the lines shown without a descriptor; default stderr.
        """
        self._fd = fd
        self._clock = clock
        self._show = show
        self._last_progress = -math.inf

    def event(self, event: str, /, **fields: Any) -> None:
        """Write one event; a reader that has gone is no error."""
        if self._fd is None:
            return
        record = {"event": event, **{key: _plain(value) for key, value in fields.items()}}
        data = (json.dumps(record, allow_nan=False) + "\n").encode()
        while data and self._fd is not None:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                # Events must not be lost to a reader that is merely slow.
                if not select.select([], [self._fd], [], READER_PATIENCE_S)[1]:
                    self._fd = None
            except OSError:
                self._fd = None

    def progress(self, fields: Callable[[], Mapping[str, Any]]) -> None:
        """Write a progress event if the last is old enough and the reader keeps up."""
        now = self._clock()
        if self._fd is None or now - self._last_progress < PROGRESS_INTERVAL_S:
            return
        self._last_progress = now
        try:
            writable = select.select([], [self._fd], [], 0)[1]
        except (OSError, ValueError):
            self._fd = None
            return
        if writable:
            self.event("progress", **fields())

    def report(self, step: int, epoch: int, metrics: Mapping[str, float], first: bool) -> None:
        """Pass on what the program reports; without a reader the first node shows it."""
        if self._fd is not None:
            self.event("report", step=step, epoch=epoch, metrics=dict(metrics))
        elif first:
            values = "  ".join(f"{name} {_short(value)}" for name, value in metrics.items())
            line = f"epoch {epoch}  step {step}  {values}"
            if self._show is not None:
                self._show(line)
            elif sys.stderr is not None:
                # A terminal that has gone is no reason to stop.
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(line + "\n")


def _plain(value: Any) -> Any:
    """Return `value` as JSON can hold it: infinities and NaN become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
