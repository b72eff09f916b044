from __future__ import annotations

import asyncio

from p2pdpt.channel import PeerInfo
from p2pdpt.config import NodeConfig
from p2pdpt.runtime.discovery import Sighting
from p2pdpt.runtime.discovery.static import StaticDiscovery

ME = PeerInfo("a" * 16, "me")


async def test_the_addresses_given_are_reported_as_lasting() -> None:
    source = StaticDiscovery(NodeConfig(join=("h:1", "[::1]:2")), ME, "r")
    assert source.availability().ok
    found: list[Sighting | str] = []
    await source.start()
    search = asyncio.create_task(source.search(found.append, lambda: found.append("swept")))
    await asyncio.sleep(0.01)
    assert found == [
        Sighting(("h:1",), lasting=True),
        Sighting(("[::1]:2",), lasting=True),
        "swept",
    ]
    assert source.describe() == "static: looked at h:1, [::1]:2"
    search.cancel()
    await asyncio.wait([search])
    await source.close()


def test_nothing_given() -> None:
    source = StaticDiscovery(NodeConfig(), ME, "r")
    assert source.describe() == "static: looked at nothing, no --join was given"
