"""S96: inside a running loop, as in a notebook."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import p2pdpt
from p2pdpt import ADD

async def cell():
    config, run = configuration()
    # The asyncio way.
    node = await Node(config).start()
    group = await node.join(dataclasses.replace(run, run=run.run + "-async"))
    memory = fill(group, 1000)
    await group.all_reduce(memory, ADD, name="sum")
    assert (memory.result == pattern_sum(2, 1000)).all()
    await node.close()
    # And the plain one, whose loop is a thread of its own.
    model = m1()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with p2pdpt.session(model, optimizer) as s:
        x, y = batch(0)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        say(mean=s.mean(loss=1.0 + s.rank)["loss"], digest=s.digest())

asyncio.run(cell())
"""


def test_s96_both_ways_work(peers: Any, together: Any) -> None:
    said = together(peers(SCRIPT, 2))
    assert {each[-1]["mean"] for each in said} == {1.5}
    assert len({each[-1]["digest"] for each in said}) == 1
