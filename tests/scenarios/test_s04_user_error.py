"""S04: one node raises an exception in user code while the others wait."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import p2pdpt
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 9 * 20

    def __getitem__(self, index):
        # The part of node 1 in batch 7.
        if index == 9 * 7 + 4:
            say(raised=name())
            raise ValueError("bad sample 1234")
        return torch.ones(8), torch.ones(1)

model = m1()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with p2pdpt.session(model, optimizer) as s:
    for epoch in s.epochs(1):
        for x, y in s.split(DataLoader(Samples(), batch_size=9)):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def test_s04_the_others_learn_of_the_error_at_once(peers: Any, within: Any) -> None:
    """The policy to go on without it belongs to view changes."""
    three = peers(SCRIPT, 3)
    raised = three[1].read()
    assert raised["raised"] == "n1"
    assert three[1].end() == 1
    assert three[1].wrote().strip().splitlines()[-1] == "ValueError: bad sample 1234"
    for peer in (three[0], three[2]):
        assert peer.end(20) == 1
        last = peer.wrote().strip().splitlines()[-1]
        assert last.startswith("p2pdpt.errors.PeerFailedError: peer n1 (")
        assert last.endswith(" at step 7: ValueError: bad sample 1234")
