from __future__ import annotations

import pytest

from p2pdpt.channel import EAGER_BYTES
from p2pdpt.protocol.round_io import MINE, RESULT, SEGMENT, WIDE, WINDOW, RoundIO, Slice


def test_areas_differ_and_scratch_is_above() -> None:
    assert len({MINE, RESULT, WIDE}) == 3
    assert RESULT == 0, "space 0 of a plugin is the bucket"
    assert max(MINE, WIDE) < 0


def test_what_comes_ahead_of_a_grant_fits_a_window() -> None:
    """In elements of one byte; a receive counts on it."""
    assert EAGER_BYTES <= WINDOW <= SEGMENT


def test_slices_are_cheap_values() -> None:
    assert Slice(1, 2, 3) == (1, 2, 3)
    assert Slice(area=1, start=2, stop=3).stop == 3


def test_a_driver_must_do_everything() -> None:
    with pytest.raises(TypeError, match="abstract"):
        RoundIO()  # type: ignore[abstract]
