"""The options that ``run`` and ``node start`` share, as environment variables of a node.

A flag becomes the variable that the node reads, so flag, environment and argument follow one
path and each value is checked in one place, :mod:`p2pdpt.config`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import click

from p2pdpt.address import parse_address
from p2pdpt.config import ENVIRONMENT, SHARED, Environ, NodeConfig, RunConfig, read_environ
from p2pdpt.errors import ConfigError

__all__ = ["as_environment", "configs", "network_options", "run_options"]

_F = TypeVar("_F", bound=Callable[..., Any])

_VARIABLES = {field: variable for variable, (_, field) in ENVIRONMENT.items()}


def _together(*options: Callable[[Any], Any]) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _names(_: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


network_options = _together(
    click.option(
        "--join", multiple=True, metavar="HOST:PORT",
        help="Where another node of the run listens; may be given several times, one is enough.",
    ),
    click.option(
        "--listen", metavar="HOST:PORT",
        help="Where to listen; by default any free port of 127.0.0.1. Beyond the loopback "
        "interface a secret is needed.",
    ),
    click.option("--port", type=click.IntRange(0, 65535), help="Only the port to listen on."),
    click.option(
        "--secret-file", metavar="FILE", help="Holds what the cluster's nodes share; mode 0600."
    ),
    click.option("--cluster", metavar="NAME", help="Nodes of other clusters are refused."),
    click.option(
        "--transport", "transports", callback=_names, metavar="LIST",
        help="What may carry the gradients: shm (memory shared on one host), tcp, or shm,tcp (the "
        "default); shm alone fails where it cannot be used.",
    ),
    click.option(
        "--patience", type=float, metavar="SECONDS",
        help="Silence after which a peer counts as dead.",
    ),
)  # fmt: skip
"""How a node is reached and whom it trusts."""

run_options = _together(
    click.option(
        "--run", metavar="NAME",
        help="The run's name; unless given, the script's, with something random added if no "
        "--join is given either.",
    ),
    click.option("--topology", metavar="NAME", help="How to exchange: ring, mapreduce, a plugin."),
    click.option(
        "--min-nodes", type=int, metavar="N",
        help="How many nodes the run waits for, those elsewhere included.",
    ),
    click.option("--wait", type=float, metavar="SECONDS", help="How long it waits for them."),
    click.option(
        "--seed",
        type=int,
        metavar="S",
        help="What the order of the data is drawn from; torch's initial seed unless given.",
    ),
)  # fmt: skip
"""Which run a node joins, and what it begins with."""


def as_environment(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the flags given set, for a node.

    Args:
        flags: values by the names of the fields of `NodeConfig` and `RunConfig`, and ``port``;
            None or empty where not given.
        environ: what holds where no flag is given.

    Raises:
        ConfigError: a value is wrong, or two flags contradict each other.
    """
    given = {name: value for name, value in flags.items() if value not in (None, (), "")}
    port = given.pop("port", None)
    if port is not None:
        if "listen" in given:
            raise ConfigError("--listen and --port are both given; put the port into --listen")
        base = environ.get(_VARIABLES["listen"]) or NodeConfig().listen
        host, _, _ = base.rpartition(":")
        given["listen"] = f"{host}:{port}"
    if given.get("min_nodes", 1) < 1:
        raise ConfigError(f"--min-nodes is {given['min_nodes']}; a run needs at least one node")
    if "secret_file" in given:
        given["secret_file"] = os.path.abspath(given["secret_file"])
    node_fields = {f.name for f in fields(NodeConfig)}
    for name, value in given.items():
        # Each alone, so that the error is about the flag and not about its variable.
        (NodeConfig if name in node_fields else RunConfig)(**{name: value})
    return {
        _VARIABLES[name]: ",".join(value) if isinstance(value, tuple) else str(value)
        for name, value in given.items()
    }


def configs(environment: Mapping[str, str]) -> tuple[NodeConfig, RunConfig, Environ]:
    """Return what a node makes of its environment, checked as far as it can be beforehand.

    Raises:
        ConfigError: a value is wrong, or the secret cannot be read.
        PluginError: there is no such topology or transport.
    """
    from p2pdpt.registry import create_topology, load_transport

    environ = read_environ(environment)
    node, run = NodeConfig(**environ.node), RunConfig(**environ.run)
    parse_address(node.listen, what="listen")
    node.read_secret()
    create_topology(run.topology)
    for name in node.transports:
        if name != SHARED:
            load_transport(name)
    return node, run, environ
