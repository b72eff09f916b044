"""Start a run's local nodes, watch over them, and end them all, whatever happens.

The launcher is the parent of every local node and no part of the run: it carries no data, and
the nodes need it for nothing. Whom to blame and how to exit is decided in
:mod:`p2pdpt.cli.outcome`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2pdpt.cli.events import MAX_LINE, Report, parse_event
from p2pdpt.cli.guard import kill_group
from p2pdpt.cli.lines import LineSplitter, TracebackHold
from p2pdpt.cli.outcome import NodeState, first_failure
from p2pdpt.cli.processes import Guard, Process, adopt_orphans, end_orphans, reap, spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from p2pdpt.cli.display import Display

__all__ = ["Launcher", "NodePlan", "RunEnd"]

GRACE = 5.0
"""Seconds that the others have to end by themselves when one node has failed."""

_STOP = ((0.0, signal.SIGINT), (2.0, signal.SIGTERM), (0.5, signal.SIGKILL))
"""What a person's Ctrl-C leads to, each after so many seconds. A node ends by KeyboardInterrupt,
which runs its farewells; SIGTERM would not."""

_ABANDON = ((GRACE, signal.SIGTERM), (1.0, signal.SIGKILL))

_TICK = 0.25

MAX_TEXT = 1 << 16
"""Bytes of the longest line of output that is shown in one piece."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node to start: its name, its program with arguments, its whole environment."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended: after how many seconds, and by which signal to us if by one."""

    seconds: float
    signal: int | None


@dataclass(slots=True)
class _Source:
    """One pipe of a node, and what is done with its lines."""

    fd: int
    splitter: LineSplitter
    take: Callable[[str], None]

    def read(self) -> bool:
        """Take in what can be read now; return whether there may be more at once."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        for line in self.splitter.feed(data):
            self.take(line)
        if not data:
            self.finish()
        return bool(data)

    def finish(self) -> None:
        """Take in a last line that has no end, and read no more."""
        for line in self.splitter.close():
            self.take(line)
        asyncio.get_running_loop().remove_reader(self.fd)

    def close(self) -> None:
        """Take in what a process wrote before it ended, and close.

        Not all to the end: something that the process left behind may hold the pipe open.
        """
        for _ in range(1024):
            if not self.read():
                break
        self.finish()
        os.close(self.fd)


@dataclass(slots=True)
class _Child:
    """A running node."""

    state: NodeState
    process: Process
    hold: TracebackHold
    sources: list[_Source]


