"""Figures as people read them, and tables of them as plain text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["human_bytes", "human_number", "human_seconds", "parse_size", "plain_table"]


def human_bytes(count: float) -> str:
    """Return a number of bytes with three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{human_number(count)} {unit}"


def human_number(value: float) -> str:
    """Return a number with three digits, or all of them before the point."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}" if digits < 7 else f"{value:.2e}"


def human_seconds(seconds: float) -> str:
    """Return a duration with its fitting unit."""
    if abs(seconds) < 1e-3:
        return f"{human_number(seconds * 1e6)} µs"
    if abs(seconds) < 1:
        return f"{human_number(seconds * 1e3)} ms"
    if abs(seconds) < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``512``, ``4K``, ``16M`` or ``1G`` (powers of 1024).

    Raises:
        ValueError: it is none, or not positive.
    """
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    power = {"K": 1, "M": 2, "G": 3}.get(digits[-1:], 0)
    number = float(digits[:-1] if power else digits) * 1024**power
    if not number >= 1 or number % 1 != 0:
        raise ValueError(f"{text!r} is not a number of bytes")
    return int(number)


def plain_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> list[str]:
    """Return aligned lines: the first `left` columns to the left, the others to the right."""
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
