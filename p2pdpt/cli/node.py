"""``p2pdpt node``: a single node, in the terminal where it is started."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from p2pdpt.address import is_loopback, parse_address
from p2pdpt.cli.logs import set_up_logging
from p2pdpt.cli.main import debug_option
from p2pdpt.cli.options import as_environment, configs, network_options, run_options

if TYPE_CHECKING:
    from p2pdpt.config import NodeConfig

__all__ = ["node"]


@click.group()
def node() -> None:
    """Start a single node."""


@node.command(context_settings={"allow_interspersed_args": False})
@click.option("--name", metavar="NAME", help="What people call the node.")
@run_options
@network_options
@debug_option
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def start(script: str | None, arguments: tuple[str, ...], **flags: Any) -> None:
    """Start one node here, until Ctrl-C.

    With SCRIPT, the node trains: the script runs in this terminal, as one member of a run.
    Without, it is a node that others can find and talk to.
    """
    if script is None:
        config, _, _ = configs({**os.environ, **as_environment(flags, os.environ)})
        from p2pdpt.cli.loops import run_on_loop

        set_up_logging()
        sys.exit(128 + run_on_loop(_stay(config)))
    sys.exit(_train(script, arguments, flags))


async def _stay(config: NodeConfig) -> int:
    """Be a node until a signal comes, and return its number."""
    from p2pdpt.cli.loops import ended_by_signal
    from p2pdpt.runtime.node import Node

    with ended_by_signal() as ended:
        async with Node(config) as here:
            click.echo(f"node {here.name} {describe(here.address, config)}")
            return await ended


def describe(address: str, config: NodeConfig) -> str:
    """Return where a node listens and how its peers are known, in a line."""
    if not address:
        return "does not listen"
    secret = config.read_secret() is not None
    known = "authenticated by the shared secret" if secret else "not authenticated (no secret)"
    only = ", this machine only" if is_loopback(parse_address(address).host) else ""
    return f"listens on {address}{only}; peers are {known}, connections are not encrypted"


def _train(script: str, arguments: tuple[str, ...], flags: dict[str, Any]) -> int:
    from p2pdpt.cli.display import ForegroundDisplay, Output
    from p2pdpt.cli.launcher import Launcher
    from p2pdpt.cli.outcome import exit_code, first_failure
    from p2pdpt.cli.run import check_script, plan_nodes, run_environment, supervise
    from p2pdpt.cli.summary import Summary

    check_script(script)
    environment = run_environment(script, flags)
    _, settings, _ = configs(environment)
    plans = plan_nodes([sys.executable, script, *arguments], 1, environment)
    launcher = Launcher(settings.run, plans, foreground=True)
    display = ForegroundDisplay(settings.run, Output(2))
    end = supervise(launcher, display)
    if end.signal is not None:
        display.end(None, [])
        return 128 + end.signal
    first = first_failure(launcher.nodes)
    # Whatever ended it but a signal, the script has told itself.
    killed = first is not None and (first.status or 0) < 0
    display.end(
        Summary.of(settings.run, end.seconds, launcher.nodes) if first is None else None,
        [f"p2pdpt: {first.sentence}"] if first is not None and killed else [],
    )
    return exit_code(first)
