"""S75: replicas stay identical to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
import random
import p2pdpt

torch.manual_seed(index())
noise = torch.Generator().manual_seed(index())
model = m1(64)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

def held():
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return hash_of(*model.parameters(), *state)

with p2pdpt.session(model, optimizer) as s:
    for step in range(1, 61):
        if step % 10 == 0:
            time.sleep(random.random() / 50)
        x = torch.randn(7, 8, generator=noise)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 10, 30, 60):
            say(step=step, held=held())
    if {torn} and index() == 2:
        with torch.no_grad():
            weight = model[2].weight.view(-1)
            weight[5] = torch.nextafter(weight[5], torch.tensor(torch.inf))
"""


@pytest.mark.parametrize("topology", ["ring", "mapreduce"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_s75_at_every_step(peers: Any, together: Any, topology: str, transport: str) -> None:
    five = peers(SCRIPT.replace("{torn}", "False"), 5, topology=topology, transport=transport)
    said = together(five)
    for number, step in enumerate((1, 10, 30, 60)):
        assert {each[number]["step"] for each in said} == {step}
        assert len({each[number]["held"] for each in said}) == 1


def test_s75_one_bit_is_found(peers: Any) -> None:
    """It is found when the session ends; a comparison every some steps belongs to the session."""
    three = peers(SCRIPT.replace("{torn}", "True"), 3)
    for peer in three:
        assert peer.end() == 1
        last = peer.wrote().strip().splitlines()[-1]
        assert "after 60 steps on n0, n1, " in last
        assert "after 60 steps on n2; they differ in 2.weight." in last
