"""What a launcher reads, and what a person sees without one."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from p2pdpt.training.report import Reporter


class Pipe:
    """A pipe, and a clock set by hand."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self.now = 0.0
        self.reporter = Reporter(self.write, lambda: self.now)

    def lines(self) -> list[Any]:
        text = os.read(self.read, 1 << 16).decode()
        assert text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    def close(self) -> None:
        for end in (self.read, self.write):
            if end >= 0:
                os.close(end)
        self.read = self.write = -1


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def test_events_are_json_lines(pipe: Pipe) -> None:
    pipe.reporter.event("joined", rank=0, members=["a", "b"])
    pipe.reporter.event("failed", error="text\nin lines", kind="ValueError", step=3)
    assert pipe.lines() == [
        {"event": "joined", "rank": 0, "members": ["a", "b"]},
        {"event": "failed", "error": "text\nin lines", "kind": "ValueError", "step": 3},
    ]


def test_numbers_that_json_has_not_become_null(pipe: Pipe) -> None:
    pipe.reporter.report(1, 0, {"loss": float("nan"), "x": float("inf")}, first=False)
    assert pipe.lines() == [
        {"event": "report", "step": 1, "epoch": 0, "metrics": {"loss": None, "x": None}}
    ]


def test_progress_comes_at_most_five_times_a_second(pipe: Pipe) -> None:
    for tick in range(20):
        pipe.now = tick * 0.0625
        pipe.reporter.progress(lambda: {"step": tick})  # noqa: B023  # called at once or never
    assert [line["step"] for line in pipe.lines()] == [0, 4, 8, 12, 16]


def test_a_reader_that_does_not_keep_up_gets_no_progress_but_every_event(pipe: Pipe) -> None:
    os.set_blocking(pipe.write, False)
    room = 0
    while True:
        try:
            room += os.write(pipe.write, b" " * 4096)
        except BlockingIOError:
            break
    pipe.now = 10.0
    pipe.reporter.progress(lambda: pytest.fail("computed for nobody"))
    found: list[str] = []

    def read() -> None:
        text = b""
        while b"\n" not in text:
            text += os.read(pipe.read, 1 << 16)
        found.append(text.decode().strip())

    reader = threading.Thread(target=read)
    reader.start()
    pipe.reporter.event("finished", steps=3)
    reader.join(5)
    assert json.loads(found[0]) == {"event": "finished", "steps": 3}


def test_a_reader_that_has_gone_is_no_error(pipe: Pipe) -> None:
    os.close(pipe.read)
    pipe.read = -1
    pipe.reporter.event("joined")
    pipe.now = 1.0
    pipe.reporter.progress(lambda: {})
    pipe.reporter.event("finished")


def test_without_a_reader_the_first_node_shows_reports() -> None:
    shown: list[str] = []
    reporter = Reporter(None, lambda: 0.0, shown.append)
    reporter.event("joined")
    reporter.progress(lambda: pytest.fail("computed for nobody"))
    reporter.report(120, 3, {"loss": 0.123456789, "correct": 7}, first=True)
    reporter.report(120, 3, {"loss": 1.0}, first=False)
    assert shown == ["epoch 3  step 120  loss 0.123457  correct 7"]


def test_by_default_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Reporter(None, lambda: 0.0).report(1, 0, {"loss": 0.5}, first=True)
    assert capsys.readouterr().err == "epoch 0  step 1  loss 0.5\n"


def test_without_a_stderr_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    Reporter(None, lambda: 0.0).report(1, 0, {"loss": 0.5}, first=True)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    Reporter(None, lambda: 0.0).report(1, 0, {"loss": 0.5}, first=True)
