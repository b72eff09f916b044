from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.channel import Meta
from p2pdpt.errors import HazardError
from p2pdpt.protocol.weighting import Fold, Reduction, finish, is_weight, join, leaf
from p2pdpt.topology import ADD, COPY, MAX, MIN, PROD

MEAN, SUM, NONE = Reduction.MEAN, Reduction.SUM, Reduction.NONE
FINISHED = Meta(1.0, 1.0, 0)


def test_a_leaf_is_worth_its_weight() -> None:
    assert leaf(3.0) == Meta(3.0, 3.0, 1)


def test_a_copy_keeps_its_worth() -> None:
    for meta in (leaf(2.0), FINISHED):
        assert join([meta], COPY, MEAN, 2, True) == Fold(meta, None, None)


def test_equal_scales_multiply_nothing() -> None:
    half = join([leaf(8.0), leaf(8.0)], ADD, MEAN, 3, True)
    assert half == Fold(Meta(8.0, 16.0, 2), None, None)
    whole = join([half.meta, leaf(8.0)], ADD, MEAN, 3, True)
    assert whole == Fold(FINISHED, None, 3.0)


def test_unequal_scales_multiply_each() -> None:
    part = join([leaf(1.0), leaf(3.0)], ADD, MEAN, 3, True)
    assert part == Fold(Meta(1.0, 4.0, 2), (1.0, 3.0), None)
    assert join([part.meta, leaf(2.0)], ADD, MEAN, 3, True) == Fold(FINISHED, (1.0, 2.0), 6.0)
    assert join([part.meta, leaf(1.0)], ADD, MEAN, 3, True) == Fold(FINISHED, None, 5.0)


def test_a_divisor_of_one_is_none() -> None:
    assert join([leaf(0.0), leaf(1.0)], ADD, MEAN, 2, True) == Fold(FINISHED, (0.0, 1.0), None)
    assert join([leaf(2.0)], ADD, MEAN, 1, True) == Fold(FINISHED, None, None)


def test_a_total_of_zero_is_zero() -> None:
    assert join([leaf(0.0)] * 3, ADD, MEAN, 3, True) == Fold(FINISHED, (0.0, 0.0, 0.0), None)
    assert finish(Meta(0.0, 0.0, 2), MEAN) == ((0.0,), None)


def test_sums_are_not_divided() -> None:
    assert join([leaf(1.0)] * 2, ADD, SUM, 2, True) == Fold(FINISHED, None, None)
    assert finish(Meta(1.0, 2.0, 2), SUM) == (None, None)
    assert finish(Meta(1.0, 2.0, 2), NONE) == (None, None)


@pytest.mark.parametrize("combine", [MIN, MAX, PROD])
def test_others_are_not_scaled(combine: object) -> None:
    assert join([leaf(2.0), leaf(3.0)], combine, MEAN, 3, True) == Fold(  # type: ignore[arg-type]
        Meta(1.0, 5.0, 2), None, None
    )
    assert join([leaf(2.0), leaf(3.0)], combine, MEAN, 2, True) == Fold(  # type: ignore[arg-type]
        FINISHED, None, None
    )


def test_what_is_whole_is_not_added_to() -> None:
    with pytest.raises(HazardError, match="already holds every contribution"):
        join([FINISHED, leaf(1.0)], ADD, MEAN, 2, True)
    with pytest.raises(HazardError, match="a fold holds 3 contributions of 2 members"):
        join([Meta(1.0, 2.0, 2), leaf(1.0)], ADD, MEAN, 2, True)
    assert join([FINISHED, leaf(1.0)], ADD, NONE, 2, False).meta == Meta(1.0, 2.0, 1)


def test_partial_folds_are_finished_at_the_end() -> None:
    assert finish(Meta(1.0, 4.0, 2), MEAN) == (None, 4.0)
    assert finish(Meta(8.0, 16.0, 2), MEAN) == (None, 2.0)
    assert finish(leaf(3.0), MEAN) == (None, None)
    assert finish(FINISHED, MEAN) == (None, None)


@given(
    weights=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=1, max_size=8),
    cuts=st.lists(st.integers(1, 7), max_size=4),
)
def test_any_tree_of_folds_is_the_weighted_mean(weights: list[float], cuts: list[int]) -> None:
    """Values are whole numbers, so that only the algebra could go wrong."""
    size = len(weights)
    values = [float(3**rank) for rank in range(size)]
    parts = [(leaf(weight), value) for weight, value in zip(weights, values, strict=True)]
    groups: list[list[tuple[Meta, float]]] = [[]]
    for index, part in enumerate(parts):
        if index in cuts and groups[-1]:
            groups.append([])
        groups[-1].append(part)

    def fold(group: list[tuple[Meta, float]]) -> tuple[Meta, float]:
        found = join([meta for meta, _ in group], ADD, MEAN, size, True)
        scales = found.scales or (1.0,) * len(group)
        total = sum(scale * value for scale, (_, value) in zip(scales, group, strict=True))
        return found.meta, total if found.divisor is None else total / found.divisor

    folded = [fold(group) for group in groups]
    meta, value = fold(folded) if len(folded) > 1 else folded[0]
    assert meta == FINISHED
    total = sum(weights)
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / total if total else 0.0
    assert value == pytest.approx(expected)


def test_what_a_contribution_may_weigh() -> None:
    assert all(is_weight(weight) for weight in (0, 1e-12, 1, 32, 1e12))
    wrong = (-1, 1e-13, 1e13, float("inf"), float("nan"))
    assert not any(is_weight(weight) for weight in wrong)
