"""What the README shows, done as it says: in a clean copy of the sources and a fresh environment.

Every command in a block marked ``sh`` is run. Two of them are not run to the letter: addresses of
documentation become those of this machine, and ``tox`` only lists, since CI itself is that command.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".tox", ".venv", ".*_cache", "build", "dist", "runs", "*.egg-info", "*.so",
    "generated", "__pycache__",
)  # fmt: skip
PATIENCE_S = 600
MAIN, TESTS = (
    'pip install -c constraints.txt ".[examples]" && p2pdpt run --nodes 4 examples/digits.py',
    "pip install tox && tox",
)

pytestmark = pytest.mark.timeout(2 * PATIENCE_S)


def blocks(language: str) -> list[str]:
    """Return the README's fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def machines() -> list[str]:
    """Return the blocks that are for several machines at once."""
    return [block for block in blocks("sh") if "192.0.2." in block]


def others() -> list[str]:
    """Return the blocks that are simply run, after the first two."""
    return [block for block in blocks("sh")[2:] if block not in machines()]


@dataclass(frozen=True)
class House:
    """A copy of the sources, an environment made for it, and what the main job printed there."""

    folder: Path
    environment: Mapping[str, str]
    printed: str

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a shell command there."""
        return start(command, self.folder, self.environment)

    def run(self, command: str) -> str:
        """Run a shell command there, which must succeed, and return what it printed."""
        return finish(self.start(command), command)


def start(command: str, folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["sh", "-ec", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], command: str) -> str:
    try:
        printed, _ = process.communicate(timeout=PATIENCE_S)
    except BaseException:
        process.terminate()
        process.communicate()
        raise
    assert process.returncode == 0, f"{command}\n{printed}"
    return printed


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """Do the main job on a machine that has only Python."""
    folder = tmp_path_factory.mktemp("house")
    copy = shutil.copytree(ROOT, folder / "p2pdpt", ignore=LEFT_OUT)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=120)
    foreign = ("P2PDPT_", "PYTHON", "PYTEST_", "TOX_", "VIRTUAL_ENV")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    environment["PATH"] = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    (copy / "train.py").write_text(blocks("python")[0], encoding="utf-8")
    main = blocks("sh")[0].strip()
    return House(copy, environment, finish(start(main, copy, environment), main))


def test_the_first_commands_are_the_promised_ones() -> None:
    assert [block.strip() for block in blocks("sh")[:2]] == [MAIN, TESTS]
    # On the first screen.
    assert README[: README.index(TESTS)].count("\n") < 40


def test_the_main_job_trains_four_nodes_alike(house: House) -> None:
    accuracy = re.search(r"^test_accuracy +([\d.]+)$", house.printed, re.MULTILINE)
    assert accuracy is not None, house.printed
    assert float(accuracy[1]) >= 0.97
    assert "equal on all 4 nodes" in house.printed
    digests = re.findall(r"^node\d .* ([0-9a-f]{16})$", house.printed, re.MULTILINE)
    assert len(digests) == 4 and len(set(digests)) == 1


def test_tox_knows_the_environments_and_ci_runs_it(house: House) -> None:
    listed = house.run(f"{TESTS} list --no-desc")
    for name in ("tests", "lint", "typing", "no-torch", "native-off", "thirdparty"):
        assert re.search(rf"^{name}$", listed, re.MULTILINE), listed
    assert TESTS in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", others(), ids=lambda block: block.splitlines()[0][:50])
def test_the_other_commands_work(house: House, block: str) -> None:
    house.run(block)


def test_the_commands_for_several_machines_form_one_run(house: House) -> None:
    # Each takes two ports; documentation's addresses become loopback ones.
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.2", 0))
        ports = {"192.0.2.1": first.getsockname()[1], "192.0.2.2": second.getsockname()[1]}
    lines = "".join(machines())
    for address, port in ports.items():
        lines = lines.replace(f"{address}:29500", f"127.0.0.{address[-1]}:{port}")
    secret, *commands = lines.splitlines()
    house.run(secret)
    assert len(commands) == 2
    started = [house.start(command) for command in commands]
    for process, command in zip(started, commands, strict=True):
        assert "4 members" in finish(process, command)


def test_the_program_with_nodes_of_its_own_works(house: House) -> None:
    (program,) = (block for block in blocks("python") if "asyncio.run" in block)
    (house.folder / "embedded.py").write_text(program, encoding="utf-8")
    assert house.run("python embedded.py") == "[2. 4. 6. 8.]\n"


def test_the_six_lines_are_numbered() -> None:
    assert re.findall(r"# (\d)$", blocks("python")[0], re.MULTILINE) == list("123456")


def test_the_plugin_shown_is_the_plugin_shipped() -> None:
    def coroutine(source: str) -> str:
        (found,) = (
            node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AsyncFunctionDef)
        )
        return "\n".join(
            ast.unparse(statement)
            for statement in found.body
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        )

    plugin = ROOT / "examples" / "plugin_gossip"
    (shown,) = (block for block in blocks("python") if "class Gossip" in block)
    shipped = plugin / "src" / "gossip_topology" / "__init__.py"
    assert coroutine(shown) == coroutine(shipped.read_text(encoding="utf-8"))
    (entry,) = blocks("toml")
    project = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert tomllib.loads(entry)["project"]["entry-points"] == project["entry-points"]


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda page: page.name,
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
