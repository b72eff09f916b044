from __future__ import annotations

import asyncio

import pytest

from p2pdpt.errors import PeerFailedError
from p2pdpt.protocol.messages import Farewell, Released
from p2pdpt.protocol.view import Member, View
from p2pdpt.runtime.departures import Departures

VIEW = View(1, tuple(Member(f"{n:016x}", f"n{n}", f"h:{n}") for n in range(3)))


@pytest.fixture
def sent() -> list[tuple[int, Released]]:
    return []


@pytest.fixture
async def departures(sent: list[tuple[int, Released]]) -> Departures:
    return Departures(VIEW, lambda rank, message: sent.append((rank, message)))


async def test_a_leaver_is_released_when_its_collectives_are_over_here(
    departures: Departures, sent: list[tuple[int, Released]]
) -> None:
    departures.over(5, 1)
    departures.take(1, Farewell(3, {5: 2, 6: 1}))
    departures.over(5, 2)
    assert sent == []
    departures.over(6, 1)
    departures.over(6, 2)
    assert sent == [(1, Released())]
    departures.take(2, Farewell(3, {5: 1}))
    assert sent == [(1, Released()), (2, Released())]


async def test_what_needs_more_of_a_leaver(departures: Departures) -> None:
    departures.take(1, Farewell(3, {5: 2}))
    assert [departures.misses(1, 0, step) for step in (2, 3)] == [False, True]
    assert [departures.misses(1, 5, count) for count in (1, 2)] == [False, True]
    assert departures.misses(1, 6, 0)
    error = departures.error(1, "seal", 3)
    assert str(error) == (
        "peer n1 (000000) at h:1 failed during seal at step 3: its script ended after step 2"
    )
    departures.take(2, Farewell(0))
    assert "before the first step was complete" in str(departures.error(2, "", None))


async def test_leaving_waits_for_all_that_are_connected(departures: Departures) -> None:
    departures.over(5, 2)
    assert departures.farewell(4, [1, 2], None, "a" * 16, None) == Farewell(4, {5: 2})
    departures.released(1)
    await departures.wait(0.02)
    waiting = asyncio.create_task(departures.wait(30))
    await asyncio.sleep(0)
    assert not waiting.done()
    departures.released(2)
    await asyncio.wait_for(waiting, 5)


async def test_with_nobody_there_nothing_is_waited_for(departures: Departures) -> None:
    departures.farewell(0, [], None, "", None)
    await asyncio.wait_for(departures.wait(30), 5)


async def test_a_failing_leaver_names_the_culprit(departures: Departures) -> None:
    failure = PeerFailedError("n1", "h:1", "the connection was closed")
    said = departures.farewell(4, [2], "PeerFailedError: x", "1" * 16, failure)
    assert said == Farewell(4, {}, "PeerFailedError: x", "1" * 16, "the connection was closed")
    assert departures.farewell(4, [2], "e" * 9000, "", None).error == "e" * 4000
