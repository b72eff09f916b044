"""S94: exceptions in the background reach whoever waits."""

from __future__ import annotations

from typing import Any

import pytest

PLUGIN = """
from p2pdpt_plugins.ring import Ring

class Boom(Ring):
    static = {static}
    async def exchange(self, links, bucket):
        type(self).rounds = getattr(type(self), "rounds", 0) + 1
        {how}
        await super().exchange(links, bucket)
"""
HOW = {
    "raises": 'if type(self).rounds >= 4 and links.rank == 1: raise RuntimeError("boom")',
    "local": (
        'def kernel(*areas): raise RuntimeError("boom")\n'
        "        if type(self).rounds >= 4 and links.rank == 1:\n"
        "            await links.local(kernel, bucket.region, bucket.region)"
    ),
}
SCRIPT = """
import gc

async def collect():
    while True:
        gc.collect()
        await asyncio.sleep(0.01)

async def body(node, group):
    collecting = asyncio.ensure_future(collect())
    memory = fill(group, 100_000)
    try:
        for step in range(100):
            await group.exchange(memory, step=step, bucket=0)
            await group.seal(step)
    finally:
        collecting.cancel()

main(body)
"""


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("static", [False, True])
def test_s94_a_plugin_that_raises(
    peers: Any, within: Any, install: Any, how: str, static: bool
) -> None:
    """Callbacks of users, and transports of third parties, belong to later issues."""
    code = PLUGIN.replace("{how}", HOW[how]).replace("{static}", str(static))
    site = install("boom", code, "[p2pdpt.topologies]\nboom = boom:Boom\n")
    path = "import sys\nsys.path.insert(0, " + repr(site) + ")\n"
    two = peers(path + SCRIPT, 2, topology="boom")
    ends = []
    for peer in two:
        assert peer.end(30) == 1, (peer.said(), peer.wrote())
        ends.append(peer.said()[-1])
        assert "RuntimeError('boom')" in ends[-1]["text"]
        assert "boom" in ends[-1]["text"].replace("RuntimeError('boom')", "")
        peer.check()
    within(abs(ends[0]["at"] - ends[1]["at"]), 1)
    # Where operations are recorded, each node does it for all ranks.
    assert "TopologyError" in {each["error"] for each in (ends if static else ends[1:])}
    assert all(
        each["cause"] == "RuntimeError('boom')" for each in ends if each["error"] == "TopologyError"
    )
