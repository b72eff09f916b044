from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from p2pdpt import registry
from p2pdpt.channel import Availability, Channel, Listener, PeerInfo, Transport
from p2pdpt.config import NodeConfig
from p2pdpt.errors import (
    ChannelClosedError,
    GroupError,
    NotEnoughNodesError,
    PeerFailedError,
    UnavailableError,
)
from p2pdpt.runtime.discovery.local import LocalDiscovery
from p2pdpt.runtime.joining import host_digest
from p2pdpt.runtime.node import Node

Start = Callable[..., Any]


class NoListener(Listener):
    endpoint = "nowhere"

    async def close(self) -> None:
        pass


class Broken(Transport):
    """Can be listened to but never connected."""

    name = "broken"

    def __init__(self, door: Any) -> None:
        pass

    @classmethod
    def availability(cls) -> Availability:
        return Availability(True, "")

    async def listen(self, accept: Callable[[Channel], None]) -> Listener:
        return NoListener()

    async def connect(self, peer: PeerInfo) -> Channel:
        raise ChannelClosedError("it is broken")


class Missing(Broken):
    name = "missing"

    @classmethod
    def availability(cls) -> Availability:
        return Availability(False, "no such device")


@pytest.fixture
def extra(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"broken": Broken, "missing": Missing}
    load = registry.load_transport
    monkeypatch.setattr(registry, "load_transport", lambda name: known.get(name) or load(name))


def test_host_digest_is_of_this_machine() -> None:
    assert host_digest() == host_digest()
    assert len(host_digest()) == 16


@pytest.mark.usefixtures("extra")
async def test_the_next_transport_is_used_where_one_fails(groups: Start) -> None:
    joined = await groups(2, transports=("broken", "tcp"))
    assert [group._channels[1 - group.rank].transport for group in joined] == ["tcp", "tcp"]


@pytest.mark.usefixtures("extra")
async def test_no_transport_in_common(run_name: str) -> None:
    nodes = [
        Node(NodeConfig(name=name, transports=(transport,)))
        for name, transport in (("a", "broken"), ("b", "tcp"))
    ]
    for node in nodes:
        await node.start()
    results = await asyncio.gather(
        *(node.join(run_name, min_nodes=2, wait=10) for node in nodes), return_exceptions=True
    )
    texts = [str(result) for result in results]
    assert all(isinstance(result, GroupError) for result in results), results
    assert any("no bulk connection with" in text and "it offers" in text for text in texts)
    await asyncio.gather(*(node.close() for node in nodes))


@pytest.mark.usefixtures("extra")
async def test_an_unavailable_transport_is_named(run_name: str) -> None:
    async with Node(NodeConfig(transports=("missing",))) as node:
        with pytest.raises(UnavailableError, match="'missing' cannot be used: no such device"):
            await node.join(run_name)


async def test_an_unavailable_discovery_is_told(
    run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LocalDiscovery, "availability", classmethod(lambda cls: Availability(False, "no table"))
    )
    async with Node(NodeConfig()) as node:
        with pytest.raises(NotEnoughNodesError, match="local: not available: no table"):
            await node.join(run_name, min_nodes=2, wait=0.1)


async def test_a_member_that_fails_while_linking_is_named(
    run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [Node(NodeConfig(name=f"n{index}")) for index in range(2)]
    for node in nodes:
        await node.start()

    def fails(spec: str) -> Any:
        calls.append(spec)
        if len(calls) > 2:
            raise GroupError("no plugin here")
        return make(spec)

    calls: list[str] = []
    make = registry.create_topology
    monkeypatch.setattr(registry, "create_topology", fails)
    results = await asyncio.gather(
        *(node.join(run_name, min_nodes=2, wait=10) for node in nodes), return_exceptions=True
    )
    assert all(isinstance(r, GroupError) for r in results)
    assert any("no plugin here" in str(r) for r in results)
    assert all(isinstance(r, PeerFailedError) or "no plugin" in str(r) for r in results)
    await asyncio.gather(*(node.close() for node in nodes))


async def test_joining_leaves_its_door_to_others(groups: Start) -> None:
    joined = await groups(2)
    door = joined[0]._mesh._door
    assert set(door.me.transports) == {"tcp"} and door.run == joined[0].run
    await joined[0].leave()
    assert "control" not in door._serving and "tcp" not in door._serving
