"""The guard: kills a run's process groups if its launcher dies without doing so.

A small process of its own, run as a file without the rest of the package. It reads from its
standard input which groups there are, ``+PID`` when one starts and ``-PID`` when one has ended;
the end of the input is the launcher's end, whatever it died of. It is out of the way of the
terminal's signals and ends with its input, so it cannot outlive the launcher.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["guard", "kill_group"]


def kill_group(group: int) -> None:
    """Kill every process of a group with SIGKILL; one that has ended already is no error."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # Gone, or (macOS) only zombies are left, which nobody may signal.
        pass


def guard(lines: Iterable[str]) -> set[int]:
    """Follow the launcher's account to its end, then kill and return the groups still open."""
    groups: set[int] = set()
    for line in lines:
        sign, number = line[:1], line[1:].strip()
        # A launcher that dies may leave half a line; a group number that was cut off must not
        # be taken for another.
        if not line.endswith("\n") or not number.isdigit():
            continue
        if sign == "+":
            groups.add(int(number))
        else:
            groups.discard(int(number))
    for group in groups:
        kill_group(group)
    return groups


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    guard(sys.stdin)
