from __future__ import annotations

import pytest

from p2pdpt.errors import HazardError, TopologyError
from p2pdpt.protocol.posting import Flight, Posted, Request, check_region
from p2pdpt.protocol.tasks import Task
from p2pdpt.topology import Message, Region

LENGTHS = {0: 10, 1: 5}


def handle(
    *, reads: tuple[Region, ...] = (), writes: Region | None = None, what: str = "an operation"
) -> Posted:
    made = Posted(what)
    made.reads, made.writes = reads, writes
    return made


def check(flight: Flight, *handles: Posted) -> None:
    flight.check(handles, LENGTHS.get)


def test_a_handle_is_done_when_its_tasks_are() -> None:
    posted = Posted("what")
    assert not posted.done
    posted.finished = True
    assert posted.done
    one, two = Task(Region(0, 2), 1), Task(Region(0, 1), 1)
    posted.tasks = [one, two]
    one.done = 2
    assert not posted.done
    two.done = 1
    assert posted.done
    assert posted.message is None
    posted.mail = Message("push")
    assert posted.message is posted.mail
    assert posted.text == "what"


def test_a_request_yields_itself_and_returns_what_it_is_sent() -> None:
    async def plugin() -> object:
        return await request

    request = Request("move", [], 0, None)
    coroutine = plugin()
    assert coroutine.send(None) is request
    with pytest.raises(StopIteration) as ended:
        coroutine.send("answer")
    assert ended.value.value == "answer"


def test_two_writes_of_one_element_in_one_move_are_refused() -> None:
    with pytest.raises(HazardError, match="two operations of one move write elements of"):
        check(Flight(), handle(writes=Region(0, 5)), handle(writes=Region(4, 6)))
    check(Flight(), handle(writes=Region(0, 5)), handle(writes=Region(5, 6)))
    check(Flight(), handle(writes=Region(0, 5)), handle(writes=Region(0, 5, 1)))
    check(Flight(), handle(writes=Region(0, 5)), handle(writes=Region(3, 3)))


def test_a_move_may_read_what_it_writes() -> None:
    check(Flight(), handle(reads=(Region(0, 5),)), handle(writes=Region(0, 5)))


@pytest.mark.parametrize(
    ("first", "second", "hazard"),
    [
        (handle(writes=Region(0, 5)), handle(writes=Region(4, 9)), True),
        (handle(writes=Region(0, 5)), handle(reads=(Region(4, 9),)), True),
        (handle(reads=(Region(0, 5),)), handle(writes=Region(4, 9)), True),
        (handle(reads=(Region(0, 5),)), handle(reads=(Region(4, 9),)), False),
        (handle(reads=(Region(8, 9), Region(0, 5))), handle(writes=Region(4, 8)), True),
        (handle(writes=Region(0, 5)), handle(writes=Region(5, 9)), False),
        (handle(writes=Region(0, 5)), handle(writes=Region(2, 2)), False),
        (handle(writes=Region(0, 5, 1)), handle(writes=Region(0, 5)), False),
    ],
)
def test_regions_in_flight_are_left_alone(first: Posted, second: Posted, hazard: bool) -> None:
    flight = Flight()
    first.awaited = False
    check(flight, first)
    flight.add([first])
    if hazard:
        with pytest.raises(HazardError, match="is used while an operation is in flight"):
            check(flight, second)
    else:
        check(flight, second)
    first.awaited = True
    check(flight, second)


def test_a_space_in_use_is_not_given_back() -> None:
    flight = Flight()
    sending, receiving = handle(reads=(Region(0, 2, 1),)), handle(writes=Region(0, 2, 2))
    flight.add([sending, receiving])
    flight.check_free(3)
    for space, posted in ((1, sending), (2, receiving)):
        with pytest.raises(HazardError, match="released while an operation uses it; wait"):
            flight.check_free(space)
        posted.awaited = True
        flight.check_free(space)


def test_regions_lie_in_their_space() -> None:
    check_region(Region(0, 10), LENGTHS.get)
    check_region(Region(5, 5, 1), LENGTHS.get)
    for region, text in (
        (Region(0, 11), "elements 0..11 lie outside the 10 elements of the bucket"),
        (Region(5, 6, 1), "elements 5..6 lie outside the 5 elements of space 1"),
        (Region(0, 0, 2), "lies in a space that does not exist"),
    ):
        with pytest.raises(TopologyError, match=text):
            check_region(region, LENGTHS.get)
        with pytest.raises(TopologyError, match=text):
            check(Flight(), handle(writes=region))
        with pytest.raises(TopologyError, match=text):
            check(Flight(), handle(reads=(region,)))
