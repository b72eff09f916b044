"""Real processes for scenarios, and what is asked of each of them when it has ended.

Rules that hold for all: nobody waits longer than a bound, standard error tells of nothing that
was forgotten, and nothing of a process is left when it has ended by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from p2pdpt.runtime.drivers.native_driver import unavailable

HERE = Path(__file__).parent
FORGOTTEN = (
    "Task exception was never retrieved",
    "Task was destroyed but it is pending",
    "was never awaited",
    "ResourceWarning",
    "Exception ignored in",
    "Segmentation fault",
)
SLACK = 4.0
"""How many times as long as promised things may take on a machine that does much else."""
LIMIT_S = 60.0
_COUNT = itertools.count()


class Forker:
    """The process that all others come from."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
        environ = {key: value for key, value in os.environ.items() if "P2PDPT" not in key}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "forker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        self.ask()

    def ask(self, **what: Any) -> dict[str, Any]:
        """Return the answer to a question, or to none: that it has begun."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if what:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


class Peer:
    """A process of a scenario.

    Attributes:
        name: what its node is called.
        pid: its process, and its session.
    """

    def __init__(self, forker: Forker, folder: Path, script: Path, environ: dict[str, str]) -> None:
        self.name = environ["P2PDPT_NAME"]
        self._forker = forker
        number = next(_COUNT)
        self._out, self._err = folder / f"{number}.out", folder / f"{number}.err"
        self._taken = 0
        self._status: int | None = None
        self.signalled = False
        self.pid: int = forker.ask(
            start=str(script), environ=json.dumps(environ), out=str(self._out), err=str(self._err)
        )["pid"]

    def said(self) -> list[dict[str, Any]]:
        """Return all that it has said so far."""
        text = self._out.read_text() if self._out.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def wrote(self) -> str:
        """Return what it has written on standard error."""
        return self._err.read_text() if self._err.exists() else ""

    def poll(self) -> int | None:
        """Return its exit code, or minus a signal's number; None while it runs."""
        if self._status is None:
            self._status = self._forker.ask(poll=self.pid)["status"]
        return self._status

    def read(self, limit: float = LIMIT_S) -> dict[str, Any]:
        """Return the next thing that it says."""
        deadline = time.monotonic() + limit
        while True:
            ended = self.poll() is not None
            said = self.said()
            if len(said) > self._taken:
                self._taken += 1
                return said[self._taken - 1]
            if ended:
                raise AssertionError(f"{self.name} ended with {self._status}: {self.wrote()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name} said nothing for {limit} s: {self.wrote()}")
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.signalled = True
        os.kill(self.pid, number)

    def kill(self) -> float:
        """Kill it, and return when."""
        self.signal(signal.SIGKILL)
        return time.monotonic()

    def end(self, limit: float = LIMIT_S) -> int:
        """Wait until it has ended, and return its exit code, or minus a signal's number."""
        deadline = time.monotonic() + limit
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{self.name} has not ended in {limit} s; it said {self.said()[-3:]} "
                    f"and wrote {self.wrote()}"
                )
            time.sleep(0.01)
        return status

    def clear(self) -> None:
        """Kill what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.end(10)

    def check(self) -> None:
        """Check that it has ended, and tells of nothing forgotten."""
        errors = self.wrote()
        for words in FORGOTTEN:
            assert words not in errors, f"{self.name} wrote:\n{errors}"
        if self.poll() is not None and not self.signalled:
            eventually(lambda: not _session(self.pid), 3, f"{self.name} left processes behind")


def _session(leader: int) -> list[int]:
    """Return the processes of a session that are no zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] not in "ZX":
                    found.append(int(entry.name))
    return found


def eventually(condition: Callable[[], bool], limit: float, what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + limit * SLACK
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Return where processes come from."""
    process = Forker()
    yield process
    process.close()


Start = Callable[..., list[Peer]]


@pytest.fixture
def run_name() -> str:
    """Return a run that nothing else on this machine is in."""
    return f"scenario-{os.getpid()}-{next(_COUNT)}"


@pytest.fixture
def environ() -> dict[str, str]:
    """Return an environment in which nothing is chosen yet."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("P2PDPT_", "PYTHON", "COV"))
    }
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
        "TERM": "dumb",
        "NO_COLOR": "1",
    }


@pytest.fixture
def peers(
    forker: Forker, environ: dict[str, str], run_name: str, tmp_path: Path
) -> Iterator[Start]:
    """Start processes that run a script each, as nodes ``n0``, ``n1`` ... of one run.

    ``peers(script, count, other=script, **settings)``: ``settings`` are variables without their
    ``P2PDPT_``; ``node`` is a dict for ``NodeConfig``; a list gives each node its own.
    """
    started: list[Peer] = []

    def start(
        script: str,
        count: int,
        *,
        first: int = 0,
        node: dict[str, Any] | None = None,
        loop: str = "uvloop",
        variables: dict[str, str] | None = None,
        **settings: Any,
    ) -> list[Peer]:
        if settings.get("transport") == "shm" and (reason := unavailable()):
            pytest.skip(reason)
        path = tmp_path / f"script{next(_COUNT)}.py"
        path.write_text("from stage import *\n" + textwrap.dedent(script))
        told = {"run": run_name, "min_nodes": count, "wait": 60, **settings}
        new = []
        for number in range(count):
            own = {
                f"P2PDPT_{key.upper()}": str(value[number] if isinstance(value, list) else value)
                for key, value in told.items()
            }
            own["P2PDPT_NAME"] = f"n{first + number}"
            own["SCENARIO_NODE"] = json.dumps(node or {})
            own["SCENARIO_LOOP"] = loop
            new.append(Peer(forker, tmp_path, path, {**environ, **own, **(variables or {})}))
            started.append(new[-1])
        return new

    yield start
    for peer in started:
        peer.clear()
    for peer in started:
        peer.check()


@pytest.fixture
def together() -> Callable[..., list[list[dict[str, Any]]]]:
    """Return a function that waits until all end well, and returns what each said.

    ``together(peers, wrote="secret")``: each may have written two lines with that word.
    """

    def wait(all_: Sequence[Peer], *, wrote: str = "") -> list[list[dict[str, Any]]]:
        for peer in all_:
            assert peer.end() == 0, (peer.name, peer.said()[-3:], peer.wrote())
            # What happens to a node that meets nothing unusual is nothing to write about.
            lines = peer.wrote().splitlines()
            assert len(lines) <= 2 and all(wrote and wrote in line for line in lines), lines
            peer.check()
        return [peer.said() for peer in all_]

    return wait


@pytest.fixture
def within() -> Callable[[float, float], None]:
    """Return a function that checks that something took at most so many seconds."""

    def check(took: float, promised: float) -> None:
        assert took < promised * SLACK, f"took {took:.2f} s; {promised} s are promised"

    return check


@pytest.fixture
def command(environ: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts the command ``p2pdpt``."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", "from p2pdpt.cli.main import main; main()", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environ, **variables},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def free_ports() -> Callable[[int], list[int]]:
    """Return a function that finds ports which nobody uses now."""

    def find(count: int) -> list[int]:
        sockets = [socket.socket() for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        return ports

    return find


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., str]:
    """Return a function that makes a distribution of one module, and returns its folder.

    ``install(name, code, entry_points)``: put the folder on the path of a process.
    """

    def make(name: str, code: str, points: str, version: str = "1.2") -> str:
        module = name.replace("-", "_")
        site = tmp_path / f"site-{name}"
        info = site / f"{module}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(points)
        (site / f"{module}.py").write_text(code)
        return str(site)

    return make
