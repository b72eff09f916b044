"""The examples as a person runs them: the real command, real nodes, real scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def environment() -> dict[str, str]:
    """Return an environment in which nothing is chosen yet, and one thread a node."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("P2PDPT_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def alone(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs an example by itself, as ``python examples/NAME`` does."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "examples" / name), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            timeout=110,
            check=False,
        )

    return run


@pytest.fixture
def train(tmp_path: Path, environment: dict[str, str]) -> Callable[..., tuple[dict[str, Any], str]]:
    """Return a function that runs an example on local nodes: the summary, and what it printed.

    Fails unless it exits with 0.
    """

    def run(
        name: str,
        *arguments: str,
        nodes: int = 2,
        options: tuple[str, ...] = (),
        variables: dict[str, str] | None = None,
    ) -> tuple[dict[str, Any], str]:
        summary = tmp_path / "summary.json"
        command = [sys.executable, "-c", "from p2pdpt.cli.main import main; main()", "run"]
        command += ["--nodes", str(nodes), "--seed", "1", "--summary", str(summary), *options]
        done = subprocess.run(
            [*command, str(ROOT / "examples" / name), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**environment, **(variables or {})},
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(summary.read_text()), done.stdout

    return run
