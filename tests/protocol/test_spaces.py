from __future__ import annotations

import pytest

from p2pdpt.channel import Meta
from p2pdpt.errors import HazardError, TopologyError
from p2pdpt.protocol.spaces import Spaces
from p2pdpt.protocol.tasks import Task
from p2pdpt.topology import Region

LEAF = Meta(1.0, 1.0, 1)


def task(start: int, stop: int, space: int = 0, done: int = 0) -> Task:
    made = Task(Region(start, stop, space), 1)
    made.done = done
    return made


def test_spaces_come_and_go() -> None:
    spaces = Spaces(10, in_place=False, replayed=False)
    assert spaces.length_of(0) == 10
    assert spaces.length_of(4) is None
    spaces.add(4, 3)
    assert spaces.length_of(4) == 3
    spaces.drop(4)
    assert spaces.length_of(4) is None


def test_a_read_finds_the_last_writers() -> None:
    spaces = Spaces(10, in_place=False, replayed=False)
    one, two = task(0, 6), task(4, 8)
    spaces.writes(one, one.region)
    spaces.writes(two, two.region)
    read = spaces.read(Region(2, 10), LEAF)
    assert read.parts == [(2, 4, one), (4, 8, two), (8, 10, None)]
    assert read.leaf == LEAF
    assert spaces.pieces() == [(0, 4, one), (4, 8, two), (8, 10, None)]


def test_scratch_is_read_only_where_it_was_written() -> None:
    spaces = Spaces(10, in_place=False, replayed=False)
    spaces.add(1, 5)
    spaces.writes(task(0, 3, 1), Region(0, 3, 1))
    assert len(spaces.read(Region(0, 3, 1), LEAF).parts) == 1
    with pytest.raises(HazardError, match="nothing has been written there"):
        spaces.read(Region(2, 4, 1), LEAF)
    with pytest.raises(TopologyError, match="outside the 5 elements of space 1"):
        spaces.read(Region(2, 6, 1), LEAF)
    with pytest.raises(TopologyError, match="does not exist"):
        spaces.read(Region(0, 1, 2), LEAF)


def test_contributions_have_no_hazard_out_of_place() -> None:
    for in_place in (False, True):
        spaces = Spaces(10, in_place=in_place, replayed=False)
        sending = task(0, 4)
        spaces.reads(sending, 0, spaces.read(Region(0, 4), LEAF))
        expected = [(sending, 2, 4)] if in_place else []
        assert spaces.hazards(Region(2, 6)) == expected


def test_hazards_are_readers_and_writers_cut_to_the_region() -> None:
    spaces = Spaces(10, in_place=False, replayed=False)
    writer, reader, far = task(0, 6), task(1, 3), task(7, 9)
    spaces.writes(writer, writer.region)
    spaces.reads(reader, 0, spaces.read(Region(1, 3), LEAF))
    spaces.writes(far, far.region)
    assert spaces.hazards(Region(2, 5)) == [
        (writer, 2, 3),
        (reader, 2, 3),
        (writer, 3, 5),
    ]


def test_users_of_overwritten_elements_are_forgotten() -> None:
    """Whoever comes later waits for the writer, which waits for them."""
    spaces = Spaces(10, in_place=True, replayed=True)
    first, second, third = task(0, 10), task(3, 5), task(0, 10)
    spaces.writes(first, first.region)
    assert spaces.hazards(second.region) == [(first, 3, 5)]
    spaces.writes(second, second.region)
    assert spaces.hazards(third.region) == [
        (first, 0, 3),
        (second, 3, 5),
        (first, 5, 10),
    ]
    spaces.writes(third, third.region)
    assert spaces.hazards(Region(0, 10)) == [(third, 0, 10)]


def test_complete_tasks_matter_only_for_a_replay() -> None:
    spaces = Spaces(10, in_place=False, replayed=True)
    done = task(0, 4, done=4)
    spaces.writes(done, done.region)
    assert spaces.hazards(Region(0, 4)) == [(done, 0, 4)]
    spaces.replayed = False
    assert spaces.hazards(Region(0, 4)) == []


def test_complete_readers_are_forgotten_unless_replayed() -> None:
    for replayed in (False, True):
        spaces = Spaces(10, in_place=True, replayed=replayed)
        whole = Region(0, 10)
        readers = [task(0, 10, done=10), task(0, 10, done=10), task(0, 10)]
        for reader in readers:
            spaces.reads(reader, 0, spaces.read(whole, LEAF))
        spaces.replayed = True
        kept = [user for user, _, _ in spaces.hazards(whole)]
        assert kept == (readers if replayed else [readers[2]])


def test_spaces_do_not_touch_each_other() -> None:
    spaces = Spaces(10, in_place=True, replayed=False)
    spaces.add(1, 10)
    writer = task(0, 10, 1)
    spaces.writes(writer, writer.region)
    assert spaces.hazards(Region(0, 10)) == []
    assert spaces.hazards(Region(0, 10, 1)) == [(writer, 0, 10)]
