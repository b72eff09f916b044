"""S116: the user's own traceback is what one sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPTS = {
    "key": """
import os
import torch
from torch import nn
import p2pdpt

def lookup(table, key):
    return table[key]

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with p2pdpt.session(model, optimizer) as s:
    for step in range(10):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if s.step == 3 and s.rank == 1:
            {what}
""",
    "import": "import no_such_module_anywhere\n",
    "code": "import os\nraise SystemExit(7 if os.environ['P2PDPT_NAME'] == 'node1' else 0)\n",
}


def end(command: Any, tmp_path: Path, nodes: int, text: str) -> Any:
    script = tmp_path / "train.py"
    script.write_text(text)
    return command("run", "--nodes", str(nodes), str(script))


def test_s116_an_exception_of_the_scripts(command: Any, tmp_path: Path) -> None:
    process = end(command, tmp_path, 2, SCRIPTS["key"].replace("{what}", 'lookup({}, "x")'))
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    lines = errors.strip().splitlines()
    start = lines.index("node1 (rank 1) failed at step 3: KeyError: 'x'")
    block = lines[start + 1 :]
    frames = [line.strip() for line in block if line.startswith("  File ")]
    assert len(frames) == 2
    assert all(str(tmp_path / "train.py") in frame for frame in frames)
    assert frames[-1].endswith("in lookup")
    followers = [line for line in block if line.startswith("node")]
    assert [line.split()[0] for line in followers] == ["node0"]
    assert "p2pdpt/cli" not in errors


def test_s116_a_killed_node(command: Any, tmp_path: Path) -> None:
    what = "os.kill(os.getpid(), 9)"
    process = end(command, tmp_path, 2, SCRIPTS["key"].replace("{what}", what))
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 137
    assert "node1 (rank 1) failed" in errors
    assert "killed by signal 9 (out of memory? see dmesg)" in errors
    assert "Traceback" not in errors


def test_s116_an_exit_code(command: Any, tmp_path: Path) -> None:
    process = end(command, tmp_path, 3, SCRIPTS["code"])
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 7
    assert errors == "node1 failed before it joined: exit code 7\n"


def test_s116_a_script_that_does_not_import(command: Any, tmp_path: Path) -> None:
    process = end(command, tmp_path, 3, SCRIPTS["import"])
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1
    words = "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    assert f"failed before it joined: {words}" in errors
    assert str(tmp_path / "train.py") in errors
    assert "p2pdpt/cli" not in errors
