"""What a run came to: the table at its end, and the same as JSON."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from p2pdpt.cli.figures import human_bytes, human_number, human_seconds, plain_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from p2pdpt.cli.events import Finished, Value
    from p2pdpt.cli.outcome import NodeState

__all__ = ["Summary", "write_json"]

_COLUMNS = ("node", "steps", "steps/s", "samples/s", "sent", "exposed", "digest")


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a finished run.

    Attributes:
        run: its name.
        seconds: from the command's start to the end of the last local node.
        nodes: what each local node that finished said.
        members: how many nodes the run had, those elsewhere included.
        exchange: how they exchanged, for instance ``ring over tcp``.
        metrics: what the script reported last.
        error: why the run failed, if it did.
    """

    run: str
    seconds: float
    nodes: Sequence[Finished]
    members: int = 0
    exchange: str = ""
    metrics: Mapping[str, Value] = field(default_factory=dict)
    error: str | None = None

    @classmethod
    def of(
        cls, run: str, seconds: float, nodes: Sequence[NodeState], error: str | None = None
    ) -> Summary:
        """Gather it from the nodes' reports; for a metric the first node that has it decides."""
        metrics: dict[str, Value] = {}
        for node in reversed(nodes):
            metrics.update(node.metrics)
        joined = next((node.joined for node in nodes if node.joined is not None), None)
        return cls(
            run=run,
            seconds=seconds,
            nodes=[node.finished for node in nodes if node.finished is not None],
            members=len(joined.members) if joined else 0,
            exchange=joined.exchange if joined else "",
            metrics=metrics,
            error=error,
        )

    @property
    def equal(self) -> bool:
        """Whether all nodes ended with the same parameters."""
        return len({node.digest for node in self.nodes}) <= 1

    def as_json(self) -> dict[str, Any]:
        """Return it as the ``--summary`` file holds it."""
        document: dict[str, Any] = {
            "run": self.run,
            "seconds": round(self.seconds, 3),
            "exchange": self.exchange,
            "members": self.members,
            "metrics": dict(self.metrics),
            "nodes": [
                {
                    "id": node.id,
                    "name": node.name,
                    "digest": node.digest,
                    "steps": node.steps,
                    "samples_per_s": node.samples_per_s,
                    "steps_per_s": node.steps_per_s,
                    "bytes_sent": node.bytes_sent,
                    "exposed_s": node.exposed_s,
                }
                for node in self.nodes
            ],
        }
        if self.error is not None:
            document["error"] = self.error
        return document

    @property
    def title(self) -> str:
        """One line: the run, its members, how they exchanged, how long it took."""
        if not self.members:
            return f"{self.run}: {human_seconds(self.seconds)}, without a session"
        members = f"{self.members} member{'s' if self.members != 1 else ''}"
        how = f", {self.exchange}" if self.exchange else ""
        return f"{self.run}: {members}{how}, {human_seconds(self.seconds)}"

    def figures(self) -> Iterator[tuple[str, str]]:
        """Yield the run's own figures as (name, text)."""
        for name, value in self.metrics.items():
            shown = f"{value:.4f}" if isinstance(value, float) else str(value)
            yield name, shown
        if not self.nodes:
            return
        yield "steps/s", human_number(self.nodes[0].steps_per_s)
        yield "samples/s", human_number(sum(node.samples_per_s for node in self.nodes))
        yield "bytes exchanged", human_bytes(sum(node.bytes_sent for node in self.nodes))
        exposed = sum(node.exposed_s for node in self.nodes) / len(self.nodes)
        trained = sum(node.seconds for node in self.nodes) / len(self.nodes)
        share = f" ({exposed / trained:.0%} of training)" if trained > 0 else ""
        yield "exposed communication", human_seconds(exposed) + share
        yield "parameters", self.verdict

    @property
    def verdict(self) -> str:
        """Whether the nodes' parameters are equal, in words."""
        count = len(self.nodes)
        if count == 1:
            return f"{self.nodes[0].digest[:16]}, one node here"
        if self.equal:
            return f"equal on all {count} nodes" if count > 2 else "equal on both nodes"
        return f"DIFFERENT on {count} nodes"

    def rows(self) -> list[list[str]]:
        """Return a row of text for each node, under `columns`."""
        return [
            [
                node.name,
                str(node.steps),
                human_number(node.steps_per_s),
                human_number(node.samples_per_s),
                human_bytes(node.bytes_sent),
                human_seconds(node.exposed_s),
                node.digest[:16],
            ]
            for node in self.nodes
        ]

    @property
    def columns(self) -> tuple[str, ...]:
        """The heads of `rows`."""
        return _COLUMNS

    def plain(self) -> list[str]:
        """Return the table as lines of plain text."""
        names = list(self.figures())
        width = max((len(name) for name, _ in names), default=0)
        lines = [self.title]
        if self.nodes:
            lines += ["", *plain_table(self.columns, self.rows())]
        if names:
            lines += ["", *(f"{name.ljust(width)}  {text}" for name, text in names)]
        return lines


def write_json(path: Path, document: object) -> None:
    """Write a file at once: what was there before stays until all of it is written.

    Raises:
        OSError: it cannot be written; nothing is left beside it.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(draft, "xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
