"""S49: ten thousand tiny parameters."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
import p2pdpt

STEPS = 3

class Tiny(nn.Module):
    def __init__(self, count, length):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(length)) for _ in range(count))

def train(count, length):
    model = Tiny(count, length)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with p2pdpt.session(model, optimizer) as s:
        group = s._live.group
        for step in range(STEPS):
            if step == 1:
                before = group.counters.messages_sent
            # The gradient of every element is 1 on node 0 and 3 on node 1.
            loss = sum(part.sum() for part in model.parts) * (1 + 2 * s.rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        messages = (group.counters.messages_sent - before) / (STEPS - 1)
    assert all((part == -2.0 * STEPS).all() for part in model.parts)
    return messages

say(messages=train(10_000, 16))
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_s49_they_travel_together(peers: Any, together: Any, transport: str) -> None:
    """How long a step takes is for benchmarks."""
    for said in together(peers(SCRIPT, 2, transport=transport)):
        assert said[-1]["messages"] <= 200
