"""S65: one tensor in two places of a model."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import p2pdpt

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(500, 32)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 500, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.emb(x))))

def texts(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(500, (8, 12), generator=generator)

def step(model, optimizer, x):
    logits = model(x[:, :-1])
    nn.functional.cross_entropy(logits.reshape(-1, 500), x[:, 1:].reshape(-1)).backward()
    optimizer.step()
    optimizer.zero_grad()

torch.manual_seed(5)
model, alone = Language(), Language()
alone.load_state_dict(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
with p2pdpt.session(model, optimizer) as s:
    sent = []
    for number in range(20):
        step(model, optimizer, part(texts(number), s.rank, s.size))
        sent.append(s._live.group.counters.bytes_sent)
        assert model.head.weight is model.emb.weight
    say(digest=s.digest(), bytes=(sent[-1] - sent[9]) / 10)
reference = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9)
for number in range(20):
    step(alone, reference, texts(number))
assert furthest(model, alone) <= 1e-5, furthest(model, alone)
"""


def test_s65_it_is_exchanged_once(peers: Any, together: Any) -> None:
    """That it is still one after joining and resuming belongs there."""
    said = together(peers(SCRIPT, 2))
    assert len({each[-1]["digest"] for each in said}) == 1
    once = 4 * (500 * 32 + 32 * 32 + 32)
    for each in said:
        assert once * 0.9 < each[-1]["bytes"] < once * 1.2
