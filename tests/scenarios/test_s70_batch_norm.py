"""S70: BatchNorm's running statistics."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import p2pdpt

torch.manual_seed(index())
model = m2()
first = hash_of(*model.state_dict().values())
with torch.no_grad():
    model[1].running_mean.add_(index())
    model[1].num_batches_tracked.add_(index())
    start = hash_of(*model.buffers())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with p2pdpt.session(model, optimizer, average_buffers={average}) as s:
    say(start=hash_of(*model.buffers()), own=start, rank=s.rank)
    for step in range(5):
        x = torch.randn(16, 64) + index()
        nn.functional.cross_entropy(model(x), torch.arange(16) % 10).backward()
        # Whatever is read after backward, it is the same everywhere.
        say(step=step, buffers=hash_of(*model.buffers()), count=int(model[1].num_batches_tracked))
        optimizer.step()
        optimizer.zero_grad()
    assert model[1].num_batches_tracked.dtype == torch.int64
    {end}
"""


def test_s70_equal_after_each_step(peers: Any, together: Any) -> None:
    """That any node's checkpoint has them belongs to checkpoints."""
    script = SCRIPT.replace("{average}", "True").replace("{end}", "pass")
    said = together(peers(script, 3))
    source = next(each[0]["own"] for each in said if each[0]["rank"] == 0)
    assert len({each[0]["own"] for each in said}) == 3
    assert {each[0]["start"] for each in said} == {source}
    for step in range(5):
        assert len({each[1 + step]["buffers"] for each in said}) == 1
        assert {each[1 + step]["count"] for each in said} == {step + 1}


def test_s70_not_averaged_but_equal_at_first(peers: Any) -> None:
    """Each node's own statistics then; the end of the session says that they differ."""
    script = SCRIPT.replace("{average}", "False").replace("{end}", "pass")
    three = peers(script, 3)
    for peer in three:
        assert peer.end() == 1
        assert "differ in 1.running_mean, 1.running_var" in peer.wrote()
    said = [peer.said() for peer in three]
    source = next(each[0]["own"] for each in said if each[0]["rank"] == 0)
    assert {each[0]["start"] for each in said} == {source}
    assert len({each[1]["buffers"] for each in said}) == 3