class Launcher:
    """Runs local nodes to their end.

    Attributes:
        nodes: the state of each, for displays; kept up to date.
    """

    def __init__(self, run: str, plans: Sequence[NodePlan], *, foreground: bool = False) -> None:
        """Prepare to start the nodes of `plans`.

        Args:
            run: the run's name, for people.
            plans: what to start; the first one's standard output is shown.
            foreground: let the nodes use our own input and outputs.
        """
        self.nodes = [NodeState(plan.name) for plan in plans]
        self._run = run
        self._plans = plans
        self._foreground = foreground
        self._children: dict[int, _Child] = {}
        self._display: Display | None = None
        self._guard: Guard | None = None
        self._announced = False
        self._signal: int | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._start = 0.0

    async def run(self, display: Display | None) -> RunEnd:
        """Start the nodes and return when all have ended and nothing of them is left.

        Installs signal handlers for as long as it runs: the first SIGINT, SIGTERM or SIGHUP
        ends the nodes in order, a second one at once.

        Raises:
            OSError: a node could not be started; those already started have been killed.
        Cancellation kills the nodes.
        """
        self._display = display
        self._start = time.monotonic()
        adopt_orphans()
        with self._signals(asyncio.get_running_loop()):
            try:
                self._spawn_all()
                while not self._ended.is_set():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._ended.wait(), _TICK)
                    self._tick()
            finally:
                self._end_all()
        return RunEnd(time.monotonic() - self._start, self._signal)

    def _spawn_all(self) -> None:
        for state, plan in zip(self.nodes, self._plans, strict=True):
            process = spawn(plan.command, plan.environment, foreground=self._foreground)
            self._children[process.pid] = self._child(state, process)
        # Last, so that the nodes are the launcher's first children for who looks at a process
        # list; until it stands, the kernel's own signal covers the launcher's death.
        self._guard = Guard()
        for pid in self._children:
            self._guard.add(pid)

    def _child(self, state: NodeState, process: Process) -> _Child:
        child = _Child(state, process, TracebackHold(), [])
        for fd, limit, take in (
            (process.report, MAX_LINE, self._heard),
            (process.stdout, MAX_TEXT, self._out),
            (process.stderr, MAX_TEXT, self._err),
        ):
            if fd >= 0:
                source = _Source(fd, LineSplitter(limit), functools.partial(take, child))
                child.sources.append(source)
                asyncio.get_running_loop().add_reader(fd, source.read)
        return child

    def _heard(self, child: _Child, line: str) -> None:
        event = parse_event(line.encode())
        if event is None:
            return
        child.state.hear(event, time.monotonic())
        if self._display is None:
            return
        if isinstance(event, Report) and child.state is self.nodes[0]:
            self._display.report(event)
        if child.state.joined is not None and not self._announced:
            self._announced = True
            self._display.joined(self._run, child.state.joined)

    def _out(self, child: _Child, line: str) -> None:
        if self._display is not None and child.state is self.nodes[0]:
            self._display.out(line)

    def _err(self, child: _Child, line: str) -> None:
        self._show(child, child.hold.feed(line, time.monotonic()))

    def _show(self, child: _Child, lines: Sequence[str]) -> None:
        if self._display is not None:
            for line in lines:
                self._display.err(child.state, line)

    def _tick(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.state.failed is None:
                self._show(child, child.hold.expire(now))
        if self._display is not None:
            self._display.tick(now - self._start)

    def _reap(self) -> None:
        """Take note of the children that have ended."""
        for pid, status in reap(set(self._children)):
            child = self._children.pop(pid, None)
            if child is None:
                continue
            if self._guard is not None:
                self._guard.remove(pid)
            for source in child.sources:
                source.close()
            child.state.end(status, time.monotonic())
            held = child.hold.release()
            if not child.state.unsuccessful:
                self._show(child, held)
            elif self._signal is None:
                child.state.traceback = held
        if not self._children:
            self._ended.set()
        elif first_failure(self.nodes) is not None and self._stopping is None:
            self._stop(_ABANDON)

    def _stop(self, steps: Sequence[tuple[float, int]]) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
        self._stopping = asyncio.create_task(self._escalate(steps))

    async def _escalate(self, steps: Sequence[tuple[float, int]]) -> None:
        for delay, number in steps:
            await asyncio.sleep(delay)
            self._signal_all(number)
        # A process that not even SIGKILL ends (in a dead network file system) is left to itself.
        await asyncio.sleep(GRACE)
        self._ended.set()

    def _signal_all(self, number: int) -> None:
        for child in self._children.values():
            child.state.stopped = True
            child.process.signal(number)

    def _interrupt(self, number: int) -> None:
        if self._signal is None:
            self._signal = number
            self._stop(_STOP)
        else:
            self._signal_all(signal.SIGKILL)

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        handled = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup, go on
            handled.append(signal.SIGHUP)
        for number in handled:
            loop.add_signal_handler(number, self._interrupt, number)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        try:
            yield
        finally:
            for number in (*handled, signal.SIGCHLD):
                loop.remove_signal_handler(number)

    def _end_all(self) -> None:
        """Kill whatever still runs, orphans too, and dismiss the guard."""
        if self._stopping is not None:
            self._stopping.cancel()
        for pid, child in self._children.items():
            child.state.stopped = True
            kill_group(pid)
            for source in child.sources:
                source.close()
        self._children.clear()
        end_orphans(spare=self._guard.pid if self._guard is not None else 0)
        if self._guard is not None:
            self._guard.close()
