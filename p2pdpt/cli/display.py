"""What people see while a run goes on: a live table on a terminal, few plain lines elsewhere.

The first node's standard output goes to ours; everything else goes to standard error. An output
that is gone (a closed terminal, a reader that had enough) is no reason to stop training.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TYPE_CHECKING, Protocol

from p2pdpt.cli.figures import human_bytes, human_number, human_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console, Group

    from p2pdpt.cli.events import Joined, Report
    from p2pdpt.cli.outcome import NodeState
    from p2pdpt.cli.summary import Summary

__all__ = [
    "Display",
    "ForegroundDisplay",
    "Output",
    "PlainDisplay",
    "TerminalDisplay",
    "create_display",
]


class Output:
    """Writes whole lines to a descriptor and falls silent when that is gone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._gone = False

    @property
    def is_terminal(self) -> bool:
        """Whether people look at it directly."""
        return os.isatty(self._fd)

    def lines(self, *lines: str) -> None:
        """Write lines; none of them is lost to a descriptor that is busy."""
        data = memoryview("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
        while data and not self._gone:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                # Somebody who shares the descriptor made it non-blocking.
                select.select([], [self._fd], [], 1.0)
            except OSError:
                self._gone = True


class Display(Protocol):
    """What the launcher tells people, and when."""

    def out(self, line: str) -> None:
        """Show a line of the first node's standard output."""

    def err(self, node: NodeState, line: str) -> None:
        """Show a line of a node's standard error."""

    def joined(self, run: str, event: Joined) -> None:
        """Say that the run has begun, once."""

    def report(self, event: Report) -> None:
        """Take in what the first node's script reported, to be shown soon."""

    def tick(self, seconds: float) -> None:
        """Bring the figures up to date, `seconds` after the start; called often."""

    def end(self, summary: Summary | None, failure: Sequence[str]) -> None:
        """Take the live part away, show the table if there is one, then the failure if any."""


def create_display(run: str, nodes: Sequence[NodeState]) -> Display:
    """Return a live display if standard error is a terminal that can, else plain lines."""
    out, err = Output(1), Output(2)
    if err.is_terminal and os.environ.get("TERM", "dumb") != "dumb":
        return TerminalDisplay(run, nodes, out)
    return PlainDisplay(run, nodes, out, err)


def _began(run: str, event: Joined) -> str:
    how = f", {event.exchange}" if event.exchange else ""
    return f"{run}: {_counted(len(event.members))} ({', '.join(event.members)}){how}"


def _counted(members: int) -> str:
    return f"{members} member{'s' if members != 1 else ''}"


def _members(nodes: Sequence[NodeState]) -> int:
    return max((len(node.joined.members) for node in nodes if node.joined), default=0)


def progress_line(run: str, nodes: Sequence[NodeState], seconds: float) -> str:
    """Return the run's figures in one line."""
    known = [node.progress for node in nodes if node.progress is not None]
    if not known:
        waiting = sum(node.joined is None and node.status is None for node in nodes)
        what = f"{waiting} of {len(nodes)} local nodes not joined yet" if waiting else "joined"
        return f"{run}: {what}, {human_seconds(seconds)}"
    losses = [progress.loss for progress in known if progress.loss is not None]
    parts = [
        f"step {max(progress.step for progress in known)}",
        *([f"loss {sum(losses) / len(losses):.4f}"] if losses else []),
        f"{human_number(sum(progress.samples_per_s for progress in known))} samples/s",
        f"{human_bytes(sum(progress.bytes_sent for progress in known))} sent",
        _counted(_members(nodes)),
        human_seconds(seconds),
    ]
    return f"{run}: {', '.join(parts)}"


class _Reports:
    """Shows reports once a second: all if they are few, else the last; scripts may report every
    step."""

    def __init__(self, run: str, show: Callable[[str], None]) -> None:
        self._run, self._show = run, show
        self._pending: list[Report] = []
        self._last = -1.0

    def add(self, event: Report) -> None:
        self._pending.append(event)

    def flush(self, seconds: float = float("inf")) -> None:
        if not self._pending or seconds - self._last < 1.0:
            return
        events, self._pending, self._last = self._pending, [], seconds
        for event in events if len(events) <= 3 else events[-1:]:
            values = (
                f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
                for name, value in event.metrics.items()
            )
            parts = [f"epoch {event.epoch}", f"step {event.step}", *values]
            self._show(f"{self._run}: {', '.join(parts)}")


class PlainDisplay:
    """Lines only: one with the figures every few seconds, as long as they change."""

    def __init__(
        self,
        run: str,
        nodes: Sequence[NodeState],
        out: Output,
        err: Output,
        *,
        every: float = 5.0,
    ) -> None:
        """Show a progress line at most every `every` seconds."""
        self._run, self._nodes = run, nodes
        self._out, self._err = out, err
        self._every = every
        self._last = 0.0
        self._shown: object = None
        self._reports = _Reports(run, err.lines)

    def out(self, line: str) -> None:
        """Show a line of the first node's standard output."""
        self._out.lines(line)

    def err(self, node: NodeState, line: str) -> None:
        """Show a line of a node's standard error, with the node's name if there are several."""
        self._err.lines(f"{node.name}: {line}" if len(self._nodes) > 1 else line)

    def joined(self, run: str, event: Joined) -> None:
        """Say that the run has begun."""
        self._err.lines(_began(run, event))

    def report(self, event: Report) -> None:
        """Take in what the script reported, to be shown at the next tick."""
        self._reports.add(event)

    def tick(self, seconds: float) -> None:
        """Show what there is to show, the figures only if it is time and they have changed."""
        self._reports.flush(seconds)
        figures = [(node.joined, node.progress) for node in self._nodes]
        if seconds - self._last >= self._every and figures != self._shown:
            self._last, self._shown = seconds, figures
            self._err.lines(progress_line(self._run, self._nodes, seconds))

    def end(self, summary: Summary | None, failure: Sequence[str]) -> None:
        """Show the table on standard output and the failure on standard error."""
        self._reports.flush()
        if summary is not None:
            self._out.lines("", *summary.plain())
        self._err.lines(*failure)


class ForegroundDisplay:
    """For a script that has the terminal to itself: only what it cannot say itself."""

    def __init__(self, run: str, err: Output) -> None:
        self._err = err
        self._reports = _Reports(run, err.lines)

    def out(self, line: str) -> None:
        """Do nothing: the script writes itself."""

    def err(self, node: NodeState, line: str) -> None:
        """Do nothing: the script writes itself."""

    def joined(self, run: str, event: Joined) -> None:
        """Say that the run has begun."""
        self._err.lines(_began(run, event))

    def report(self, event: Report) -> None:
        """Take in what the script reported, to be shown at the next tick."""
        self._reports.add(event)

    def tick(self, seconds: float) -> None:
        """Show what was reported."""
        self._reports.flush(seconds)

    def end(self, summary: Summary | None, failure: Sequence[str]) -> None:
        """Show the node's figures, or how it ended, on standard error."""
        self._reports.flush()
        if summary is not None and summary.nodes:
            self._err.lines("", *summary.plain())
        self._err.lines(*failure)


class TerminalDisplay:
    """A live table under the lines that scroll by."""

    def __init__(
        self,
        run: str,
        nodes: Sequence[NodeState],
        out: Output,
        console: Console | None = None,
    ) -> None:
        """Draw on standard error, or on another `console`."""
        from rich.console import Console
        from rich.live import Live

        self._run, self._nodes, self._out = run, nodes, out
        self._console = console or Console(stderr=True, highlight=False)
        # No thread of its own and no replaced streams: the launcher says when to draw.
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._reports = _Reports(run, self._print)
        with contextlib.suppress(OSError):
            self._live.start()

    def out(self, line: str) -> None:
        """Show a line of the first node's standard output, above the table if on a terminal."""
        if self._out.is_terminal:
            self._print(line)
        else:
            self._out.lines(line)

    def err(self, node: NodeState, line: str) -> None:
        """Show a line of a node's standard error, with the node's name if there are several."""
        self._print(f"{node.name}: {line}" if len(self._nodes) > 1 else line)

    def joined(self, run: str, event: Joined) -> None:
        """Say that the run has begun."""
        self._print(_began(run, event))

    def report(self, event: Report) -> None:
        """Take in what the script reported, to be shown at the next tick."""
        self._reports.add(event)

    def tick(self, seconds: float) -> None:
        """Draw the table anew, under what was reported."""
        self._reports.flush(seconds)
        with contextlib.suppress(OSError):
            self._live.update(self._table(seconds), refresh=True)

    def end(self, summary: Summary | None, failure: Sequence[str]) -> None:
        """Replace the live table by the final one, and show the failure under it."""
        self._reports.flush()
        with contextlib.suppress(OSError):
            self._live.update("", refresh=True)
            self._live.stop()
        if summary is not None and self._out.is_terminal:
            self._final(summary)
        elif summary is not None:
            self._out.lines(*summary.plain())
        for line in failure:
            self._print(line)

    def _print(self, line: str) -> None:
        from rich.text import Text

        with contextlib.suppress(OSError):
            self._console.print(Text.from_ansi(line), soft_wrap=True)

    def _table(self, seconds: float) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title = progress_line(self._run, self._nodes, seconds)
        table = Table()
        table.add_column("node")
        table.add_column("state")
        for head in ("step", "samples/s", "loss", "sent", "exposed", "members"):
            table.add_column(head, justify="right")
        for node in self._nodes:
            seen = node.progress
            cells = ["", "", "", "", ""]
            if seen is not None:
                cells = [
                    str(seen.step),
                    human_number(seen.samples_per_s),
                    "" if seen.loss is None else f"{seen.loss:.4f}",
                    human_bytes(seen.bytes_sent),
                    human_seconds(seen.exposed_s),
                ]
            members = str(len(node.joined.members)) if node.joined else ""
            style = {"failed": "red", "failing": "red", "done": "green"}.get(node.state)
            table.add_row(node.name, node.state, *cells, members, style=style)
        return Group(Text(title, style="bold", no_wrap=True, overflow="ellipsis"), table)

    def _final(self, summary: Summary) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for column, head in enumerate(summary.columns):
            table.add_column(head, justify="right" if column else "left", no_wrap=True)
        for row in summary.rows():
            table.add_row(*row)
        figures = Table.grid(padding=(0, 2))
        for name, value in summary.figures():
            wrong = name == "parameters" and not summary.equal
            figures.add_row(Text(name), Text(value, style="bold red" if wrong else "bold"))
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            self._console.print(Text(summary.title, style="bold"))
            if summary.nodes:
                self._console.print(table)
            self._console.print(figures)
