"""Rounds under way: what others give up ends here, as an error or, if it had ended, not at all."""

from __future__ import annotations

import asyncio

import pytest

from p2pdpt.errors import FrameError, GroupError, SessionError
from p2pdpt.protocol.messages import Abandoned
from p2pdpt.protocol.view import Member
from p2pdpt.runtime import rounds as module
from p2pdpt.runtime.drivers.asyncio_driver import RoundKey
from p2pdpt.runtime.rounds import Rounds

BOB = Member("b" * 16, "bob", "h:2")
KEY = RoundKey(1, 77, 3, 0, 0)
STEP = RoundKey(1, 0, 12, 0, 4)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FAREWELL_S", 0.01)


@pytest.fixture
async def rounds() -> Rounds:
    return Rounds()


def given_up(key: RoundKey, reason: str = "") -> Abandoned:
    return Abandoned(*key, reason)


async def waiting(rounds: Rounds, key: RoundKey, seconds: float = 60) -> None:
    with rounds.running(key, "all_reduce 'x' (ring)"):
        await asyncio.sleep(seconds)


async def test_what_another_cancels_is_an_error_here(rounds: Rounds) -> None:
    task = asyncio.create_task(waiting(rounds, KEY))
    await asyncio.sleep(0)
    assert rounds.keys == [KEY]
    rounds.abandoned(KEY, BOB, given_up(KEY))
    with pytest.raises(GroupError, match=r"^all_reduce 'x' \(ring\): cancelled by bob \(b{6}\) at"):
        await task
    assert rounds.keys == []
    # It is over; another of its name begins afresh.
    await waiting(rounds, KEY, 0.05)


async def test_what_another_failed_in_says_why_and_at_which_step(rounds: Rounds) -> None:
    rounds.abandoned(STEP, BOB, given_up(STEP, "MemoryError: no room"))
    assert STEP in rounds.given_up
    with pytest.raises(GroupError, match=r" at step 12: failed on bob .* h:2: MemoryError: no ro"):
        await waiting(rounds, STEP)
    assert STEP not in rounds.given_up


async def test_a_round_that_ends_in_time_has_ended_well(rounds: Rounds) -> None:
    rounds.abandoned(KEY, BOB, given_up(KEY))
    await waiting(rounds, KEY, 0)
    await asyncio.sleep(0.05)


async def test_a_cancelled_caller_is_cancelled(rounds: Rounds) -> None:
    task = asyncio.create_task(waiting(rounds, KEY))
    await asyncio.sleep(0)
    rounds.abandoned(KEY, BOB, given_up(KEY))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_task_is_as_it_was_afterwards(rounds: Rounds) -> None:
    rounds.abandoned(KEY, BOB, given_up(KEY))
    with pytest.raises(GroupError):
        await waiting(rounds, KEY)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    async with asyncio.timeout(5):
        await asyncio.sleep(0.01)


async def test_one_round_is_not_begun_twice(rounds: Rounds) -> None:
    with (
        rounds.running(KEY, "one"),
        pytest.raises(SessionError, match="two is under way already"),
        rounds.running(KEY, "two"),
    ):
        pass


async def test_old_steps_are_forgotten_and_the_number_is_bounded(rounds: Rounds) -> None:
    for bucket in range(4096):
        key = STEP._replace(bucket=bucket)
        rounds.abandoned(key, BOB, given_up(key))
    with pytest.raises(FrameError, match="4096 rounds given up"):
        rounds.abandoned(KEY, BOB, given_up(KEY))
    rounds.sealed(12)
    assert STEP in rounds.given_up
    rounds.sealed(13)
    assert STEP not in rounds.given_up
    rounds.abandoned(KEY, BOB, given_up(KEY))
