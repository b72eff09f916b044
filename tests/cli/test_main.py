from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

Command = Callable[..., tuple[int, str, str]]


def test_help_names_the_commands(command: Command) -> None:
    code, out, err = command("--help")
    assert (code, err) == (0, "")
    commands = out.partition("Commands:\n")[2].split("\n")
    assert [line.split()[0] for line in commands if line] == ["run", "node", "plugins", "bench"]


def test_help_imports_nothing_heavy(environment: dict[str, str]) -> None:
    code = (
        "import sys\nfrom p2pdpt.cli.main import main\nsys.argv = ['p2pdpt', '--help']\n"
        "try: main()\nfinally:\n"
        "    heavy = {'torch', 'numpy', 'rich', 'msgspec', 'asyncio', 'uvloop'}\n"
        "    print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert (result.returncode, result.stderr) == (0, "[]\n")


def test_the_version(command: Command) -> None:
    import p2pdpt

    assert command("--version") == (0, f"p2pdpt {p2pdpt.__version__}\n", "")


def test_no_command_shows_help_and_fails(command: Command) -> None:
    code, out, err = command()
    assert (code, out) == (2, "")
    assert err.startswith("Usage: p2pdpt ")


def test_an_unknown_command(command: Command) -> None:
    code, out, err = command("rum")
    assert (code, out) == (2, "")
    lines = err.split("\n")
    assert lines[0].startswith("p2pdpt: No such command 'rum'.")
    assert lines[1:] == ["Try: p2pdpt --help", ""]
