"""S67: accumulated gradients equal those of the big batch."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import contextlib
import p2pdpt

torch.manual_seed(5)
model, alone = m1(), m1()
alone.load_state_dict(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with p2pdpt.session(model, optimizer) as s:
    for number in range(20):
        x, y = batch(number, 32)
        x, y = part(x, s.rank, s.size), part(y, s.rank, s.size)
        local = [torch.zeros_like(p) for p in model.parameters()]
        for micro in range(4):
            mx, my = x[4 * micro : 4 * micro + 4], y[4 * micro : 4 * micro + 4]
            loss = nn.functional.mse_loss(model(mx), my) / 4
            own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            local = [a + b for a, b in zip(local, own)]
            with s.accumulate() if micro < 3 else contextlib.nullcontext():
                loss.backward()
            if micro < 3:
                # The sum of this node's own.
                assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), local))
        optimizer.step()
        optimizer.zero_grad()
    say(digest=s.digest(), rounds=s.rounds, steps=s.step)
reference = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
for number in range(20):
    x, y = batch(number, 32)
    nn.functional.mse_loss(alone(x), y).backward()
    reference.step()
    reference.zero_grad()
assert furthest(model, alone) <= 1e-6, furthest(model, alone)
"""


def test_s67_one_exchange_a_step(peers: Any, together: Any) -> None:
    said = together(peers(SCRIPT, 2))
    assert len({each[-1]["digest"] for each in said}) == 1
    assert {(each[-1]["rounds"], each[-1]["steps"]) for each in said} == {(20, 20)}
