"""S59: peers have different models."""

from __future__ import annotations

import time
from typing import Any

import pytest

SCRIPT = """
import p2pdpt

def other():
    {other}

model = other() if index() == 2 else m1()
parameters = [p for p in model.parameters() if p.requires_grad] or [torch.zeros(1)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
say(entering=True)
try:
    with p2pdpt.session(model, optimizer) as s:
        say(entered=True)
except p2pdpt.SchemaError as error:
    say(text=str(error))
    raise
"""
OTHERS = {
    "wider": ("return m1(5)", "0.weight: (4,8) float32 on n0, n1 vs (5,8) float32 on n2"),
    "deeper": (
        "return nn.Sequential(*m1(), nn.Linear(1, 1))",
        "3.weight: absent on n0, n1 vs (1,1) float32 on n2",
    ),
    "frozen": (
        "return m1().requires_grad_(False)",
        "0.weight: (4,8) float32 on n0, n1 vs (4,8) float32 frozen on n2",
    ),
    "much else": (
        "return nn.Sequential(*(nn.Linear(3, 3) for _ in range(30)))",
        "0.weight: (4,8) float32 on n0, n1 vs (3,3) float32 on n2",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_s59_all_are_told_the_differences(peers: Any, within: Any, other: str) -> None:
    """That the two that agree go on belongs to view changes."""
    code, line = OTHERS[other]
    three = peers(SCRIPT.replace("{other}", code), 3)
    began = max(peer.read()["at"] for peer in three)
    for peer in three:
        assert peer.end() == 1
        assert "p2pdpt.errors.SchemaError" in peer.wrote()
    ended = time.monotonic()
    within(ended - began, 5)
    texts = {peer.said()[-1]["text"] for peer in three}
    assert len(texts) == 1
    lines = texts.pop().splitlines()
    assert f"  {line}" in lines
    assert len(lines) <= 12
    assert not any("entered" in each for peer in three for each in peer.said())
