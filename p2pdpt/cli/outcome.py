"""What became of a run's local nodes: who failed first, what to say about it, how to exit.

Decisions only: events and the statuses of processes come in, sentences and numbers go out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from p2pdpt import errors
from p2pdpt.cli.events import Event, Failed, Finished, Joined, Progress, Report, Value
from p2pdpt.cli.lines import last_error, own_frames

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "NOT_ENOUGH_NODES",
    "NodeState",
    "USAGE",
    "exit_code",
    "failure_lines",
    "first_failure",
]

USAGE = 2
NOT_ENOUGH_NODES = 3

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")

_SIGNALS = {
    4: "illegal instruction",
    6: "aborted",
    7: "bus error; is /dev/shm full?",
    9: "out of memory? see dmesg",
    11: "segmentation fault",
    15: "terminated from outside",
}


@dataclass(slots=True)
class NodeState:
    """One local node as the launcher knows it.

    Attributes:
        name: the node's name.
        joined: what it said when it became a member.
        progress: its last report of progress.
        metrics: the last value of each metric it reported.
        finished: what it said when its session ended well.
        failed: what it said when its session failed.
        failed_at: when that was heard, in seconds.
        status: how its process ended: an exit code, minus a signal's number, None while it runs.
        ended_at: when that was seen.
        stopped: whether the launcher ended the process.
        traceback: the last block that it wrote on stderr, if that is a traceback.
    """

    name: str
    joined: Joined | None = None
    progress: Progress | None = None
    metrics: dict[str, Value] = field(default_factory=dict)
    finished: Finished | None = None
    failed: Failed | None = None
    failed_at: float | None = None
    status: int | None = None
    ended_at: float | None = None
    stopped: bool = False
    traceback: Sequence[str] = ()

    def hear(self, event: Event, now: float) -> None:
        """Take in what the node's session reported."""
        match event:
            case Joined():
                self.joined = event
            case Progress():
                self.progress = event
            case Report():
                self.metrics.update(event.metrics)
            case Finished():
                self.finished = event
                self.metrics.update(event.metrics)
            case Failed():
                # What the launcher's own signal made of it is no failure of the node's.
                if self.failed is None and not self.stopped:
                    self.failed, self.failed_at = event, now

    def end(self, status: int, now: float) -> None:
        """Take in that the process has ended."""
        self.status, self.ended_at = status, now

    @property
    def unsuccessful(self) -> bool:
        """Whether the process ended otherwise than well."""
        return self.status is not None and self.status != 0

    @property
    def title(self) -> str:
        """The node's name, and its rank once it has one."""
        return f"{self.name} (rank {self.joined.rank})" if self.joined else self.name

    @property
    def state(self) -> str:
        """One word for a table."""
        if self.status is not None:
            return "done" if self.status == 0 else "failed"
        if self.failed is not None:
            return "failing"
        if self.finished is not None:
            return "finished"
        return "training" if self.progress else "joined" if self.joined else "starting"

    @property
    def code(self) -> int:
        """How it ended on its own account: what the launcher's signals made of it left out."""
        return 1 if self.stopped and self.failed is not None else self.status or 0

    @property
    def follows(self) -> bool:
        """Whether it ended because of another: a peer failed, or the launcher stopped it."""
        if self.failed is None:
            return self.stopped
        kind = _error_class(self.failed)
        return issubclass(kind, (errors.PeerFailedError, errors.ViewChangedError))

    @property
    def cause(self) -> str:
        """Why it failed, in one line."""
        status = self.code
        if status < 0:
            hint = f" ({_SIGNALS[-status]})" if -status in _SIGNALS else ""
            return f"killed by signal {-status}{hint}"
        said = ""
        if self.failed is not None and self.failed.kind != "SystemExit":
            text = self.failed.error.partition("\n")[0].removeprefix(f"{self.failed.kind}: ")
            said = f"{self.failed.kind}: {text}" if text else self.failed.kind
        said = said or last_error(self.traceback)
        if not said:
            return f"exit code {status}"
        return said if status in (0, 1) else f"{said} (exit code {status})"

    @property
    def sentence(self) -> str:
        """Who failed when of what, in one line."""
        when = "" if self.joined else " before it joined"
        if self.joined and self.failed is not None and self.failed.step is not None:
            when = f" at step {self.failed.step}"
        elif self.progress is not None:
            when = f" after step {self.progress.step}"
        return f"{self.title} failed{when}: {self.cause}"


def _error_class(failed: Failed | None) -> type[BaseException]:
    found = getattr(errors, failed.kind, None) if failed is not None else None
    return found if isinstance(found, type) and issubclass(found, BaseException) else Exception


def first_failure(nodes: Iterable[NodeState]) -> NodeState | None:
    """Return the node whose failure the others follow, or None if all is well so far.

    A failure of a node's own comes before those that only follow, whenever each was noticed.
    """

    def order(node: NodeState) -> tuple[bool, float]:
        noticed = node.failed_at if node.failed_at is not None else node.ended_at
        return node.follows, noticed or 0.0

    return min((node for node in nodes if node.unsuccessful), key=order, default=None)


def exit_code(first: NodeState | None) -> int:
    """Return the command's exit code, given the first failure.

    The child's own code, 128 and the number of its signal, 2 where what was asked could not
    be done and 3 where the nodes never came.
    """
    if first is None or not first.unsuccessful:
        return 0
    if first.code < 0:
        return 128 - first.code
    kind = _error_class(first.failed)
    if first.code == 1 and issubclass(kind, errors.UsageError):
        return USAGE
    if first.code == 1 and issubclass(kind, errors.NotEnoughNodesError):
        return NOT_ENOUGH_NODES
    return first.code


def failure_lines(nodes: Sequence[NodeState], *, debug: bool = False) -> list[str]:
    """Return the last block of a failed run: the first failure with the user's frames, then a
    line for each node that failed with it. Empty if none failed.

    With `debug`, the frames of this package and the tracebacks of the followers are shown too.
    """
    first = first_failure(nodes)
    if first is None:
        return []
    lines = [first.sentence]
    plain = exit_code(first) in (USAGE, NOT_ENOUGH_NODES) and first.failed is not None
    if first.failed is not None:
        # The rest of a text of several lines, which the traceback would have shown.
        lines += first.failed.error.split("\n")[1:] if plain else []
    if debug:
        lines += first.traceback
    elif not plain:
        lines += own_frames(first.traceback, _PACKAGE, _LIBRARY)
    for node in nodes:
        if node is first or not node.unsuccessful:
            continue
        if node.stopped and node.failed is None:
            lines.append(f"{node.title} was stopped after it")
        elif node.follows:
            lines.append(f"{node.title} ended with it: {node.cause}")
        elif node.cause == first.cause or (plain and exit_code(node) == exit_code(first)):
            lines.append(f"{node.title} failed in the same way")
        else:
            lines.append(node.sentence)
        if debug:
            lines += node.traceback
    return lines
