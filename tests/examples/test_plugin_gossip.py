"""``examples/plugin_gossip``: small enough to copy, and chosen by its name once installed."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "plugin_gossip"


def install(folder: Path) -> str:
    """Write the metadata that pip would, and return the PYTHONPATH that has it and the code."""
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
            for group, entries in project["entry-points"].items()
        )
    )
    return os.pathsep.join([str(folder), str(FOLDER / "src")])


def test_the_plugin_is_at_most_forty_lines() -> None:
    source = (FOLDER / "src" / "gossip_topology" / "__init__.py").read_text()
    assert len(source.splitlines()) <= 40


def test_the_command_line_trains_with_it(
    train: Callable[..., tuple[dict[str, Any], str]],
    tmp_path: Path,
    environment: dict[str, str],
) -> None:
    path = os.pathsep.join([install(tmp_path), environment["PYTHONPATH"]])
    # With three nodes one sits out each round, so they do differ; nobody complains.
    summary, printed = train(
        "digits.py",
        "--epochs",
        "1",
        nodes=3,
        options=("--topology", "gossip"),
        variables={"PYTHONPATH": path},
    )
    assert "3 members, gossip" in printed
    assert [node["steps"] for node in summary["nodes"]] == [22, 22, 22]
    assert len({node["digest"] for node in summary["nodes"]}) == 3
