from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from p2pdpt.cli.bench_lag import percentile

Command = Callable[..., tuple[int, str, str]]


def test_percentiles() -> None:
    ordered = [float(each) for each in range(1, 201)]
    assert percentile(ordered, 0.5) == 101.0
    assert percentile(ordered, 0.99) == 199.0
    assert percentile([7.0], 0.99) == 7.0


def test_a_short_one(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    code, out, err = command(
        *("bench", "lag", "--nodes", "2", "--size", "1M", "--seconds", "0.1", "--no-train"),
        *("--json", str(file)),
    )
    assert code == 0, err
    assert out.splitlines()[0].split() == (
        "node over median p99 worst samples sums training steps".split()
    )
    rows = json.loads(file.read_text())["rows"]
    assert [(row["name"], row["training_steps"]) for row in rows] == [("node0", 0), ("node1", 0)]
    assert rows[0]["reductions"] == rows[1]["reductions"] >= 3
    for row in rows:
        assert 0 <= row["median_s"] <= row["p99_s"] <= row["worst_s"]


def test_a_wrong_size(command: Command) -> None:
    code, _, err = command("bench", "lag", "--size", "big")
    assert code == 2
    assert "write for instance 100M" in err
