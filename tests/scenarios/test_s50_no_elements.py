"""S50: tensors without elements."""

from __future__ import annotations

from typing import Any

import pytest

COLLECTIVES = """
from p2pdpt import ADD, MIN, COPY

async def body(node, group):
    empty = group.allocate(dtype_named("float32"), 0)
    for turn in range(3):
        await group.all_reduce(empty, ADD, name="sum")
        await group.all_reduce(empty, ADD, name="mean", mean=True)
        await group.broadcast(empty, root=turn, name="copy")
        assert await group.all_gather(b"", name="bytes") == [b"", b"", b""]
        await group.exchange(empty, step=turn, bucket=0)
        await group.seal(turn)
        assert empty.result.shape == empty.mine.shape == (0,)
        assert empty.result.dtype == np.float32
    memory = fill(group, 3)
    await group.all_reduce(memory, ADD, name="sum")
    assert (memory.result == pattern_sum(3, 3)).all()
    # Who is in it, is in it: the call is a place where all meet.
    if group.rank == 0:
        await asyncio.sleep(0.5)
        say(came=True)
    await group.exchange(empty, step=3, bucket=0)
    await group.seal(3)
    say(went=True)
    await group.leave()

main(body)
"""
MODEL = """
import p2pdpt

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 4)
        self.none = nn.Parameter(torch.zeros(0))
        self.wide = nn.Parameter(torch.zeros(1, 0, 2))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("nothing", torch.zeros(0, 3))

    def forward(self, x):
        return self.first(x).sum(1, keepdim=True) * self.scalar + self.none.sum() + self.wide.sum()

def step(model, optimizer, x, y):
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()

torch.manual_seed(1)
model = Odd()
alone = Odd()
alone.load_state_dict(model.state_dict())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with p2pdpt.session(model, optimizer) as s:
    for number in range(5):
        x, y = batch(number)
        step(model, optimizer, part(x, s.rank, s.size), part(y, s.rank, s.size))
    say(digest=s.digest())
reference = torch.optim.Adam(alone.parameters(), lr=0.01)
for number in range(5):
    step(alone, reference, *batch(number))
assert furthest(model, alone) <= 1e-6
assert model.wide.shape == (1, 0, 2) and model.wide.dtype == torch.float32
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("topology", ["ring", "mapreduce"])
def test_s50_collectives(peers: Any, together: Any, topology: str, transport: str) -> None:
    said = together(peers(COLLECTIVES, 3, topology=topology, transport=transport))
    came = next(one["at"] for each in said for one in each if "came" in one)
    assert all(one["at"] >= came for each in said for one in each if "went" in one)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_s50_in_a_model(peers: Any, together: Any, transport: str) -> None:
    """That a joiner gets an optimizer's empty tensors belongs to joining."""
    said = together(peers(MODEL, 3, transport=transport))
    assert len({each[-1]["digest"] for each in said}) == 1
