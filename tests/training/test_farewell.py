"""Ending together."""

from __future__ import annotations

from typing import Any

import pytest

from p2pdpt.errors import SessionError
from p2pdpt.training.farewell import Ending, compare_endings, end_together


def test_equal_endings_are_fine() -> None:
    compare_endings(["a", "b"], [Ending(3, "f" * 64)] * 2)


def test_unequal_ones_are_told_with_their_nodes() -> None:
    with pytest.raises(SessionError) as info:
        compare_endings(
            ["a", "b", "c"], [Ending(3, "f" * 64), Ending(4, "0" * 64), Ending(3, "f" * 64)]
        )
    assert "ffffffffffff after 3 steps on a, c, 000000000000 after 4 steps on b" in str(info.value)


@pytest.mark.parametrize("exact", [True, False])
def test_all_wait_for_all(arena: Any, exact: bool) -> None:
    def body(parts: Any) -> str:
        rank = parts.waiting.group.rank
        end_together(parts.agreement, Ending(1, "ab"[rank] * 64), exact=exact)
        return "ended"

    outcomes = arena.outcomes(2, lambda rank: arena.member(rank, body))
    if exact:
        assert all(isinstance(each, SessionError) for each in outcomes)
    else:
        assert outcomes == ["ended", "ended"]
