from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.cli.lines import MAX_HELD, LineSplitter, TracebackHold, last_error, own_frames

TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    for x, y in s.split(loader):
                ^^^^^^^^^^^^^^^
  File "/site/p2pdpt/training/data.py", line 5, in split
    yield from loader
  [Previous line repeated 3 more times]
  File "/home/me/data.py", line 2, in __getitem__
    raise KeyError("x")
KeyError: 'x'""".split("\n")


@given(st.lists(st.binary(max_size=20)))
def test_lines_do_not_depend_on_the_pieces(pieces: list[bytes]) -> None:
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)] + splitter.close()
    whole = LineSplitter()
    assert lines == whole.feed(b"".join(pieces)) + whole.close()


def test_the_last_line_needs_no_end() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw") == ["one"]
    assert splitter.feed(b"o\n\nthree") == ["two", ""]
    assert splitter.close() == ["three"]
    assert splitter.close() == []


def test_a_progress_bar_leaves_its_last_state() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r 10%") == []
    assert splitter.feed(b"\r 50%\r100%\n") == ["100%"]
    assert splitter.feed(b"dos\r\n") == ["dos"]


def test_an_endless_line_is_cut() -> None:
    splitter = LineSplitter(4)
    assert splitter.feed(b"abcdefghij") == ["abcd", "efgh"]
    assert splitter.feed(b"\rnew\n") == ["new"]


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert LineSplitter().feed(b"\xff\n") == ["\ufffd"]


def test_ordinary_lines_pass() -> None:
    hold = TracebackHold()
    assert hold.feed("Traceback? No.", 0.0) == ["Traceback? No."]
    assert hold.release() == []


def test_a_traceback_is_kept_until_its_process_ends() -> None:
    hold = TracebackHold(2.0)
    assert [hold.feed(line, 1.0) for line in TRACEBACK] == [[]] * len(TRACEBACK)
    assert hold.expire(2.9) == []
    assert hold.held == TRACEBACK
    assert hold.release() == TRACEBACK


def test_a_traceback_that_the_script_survives_is_shown() -> None:
    hold = TracebackHold(2.0)
    hold.feed(TRACEBACK[0], 1.0)
    hold.feed(TRACEBACK[-1], 2.0)
    assert hold.expire(3.0) == [TRACEBACK[0], TRACEBACK[-1]]
    assert hold.feed("next", 3.1) == ["next"]


def test_a_syntax_error_begins_without_a_heading() -> None:
    hold = TracebackHold()
    assert hold.feed('  File "/home/me/train.py", line 3', 0.0) == []


def test_no_more_is_kept_than_a_traceback_can_need() -> None:
    hold = TracebackHold()
    shown = [line for n in range(MAX_HELD + 1) for line in hold.feed(TRACEBACK[0], float(n))]
    assert len(shown) == MAX_HELD + 1


def test_the_last_error_is_the_one_that_ended_it() -> None:
    assert last_error(TRACEBACK) == "KeyError: 'x'"
    chained = [*TRACEBACK, "", "During handling", "", *TRACEBACK[:3], "OSError: a", "b"]
    assert last_error(chained) == "OSError: a"
    assert last_error([]) == ""
    assert last_error(["KeyError: 'x'"]) == ""


def test_frames_of_the_package_are_left_out() -> None:
    assert own_frames(TRACEBACK, "/site/p2pdpt/", "/py/") == [*TRACEBACK[:4], *TRACEBACK[7:]]


def test_frames_of_python_are_left_out_after_those_of_the_package() -> None:
    python = ['  File "/py/concurrent/futures/_base.py", line 3, in result', "    raise error"]
    inner = [*TRACEBACK[:6], *python, *TRACEBACK[7:]]
    assert own_frames(inner, "/site/p2pdpt/", "/py/") == [*TRACEBACK[:4], *TRACEBACK[7:]]
    outer = [TRACEBACK[0], *python, *TRACEBACK[1:]]
    assert own_frames(outer, "/site/p2pdpt/", "/py/") == [
        TRACEBACK[0],
        *python,
        *TRACEBACK[1:4],
        *TRACEBACK[7:],
    ]
    torch = [line.replace("/py/", "/py/site-packages/") for line in python]
    inner = [*TRACEBACK[:6], *torch, *TRACEBACK[7:]]
    assert own_frames(inner, "/site/p2pdpt/", "/py/") == [
        *TRACEBACK[:4],
        *torch,
        *TRACEBACK[7:],
    ]


def test_a_traceback_of_nothing_else_is_whole() -> None:
    inner = [TRACEBACK[0], *TRACEBACK[4:7], TRACEBACK[-1]]
    assert own_frames(inner, "/site/p2pdpt/", "/py/") == inner
