"""S118: how much is written of a run in which nothing happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SCRIPT = """
import time
import torch
from torch import nn
import p2pdpt

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with p2pdpt.session(model, optimizer) as s:
    for epoch in s.epochs(2):
        for step in range(20):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05)
        s.report(**s.mean(loss=1.0))
"""


def test_s118_a_healthy_run(command: Any, tmp_path: Path) -> None:
    """A peer that comes and goes belongs to view changes, JSON to the log options."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = command("run", "--nodes", "2", str(script))
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert len((output + errors).splitlines()) <= 2 * 20
    for words in ("WARN", "ERROR", "Traceback", "INFO", "DEBUG"):
        assert words not in output + errors
