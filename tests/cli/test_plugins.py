from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def broken(tmp_path: Path, environment: dict[str, str]) -> None:
    """Install a distribution whose plugin does not import."""
    folder = tmp_path / "broken_plugin-1.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.5\n")
    (folder / "entry_points.txt").write_text(
        "[p2pdpt.topologies]\nbroken = nothing_there:Topology\n"
    )
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"


def test_the_list(command: Command) -> None:
    code, out, err = command("plugins", "list")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.split("\n")]
    assert lines[0] == ["name", "kind", "distribution", "version", "status"]
    assert [line[:3] for line in lines if "p2pdpt" in line and "topology" in line] == [
        ["mapreduce", "topology", "p2pdpt"],
        ["ring", "topology", "p2pdpt"],
    ]
    assert {line[-1] for line in lines[1:-1]} == {"available"}


@pytest.mark.usefixtures("broken")
def test_a_broken_plugin_is_listed_and_told_once(command: Command) -> None:
    reason = (
        "topology 'broken' of broken-plugin 1.5 (p2pdpt.topologies: nothing_there:Topology) does "
        "not import: ModuleNotFoundError: No module named 'nothing_there'; repair or uninstall "
        "broken-plugin"
    )
    code, out, err = command("plugins", "list", "--json")
    assert code == 0
    assert {
        "group": "p2pdpt.topologies",
        "name": "broken",
        "distribution": "broken-plugin",
        "version": "1.5",
        "value": "nothing_there:Topology",
        "status": "broken",
        "reason": reason,
    } in json.loads(out)
    assert err.split(" ", 1)[1] == f"WARNING {reason}\n"
    code, out, _ = command("plugins", "list")
    assert code == 0
    row = next(line for line in out.split("\n") if line.startswith("broken"))
    assert row.split() == f"broken topology broken-plugin 1.5 broken: {reason}".split()


@pytest.mark.usefixtures("broken")
def test_a_broken_plugin_is_an_error_only_for_who_asks_for_it(
    command: Command, script: Callable[[str], str]
) -> None:
    path = script("")
    assert command("run", path)[0] == 0
    code, out, err = command("run", "--topology", "broken", path)
    assert (code, out) == (2, "")
    assert err.startswith("p2pdpt: topology 'broken' of broken-plugin 1.5 (")
    assert err.count("\n") == 1
    code, _, err = command("run", "--debug", "--topology", "broken", path)
    assert err.startswith("Traceback (most recent call last):\n")
    assert code == 2
    # What comes after the script is the script's.
    assert command("run", "--topology", "broken", path, "--debug")[2].count("\n") == 1
