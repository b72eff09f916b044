"""S01: a peer is killed in the middle of a round."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

SCRIPT = """
async def body(node, group):
    length = 4_000_000
    memory = fill(group, length)
    mean = pattern_sum(group.size, length) / group.size
    for step in range(10_000):
        await group.exchange(memory, step=step, bucket=0)
        await group.seal(step)
        assert (memory.result == mean).all(), step
        say(step=step)

main(body)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_s01_every_survivor_names_the_dead(peers: Any, within: Any, transport: str) -> None:
    """That survivors go on with three members belongs to view changes."""
    four = peers(SCRIPT, 4, transport=transport)
    joined = [peer.read() for peer in four]
    assert {each["transport"] for each in joined} == {transport}
    while four[0].read()["step"] < 3:
        pass
    # Somewhere in a round.
    time.sleep(random.Random(transport).random() / 10)
    killed = four[3].kill()
    for peer in four[:3]:
        assert peer.end(20) == 1
        last = peer.said()[-1]
        assert last["error"] == "PeerFailedError"
        within(last["at"] - killed, 2)
        text = last["text"]
        step = peer.said()[-2]["step"]
        assert f"n3 ({joined[3]['id'][:6]})" in text
        assert joined[3]["address"] in text
        assert "exchange of bucket 0 (ring)" in text or "seal (ring)" in text
        assert f"at step {step + 1}:" in text or f"at step {step}:" in text
        assert "connection" in text
        assert peer.wrote() == ""
