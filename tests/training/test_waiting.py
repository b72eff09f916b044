"""Waits of the training thread, and the verdict when members wait for different things."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import nn

from p2pdpt.errors import PeerFailedError, SessionError
from p2pdpt.training.waiting import ROUNDS_OF_DETAIL, ROUNDS_OF_KIND, Verdict, Waiting, WaitState


def looks(verdict: Verdict, states: list[WaitState], count: int) -> list[str | None]:
    return [verdict.look(states) for _ in range(count)]


def test_different_kinds_are_judged_when_nothing_moves() -> None:
    verdict = Verdict(["node0", "node1"])
    states = [WaitState(7, "s.mean(loss)"), WaitState(9, "the backward of step 3", "attempt 0")]
    found = looks(verdict, states, ROUNDS_OF_KIND + 1)
    assert found[:-1] == [None] * ROUNDS_OF_KIND
    assert found[-1] is not None
    assert found[-1].startswith(
        "the nodes wait for each other in different places: node0 in s.mean(loss); node1 in the "
        "backward of step 3 (attempt 0). All nodes must make the same calls"
    )


def test_anything_that_moves_starts_anew() -> None:
    verdict = Verdict(["a", "b"])
    for serial in range(10):
        states = [WaitState(serial, "s.sum(x)"), WaitState(0, "the end of the session")]
        assert looks(verdict, states, ROUNDS_OF_KIND) == [None] * ROUNDS_OF_KIND


def test_who_computes_may_take_any_time() -> None:
    verdict = Verdict(["a", "b"])
    states = [WaitState(1, "the end of the session"), WaitState(5)]
    assert looks(verdict, states, 50) == [None] * 50


def test_the_same_place_is_only_slow() -> None:
    verdict = Verdict(["a", "b"])
    states = [WaitState(1, "the backward of step 3"), WaitState(8, "the backward of step 3")]
    assert looks(verdict, states, 50) == [None] * 50


def test_a_difference_within_a_kind_takes_longer() -> None:
    verdict = Verdict(["a", "b"])
    states = [WaitState(1, "the backward of step 3"), WaitState(1, "the backward of step 4")]
    found = looks(verdict, states, ROUNDS_OF_DETAIL + 1)
    assert found[:-1] == [None] * ROUNDS_OF_DETAIL
    assert found[-1] is not None


def waiting(arena: Any, rank: int) -> tuple[Any, Waiting]:
    connection = arena.connection(rank)
    made = Waiting(connection.loop, connection.open())
    made.start()
    return connection, made


def test_results_and_errors_come_back(arena: Any) -> None:
    connection, made = waiting(arena, 0)

    async def answer() -> int:
        await asyncio.sleep(0)
        return 5

    async def fail() -> None:
        raise ValueError("on purpose")

    assert made.wait("a test", "", answer()) == 5
    with pytest.raises(ValueError, match="on purpose"):
        made.wait("a test", "", fail())
    assert made.wait("a test", "", answer()) == 5
    made.stop()
    made.stop()
    connection.close()


def test_members_that_wait_for_different_things_all_get_the_verdict(arena: Any) -> None:
    def member(rank: int) -> None:
        connection, made = waiting(arena, rank)
        try:
            name = ("one", "other")[rank]
            made.wait(f"the {name} thing", "", made.group.all_gather(b"", name=name))
        finally:
            made.stop()
            connection.close()

    for outcome in arena.outcomes(2, member):
        assert isinstance(outcome, SessionError)
        assert "node0 in the one thing; node1 in the other thing" in str(outcome)


@pytest.mark.parametrize("ending", ["fewer batches", "no step", "another call"])
def test_scripts_that_part_company_end_by_name(arena: Any, ending: str) -> None:
    models = [nn.Linear(2, 1) for _ in range(2)]

    def train(rank: int) -> None:
        model = models[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with arena.session(rank, model, optimizer) as s:
            for step in range(3):
                if ending == "fewer batches" and rank == 0 and step == 2:
                    break
                model(torch.ones(1, 2)).sum().backward()
                if ending == "another call" and rank == 0 and step == 1:
                    s.mean(loss=1.0)
                if not (ending == "no step" and rank == 0 and step == 1):
                    optimizer.step()

    expected = {
        "fewer batches": "node0 in the end of the session; node1 in the backward of step 2",
        "no step": "node0 in the backward of step 1 (attempt 1); node1 in the backward of step 2",
        "another call": "node0 in s.mean(loss); node1 in the backward of step 2",
    }
    outcomes = arena.outcomes(2, train)
    assert all(isinstance(each, SessionError | PeerFailedError) for each in outcomes)
    assert all(expected[ending] in str(each) for each in outcomes)
