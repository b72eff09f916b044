from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from p2pdpt.cli.processes import Guard, Process, reap, spawn, threads_per_node


@pytest.fixture(autouse=True)
def _only_ours() -> Iterator[None]:
    """`reap` takes every child of this process, so there must be none of others'."""
    yield
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def close(process: Process) -> None:
    for fd in (process.stdout, process.stderr, process.report):
        os.close(fd)


def read(fd: int) -> bytes:
    select.select([fd], [], [], 10)
    return os.read(fd, 1000)


def wait_for(pid: int, groups: set[int]) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for ended, status in reap(groups):
            if ended == pid:
                return status
        time.sleep(0.01)
    raise AssertionError("it did not end")


def test_three_pipes_and_a_session() -> None:
    code = (
        "import os, sys; os.write(int(os.environ['P2PDPT_REPORT_FD']), b'event');"
        "os.write(1, b'out'); os.write(2, b'err'); assert os.getsid(0) == os.getpid(); sys.exit(3)"
    )
    process = spawn([sys.executable, "-c", code], {"HOME": "/"})
    assert wait_for(process.pid, {process.pid}) == 3
    assert [read(fd) for fd in (process.report, process.stdout, process.stderr)] == [
        b"event",
        b"out",
        b"err",
    ]
    close(process)


def test_a_program_that_is_not_there_leaves_nothing_open() -> None:
    with pytest.raises(FileNotFoundError):
        spawn(["/nothing/of/that/name"], {})


def test_a_group_goes_with_its_leader() -> None:
    code = (
        "import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(600)']); os.write(1, str(p.pid).encode())"
    )
    process = spawn([sys.executable, "-c", code], dict(os.environ))
    grandchild = int(read(process.stdout))
    assert wait_for(process.pid, {process.pid}) == 0
    # All writers of the pipe are gone: the grandchild is.
    assert read(process.stdout) == b""
    close(process)
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{grandchild}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_signal_to_one_that_has_ended_is_no_error() -> None:
    process = spawn([sys.executable, "-c", ""], {})
    wait_for(process.pid, {process.pid})
    process.signal(signal.SIGINT)
    close(process)


def test_the_kernel_kills_a_node_with_its_launcher() -> None:
    # In a process of its own, which is killed like a launcher without a guard.
    code = (
        "import os, sys, time; from p2pdpt.cli.processes import spawn;"
        "p = spawn([sys.executable, '-c', 'import time; time.sleep(600)'], dict(os.environ));"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    launcher.kill()
    launcher.communicate()
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{pid}"):
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                break
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_guard_kills_what_is_open_when_its_input_ends() -> None:
    process = spawn([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ))
    guard = Guard()
    guard.add(process.pid)
    os.close(guard._write)
    assert wait_for(process.pid, {process.pid}) == -signal.SIGKILL
    close(process)


def test_a_guard_that_is_dismissed_is_gone() -> None:
    guard = Guard()
    guard.add(1 << 22)
    guard.remove(1 << 22)
    guard.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(guard.pid, 0)


def test_a_guard_that_was_killed_is_no_error() -> None:
    guard = Guard()
    os.kill(guard.pid, signal.SIGKILL)
    wait_for(guard.pid, set())
    guard.add(1)
    guard.close()


def test_threads() -> None:
    assert threads_per_node(1) >= 1
    assert threads_per_node(100_000) == 1
