from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.errors import SessionError
from p2pdpt.protocol.step import Act, Place, State, StepTransaction


def test_alone_a_step_is_sealed_when_held() -> None:
    step = StepTransaction(1, 1, 0)
    step.open(0)
    assert step.hold(0).act is Act.TELL_AND_WAKE
    assert (step.state, step.held, step.applied, step.done) == (State.SEALED, 0, -1, 1)
    step.apply(0)
    assert (step.state, step.applied) == (State.APPLIED, 0)


def test_sealed_only_by_the_oks_of_all() -> None:
    step = StepTransaction(1, 3, 0)
    step.open(0)
    assert step.open(0).act is Act.NOTHING
    assert step.ok(1, 1, 0).act is Act.NOTHING
    decision = step.hold(0)
    assert decision == (Act.TELL, "step 0 is held; no ok yet from rank 2")
    assert step.done == 0
    assert step.has_ok(1, 0) and not step.has_ok(2, 0)
    assert step.ok(2, 1, 0) == (Act.WAKE, "all members hold step 0")
    assert step.state is State.SEALED and step.done == 1


def test_an_ok_of_the_next_step_may_come_first() -> None:
    step = StepTransaction(1, 3, 0)
    step.open(0)
    step.hold(0)
    step.ok(1, 1, 0)
    step.ok(1, 1, 1)
    assert step.state is State.HELD
    assert step.ok(2, 1, 0).act is Act.WAKE


def test_attempts() -> None:
    step = StepTransaction(1, 2, 0)
    step.open(0)
    step.ok(1, 1, 0)
    step.hold(0)
    step.open(0, 1)
    assert step.place == Place(0, 1) and step.state is State.OPEN
    assert step.hold(0, 1).act is Act.TELL
    assert step.ok(1, 1, 0, 1).act is Act.WAKE
    step.open(1)
    assert step.applied == 0 and step.held == 0


@pytest.mark.parametrize("place", [(1, 0), (0, 1), (2, 0)])
def test_steps_follow_each_other(place: tuple[int, int]) -> None:
    step = StepTransaction(1, 2, 0)
    step.open(0)
    with pytest.raises(SessionError, match="steps follow each other"):
        step.open(*place)
    with pytest.raises(SessionError, match="cannot be held"):
        step.hold(*place)
    with pytest.raises(SessionError, match="cannot be applied"):
        step.apply(0)


def test_nothing_counts_once_frozen() -> None:
    step = StepTransaction(1, 2, 0)
    step.open(0)
    step.freeze("peer b failed")
    step.freeze("another reason")
    assert step.frozen == "peer b failed"
    for decision in (step.open(0), step.hold(0), step.ok(1, 1, 0)):
        assert decision == (Act.IGNORE, "the view is frozen: peer b failed")
    assert step.held == -1 and step.state is State.OPEN


def test_oks_of_other_views_and_out_of_order() -> None:
    step = StepTransaction(2, 3, 0)
    assert step.ok(1, 1, 0).act is Act.IGNORE
    assert step.ok(1, 2, 1).act is Act.REFUSE
    assert step.ok(0, 2, 0).act is Act.REFUSE
    assert step.ok(3, 2, 0).act is Act.REFUSE
    assert step.ok(1, 2, 0).act is Act.NOTHING
    assert step.ok(1, 2, 0).act is Act.REFUSE


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 6))
def test_applied_only_when_all_hold(seed: int, size: int, steps: int) -> None:
    rng = random.Random(seed)
    members = [StepTransaction(1, size, rank) for rank in range(size)]
    links: dict[tuple[int, int], list[int]] = {
        (a, b): [] for a in range(size) for b in range(size) if a != b
    }
    while True:
        actions: list[tuple[str, int, int]] = []
        for rank, member in enumerate(members):
            ready = member.state in (State.SEALED, State.APPLIED)
            if ready and member.place.step + 1 < steps:
                actions.append(("open", rank, member.place.step + 1))
            if member.state is State.OPEN and all(
                other.place.step >= member.place.step for other in members
            ):
                # Everybody's contribution is there once everybody has opened the step.
                actions.append(("hold", rank, member.place.step))
        actions += [("ok", *link) for link, queue in links.items() if queue]
        if not actions:
            break
        what, one, two = rng.choice(actions)
        if what == "open":
            members[one].open(two)
            assert all(member.held >= two - 1 for member in members)
        elif what == "hold":
            members[one].hold(two)
            for other in range(size):
                if other != one:
                    links[one, other].append(two)
        else:
            decision = members[two].ok(one, 1, links[one, two].pop(0))
            assert decision.act in (Act.WAKE, Act.NOTHING)
        assert max(m.applied for m in members) - min(m.applied for m in members) <= 1
    assert [member.done for member in members] == [steps] * size
