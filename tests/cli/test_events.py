from __future__ import annotations

import pytest

from p2pdpt.cli.events import Failed, Finished, Joined, Progress, Report, parse_event


def test_each_event_is_read() -> None:
    assert parse_event(
        b'{"event":"joined","id":"00ff","name":"node0","rank":0,"members":["node0"],'
        b'"topology":"ring","transport":"tcp","address":"127.0.0.1:7"}'
    ) == Joined("00ff", "node0", 0, ["node0"], "ring", "tcp", "127.0.0.1:7")
    assert parse_event(
        b'{"event":"progress","step":3,"epoch":1,"samples_per_s":10,"steps_per_s":2.5,'
        b'"bytes_sent":7,"exposed_s":0.5,"loss":null}'
    ) == Progress(3, 1, 10.0, 2.5, 7, 0.5, None)
    assert parse_event(
        b'{"event":"report","step":3,"epoch":1,"metrics":{"loss":0.5,"best":true,"note":"x"}}'
    ) == Report({"loss": 0.5, "best": True, "note": "x"}, 3, 1)
    assert parse_event(
        b'{"event":"finished","id":"00ff","name":"node0","digest":"ab","steps":3,'
        b'"samples_per_s":1.0,"steps_per_s":2.0,"bytes_sent":3,"exposed_s":4.0,"seconds":5.0,'
        b'"metrics":{"test_accuracy":0.5}}'
    ) == Finished("00ff", "node0", "ab", 3, 1.0, 2.0, 3, 4.0, 5.0, {"test_accuracy": 0.5})
    assert parse_event(
        b'{"event":"failed","error":"\'x\'","kind":"KeyError","step":3,"more":"is ignored"}'
    ) == Failed("'x'", "KeyError", 3)


def test_how_members_exchange() -> None:
    assert Joined("00", "node0", 0, [], "ring", "tcp").exchange == "ring over tcp"
    assert Joined("00", "node0", 0, [], "ring").exchange == "ring"
    assert Joined("00", "node0", 0, []).exchange == ""


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b'{"event":"unknown"}',
        b'{"step":3}',
        b'{"event":"progress","step":"three"}',
        b'{"event":"progress","step":3,"loss":NaN}',
        b'{"event":"failed","error":"\xff"}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_event_is_dropped(line: bytes) -> None:
    assert parse_event(line) is None
