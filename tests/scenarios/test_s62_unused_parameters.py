"""S62: parameters that get no gradient."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import p2pdpt

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = m1()
        self.aux = nn.Linear(4, 2)

    def forward(self, x):
        return self.main(x)

def step(model, optimizer, x, y):
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()

torch.manual_seed(5)
model, alone = Model(), Model()
alone.load_state_dict(model.state_dict())
before = hash_of(*model.aux.parameters())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with p2pdpt.session(model, optimizer, strict_unused={strict}) as s:
    for number in range(20):
        x, y = batch(number)
        try:
            step(model, optimizer, part(x, s.rank, s.size), part(y, s.rank, s.size))
        except p2pdpt.SessionError as error:
            say(refused=str(error), step=number)
            raise
        assert all(p.grad is None for p in model.aux.parameters())
    say(digest=s.digest())
assert hash_of(*model.aux.parameters()) == before
reference = torch.optim.Adam(alone.parameters(), lr=0.01)
for number in range(20):
    step(alone, reference, *batch(number))
assert furthest(model, alone) <= 1e-6
"""


def test_s62_they_keep_their_values(peers: Any, together: Any) -> None:
    two = peers(SCRIPT.replace("{strict}", "False"), 2)
    said = together(two, wrote="no gradient on any node in step 0 for aux.weight, aux.bias")
    assert len({each[-1]["digest"] for each in said}) == 1
    assert sum(len(peer.wrote().splitlines()) for peer in two) == 1


def test_s62_strictly(peers: Any) -> None:
    """Whoever comes later to the same backward hears of it from the one who came first."""
    two = peers(SCRIPT.replace("{strict}", "True"), 2)
    words = "no gradient in step 0 for aux.weight, aux.bias"
    for peer in two:
        assert peer.end() == 1
        assert words in peer.wrote()
    said = [each for peer in two for each in peer.said()]
    assert said
    assert all(each["step"] == 0 and words in each["refused"] for each in said)
