"""S138: the same numbers from every topology and transport."""

from __future__ import annotations

from typing import Any

import pytest

from p2pdpt.runtime.drivers.native_driver import unavailable

TRANSPORTS = ("tcp",) if unavailable() else ("shm", "tcp")
WAYS = [
    (topology, transport)
    for topology in ("ring", "mapreduce", "mapreduce:reducer=0")
    for transport in TRANSPORTS
]

COLLECTIVES = """
from p2pdpt import ADD

LENGTHS = (1, 3, 1000, 300_001)

async def one(number, topology, transport):
    config, run = configuration()
    config = dataclasses.replace(config, transports=(transport,))
    run = dataclasses.replace(run, run=f"{run.run}-{number}", topology=topology)
    async with Node(config) as node:
        group = await node.join(run)
        assert (group.transport, group.topology) == (transport, topology)
        for length in LENGTHS:
            memory = fill(group, length)
            total = pattern_sum(group.size, length)
            await group.all_reduce(memory, ADD, name="sum")
            assert (memory.result == total).all()
            await group.all_reduce(memory, ADD, name="mean", mean=True)
            exact = total.astype("float64") / group.size
            if group.size in (1, 2, 4):
                assert (memory.result == exact).all()
            assert (abs(memory.result - exact) <= 1e-6 * exact).all()
        say(mean=hash_of(torch.from_numpy(memory.result)))
        await group.leave()

async def every():
    for number, (topology, transport) in enumerate({ways}):
        await one(number, topology, transport)

asyncio.run(every())
"""


@pytest.mark.parametrize("size", [3, 4, 5])
def test_s138_collectives(peers: Any, together: Any, size: int) -> None:
    """Parameter servers belong to the issue that brings them."""
    said = together(peers(COLLECTIVES.replace("{ways}", repr(WAYS)), size))
    for number in range(len(WAYS)):
        assert len({each[number]["mean"] for each in said}) == 1


TRAINING = """
import p2pdpt

def step(model, optimizer, x, y):
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()

def fresh():
    torch.manual_seed(5)
    model = m1()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

alone, reference = fresh()
for number in range(20):
    step(alone, reference, *batch(number))
run = os.environ["P2PDPT_RUN"]
for number, (topology, transport) in enumerate({ways}):
    os.environ.update(
        P2PDPT_RUN=f"{run}-{number}", P2PDPT_TOPOLOGY=topology, P2PDPT_TRANSPORT=transport
    )
    model, optimizer = fresh()
    with p2pdpt.session(model, optimizer) as s:
        for number in range(20):
            x, y = batch(number)
            step(model, optimizer, part(x, s.rank, s.size), part(y, s.rank, s.size))
        say(digest=s.digest())
    assert furthest(model, alone) <= 1e-5
"""


@pytest.mark.parametrize("size", [3, 4])
def test_s138_training(peers: Any, together: Any, size: int) -> None:
    said = together(peers(TRAINING.replace("{ways}", repr(WAYS)), size))
    for number in range(len(WAYS)):
        assert len({each[number]["digest"] for each in said}) == 1
