"""``p2pdpt plugins``: what is installed, and whether it works."""

from __future__ import annotations

import logging

import click
import msgspec

from p2pdpt.cli.figures import plain_table
from p2pdpt.cli.logs import set_up_logging
from p2pdpt.cli.main import debug_option

__all__ = ["plugins"]

logger = logging.getLogger(__name__)


@click.group()
def plugins() -> None:
    """Show topologies, transports and ways of discovery, our own and others'."""


@plugins.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array instead.")
@debug_option
def list_plugins(as_json: bool) -> None:
    """List all plugins: name, kind, distribution, version and whether it works here.

    Imports each of them to tell. Exits with 0 even if some are broken.
    """
    from p2pdpt.registry import GROUPS
    from p2pdpt.registry import plugins as registered

    set_up_logging("warning")
    found = registered()
    for plugin in found:
        if plugin.status == "broken":
            logger.warning("%s", plugin.reason)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    rows = [
        (
            plugin.name,
            GROUPS[plugin.group],
            plugin.distribution,
            plugin.version,
            "available" if plugin.status == "ok" else f"{plugin.status}: {plugin.reason}",
        )
        for plugin in found
    ]
    for line in plain_table(("name", "kind", "distribution", "version", "status"), rows, left=5):
        click.echo(line)
