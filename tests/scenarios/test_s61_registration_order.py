"""S61: the same model, its parts registered in another order."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import p2pdpt

model = nn.Module()
for part in ("ab" if index() == 0 else "ba"):
    model.add_module(part, nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with p2pdpt.session(model, optimizer) as s:
    say(entered=True)
"""


def test_s61_it_is_refused_by_name(peers: Any) -> None:
    two = peers(SCRIPT, 2)
    for peer in two:
        assert peer.end() == 1
        assert peer.said() == []
        assert "parameter order differs at index 0: a.weight vs b.weight" in peer.wrote()
