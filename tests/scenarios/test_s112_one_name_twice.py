"""S112: two plugins with one name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CODE = """
from p2pdpt_plugins.ring import Ring

class Other(Ring):
    pass
"""
SCRIPT = """
import torch
import p2pdpt
with p2pdpt.session(torch.nn.Linear(1, 1), min_nodes=1, run={run!r}) as s:
    print("topology", s._live.group._topology.__class__.__module__)
"""


@pytest.fixture
def sites(install: Any) -> list[str]:
    return [
        install("first-rings", CODE, "[p2pdpt.topologies]\nring2 = first_rings:Other\n"),
        install(
            "second-rings",
            CODE,
            "[p2pdpt.topologies]\nring2 = second_rings:Other\nring = second_rings:Other\n",
        ),
    ]


@pytest.mark.parametrize("reverse", [False, True])
def test_s112_the_same_whatever_the_path(
    command: Any,
    environ: dict[str, str],
    sites: list[str],
    tmp_path: Path,
    run_name: str,
    reverse: bool,
) -> None:
    path = ":".join([*(reversed(sites) if reverse else sites), environ["PYTHONPATH"]])
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(run=run_name))
    said = {}
    for topology in ("ring2", "first-rings:ring2", "ring", "second-rings:ring"):
        process = command("run", "--topology", topology, str(script), PYTHONPATH=path)
        said[topology] = process
    texts = {topology: process.communicate(timeout=60) for topology, process in said.items()}
    assert said["ring2"].returncode == 2
    errors = texts["ring2"][1]
    for words in ("ring2", "first-rings:ring2", "second-rings:ring2"):
        assert words in errors
    assert "Traceback" not in errors
    used = {"first-rings:ring2": "first_rings", "ring": "p2pdpt_plugins.ring"}
    for topology, module in {**used, "second-rings:ring": "second_rings"}.items():
        assert said[topology].returncode == 0, texts[topology]
        assert f"topology {module}\n" in texts[topology][0]
