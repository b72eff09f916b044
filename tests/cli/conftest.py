"""Real processes: the command itself, and scripts that report what a session would."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PREAMBLE = """
import json, os, signal, sys, time

name = os.environ["P2PDPT_NAME"]
rank = int(name.removeprefix("node"))
size = int(os.environ["P2PDPT_MIN_NODES"])
report = int(os.environ["P2PDPT_REPORT_FD"])

def event(what, **values):
    os.write(report, json.dumps({"event": what, **values}).encode() + b"\\n")

def join():
    event("joined", id=f"{rank:016x}", name=name, rank=rank, topology="ring", transport="tcp",
          members=[f"node{i}" for i in range(size)], address="127.0.0.1:1")

def progress(step):
    event("progress", step=step, epoch=0, samples_per_s=100.0, steps_per_s=10.0,
          bytes_sent=1000 * step, exposed_s=0.25, loss=0.5)

def finish(digest="d" * 32, **metrics):
    event("finished", id=f"{rank:016x}", name=name, digest=digest, steps=8, samples_per_s=100.0,
          steps_per_s=10.0, bytes_sent=1500, exposed_s=0.25, seconds=1.0, metrics=metrics)

def fail(error, step=None):
    event("failed", error=str(error), kind=type(error).__name__, step=step)

"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that makes a script of its text and returns its path."""

    def make(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(PREAMBLE + text)
        return str(path)

    return make


@pytest.fixture
def environment() -> dict[str, str]:
    """Return an environment in which nothing is chosen yet."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("P2PDPT_", "OMP_", "PYTHON"))},
        **{k: v for k, v in os.environ.items() if k == "P2PDPT_NATIVE"},
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TERM": "dumb",
        "NO_COLOR": "1",
    }


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts the command; whatever still runs afterwards is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", "from p2pdpt.cli.main import main; main()", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, **variables},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def command(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command to its end: (exit code, output, errors)."""

    def run(*arguments: str, **variables: str) -> tuple[int, str, str]:
        process = start(*arguments, **variables)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    return run


@pytest.fixture
def gone() -> Callable[[str], None]:
    """Return a function that waits until no process has a word in its command line."""

    def running(word: str) -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue
                if word in line:
                    found.append(f"{entry.name} {line}")
        return found

    def wait(word: str, limit: float = 3.0) -> None:
        deadline = time.monotonic() + limit
        while left := running(word):
            assert time.monotonic() < deadline, left
            time.sleep(0.02)

    return wait
