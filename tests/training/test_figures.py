"""Sums and means over members."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from p2pdpt.errors import SessionError
from p2pdpt.training.figures import common_mean, common_sum, plain_number


def everybody(arena: Any, size: int, body: Any) -> list[Any]:
    def run(rank: int) -> Any:
        return arena.member(rank, lambda parts: body(parts.agreement, rank))

    found: list[Any] = arena.outcomes(size, run)
    return found


def test_plain_numbers() -> None:
    assert plain_number(3) == 3.0
    assert plain_number(torch.tensor([0.5], requires_grad=True)) == 0.5


def test_sums_in_float64(arena: Any) -> None:
    def body(agreement: Any, rank: int) -> Any:
        return common_sum(agreement, {"a": rank + 2**40, "b": torch.tensor(0.5)})

    assert everybody(arena, 3, body) == [{"a": 3.0 * 2**40 + 3, "b": 1.5}] * 3


def test_means_by_weight(arena: Any) -> None:
    assert everybody(arena, 2, lambda a, rank: common_mean(a, {"x": rank})) == [{"x": 0.5}] * 2
    assert (
        everybody(arena, 2, lambda a, rank: common_mean(a, {"x": rank}, [1, 3][rank]))
        == [{"x": 0.75}] * 2
    )


def test_what_weighs_nothing_does_not_spoil_the_rest(arena: Any) -> None:
    def body(agreement: Any, rank: int) -> Any:
        return common_mean(agreement, {"x": math.nan if rank else 4.0}, 1 - rank)

    assert everybody(arena, 2, body) == [{"x": 4.0}] * 2
    nothing = everybody(arena, 2, lambda a, rank: common_mean(a, {"x": 1.0}, 0.0))
    assert all(math.isnan(each["x"]) for each in nothing)


def test_other_names_are_an_error_on_all(arena: Any) -> None:
    def body(agreement: Any, rank: int) -> Any:
        return common_mean(agreement, {["loss", "accuracy"][rank]: 1.0})

    for outcome in everybody(arena, 2, body):
        assert isinstance(outcome, SessionError)
        assert "node0 called s.mean(loss); node1 called s.mean(accuracy)" in str(outcome)


def test_negative_weights_are_refused(arena: Any) -> None:
    (outcome,) = everybody(arena, 1, lambda a, rank: common_mean(a, {"x": 1.0}, -1.0))
    with pytest.raises(SessionError, match="0 or more"):
        raise outcome
