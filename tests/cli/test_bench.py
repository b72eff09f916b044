from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdpt.cli.bench import _table
from p2pdpt.cli.bench_allreduce import Row
from p2pdpt.runtime.drivers.native_driver import unavailable

Command = Callable[..., tuple[int, str, str]]


def test_the_table() -> None:
    rows = [
        Row(2, 4096, "gloo", 100e-6, 1.0, 250e-6, 300),
        Row(2, 4096, "tcp", 90e-6, 0.9, 200e-6, 300),
        Row(2, 100 << 20, "tcp", 0.25, None, 0.5, 7),
        Row(2, 1000, "tcp", 1.0, None, 0.5, 7),
    ]
    assert _table(rows) == [
        "method  nodes  size   median       rate     CPU  times gloo  repeats",
        "gloo        2    4K   100 µs  41.0 MB/s  250 µs        1.00      300",
        "tcp         2    4K  90.0 µs  45.5 MB/s  200 µs        0.90      300",
        "tcp         2  100M   250 ms   419 MB/s  500 ms                    7",
        "tcp         2  1000    1.0 s  1.00 kB/s  500 ms                    7",
    ]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--sizes", "4K,x", "could not convert string to float: 'X'"),
        ("--sizes", "6", "6 bytes are no whole number of float32"),
        ("--nodes", "2,0", "'2,0' is not a list of numbers from 1 to 64, like 2,4"),
        ("--against", "glue", "'glue' is not 'gloo'"),
    ],
)
def test_wrong_use(command: Command, option: str, value: str, said: str) -> None:
    code, out, err = command("bench", "allreduce", option, value)
    assert (code, out) == (2, "")
    assert said in err
    assert err.endswith("\nTry: p2pdpt bench allreduce --help\n")


def test_an_unknown_topology(command: Command) -> None:
    code, out, err = command("bench", "allreduce", "--topology", "torus")
    assert (code, out) == (2, "")
    assert err == "p2pdpt: there is no topology called 'torus'; known: mapreduce, ring\n"


@pytest.mark.needs_torch
def test_a_small_one(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    code, out, err = command(
        *("bench", "allreduce", "--sizes", "4K,64K", "--nodes", "2,3", "--against", "gloo"),
        *("--repeat", "3", "--json", str(file)),
    )
    shares = not unavailable()
    assert code == 0, err
    rows = json.loads(file.read_text())["rows"]
    assert [(row["nodes"], row["bytes"], row["method"], row["repeats"]) for row in rows] == [
        (nodes, nbytes, method, 3)
        for nodes in (2, 3)
        for nbytes in (4096, 65536)
        for method in (("gloo", "shm", "tcp") if shares else ("gloo", "tcp"))
    ]
    assert sum(" nodes, " in line for line in err.splitlines()) == len(rows)
    assert ("no shared memory: " in err) is not shares
    each = len(rows) // 4
    for gloo, *ours in (rows[start : start + each] for start in range(0, len(rows), each)):
        assert gloo["ratio_to_gloo"] == 1.0 and gloo["cpu_s"] > 0
        for row in ours:
            assert row["ratio_to_gloo"] == gloo["median_s"] / row["median_s"]
            assert row["cpu_s"] > 0
    assert out.count("\n") == 1 + len(rows)


def test_a_folder_of_our_name_hides_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "p2pdpt").mkdir()
    (tmp_path / "p2pdpt" / "__init__.py").write_text("raise ImportError('the wrong one')\n")
    # -P is what the installed command amounts to: it does not look where the user stands.
    begin = [sys.executable, "-P", "-c", "from p2pdpt.cli.main import main; main()"]
    small = ["bench", "allreduce", "--sizes", "4K", "--nodes", "2", "--repeat", "1"]
    done = subprocess.run(
        begin + small, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.count("the wrong one")) == (0, 0)
    assert " 4K " in done.stdout
