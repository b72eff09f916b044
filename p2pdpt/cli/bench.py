"""``p2pdpt bench``: how fast this machine exchanges, compared with others' libraries."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from p2pdpt.cli.display import Output
from p2pdpt.cli.figures import human_bytes, human_seconds, parse_size, plain_table
from p2pdpt.cli.main import debug_option, is_debug
from p2pdpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from p2pdpt.cli.bench_allreduce import Row
    from p2pdpt.cli.bench_lag import Lag
    from p2pdpt.cli.events import Joined, Report
    from p2pdpt.cli.outcome import NodeState
    from p2pdpt.cli.summary import Summary

__all__ = ["bench"]

_HEAD = ("method", "nodes", "size", "median", "rate", "CPU", "times gloo", "repeats")


@click.group()
def bench() -> None:
    """Measure this machine."""


def _sizes(_: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    try:
        sizes = [parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{error}; write for instance 4K,1M") from None
    for size in sizes:
        if size % 4:
            raise click.BadParameter(f"{size} bytes are no whole number of float32")
    return sizes


def _counts(_: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= 64 for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of numbers from 1 to 64, like 2,4")
    return [int(part) for part in parts]


@bench.command()
@click.option(
    "--sizes",
    default="4K,64K,1M,16M,100M",
    show_default=True,
    callback=_sizes,
    metavar="LIST",
    help="Bytes of each node's float32 contribution.",
)
@click.option(
    "--nodes",
    default="2,4",
    show_default=True,
    callback=_counts,
    metavar="LIST",
    help="How many nodes, one measurement after the other.",
)
@click.option("--against", type=click.Choice(["gloo"]), help="Measure another library beside.")
@click.option("--topology", default="ring", show_default=True, metavar="NAME")
@click.option(
    "--repeat",
    type=click.IntRange(1),
    metavar="N",
    help="Repetitions; by default many of small sizes and few of large ones.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the rows to a file too.",
)
@debug_option
def allreduce(
    sizes: list[int],
    nodes: list[int],
    against: str | None,
    topology: str,
    repeat: int | None,
    json_file: Path | None,
) -> None:
    """Time the sum of a vector over local nodes, each a process of its own.

    Methods take turns within one run, between barriers; figures are medians over repetitions of
    the slowest node's time. CPU is processor time of one all-reduce over all nodes.
    """
    from p2pdpt.cli.bench_allreduce import Task
    from p2pdpt.registry import create_topology

    create_topology(topology)
    task = Task(sizes, [against] if against else [], repeat)
    rows: list[Row] = []
    for count in nodes:
        rows += _run(task, count, topology)
    Output(1).lines(*_table(rows))
    if json_file is not None:
        _write(json_file, rows)


@bench.command()
@click.option("--nodes", default=2, show_default=True, type=click.IntRange(1, 64), metavar="N")
@click.option("--size", default="100M", show_default=True, metavar="BYTES", help="Of each sum.")
@click.option(
    "--seconds", default=10.0, show_default=True, type=click.FloatRange(0.01), metavar="S"
)
@click.option("--train/--no-train", default=True, help="Train a network in a thread beside it.")
@click.option("--topology", default="ring", show_default=True, metavar="NAME")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the rows to a file too.",
)
@debug_option
def lag(
    nodes: int, size: str, seconds: float, train: bool, topology: str, json_file: Path | None
) -> None:
    """Time how late each node's event loop wakes while it sums and trains."""
    from p2pdpt.cli.bench_lag import Lag, LagTask
    from p2pdpt.registry import create_topology

    create_topology(topology)
    try:
        nbytes = parse_size(size)
    except ValueError as error:
        raise click.BadParameter(f"{error}; write for instance 100M") from None
    task = LagTask(nbytes - nbytes % 4, seconds, train)
    rows = _run(task, nodes, topology, module="p2pdpt.cli.bench_lag", kind=Lag)
    Output(1).lines(*_lag_table(rows))
    if json_file is not None:
        _write(json_file, rows)


def _write(file: Path, rows: Sequence[Any]) -> None:
    from p2pdpt.cli.summary import write_json

    try:
        write_json(file, {"rows": rows})
    except OSError as error:
        raise ConfigError(f"--json {file} cannot be written: {error.strerror}") from error


