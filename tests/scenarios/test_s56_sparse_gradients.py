"""S56: sparse gradients."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import p2pdpt

def table():
    torch.manual_seed(3)
    return nn.Embedding(1000, 16, sparse=True)

ROWS = [[1, 2, 2], [2, 3, 3]]
model, alone = table(), table()
before = model.weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
with p2pdpt.session(model, optimizer) as s:
    for step in range(3):
        model(torch.tensor(ROWS[s.rank])).sum().backward()
        say(layout=str(model.weight.grad.layout))
        optimizer.step()
        optimizer.zero_grad()
    say(digest=s.digest())
reference = torch.optim.SGD(alone.parameters(), lr=0.5)
for step in range(3):
    # The mean over nodes.
    (sum(alone(torch.tensor(rows)).sum() for rows in ROWS) / 2).backward()
    reference.step()
    reference.zero_grad()
assert torch.equal(model.weight, alone.weight)
others = [row for row in range(1000) if row not in (1, 2, 3)]
assert torch.equal(model.weight[others], before[others])
"""


def test_s56_the_rows_used_are_trained_and_no_others(peers: Any, together: Any) -> None:
    """They travel as dense gradients; that only the rows used travel belongs to codecs."""
    said = together(peers(SCRIPT, 2))
    assert len({each[-1]["digest"] for each in said}) == 1
    assert {each[0]["layout"] for each in said} == {"torch.strided"}
