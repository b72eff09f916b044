"""Tasks one by one, with a driver that only writes down what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest

from p2pdpt.channel import Meta
from p2pdpt.errors import HazardError
from p2pdpt.protocol import tasks
from p2pdpt.protocol.round_io import MINE, RESULT, WIDE, RoundIO, Slice
from p2pdpt.protocol.tasks import LocalTask, Read, RecvTask, SendTask, Source, Task
from p2pdpt.protocol.weighting import Reduction, join
from p2pdpt.topology import ADD, COPY, Combine, Message, Region

LEAF = Meta(1.0, 1.0, 1)
PAIR = Meta(1.0, 2.0, 2)
FINISHED = Meta(1.0, 1.0, 0)
TEN, FOUR, SCRATCH = Region(0, 10), Region(0, 4), Region(0, 4, 3)


class Recorder(RoundIO):
    """Writes down every call but ``release``; staging is area 100, 102, ..."""

    def __init__(self, half: bool = False) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.half = half
        self.staged: list[tuple[tuple[int, int], int]] = []
        self.released: list[tuple[int, int]] = []
        self.done: list[Callable[[], None]] = []

    def take(self) -> list[tuple[Any, ...]]:
        """Return what was written down since the last call."""
        log, self.log = self.log, []
        return log

    def open_send(self, peer: int, ordinal: int, length: int) -> None:
        self.log.append(("open_send", peer, ordinal, length))

    def push(self, peer: int, ordinal: int, data: Slice, meta: Meta) -> None:
        self.log.append(("push", peer, ordinal, data, meta))

    def push_bytes(self, peer: int, ordinal: int, payload: bytes) -> None:
        self.log.append(("push_bytes", peer, ordinal, payload))

    def open_receive(self, peer: int, ordinal: int, length: int) -> None:
        self.log.append(("open_receive", peer, ordinal, length))

    def cancel_receive(self, peer: int, ordinal: int) -> None:
        self.log.append(("cancel_receive", peer, ordinal))

    def grant(self, peer: int, ordinal: int, upto: int) -> None:
        self.log.append(("grant", peer, ordinal, upto))

    def fold(
        self,
        out: Slice,
        sources: Sequence[Slice],
        combine: Combine,
        scales: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        self.log.append(("fold", out, list(sources), combine, scales, divisor))

    def local(
        self, kernel: Any, src: Sequence[Slice], dst: Slice, done: Callable[[], None]
    ) -> None:
        self.log.append(("local", list(src), dst))
        self.done.append(done)

    def apply(
        self, shard: int, message: Message, data: Sequence[Slice], done: Callable[[], None]
    ) -> None:
        raise NotImplementedError

    def scratch(self, area: int, length: int) -> None:
        raise NotImplementedError

    def drop(self, area: int) -> None:
        raise NotImplementedError

    def staging(self, length: int) -> tuple[int, int]:
        area = 100 + 2 * len(self.staged)
        areas = (area, area + 1 if self.half else area)
        self.staged.append((areas, length))
        return areas

    def release(self, areas: tuple[int, int]) -> None:
        self.released.append(areas)

    def now(self) -> float:
        raise NotImplementedError

    def wake_at(self, when: float) -> None:
        raise NotImplementedError


def written(region: Region, done: int, area: int = RESULT, meta: Meta = LEAF) -> Task:
    """Return a task that has finished `done` elements of a region."""
    task = Task(region, 1)
    if done:
        task.finish_run(region.start + done, area, meta)
    return task


def receive(
    sources: Sequence[Source | Read],
    region: Region = TEN,
    combine: Combine = ADD,
    hazards: Sequence[tuple[Task, int, int]] = (),
    *,
    half: bool = False,
    size: int = 2,
    move: int = 2,
) -> RecvTask:
    return RecvTask(
        region,
        move,
        sources,
        combine,
        list(hazards),
        half=half,
        wide_width=4,
        join=lambda metas: join(metas, combine, Reduction.MEAN, size, True),
    )


def own(region: Region = TEN) -> Read:
    return Read([(region.start, region.stop, None)], LEAF)


# Task and Read.


def test_a_task_finishes_a_prefix_in_runs() -> None:
    task = Task(Region(5, 15), 3)
    assert (task.length, task.done, task.complete) == (10, 0, False)
    task.finish_run(7, RESULT, LEAF)
    task.finish_run(9, RESULT, LEAF)
    task.finish_run(11, RESULT, PAIR)
    task.finish_run(15, WIDE, PAIR)
    assert task.runs == [(9, RESULT, LEAF), (11, RESULT, PAIR), (15, WIDE, PAIR)]
    assert task.complete
    task.dirty = True
    task.reset(LEAF)
    assert (task.done, task.runs, task.dirty, task.complete) == (0, [], False, False)
    assert Task(Region(4, 4), 1).complete


def test_a_read_is_available_as_far_as_its_writers_have_come() -> None:
    one, two = written(Region(2, 6), 2), written(Region(0, 9), 7, WIDE, PAIR)
    read = Read([(0, 2, None), (2, 5, one), (5, 8, two)], LEAF)
    assert read.available(0) == 4
    assert read.available(4) == 4
    assert read.available(5) == 7
    one.finish_run(6, RESULT, PAIR)
    assert read.available(0) == 7
    two.finish_run(9, WIDE, PAIR)
    assert read.available(0) == 8
    assert read.run(0) == (2, MINE, LEAF)
    assert read.run(2) == (4, RESULT, LEAF)
    assert read.run(4) == (5, RESULT, PAIR)
    assert read.run(5) == (8, WIDE, PAIR)


def test_a_read_of_nothing_yet_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="element 3 is not available"):
        Read([(0, 5, written(Region(0, 5), 2))], LEAF).run(3)


# Sends.


def test_a_send_of_a_contribution_leaves_at_once() -> None:
    io = Recorder()
    task = SendTask(Region(2, 6), 1, [(1, 0), (3, 4)], own(Region(2, 6)))
    task.start(io)
    assert task.advance(io) is False
    assert io.take() == [
        ("open_send", 1, 0, 4),
        ("open_send", 3, 4, 4),
        ("push", 1, 0, Slice(MINE, 2, 6), LEAF),
        ("push", 3, 4, Slice(MINE, 2, 6), LEAF),
    ]
    assert task.note_drained(1, 0, 4) is False
    assert task.note_drained(3, 4, 2) is True
    assert task.done == 2
    assert task.describe() == "send of elements 2..6 to rank 1, 3: 2 of 4 elements were taken"
    assert task.note_drained(3, 4, 4) is True
    assert task.complete
    task.advance(io)
    assert io.take() == []


def test_a_send_follows_its_writer_a_segment_at_a_time() -> None:
    io = Recorder()
    writer = written(Region(0, 10), 2)
    with mock.patch.object(tasks, "SEGMENT", 4):
        task = SendTask(Region(0, 10), 1, [(1, 0)], Read([(0, 10, writer)], LEAF))
        task.start(io)
        task.advance(io)
        assert io.take() == [("open_send", 1, 0, 10)]
        assert task.describe() == "send of elements 0..10 to rank 1: 0 of 10 elements were ready"
        writer.finish_run(5, RESULT, PAIR)
        task.advance(io)
        assert io.take() == [
            ("push", 1, 0, Slice(RESULT, 0, 2), LEAF),
            ("push", 1, 0, Slice(RESULT, 2, 5), PAIR),
        ]
        writer.finish_run(8, RESULT, PAIR)
        task.advance(io)
        assert io.take() == []
        writer.finish_run(10, WIDE, PAIR)
        task.advance(io)
        assert io.take() == [
            ("push", 1, 0, Slice(RESULT, 5, 8), PAIR),
            ("push", 1, 0, Slice(WIDE, 8, 10), PAIR),
        ]
    task.reset(Meta(3.0, 3.0, 1))
    assert (task.pushed, task.drained, task.read.leaf.scale) == (0, {(1, 0): 0}, 3.0)


# Receives.


def test_a_copy_that_nobody_minds_lands_in_place() -> None:
    io = Recorder()
    source = Source(1, 7)
    task = receive([source], Region(10, 16), COPY)
    task.start(io)
    assert io.take() == [("open_receive", 1, 7, 6), ("grant", 1, 7, 6)]
    assert task.land(source, 0, 4, 4) == Slice(RESULT, 10, 14)
    assert task.note_arrived(source, 4, PAIR) is True
    assert task.describe() == "receive (copy) into elements 10..16: rank 1 sent 4 of 6 elements"
    assert task.note_arrived(source, 2, PAIR) is True
    assert task.complete
    assert task.runs == [(16, RESULT, PAIR)]
    assert io.staged == []


def test_a_long_copy_waits_until_its_memory_is_free() -> None:
    io = Recorder()
    busy = written(Region(0, 20), 0)
    with mock.patch.object(tasks, "WINDOW", 4):
        task = receive([Source(1, 0)], Region(5, 15), COPY, [(busy, 5, 15)])
        task.start(io)
        assert io.take() == [("open_receive", 1, 0, 10)]
        busy.finish_run(14, RESULT, LEAF)
        task.advance(io)
        assert io.take() == []
        assert task.describe().endswith("rank 1 sent 0 of 10 elements; the memory is still in use")
        busy.finish_run(15, RESULT, LEAF)
        task.advance(io)
        assert io.take() == [("grant", 1, 0, 10)]
    assert io.staged == []


def test_a_short_copy_over_busy_memory_is_staged() -> None:
    """It may come ahead of every grant, so it needs a place at once."""
    io = Recorder()
    busy = written(Region(0, 20), 0)
    source = Source(1, 0)
    task = receive([source], Region(5, 15), COPY, [(busy, 5, 15)])
    task.start(io)
    assert io.staged == [((100, 100), 10)]
    assert io.take() == [("open_receive", 1, 0, 10), ("grant", 1, 0, 10)]
    assert task.land(source, 0, 10, 4) == Slice(100, 0, 10)
    assert task.note_arrived(source, 10, LEAF) is False
    assert task.advance(io) is False
    busy.finish_run(9, RESULT, LEAF)
    assert task.advance(io) is True
    busy.finish_run(20, RESULT, LEAF)
    assert task.advance(io) is True
    assert io.take() == [
        ("fold", Slice(RESULT, 5, 9), [Slice(100, 0, 4)], COPY, None, None),
        ("fold", Slice(RESULT, 9, 15), [Slice(100, 4, 10)], COPY, None, None),
    ]
    assert io.released == [(100, 100)]


def test_a_fold_joins_in_the_listed_order_as_far_as_all_have_come() -> None:
    io = Recorder()
    one, two = Source(1, 0), Source(2, 0)
    task = receive([two, own(), one], size=3)
    task.start(io)
    assert io.take() == [
        ("open_receive", 2, 0, 10),
        ("open_receive", 1, 0, 10),
        ("grant", 2, 0, 10),
        ("grant", 1, 0, 10),
    ]
    task.land(one, 0, 6, 4)
    task.note_arrived(one, 6, LEAF)
    assert task.advance(io) is False
    task.land(two, 0, 4, 4)
    task.note_arrived(two, 4, LEAF)
    assert task.advance(io) is True
    assert io.take() == [
        (
            "fold",
            Slice(RESULT, 0, 4),
            [Slice(100, 0, 4), Slice(MINE, 0, 4), Slice(102, 0, 4)],
            ADD,
            None,
            3.0,
        )
    ]
    assert task.runs == [(4, RESULT, FINISHED)]
    task.land(two, 4, 6, 4)
    task.note_arrived(two, 6, Meta(2.0, 2.0, 1))
    task.land(one, 6, 4, 4)
    task.note_arrived(one, 4, LEAF)
    assert task.advance(io) is True
    folds = io.take()
    assert [(fold[1], fold[4], fold[5]) for fold in folds] == [
        (Slice(RESULT, 4, 10), (2.0, 1.0, 1.0), 4.0)
    ]
    assert task.complete
    assert sorted(io.released) == [(100, 100), (102, 102)]
    assert task.advance(io) is False


def test_a_fold_is_cut_where_a_source_changes() -> None:
    io = Recorder()
    writer = written(Region(0, 10), 3, RESULT, LEAF)
    writer.finish_run(10, RESULT, Meta(2.0, 2.0, 1))
    source = Source(1, 0)
    task = receive([source, Read([(0, 10, writer)], LEAF)])
    task.start(io)
    task.land(source, 0, 10, 4)
    task.note_arrived(source, 5, LEAF)
    task.note_arrived(source, 5, Meta(2.0, 2.0, 1))
    task.advance(io)
    assert [(fold[1], fold[4], fold[5]) for fold in io.take() if fold[0] == "fold"] == [
        (Slice(RESULT, 0, 3), None, 2.0),
        (Slice(RESULT, 3, 5), (1.0, 2.0), 3.0),
        (Slice(RESULT, 5, 10), None, 2.0),
    ]


def test_windows_move_on_as_they_are_folded() -> None:
    """Two sources: each may be ahead of the other by a window, in grants of half of one."""
    io = Recorder()
    one, two = Source(1, 0), Source(2, 0)
    with mock.patch.object(tasks, "WINDOW", 4):
        task = receive([one, two], size=3)
        task.start(io)
        assert io.staged == [((100, 100), 4), ((102, 102), 4)]
        assert io.take()[2:] == [("grant", 1, 0, 4), ("grant", 2, 0, 4)]
        assert task.land(one, 0, 4, 4) == Slice(100, 0, 4)
        task.note_arrived(one, 4, LEAF)
        assert task.land(two, 0, 1, 4) == Slice(102, 0, 1)
        task.note_arrived(two, 1, LEAF)
        task.advance(io)
        assert io.take() == [
            ("fold", Slice(RESULT, 0, 1), [Slice(100, 0, 1), Slice(102, 0, 1)], ADD, None, None)
        ]
        task.land(two, 1, 2, 4)
        task.note_arrived(two, 2, LEAF)
        task.advance(io)
        assert io.take()[1:] == [("grant", 1, 0, 7), ("grant", 2, 0, 7)]
        # What lands is cut at the end of the window, and goes on at its start.
        assert task.land(two, 3, 4, 4) == Slice(102, 3, 4)
        task.note_arrived(two, 1, LEAF)
        assert task.land(two, 4, 3, 4) == Slice(102, 0, 3)
        task.note_arrived(two, 3, LEAF)
        task.land(one, 4, 3, 4)
        task.note_arrived(one, 3, LEAF)
        task.advance(io)
        assert [each[1] for each in io.take()] == [Slice(RESULT, 3, 4), Slice(RESULT, 4, 7), 1, 2]
        assert one.granted == 10


def test_a_single_source_is_granted_ahead() -> None:
    """Nothing but its arrival holds a fold of one remote and the own part, so all may come."""
    io = Recorder()
    with mock.patch.object(tasks, "WINDOW", 4):
        receive([Source(1, 0), own()]).start(io)
        assert io.take()[1:] == [("grant", 1, 0, 10)]
        late = written(Region(0, 10), 0)
        task = receive([Source(1, 1), Read([(0, 10, late)], LEAF)])
        task.start(io)
        assert io.take()[1:] == [("grant", 1, 1, 4)]
        late.finish_run(10, RESULT, LEAF)
        task.advance(io)
        assert io.take() == [("grant", 1, 1, 10)]


def test_a_send_of_the_same_move_that_lags_gets_a_window_for_everything() -> None:
    io = Recorder()
    with mock.patch.object(tasks, "WINDOW", 4):
        for start, window in ((0, 4), (2, 4), (3, 10)):
            send = SendTask(Region(0, 10), 2, [(1, 0)], own())
            task = receive([Source(1, 0)], Region(start, start + 10), COPY, [(send, start, 10)])
            assert task.staged
            assert task.window == window
        earlier = SendTask(Region(0, 10), 1, [(1, 0)], own())
        assert receive([Source(1, 0)], Region(3, 13), ADD, [(earlier, 3, 10)]).window == 4
    assert io.log == []


def test_half_precision_lands_by_its_width_and_rounds_when_whole() -> None:
    io = Recorder(half=True)
    source = Source(1, 0)
    task = receive([source, own()], half=True, size=3)
    task.start(io)
    assert task.land(source, 0, 4, 2) == Slice(100, 0, 4)
    task.note_arrived(source, 4, LEAF)
    assert task.land(source, 4, 6, 4) == Slice(101, 4, 10)
    task.note_arrived(source, 6, PAIR)
    task.advance(io)
    assert [(fold[1], fold[2][0], fold[5]) for fold in io.take() if fold[0] == "fold"] == [
        (Slice(WIDE, 0, 4), Slice(100, 0, 4), None),
        (Slice(RESULT, 4, 10), Slice(101, 4, 10), 3.0),
    ]
    assert task.runs == [(4, WIDE, PAIR), (10, RESULT, FINISHED)]


def test_half_precision_copied_in_place_keeps_its_width() -> None:
    io = Recorder(half=True)
    source = Source(1, 0)
    task = receive([source], combine=COPY, half=True)
    task.start(io)
    assert task.land(source, 0, 4, 2) == Slice(RESULT, 0, 4)
    task.note_arrived(source, 4, FINISHED)
    assert task.land(source, 4, 6, 4) == Slice(WIDE, 4, 10)
    task.note_arrived(source, 6, PAIR)
    assert task.runs == [(4, RESULT, FINISHED), (10, WIDE, PAIR)]
    assert io.staged == []


def test_half_precision_for_scratch_is_widened_on_the_way() -> None:
    io = Recorder(half=True)
    source = Source(1, 0)
    task = receive([source], Region(0, 4, 9), COPY, half=True)
    task.start(io)
    assert task.land(source, 0, 4, 2) == Slice(100, 0, 4)
    task.note_arrived(source, 4, LEAF)
    task.advance(io)
    assert io.take()[-1] == ("fold", Slice(9, 0, 4), [Slice(100, 0, 4)], COPY, None, None)
    whole = receive([Source(1, 1)], Region(0, 4, 9), COPY)
    whole.start(io)
    assert whole.land(whole.sources[0], 0, 4, 4) == Slice(9, 0, 4)  # type: ignore[arg-type]


def test_a_receive_begins_anew() -> None:
    io = Recorder()
    busy = written(Region(0, 10), 10)
    source, mine = Source(1, 0), own()
    task = receive([source, mine], hazards=[(busy, 0, 10)])
    for weight in (1.0, 5.0):
        meta = Meta(weight, weight, 1)
        task.reset(meta)
        busy.reset(meta)
        assert (source.arrived, source.granted, source.areas, source.runs) == (0, 0, None, [])
        assert mine.leaf == meta
        task.start(io)
        task.land(source, 0, 10, 4)
        task.note_arrived(source, 10, meta)
        assert task.advance(io) is False, "the memory is in use again"
        busy.finish_run(10, RESULT, LEAF)
        assert task.advance(io) is True
        assert task.complete
        assert [each[5] for each in io.take() if each[0] == "fold"] == [2.0]


# Kernels.


def local(
    read: Read,
    hazards: Sequence[tuple[Task, int, int]] = (),
    *,
    source: Region = FOUR,
    region: Region = SCRATCH,
    half: bool = False,
) -> tuple[LocalTask, list[Task]]:
    told: list[Task] = []
    task = LocalTask(
        region, 2, source, read, lambda dst, src: None, list(hazards), told.append, half=half
    )
    return task, told


def test_a_kernel_runs_when_all_is_there_and_free() -> None:
    io = Recorder()
    writer, busy = written(Region(0, 4), 3), written(Region(0, 4, 3), 3)
    task, told = local(Read([(0, 4, writer)], LEAF), [(busy, 0, 4)])
    task.advance(io)
    writer.finish_run(4, RESULT, LEAF)
    task.advance(io)
    assert io.take() == []
    assert task.describe() == (
        "kernel from elements 0..4 into elements 0..4 of space 3: waiting for its input"
    )
    busy.finish_run(4, 3, LEAF)
    task.advance(io)
    task.advance(io)
    assert io.take() == [("local", [Slice(RESULT, 0, 4)], Slice(3, 0, 4))]
    assert task.describe().endswith("running")
    assert not task.complete
    io.done[0]()
    assert task.complete
    assert told == [task]
    assert task.runs == [(4, 3, LEAF)]
    task.reset(LEAF)
    assert not task.complete


def test_a_kernel_without_output_is_complete_when_it_has_run() -> None:
    io = Recorder()
    task, told = local(own(Region(0, 4)), region=Region(0, 0, 3))
    assert not task.complete
    task.advance(io)
    assert not task.complete
    io.done[0]()
    assert task.complete
    assert told == [task]


def test_a_kernel_of_nothing_runs_too() -> None:
    io = Recorder()
    task, _ = local(Read([], LEAF), source=Region(2, 2), region=Region(2, 2, 3))
    task.advance(io)
    assert io.take() == [("local", [Slice(RESULT, 2, 2)], Slice(3, 2, 2))]


def test_a_kernel_over_different_contributions_is_refused() -> None:
    writer = written(Region(0, 2), 2, RESULT, PAIR)
    task, _ = local(Read([(0, 2, writer), (2, 4, None)], LEAF))
    with pytest.raises(HazardError, match="whose parts hold different contributions"):
        task.advance(Recorder())


@pytest.mark.parametrize(("meta", "area"), [(PAIR, WIDE), (FINISHED, RESULT)])
def test_a_kernel_on_half_precision_writes_partial_sums_wide(meta: Meta, area: int) -> None:
    io = Recorder(half=True)
    scratch = written(Region(0, 4, 3), 4, 3, meta)
    task, _ = local(
        Read([(0, 4, scratch)], LEAF), source=Region(0, 4, 3), region=Region(4, 8), half=True
    )
    task.advance(io)
    assert io.take() == [("local", [Slice(3, 0, 4)], Slice(area, 4, 8))]


def test_what_can_go_on_before_anything_has_come() -> None:
    writer = written(Region(0, 10), 0)
    assert SendTask(Region(0, 4), 1, [(1, 0)], own(Region(0, 4))).first
    assert SendTask(Region(0, 4), 1, [(1, 0)], Read([(0, 2, None), (2, 4, writer)], LEAF)).first
    assert not SendTask(Region(0, 4), 1, [(1, 0)], Read([(0, 4, writer)], LEAF)).first
    assert receive([own()]).first
    assert not receive([Source(1, 0), own()]).first
    assert local(own(FOUR))[0].first
