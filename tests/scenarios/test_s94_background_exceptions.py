"""S94: exceptions in the background reach whoever waits."""

from __future__ import annotations

from pathlib import Path
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
            begun = time.monotonic()
            await group.exchange(memory, step=step, bucket=0)
            await group.seal(step)
    except P2PError as error:
        say(
            took=time.monotonic() - begun, step=step,
            kind=type(error).__name__, words=str(error), because=repr(error.__cause__),
        )
        raise
    finally:
        collecting.cancel()

main(body)
"""


def install(folder: Path, name: str, code: str, points: str) -> str:
    """Return a folder with a distribution of one module and its entry points."""
    site = folder / f"site-{name}"
    info = site / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(points)
    (site / f"{name.replace('-', '_')}.py").write_text(code)
    return str(site)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("static", [False, True])
def test_s94_a_plugin_that_raises(
    peers: Any, within: Any, environ: dict[str, str], tmp_path: Path, how: str, static: bool
) -> None:
    """Callbacks of users, and transports of third parties, belong to later issues."""
    code = PLUGIN.replace("{how}", HOW[how]).replace("{static}", str(static))
    site = install(tmp_path, "boom", code, "[p2pdpt.topologies]\nboom = boom:Boom\n")
    path = "import sys\nsys.path.insert(0, " + repr(site) + ")\n"
    two = peers(path + SCRIPT, 2, topology="boom")
    for peer in two:
        assert peer.end(30) == 1, (peer.said(), peer.wrote())
        last = peer.said()[-2]
        within(last["took"], 2)
        assert "boom" in last["words"]
        assert "RuntimeError('boom')" in last["words"]
        peer.check()
    mine = two[1].said()[-2]
    assert mine["kind"] == "TopologyError"
    assert mine["because"] == "RuntimeError('boom')"
