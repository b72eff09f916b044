from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from p2pdpt.dtypes import dtype_named
from p2pdpt.errors import DeadlockError, HazardError
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.testing.programs import Local, Move, Program
from p2pdpt.testing.reference import narrowed, run_reference, widened
from p2pdpt.topology import ADD, COPY, MAX, MIN, PROD, Combine, Recv, Region, Send

WHOLE = Region(0, 3)


def run(moves: list[list[Move]], given: list[list[float]], **options: Any) -> list[list[float]]:
    scratch = options.pop("scratch", ())
    kind = options.pop("storage", "float32")
    program = Program(3, scratch, tuple(tuple(each) for each in moves))
    options.setdefault("reduction", Reduction.NONE)
    return [
        each.tolist()
        for each in run_reference(program, [np.array(each, kind) for each in given], **options)
    ]


def test_sends_read_the_state_before_the_move() -> None:
    swap: list[list[Move]] = [
        [(Recv(1, WHOLE), Send(1, WHOLE))],
        [(Recv(0, WHOLE), Send(0, WHOLE))],
    ]
    assert run(swap, [[1, 2, 3], [4, 5, 6]]) == [[4, 5, 6], [1, 2, 3]]


def test_two_moves_read_what_the_first_wrote() -> None:
    moves: list[list[Move]] = [
        [(Send(1, WHOLE),)],
        [(Recv((0, 1), WHOLE, ADD),), (Send(2, Region(1, 3)),)],
        [(Recv(1, Region(0, 2), COPY),)],
    ]
    assert run(moves, [[1, 2, 3], [10, 20, 30], [7, 8, 9]])[2] == [22, 33, 9]


@pytest.mark.parametrize(
    ("combine", "expected"),
    [(ADD, [5, -1, 6]), (MIN, [2, -4, 3]), (MAX, [3, 3, 3]), (PROD, [6, -12, 9])],
)
def test_ways_to_combine(combine: Combine, expected: list[float]) -> None:
    moves: list[list[Move]] = [[(Send(1, WHOLE),)], [(Recv((0, 1), WHOLE, combine),)]]
    assert run(moves, [[2, 3, 3], [3, -4, 3]])[1] == expected


def test_folds_go_in_the_listed_order() -> None:
    """In float32, 1e8 + 1 - 1e8 depends on it."""
    given = [[1e8] * 3, [1.0] * 3, [-1e8] * 3]
    sends: list[list[Move]] = [[(Send(2, WHOLE),)], [(Send(2, WHOLE),)]]
    assert run([*sends, [(Recv((0, 1, 2), WHOLE, ADD),)]], given)[2] == [0.0] * 3
    assert run([*sends, [(Recv((0, 2, 1), WHOLE, ADD),)]], given)[2] == [1.0] * 3


def test_means_are_weighted_and_weight_zero_is_not_read() -> None:
    moves: list[list[Move]] = [[(Send(1, WHOLE),)], [(Recv((0, 1), WHOLE, ADD),)]]
    given = [[1.0, 2.0, float("nan")], [5.0, 6.0, 7.0]]
    mean = {"reduction": Reduction.MEAN}
    assert run(moves, given, weights=[0.0, 2.0], **mean)[1] == [5.0, 6.0, 7.0]
    assert run(moves, given, weights=[3.0, 1.0], **mean)[1][:2] == [2.0, 3.0]
    assert run(moves, given, weights=[0.0, 0.0], **mean)[1] == [0.0, 0.0, 0.0]
    assert run(moves, given, **mean)[1][:2] == [3.0, 4.0]
    assert run(moves, given, weights=[3.0, 1.0], reduction=Reduction.SUM)[1][:2] == [6.0, 8.0]


def test_half_precision_rounds_once() -> None:
    """2048 + 1 is 2048 in float16; twice 1 first, or in float32, it is 2050."""
    moves: list[list[Move]] = [
        [(Send(1, WHOLE),)],
        [(Recv((0, 1), WHOLE, ADD),), (Send(2, WHOLE),)],
        [(Recv((1, 2), WHOLE, ADD),)],
    ]
    given = [[2048.0] * 3, [1.0] * 3, [1.0] * 3]
    found = run(moves, given, storage="float16")
    assert found[2] == [2050.0] * 3
    assert found[1] == [2048.0] * 3


def test_kernels_write_scratch() -> None:
    moves: list[list[Move]] = [
        [Local(WHOLE, Region(0, 3, 1)), (Send(1, Region(1, 3, 1)),)],
        [(Recv(0, Region(0, 2)),)],
    ]
    assert run(moves, [[1, 2, 3], [0, 0, 9]], scratch=(3,))[1] == [6, 9, 9]


def test_a_kernel_over_different_contributions_is_refused() -> None:
    moves: list[list[Move]] = [
        [(Recv((0, 1), Region(0, 1), ADD),), Local(WHOLE, Region(0, 3, 1))],
        [(Send(0, Region(0, 1)),)],
    ]
    with pytest.raises(HazardError, match="differ in worth"):
        run(moves, [[1, 2, 3], [0, 0, 9]], scratch=(3,))


def test_a_deadlock_is_found() -> None:
    moves: list[list[Move]] = [
        [(Recv(1, WHOLE),), (Send(1, WHOLE),)],
        [(Recv(0, WHOLE),), (Send(0, WHOLE),)],
    ]
    with pytest.raises(DeadlockError, match="no rank can go on"):
        run(moves, [[1, 2, 3], [4, 5, 6]])


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    element = dtype_named("bfloat16")
    stored = np.array([0x3F80, 0xC000, 0x7F80], "uint16")
    np.testing.assert_array_equal(widened(stored, element), np.array([1, -2, np.inf], "float32"))
    wide = np.array([1.0, 1.00390625, 1.01171875, np.nan], "float32")
    assert narrowed(wide, element).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x7FC0]
