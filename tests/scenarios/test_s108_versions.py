"""S108: peers of different versions."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
import p2pdpt.protocol.handshake
import p2pdpt.runtime.node
from p2pdpt import ADD

protocol = os.environ.get("PROTOCOL")
if protocol:
    p2pdpt.protocol.handshake.PROTOCOL = int(protocol)
versions = os.environ.get("VERSIONS")
if versions:
    p2pdpt.runtime.node._version = lambda distribution: versions

async def body(node, group):
    memory = fill(group, 100)
    await group.all_reduce(memory, ADD, name="sum")
    await group.leave()

main(body)
"""


@pytest.mark.parametrize("protocol", [2, 0, 41234])
def test_s108_another_protocol(
    peers: Any, together: Any, free_ports: Any, within: Any, protocol: int
) -> None:
    seed = f"127.0.0.1:{free_ports(1)[0]}"
    node = {"discovery": ["static"]}
    first = peers(SCRIPT, 1, listen=seed, min_nodes=2, node=node)
    other = peers(
        SCRIPT, 1, first=1, join=seed, min_nodes=2, node=node, variables={"PROTOCOL": str(protocol)}
    )
    assert other[0].end(20) == 1
    (said,) = other[0].said()
    assert said["error"] == "VersionError"
    assert "protocol 1 (p2pdpt " in said["text"]
    assert f"at {seed}, {protocol} (p2pdpt " in said["text"]
    assert "install the same version on both" in said["text"]
    # The other goes on, and said it too.
    assert first[0].poll() is None
    right = peers(SCRIPT, 1, first=2, join=seed, min_nodes=2, node=node)
    together([*first, *right], wrote=f"protocol {protocol} (p2pdpt ")
    assert len(first[0].wrote().splitlines()) == 1


def test_s108_other_packages_of_one_protocol(peers: Any, together: Any) -> None:
    three = [
        *peers(SCRIPT, 2, min_nodes=3),
        *peers(SCRIPT, 1, first=2, min_nodes=3, variables={"VERSIONS": "9.9.9"}),
    ]
    together(three, wrote="has other versions: p2pdpt ")
    for peer, lines in zip(three, (1, 1, 2), strict=True):
        # Once for each pair.
        assert len(peer.wrote().splitlines()) == lines
        assert "9.9.9 there" in peer.wrote() or "9.9.9 here" in peer.wrote()
