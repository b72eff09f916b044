"""The command ``p2pdpt``: finds the subcommand, and turns errors into lines and exit codes.

Nothing is imported here that the command at hand does not need.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import NoReturn

import click

from p2pdpt.errors import NotEnoughNodesError, P2PError, UsageError

__all__ = ["cli", "main"]

_EXIT_FAILED, _EXIT_USAGE, _EXIT_NOT_ENOUGH, _EXIT_INTERRUPTED = 1, 2, 3, 130


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when they are listed."""

    def __init__(self, *args: object, lazy: dict[str, tuple[str, str]], **kwargs: object) -> None:
        """Take ``lazy``: for each command its ``module:attribute`` and its help in one line."""
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._lazy.items()])


_shown_whole = False
"""Whether ``--debug`` was given; kept here for what happens after click's own context is gone."""


def _set_debug(_: click.Context, __: click.Parameter, value: bool) -> None:
    global _shown_whole
    _shown_whole |= value


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_set_debug,
    help="Show whole tracebacks, our own frames included.",
)


def is_debug() -> bool:
    """Return whether ``--debug`` was given to the command that runs."""
    return _shown_whole


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        import p2pdpt

        click.echo(f"p2pdpt {p2pdpt.__version__}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    lazy={
        "run": ("p2pdpt.cli.run:run", "Train: start local nodes of a run and watch over them."),
        "node": ("p2pdpt.cli.node:node", "Start a single node."),
        "plugins": ("p2pdpt.cli.plugins:plugins", "List topologies, transports and discovery."),
        "bench": ("p2pdpt.cli.bench:bench", "Measure this machine."),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version,
    help="Show the version and exit.",
)  # fmt: skip
@debug_option
def cli() -> None:
    """Train a PyTorch model on many machines with no master.

    Exit codes: 0 done, 1 failed, 2 usage or start-up, 3 the nodes never came, 130 and 143
    signals, else the script's own.
    """


def main() -> NoReturn:
    """Run the command line and exit with one of the codes that its help lists."""
    try:
        code = cli.main(prog_name="p2pdpt", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else str(error), err=True)
        code = _EXIT_USAGE
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "p2pdpt"
        _complain(f"{error.format_message()}\nTry: {path} --help")
        code = _EXIT_USAGE
    except click.exceptions.Abort:
        code = _EXIT_INTERRUPTED
    except KeyboardInterrupt:
        code = _EXIT_INTERRUPTED
    except P2PError as error:
        if is_debug():
            traceback.print_exc()
        else:
            _complain(str(error))
        if isinstance(error, UsageError):
            code = _EXIT_USAGE
        else:
            code = _EXIT_NOT_ENOUGH if isinstance(error, NotEnoughNodesError) else _EXIT_FAILED
    try:
        sys.stdout.flush()
    except OSError:
        # Whoever read our output has gone; the interpreter must not stumble over it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code if isinstance(code, int) else 0)


def _complain(text: str) -> None:
    click.echo(f"p2pdpt: {text}", err=True)
