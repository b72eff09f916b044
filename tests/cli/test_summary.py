from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from p2pdpt.cli.events import Finished, Joined, Report
from p2pdpt.cli.outcome import NodeState
from p2pdpt.cli.summary import Summary, write_json


def finished(*digests: str) -> list[NodeState]:
    run = []
    for rank, digest in enumerate(digests):
        name = f"node{rank}"
        node = NodeState(name)
        names = [f"node{n}" for n in range(len(digests))]
        node.hear(Joined(f"{rank:016x}", name, rank, names, "ring", "tcp"), 0.0)
        node.hear(Report({"test_accuracy": 0.5 + rank}), 0.0)
        node.hear(Finished(f"{rank:016x}", name, digest, 8, 100.0, 10.0, 1500, 0.25, 1.0), 0.0)
        run.append(node)
    return run


def test_the_table_as_text() -> None:
    assert Summary.of("run", 12.34, finished("a" * 20, "a" * 20)).plain() == [
        "run: 2 members, ring over tcp, 12.3 s",
        "",
        "node   steps  steps/s  samples/s     sent  exposed            digest",
        "node0      8     10.0        100  1.50 kB   250 ms  aaaaaaaaaaaaaaaa",
        "node1      8     10.0        100  1.50 kB   250 ms  aaaaaaaaaaaaaaaa",
        "",
        "test_accuracy          0.5000",
        "steps/s                10.0",
        "samples/s              200",
        "bytes exchanged        3.00 kB",
        "exposed communication  250 ms (25% of training)",
        "parameters             equal on both nodes",
    ]


def test_parameters_that_differ_are_told() -> None:
    summary = Summary.of("run", 1.0, finished("a", "b", "a"))
    assert not summary.equal
    assert summary.plain()[-1] == "parameters             DIFFERENT on 3 nodes"


def test_nothing_was_reported() -> None:
    assert Summary.of("run", 1.0, [NodeState("node0")]).plain() == ["run: 1.0 s, without a session"]


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    write_json(path, Summary.of("run", 1.5, finished("ab")).as_json())
    assert json.loads(path.read_text()) == {
        "run": "run",
        "seconds": 1.5,
        "exchange": "ring over tcp",
        "members": 1,
        "metrics": {"test_accuracy": 0.5},
        "nodes": [
            {
                "id": "0000000000000000",
                "name": "node0",
                "digest": "ab",
                "steps": 8,
                "samples_per_s": 100.0,
                "steps_per_s": 10.0,
                "bytes_sent": 1500,
                "exposed_s": 0.25,
            }
        ],
    }
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_json(path, object())
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["summary.json"]
