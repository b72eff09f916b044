from __future__ import annotations

import numpy as np
import pytest

from p2pdpt.errors import DeadlockError, HazardError, MismatchError
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.testing.programs import AllReduce, Local, Program, Scripted, check, thrice, touched
from p2pdpt.testing.simulator import simulate
from p2pdpt.topology import ADD, Recv, Region, Send

A, B = Region(0, 2), Region(2, 4)


def program(*moves: tuple[object, ...], scratch: tuple[int, ...] = ()) -> Program:
    return Program(4, scratch, moves)  # type: ignore[arg-type]


def test_a_script_issues_its_moves() -> None:
    script = Scripted(
        program(
            ((Send(1, A),), Local(A, Region(0, 2, 1)), (Recv((0, 1), B, ADD),)),
            ((Recv(0, B),), (Send(0, A),)),
            scratch=(2,),
        )
    )
    given = [np.array([1, 2, 3, 4], "float32"), np.array([10, 20, 30, 40], "float32")]
    outcome = simulate(script, given, reduction=Reduction.NONE)
    np.testing.assert_array_equal(outcome.results[0], [1, 2, 13, 24])
    np.testing.assert_array_equal(outcome.results[1], [10, 20, 1, 2])
    assert script.static
    assert script.agreement == "eventual"
    assert script.program.size == 2
    assert AllReduce(script.program).agreement == "exact"


def test_thrice() -> None:
    out = np.zeros(3)
    thrice(out, np.array([1.0, 2.0, -3.0]))
    np.testing.assert_array_equal(out, [3.0, 6.0, -9.0])


def test_what_a_move_touches() -> None:
    assert touched(1, Local(A, B)) == ([A], [B])
    assert touched(1, (Send(0, A), Recv((0, 1), B, ADD))) == ([A, B], [B])
    assert touched(1, (Recv(0, B),)) == ([], [B])


def test_an_exchange_and_a_chain_keep_the_rules() -> None:
    check(program(((Send(1, A), Recv(1, A)),), ((Recv(0, A), Send(0, A)),)))
    check(
        program(
            ((Send(1, A),), (Recv(2, A),)),
            ((Recv(0, A),), (Send(2, A),)),
            ((Recv(1, A),), (Send(0, A),)),
        )
    )


@pytest.mark.parametrize(
    ("moves", "error", "text"),
    [
        (
            [((Recv(1, A), Recv(1, Region(1, 3))),), ((Send(0, A), Send(0, A)),)],
            HazardError,
            "twic",
        ),
        ([((Send(1, Region(0, 1, 1)),),), ((Recv(0, Region(0, 1)),),)], HazardError, "never writ"),
        ([((Send(1, A),),), ((Recv(0, Region(0, 1)),),)], MismatchError, "receive 0 of rank 1"),
        ([((Send(1, A),),), ()], MismatchError, "rank 0 sends more than rank 1 receives"),
        ([((Recv(1, A),),), ()], MismatchError, "receive 0 of rank 0 from rank 1"),
        (
            [((Recv(1, A),), (Send(1, A),)), ((Recv(0, A),), (Send(0, A),))],
            DeadlockError,
            "wait for each other",
        ),
        # The receive of rank 1 overwrites what it sends, which rank 0 takes a move later.
        (
            [((Send(1, A),), (Recv(1, A),)), ((Recv(0, A), Send(0, A)),)],
            DeadlockError,
            "wait for each other",
        ),
    ],
)
def test_broken_rules_are_refused(moves: list[object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check(program(*moves, scratch=(2,)))  # type: ignore[arg-type]


def test_empty_regions_conflict_with_nothing() -> None:
    check(
        program(
            ((Recv(1, A), Recv(1, Region(1, 1))),),
            ((Send(0, A), Send(0, Region(3, 3))),),
        )
    )
