"""A node's process as the operating system sees it: start, signal, reap, leave nothing behind.

Every node leads a session and process group of its own, so that signals of the terminal reach
the launcher alone, and all that a script started (loader workers, subprocesses) can be ended
with it. On Linux the kernel kills a node when its launcher dies and hands orphans to the
launcher; elsewhere, and for the rest of a group, the guard does it (:mod:`p2pdpt.cli.guard`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from p2pdpt.cli import guard as guard_module
from p2pdpt.cli.guard import kill_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["Guard", "Process", "adopt_orphans", "end_orphans", "reap", "spawn", "threads_per_node"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_READ = 1 << 16


@dataclass(slots=True)
class Process:
    """A node's process and the read ends of what it writes.

    Attributes:
        pid: its process, session and group.
        stdout: descriptor, not blocking, or -1 where it writes to our own.
        stderr: the same.
        report: the same, for the session's events.
    """

    pid: int
    stdout: int
    stderr: int
    report: int

    def signal(self, number: int) -> None:
        """Send a signal to the node itself, not to what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@functools.cache
def _prctl() -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    import ctypes

    prctl: Any = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    prctl.restype = ctypes.c_int
    return lambda option, value: int(prctl(option, value, 0, 0, 0))


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies below this one (Linux)."""
    if (prctl := _prctl()) is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _die_with(parent: int, prctl: Callable[..., int]) -> None:
    # Between fork and exec. The launcher has one thread, so no lock can be held here.
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def spawn(
    command: Sequence[str], environment: Mapping[str, str], *, foreground: bool = False
) -> Process:
    """Start a node whose session finds the report descriptor in ``P2PDPT_REPORT_FD``.

    Args:
        command: the program and its arguments.
        environment: all of it.
        foreground: leave it our input and outputs, for instance the terminal.

    Raises:
        OSError: the program cannot be started; nothing is left open.
    """
    with contextlib.ExitStack() as on_error, contextlib.ExitStack() as ours:
        pipes = []
        for _ in range(1 if foreground else 3):
            read, write = os.pipe()
            on_error.callback(os.close, read)
            ours.callback(os.close, write)
            os.set_blocking(read, False)
            pipes.append((read, write))
        report = pipes[0][1]
        prctl = _prctl()
        child = subprocess.Popen(
            list(command),
            stdin=None if foreground else subprocess.DEVNULL,
            stdout=None if foreground else pipes[1][1],
            stderr=None if foreground else pipes[2][1],
            env={**environment, "P2PDPT_REPORT_FD": str(report)},
            pass_fds=(report,),
            start_new_session=True,
            preexec_fn=functools.partial(_die_with, os.getpid(), prctl) if prctl else None,
        )
        # Reaped by reap(), which must see orphans too; the object must not do it again.
        child.returncode = 0
        on_error.pop_all()
        reads = [read for read, _ in pipes] + [-1, -1]
        return Process(child.pid, stdout=reads[1], stderr=reads[2], report=reads[0])


def reap(groups: set[int]) -> Iterator[tuple[int, int]]:
    """Yield the children that have ended as (pid, status), orphans included.

    A child that leads one of `groups` takes what is left of its group with it: while it is not
    reaped its number cannot be another's.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        if ended.si_pid in groups:
            kill_group(ended.si_pid)
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(ended.si_pid, 0)
            yield pid, os.waitstatus_to_exitcode(status)


def _children() -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children") as file:
                found += [int(pid) for pid in file.read().split()]
    return found


def end_orphans(spare: int, limit: float = 1.0) -> None:
    """Kill all children but `spare`, and theirs as they are handed up, for at most `limit` s."""
    deadline = time.monotonic() + limit
    while (left := [pid for pid in _children() if pid != spare]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for _ in reap(set()):
            pass
        time.sleep(0.005)


class Guard:
    """The launcher's end of its guard."""

    def __init__(self) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        read, self._write = os.pipe()
        try:
            # -I -S: nothing of the user's environment, and half the start-up time. The number is
            # for who looks at a list of processes.
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", guard_module.__file__, str(os.getpid())],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except OSError:
            os.close(self._write)
            raise
        finally:
            os.close(read)
        child.returncode = 0
        self.pid = child.pid

    def _tell(self, text: str) -> None:
        # A guard that was killed leaves us to our own care.
        with contextlib.suppress(OSError):
            os.write(self._write, text.encode())

    def add(self, group: int) -> None:
        """Watch over a process group."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Forget a process group, for it has ended."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the guard, which has nothing to do any more."""
        with contextlib.suppress(ChildProcessError):
            # Not if it was reaped before: the number may be another's by now.
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
        os.close(self._write)


def threads_per_node(nodes: int) -> int:
    """Return how many threads each of `nodes` local nodes may use: this process's cores, or what
    its container grants, divided."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:
        quota, period = file.read().split()[:2]
        if quota != "max":
            cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores // nodes)
