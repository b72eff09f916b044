"""S64: frozen parameters, and unfreezing them later."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import p2pdpt

def step(model, optimizer, x, y):
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()

def thaw(model, number):
    model[0].requires_grad_(number >= 10)

torch.manual_seed(5)
model, alone = m1(2000), m1(2000)
alone.load_state_dict(model.state_dict())
frozen = hash_of(*model[0].parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)
thaw(model, 0)
with p2pdpt.session(model, optimizer) as s:
    sent = []
    for number in range(20):
        if index() == 0 or not {one_sided}:
            thaw(model, number)
        x, y = batch(number)
        try:
            step(model, optimizer, part(x, s.rank, s.size), part(y, s.rank, s.size))
        except p2pdpt.SchemaError as error:
            say(refused=str(error), step=number)
            raise
        sent.append(s._live.group.counters.bytes_sent)
        assert (hash_of(*model[0].parameters()) == frozen) == (number < 10)
    say(digest=s.digest(), cold=sent[9] - sent[4], warm=sent[19] - sent[14])
reference = torch.optim.SGD(alone.parameters(), lr=0.0001)
for number in range(20):
    thaw(alone, number)
    step(alone, reference, *batch(number))
assert furthest(model, alone) <= 1e-6
"""


def test_s64_on_all_nodes(peers: Any, together: Any) -> None:
    said = together(peers(SCRIPT.replace("{one_sided}", "False"), 2))
    assert len({each[-1]["digest"] for each in said}) == 1
    for each in said:
        # 2001 elements without the first layer, 20001 with it.
        assert each[-1]["cold"] < 5 * 4 * 2001 * 1.5
        assert each[-1]["warm"] > 5 * 4 * 20001 * 0.9


def test_s64_on_one_node_only(peers: Any) -> None:
    two = peers(SCRIPT.replace("{one_sided}", "True"), 2)
    for peer in two:
        assert peer.end() == 1
        (said,) = peer.said()
        assert said["step"] == 10
        assert "parameter 0.bias is trainable on n0 and frozen on n1 at step 10" in said["refused"]
