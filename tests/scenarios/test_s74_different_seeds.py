"""S74: every node begins with other random numbers."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
import p2pdpt

torch.manual_seed(index())
model = nn.Sequential(m2(), nn.Linear(1000, 5000))
own = hash_of(*model.state_dict().values())
for repeat in range(4):
    with p2pdpt.session(model, run=None) as s:
        say(own=own, held=hash_of(*model.state_dict().values()), rank=s.rank, seed=s.seed)
        # Change it for the next time.
        torch.manual_seed(100 + 10 * repeat + index())
    for tensor in model.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape))
    own = hash_of(*model.state_dict().values())
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_s74_all_begin_with_the_first_nodes_values(
    peers: Any, together: Any, transport: str
) -> None:
    said = together(peers(SCRIPT, 3, transport=transport))
    for repeat in range(4):
        turn = [each[repeat] for each in said]
        assert len({each["own"] for each in turn}) == 3
        first = next(each["own"] for each in turn if each["rank"] == 0)
        assert {each["held"] for each in turn} == {first}
        assert len({each["seed"] for each in turn}) == 1
