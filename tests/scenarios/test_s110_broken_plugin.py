"""S110: a plugin that does not import."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

CODE = """
import os
open(os.environ["MARK"], "a").write("imported")
import no_such_module_anywhere
"""
POINTS = """
[p2pdpt.topologies]
broken = broken_plugin:Topology
[p2pdpt.transports]
broken = broken_plugin:Transport
[p2pdpt.discovery]
broken = broken_plugin:Discovery
[p2pdpt.codecs]
broken = broken_plugin:Codec
"""


@pytest.fixture
def with_broken(install: Any, environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    site = install("broken-plugin", CODE, POINTS)
    return {
        "PYTHONPATH": f"{site}:{environ['PYTHONPATH']}",
        "MARK": str(tmp_path / "mark"),
    }


def test_s110_what_does_not_use_it_works(
    command: Any, with_broken: dict[str, str], tmp_path: Path
) -> None:
    helping = command("--help", **with_broken)
    output, errors = helping.communicate(timeout=30)
    assert helping.returncode == 0
    assert "Commands" in output
    assert errors == ""
    node = command("node", "start", **with_broken)
    assert "listens on" in node.stdout.readline()
    node.terminate()
    _, errors = node.communicate(timeout=30)
    assert "broken" not in errors
    # Nobody has even looked at it.
    assert not (tmp_path / "mark").exists()


def test_s110_it_is_listed_as_broken(command: Any, with_broken: dict[str, str]) -> None:
    listing = command("plugins", "list", **with_broken)
    output, errors = listing.communicate(timeout=30)
    assert listing.returncode == 0
    assert len(re.findall(r"^broken +\w+ +broken-plugin +1\.2 +broken: ", output, re.M)) >= 3
    assert re.search(r"^ring ", output, re.M)
    warnings = [line for line in errors.splitlines() if "WARNING" in line]
    assert warnings
    for line in warnings:
        assert "broken-plugin" in line
        assert "No module named 'no_such_module_anywhere'" in line
    assert "Traceback" not in errors


@pytest.mark.parametrize("debug", [False, True])
def test_s110_asking_for_it(
    command: Any, with_broken: dict[str, str], tmp_path: Path, debug: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(9)\n")
    options = ["--debug"] if debug else []
    process = command(*options, "run", "--topology", "broken", str(script), **with_broken)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    for words in ("topolog", "broken", "broken-plugin", "1.2", "no_such_module_anywhere"):
        assert words in errors
    assert ("Traceback" in errors) == debug
