"""``examples/digits.py``: it learns, alone and on several nodes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from typing import Any

from p2pdpt.runtime.drivers.native_driver import unavailable

Train = Callable[..., tuple[dict[str, Any], str]]


def test_two_nodes_learn_the_same_model(train: Train) -> None:
    summary, printed = train("digits.py", "--epochs", "2")
    assert summary["metrics"]["test_accuracy"] > 0.6
    assert len(summary["nodes"]) == 2
    assert len({node["digest"] for node in summary["nodes"]}) == 1
    # 1347 images in batches of 64, twice.
    assert [node["steps"] for node in summary["nodes"]] == [44, 44]
    assert "test_accuracy" in printed


def test_mapreduce_learns_too(train: Train) -> None:
    options = ("--topology", "mapreduce")
    summary, printed = train("digits.py", "--epochs", "1", nodes=3, options=options)
    assert "3 members, mapreduce" in printed
    assert len({node["digest"] for node in summary["nodes"]}) == 1


def test_transports_give_the_same_bits(train: Train) -> None:
    digests = set()
    for transport in ("shm,tcp", "tcp"):
        options = ("--transport", transport)
        summary, printed = train("digits.py", "--epochs", "1", nodes=4, options=options)
        shares = transport != "tcp" and not unavailable()
        assert f"4 members, ring over {'shm' if shares else 'tcp'}" in printed
        digests |= {node["digest"] for node in summary["nodes"]}
    assert len(digests) == 1


def test_alone_it_is_an_ordinary_script(
    alone: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = alone("digits.py", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    found = re.search(r"test_accuracy ([\d.]+)", done.stderr)
    assert found is not None
    assert 0.1 < float(found[1]) <= 1.0
