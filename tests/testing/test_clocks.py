from __future__ import annotations

import pytest

from p2pdpt.testing import ManualClock


def test_it_moves_only_when_told() -> None:
    clock = ManualClock(5.0)
    assert clock() == 5.0
    assert clock.advance(1.5) == 6.5
    assert clock() == 6.5
    assert clock.advance(0.0) == 6.5


def test_it_begins_at_zero() -> None:
    assert ManualClock()() == 0.0


def test_it_never_goes_back() -> None:
    clock = ManualClock(2.0)
    with pytest.raises(ValueError, match=r"cannot go back by 0.5 s"):
        clock.advance(-0.5)
    assert clock() == 2.0