def _run(
    task: Any,
    count: int,
    topology: str,
    *,
    module: str = "p2pdpt.cli.bench_allreduce",
    kind: type[Any] | None = None,
) -> list[Any]:
    """Measure with `count` nodes; exits with their code if they fail."""
    from p2pdpt.cli.launcher import Launcher, NodePlan
    from p2pdpt.cli.outcome import exit_code, failure_lines, first_failure
    from p2pdpt.cli.run import supervise

    run = f"bench-{secrets.token_hex(4)}"
    base = {k: v for k, v in os.environ.items() if not k.startswith("P2PDPT_")}
    # The switch of the compiled parts is the only one that is meant for benchmarks too.
    if "P2PDPT_NATIVE" in os.environ:
        base["P2PDPT_NATIVE"] = os.environ["P2PDPT_NATIVE"]
    base |= {
        "P2PDPT_RUN": run,
        "P2PDPT_MIN_NODES": str(count),
        "P2PDPT_TOPOLOGY": topology,
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-P",  # else a folder called p2pdpt where the user stands hides the installed one
        "-m",
        module,
        msgspec.json.encode(task).decode(),
    ]
    names = [f"node{rank}" for rank in range(count)]
    plans = [NodePlan(name, command, {**base, "P2PDPT_NAME": name}) for name in names]
    launcher = Launcher(run, plans)
    display = _BenchDisplay(kind)
    end = supervise(launcher, display)
    first = first_failure(launcher.nodes)
    code = exit_code(first) if end.signal is None else 128 + end.signal
    if code:
        if first is not None and not first.stopped:
            display.end(None, failure_lines(launcher.nodes, debug=is_debug()))
        sys.exit(code)
    return display.rows


class _BenchDisplay:
    """Collects the rows that the first node prints, and says that they have come."""

    def __init__(self, kind: type[Any] | None) -> None:
        self.rows: list[Any] = []
        self._kind = kind
        self._err = Output(2)

    def out(self, line: str) -> None:
        """Take in a row."""
        from p2pdpt.cli.bench_allreduce import Row

        if self._kind is not None:
            self.rows.append(msgspec.json.decode(line, type=self._kind))
            return
        row = msgspec.json.decode(line, type=Row)
        self.rows.append(row)
        self._err.lines(
            f"{row.nodes} nodes, {_size(row.bytes)}, {row.method}: {human_seconds(row.median_s)}"
        )

    def err(self, node: NodeState, line: str) -> None:
        """Show what a node complains of."""
        self._err.lines(f"{node.name}: {line}")

    def joined(self, run: str, event: Joined) -> None:
        """Say nothing: these nodes are no session."""

    def report(self, event: Report) -> None:
        """Say nothing: these nodes are no session."""

    def tick(self, seconds: float) -> None:
        """Say nothing: rows are news enough."""

    def end(self, summary: Summary | None, failure: Sequence[str]) -> None:
        """Show why it failed."""
        self._err.lines(*failure)


def _size(count: int) -> str:
    for power, unit in ((3, "G"), (2, "M"), (1, "K")):
        if count >= 1024**power and count % 1024**power == 0:
            return f"{count // 1024**power}{unit}"
    return str(count)


def _lag_table(rows: Sequence[Lag]) -> list[str]:
    head = ("node", "over", "median", "p99", "worst", "samples", "sums", "training steps")
    lines = [
        (
            row.name,
            row.transport or "alone",
            human_seconds(row.median_s),
            human_seconds(row.p99_s),
            human_seconds(row.worst_s),
            str(row.samples),
            str(row.reductions),
            str(row.training_steps),
        )
        for row in rows
    ]
    return plain_table(head, lines)


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [
        (
            row.method,
            str(row.nodes),
            _size(row.bytes),
            human_seconds(row.median_s),
            f"{human_bytes(row.bytes / row.median_s)}/s",
            human_seconds(row.cpu_s),
            "" if row.ratio_to_gloo is None else f"{row.ratio_to_gloo:.2f}",
            str(row.repeats),
        )
        for row in rows
    ]
    return plain_table(_HEAD, lines)
