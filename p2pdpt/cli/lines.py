"""Text that arrives in pieces: split into lines, and tracebacks kept together.

No input or output and no clock here: bytes and times are arguments.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LineSplitter", "TracebackHold", "last_error", "own_frames"]

MAX_HELD = 2000
"""Lines of a traceback that are kept; recursion errors are shortened by Python itself."""

_STARTS = re.compile(r"Traceback \(most recent call last\):|  File \".*\", line \d+\s*$")
_FRAME = re.compile(r'\s+File "(?P<path>.*)", line \d+')


class LineSplitter:
    """Cuts a byte stream into lines of text as a terminal would show them.

    What a carriage return would have overwritten is left out, so a progress bar gives its last
    state only. A line longer than `limit` bytes is cut there.
    """

    def __init__(self, limit: int = 1 << 16) -> None:
        self._limit = limit
        self._pending = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        *whole, rest = (self._pending + data).split(b"\n")
        if len(rest) > self._limit:
            rest = _overwritten(rest)
        while len(rest) > self._limit:
            whole.append(rest[: self._limit])
            rest = rest[self._limit :]
        self._pending = rest
        return [_text(line) for line in whole]

    def close(self) -> list[str]:
        """Return the last line, if it had no end."""
        rest, self._pending = self._pending, b""
        return [_text(rest)] if rest else []


def _overwritten(line: bytes) -> bytes:
    line = line.removesuffix(b"\r")
    return line[line.rfind(b"\r") + 1 :]


def _text(line: bytes) -> str:
    return _overwritten(line).decode("utf-8", "replace")


class TracebackHold:
    """Keeps a traceback back until it is known whether its process dies of it.

    Whoever feeds it releases it for good when the process has ended. A dying node's traceback
    belongs at the end of the output, once; one that the script caught and wrote itself belongs
    where it was written.
    """

    def __init__(self, patience: float = 2.0) -> None:
        """Hold for `patience` seconds, which a dying interpreter may need to clean up."""
        self._patience = patience
        self._held: list[str] = []
        self._since = 0.0

    @property
    def held(self) -> Sequence[str]:
        """The lines that are kept back."""
        return self._held

    def feed(self, line: str, now: float) -> list[str]:
        """Return the lines to show now that `line` has come."""
        if not self._held:
            if not _STARTS.match(line):
                return [line]
            self._since = now
        self._held.append(line)
        return self.release() if len(self._held) > MAX_HELD else []

    def expire(self, now: float) -> list[str]:
        """Return what has been kept too long for a process that still lives."""
        return self.release() if self._held and now - self._since >= self._patience else []

    def release(self) -> list[str]:
        """Return what is kept, and keep it no longer."""
        held, self._held = self._held, []
        return held


def last_error(block: Sequence[str]) -> str:
    """Return the first line of a traceback's error, for instance ``KeyError: 'x'``, or nothing."""
    last_frame = max((at for at, line in enumerate(block) if _FRAME.match(line)), default=-1)
    if last_frame < 0:
        return ""
    return next((line for line in block[last_frame:] if line[:1].strip()), "")


def own_frames(block: Sequence[str], package: str, library: str) -> list[str]:
    """Return a traceback without our own frames: those of the script and its libraries stay.

    Args:
        block: the lines.
        package: the folder whose frames are left out.
        library: the folder of Python's own modules, whose frames are left out where they follow
            one of the package's.

    A traceback that has no other frames is returned whole.
    """
    kept: list[str] = []
    frames = 0
    hiding = False
    for line in block:
        frame = _FRAME.match(line)
        if frame is not None:
            path = frame["path"]
            inner = path.startswith(library) and "site-packages" not in path
            hiding = path.startswith(package) or (inner and hiding)
            frames += not hiding
        elif not line.startswith("    "):
            hiding = line.startswith("  [Previous line repeated") and hiding
        if not hiding:
            kept.append(line)
    return kept if frames else list(block)
