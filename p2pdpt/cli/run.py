"""``p2pdpt run``: train with local nodes, each a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pdpt.address import Address, parse_address
from p2pdpt.cli.display import Display, create_display
from p2pdpt.cli.launcher import Launcher, NodePlan, RunEnd
from p2pdpt.cli.main import debug_option, is_debug
from p2pdpt.cli.options import as_environment, configs, network_options, run_options
from p2pdpt.cli.outcome import exit_code, failure_lines, first_failure
from p2pdpt.cli.processes import threads_per_node
from p2pdpt.cli.summary import Summary, write_json
from p2pdpt.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["run"]


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--nodes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    metavar="N",
    help="How many nodes to start on this machine.",
)
@run_options
@network_options
@click.option(
    "--summary",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the figures of the end to a file, as JSON.",
)
@debug_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    nodes: int, summary: Path | None, script: str, arguments: tuple[str, ...], **flags: Any
) -> None:
    """Train SCRIPT on this machine's nodes, and on others that join the same run.

    Every node runs the same script; ARGUMENTS are passed on to it. Ends with a table of what
    was done, and exits with the failed node's code if one fails.
    """
    check_script(script)
    if summary is not None:
        _check_writable(summary)
    environment = run_environment(script, flags)
    environment["P2PDPT_MIN_NODES"] = environment.get("P2PDPT_MIN_NODES") or str(nodes)
    plans = plan_nodes([sys.executable, script, *arguments], nodes, environment)
    for plan in plans:
        _, settings, _ = configs(plan.environment)
    launcher = Launcher(settings.run, plans)
    display = create_display(settings.run, launcher.nodes)
    end = supervise(launcher, display)

    first = first_failure(launcher.nodes)
    code = exit_code(first) if end.signal is None else 128 + end.signal
    failure: list[str] = []
    if first is not None and not first.stopped:
        failure = failure_lines(launcher.nodes, debug=is_debug())
    if end.signal is not None:
        name = signal.Signals(end.signal).name
        failure.append(f"{settings.run}: stopped by {name} after {end.seconds:.1f} s")
    figures = Summary.of(
        settings.run, end.seconds, launcher.nodes, error=failure[0] if failure else None
    )
    if code == 0 and not figures.equal and _must_agree(settings.topology):
        code = 1
        failure.append(f"{settings.run}: the nodes ended with different parameters; see the table")
    display.end(figures if end.signal is None and first is None else None, failure)
    if summary is not None:
        try:
            write_json(summary, figures.as_json())
        except OSError as error:
            raise ConfigError(f"--summary {summary} cannot be written: {error.strerror}") from error
    sys.exit(code)


def supervise(launcher: Launcher, display: Display | None) -> RunEnd:
    """Run the launcher on an event loop of its own; the display is put away if that fails.

    Raises:
        UsageError: a node cannot be started.
    """
    try:
        return asyncio.run(launcher.run(display))
    except BaseException as error:
        if display is not None:
            display.end(None, [])
        if isinstance(error, OSError):
            raise UsageError(f"a node cannot be started: {error}") from error
        raise


def run_environment(script: str, flags: Mapping[str, Any]) -> dict[str, str]:
    """Return our environment with what the flags set, and a name for the run.

    Raises:
        ConfigError: a flag's value is wrong.
    """
    environment = {**os.environ, **as_environment(flags, os.environ)}
    if not environment.get("P2PDPT_RUN"):
        # Nodes elsewhere that are started by the same command must come to the same name.
        own = "" if environment.get("P2PDPT_JOIN") else f"-{secrets.token_hex(3)}"
        environment["P2PDPT_RUN"] = _slug(script) + own
    return environment


def check_script(script: str) -> None:
    """Raise :class:`ConfigError` unless `script` is a file that can be read."""
    if not os.path.isfile(script):
        what = "is a folder" if os.path.isdir(script) else "does not exist"
        raise ConfigError(f"script {script!r} {what}")
    if not os.access(script, os.R_OK):
        raise ConfigError(f"script {script!r} cannot be read")


def plan_nodes(
    command: Sequence[str], nodes: int, environment: Mapping[str, str]
) -> list[NodePlan]:
    """Return what to start: `nodes` times `command`, each with its own name and port.

    A port other than 0 is the first node's, the others take those after it.

    Raises:
        ConfigError: the ports do not suffice, or the address is none.
    """
    listen = environment.get("P2PDPT_LISTEN", "")
    address = parse_address(listen, what="listen") if listen else None
    if address is not None and address.port + nodes > 65536:
        raise ConfigError(f"listen {listen!r}: there are no {nodes} ports from {address.port} on")
    plans = []
    for number in range(nodes):
        own = dict(environment)
        if nodes > 1 or not own.get("P2PDPT_NAME"):
            # Members are ranked by name.
            own["P2PDPT_NAME"] = f"node{number:0{len(str(nodes - 1))}}"
        if address is not None and address.port and number:
            own["P2PDPT_LISTEN"] = str(Address(address.host, address.port + number))
        # All nodes compute at once: without this each would take every core.
        own.setdefault("OMP_NUM_THREADS", str(threads_per_node(nodes)))
        own.setdefault("PYTHONUNBUFFERED", "1")
        plans.append(NodePlan(own["P2PDPT_NAME"], command, own))
    return plans


def _slug(script: str) -> str:
    stem = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")
    return stem[:40] or "run"


def _check_writable(path: Path) -> None:
    # Now, rather than after hours of training.
    if not path.parent.is_dir():
        raise ConfigError(f"--summary {path}: the folder {str(path.parent)!r} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--summary {path}: the folder {str(path.parent)!r} cannot be written")


def _must_agree(topology: str) -> bool:
    from p2pdpt.registry import create_topology

    return create_topology(topology).agreement == "exact"
