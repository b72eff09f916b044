"""Ending together."""

from __future__ import annotations

from typing import Any

import pytest

from p2pdpt.errors import SessionError
from p2pdpt.training.farewell import Ending, describe_difference, end_together


def test_differences_are_told_with_their_nodes_and_names() -> None:
    text = describe_difference(
        ["a", "b", "c"],
        [Ending(3, "f" * 64), Ending(4, "0" * 64), Ending(3, "f" * 64)],
        [{"w": "1", "b": "2"}, {"w": "1", "b": "3"}, {"w": "1", "b": "2"}],
    )
    assert text.startswith(
        "the nodes' parameters and buffers are not equal at the end: ffffffffffff after 3 steps on "
        "a, c, 000000000000 after 4 steps on b; they differ in b. Something"
    )
    many = [{f"w{n}": str(n * own) for n in range(1, 9)} for own in (1, 2)]
    text = describe_difference(["a", "b"], [Ending(1, "0"), Ending(1, "1")], many)
    assert "they differ in w1, w2, w3, w4, w5 and 3 more." in text


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
