"""S68: nodes with uneven numbers and sizes of batches."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
import p2pdpt

SIZES = {sizes}
EPOCHS = 3

def data(node, epoch, number):
    return batch(100 * node + 10 * epoch + number, SIZES[node][number])

class Own:
    epoch = 0

    def __iter__(self):
        for number in range(len(SIZES[index()])):
            yield data(index(), self.epoch, number)

torch.manual_seed(5)
model, alone = m1(), m1()
alone.load_state_dict(model.state_dict())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
own = Own()
with p2pdpt.session(model, optimizer) as s:
    for own.epoch in s.epochs(EPOCHS):
        for x, y in s.local(own):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        say(epoch=own.epoch)
    say(digest=s.digest(), steps=s.step)
reference = torch.optim.SGD(alone.parameters(), lr=0.05)
for epoch in range(EPOCHS):
    for number in range(5):
        # Each sample counts alike, whoever has it.
        parts = [data(node, epoch, number) for node in (0, 1) if number < len(SIZES[node])]
        x, y = (torch.cat(each) for each in zip(*parts))
        nn.functional.mse_loss(alone(x), y).backward()
        reference.step()
        reference.zero_grad()
assert furthest(model, alone) <= 1e-6, furthest(model, alone)
"""
CASES = {"A": [[8] * 5, [8, 8, 8, 8, 3]], "B": [[8] * 5, [8] * 4]}


@pytest.mark.parametrize("case", CASES)
def test_s68_every_sample_counts_alike(peers: Any, together: Any, within: Any, case: str) -> None:
    said = together(peers(SCRIPT.replace("{sizes}", str(CASES[case])), 2))
    assert {each[-1]["steps"] for each in said} == {15}
    assert len({each[-1]["digest"] for each in said}) == 1
    for epoch in range(3):
        ends = [each[epoch]["at"] for each in said]
        within(max(ends) - min(ends), 2)
