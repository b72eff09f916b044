"""Small gathers: typed, and the same call on every member."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pdpt.errors import SessionError


class Pair(msgspec.Struct):
    """Something to say."""

    number: int
    text: str


def member(arena: Any, rank: int, call: str, value: Any, kind: Any) -> Any:
    def body(parts: Any) -> Any:
        names = parts.agreement.names
        assert names == [f"node{each}" for each in range(len(names))]
        return parts.agreement.gather(call, value, kind)

    return arena.member(rank, body)


def test_all_hear_all_in_rank_order(arena: Any) -> None:
    heard = arena.run(3, lambda rank: member(arena, rank, "a call", Pair(rank, "x" * rank), Pair))
    assert heard == [[Pair(0, ""), Pair(1, "x"), Pair(2, "xx")]] * 3


def test_different_calls_are_an_error_on_all_that_names_who_called_what(arena: Any) -> None:
    outcomes = arena.outcomes(
        3, lambda rank: member(arena, rank, "s.sum(a)" if rank == 1 else "s.mean(a)", 1.0, float)
    )
    for outcome in outcomes:
        assert isinstance(outcome, SessionError)
        assert "node0, node2 called s.mean(a); node1 called s.sum(a)" in str(outcome)


def test_values_are_checked_against_their_type(arena: Any) -> None:
    values = [Pair(1, "x"), {"number": "no", "text": 3}]
    outcomes = arena.outcomes(2, lambda rank: member(arena, rank, "a call", values[rank], Pair))
    for outcome in outcomes:
        assert isinstance(outcome, msgspec.ValidationError)


@pytest.mark.parametrize("value", [True, 3, "text", None])
def test_plain_values(arena: Any, value: Any) -> None:
    kind: Any = type(value)
    assert arena.run(1, lambda rank: member(arena, rank, "a call", value, kind)) == [[value]]
