from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from p2pdpt.errors import FrameError
from p2pdpt.protocol.handshake import Identity
from p2pdpt.protocol.messages import Adopt, Control, Vote
from p2pdpt.runtime.background import Background
from p2pdpt.runtime.discovery import Sighting
from p2pdpt.runtime.door import NodeDoor
from p2pdpt.runtime.mesh import Mesh


class Peer:
    """A node's door and mesh, and what the mesh told."""

    def __init__(self, number: int, patience: float, **versions: str) -> None:
        self.node_id = f"{number:016x}"
        self.up: list[str] = []
        self.down: list[tuple[str, str]] = []
        self.heard: list[tuple[str, Control]] = []
        self.changes = 0
        self.failed: list[str] = []
        identity = msgspec.structs.replace(
            Identity(cluster="c", run="r", node_id=self.node_id, name=f"n{number}"), **versions
        )
        self.background = Background(self.broke)
        self.door = NodeDoor(identity, None, self.background, self.broke)
        self.mesh = Mesh(
            self.door,
            identity,
            self.background,
            patience,
            on_up=self.up.append,
            on_down=lambda peer, reason: self.down.append((peer, reason)),
            on_message=self.hear,
            on_change=self.change,
        )

    def broke(self, what: str, error: Exception) -> None:
        self.failed.append(f"{what}: {error!r}")

    def hear(self, peer: str, message: Control) -> None:
        self.heard.append((peer, message))
        if message == Vote(99):
            raise FrameError("bad message: 99")

    def change(self) -> None:
        self.changes += 1

    async def start(self) -> Peer:
        await self.door.start("127.0.0.1:0")
        self.door.run = "r"
        self.mesh.open()
        return self

    def sight(self, other: Peer, *, known: bool = True, lasting: bool = False) -> None:
        node_id = other.node_id if known else ""
        self.mesh.sight(Sighting((other.door.address,), node_id, lasting))

    async def close(self) -> None:
        await self.mesh.close()
        self.door.shut()
        await self.background.close()


Make = Callable[..., Awaitable[Peer]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    peers: list[Peer] = []

    async def build(number: int, patience: float = 10.0, **versions: str) -> Peer:
        peers.append(Peer(number, patience, **versions))
        return await peers[-1].start()

    yield build
    for peer in peers:
        await peer.close()
    assert [peer.failed for peer in peers] == [[]] * len(peers)


async def wait_for(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happens")


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("sighters", [(0,), (1,), (0, 1)])
async def test_one_connection_for_each_pair(
    make: Make, sighters: tuple[int, ...], known: bool
) -> None:
    pair = [await make(1), await make(2)]
    for index in sighters:
        pair[index].sight(pair[1 - index], known=known)
        assert not pair[index].mesh.settled
    await wait_for(lambda: all(each.mesh.links and each.mesh.settled for each in pair))
    await asyncio.sleep(0.1)
    for here, there in (pair, pair[::-1]):
        assert here.up == [there.node_id] and here.down == []
        assert list(here.mesh.links) == [there.node_id]
        here.mesh.send(there.node_id, Vote(1))
    await wait_for(lambda: all(each.heard for each in pair))
    assert pair[0].heard == [(pair[1].node_id, Vote(1))]
    assert all(number > 0 for number in pair[0].mesh.counters())


async def test_knowing_one_is_enough(make: Make) -> None:
    peers = [await make(number) for number in range(1, 5)]
    for peer in peers[1:]:
        peer.sight(peers[0], known=False, lasting=True)
    await wait_for(lambda: all(len(peer.mesh.links) == 3 for peer in peers))
    assert all(peer.mesh.settled for peer in peers)


async def test_a_node_does_not_connect_to_itself(make: Make) -> None:
    one = await make(1)
    one.sight(one)
    one.mesh.sight(Sighting((one.door.address,)))
    assert one.mesh.settled
    port = one.door.address.rpartition(":")[2]
    one.mesh.sight(Sighting((f"localhost:{port}",), lasting=True))
    await wait_for(lambda: one.mesh.settled)
    assert one.mesh.links == {}
    assert one.mesh.errors() == [f"localhost:{port} is this node itself"]


async def test_settled_once_everything_was_tried(make: Make) -> None:
    one = await make(1)
    swept = one.mesh.expect_sweep()
    assert not one.mesh.settled
    swept()
    swept()
    assert one.mesh.settled
    one.mesh.sight(Sighting(("127.0.0.1:1",), "f" * 16))
    assert not one.mesh.settled
    await wait_for(lambda: one.mesh.settled)
    assert one.mesh.errors() == ["127.0.0.1:1: Connection refused"]


async def test_a_lasting_target_is_tried_for_ever(make: Make) -> None:
    one, two = await make(1), await make(2)
    address = two.door.address
    two.door.close("control")
    one.mesh.sight(Sighting((address,), lasting=True))
    await wait_for(lambda: "takes no 'control' streams" in str(one.mesh.errors()))
    await asyncio.sleep(0.3)
    two.mesh.open()
    await wait_for(lambda: one.mesh.links)
    assert one.mesh.errors() == []


async def test_a_lost_connection_is_told_and_made_again(make: Make) -> None:
    one, two = await make(1), await make(2)
    one.sight(two)
    await wait_for(lambda: one.up and two.up)
    one.mesh.drop(two.node_id, "for the test")
    await wait_for(lambda: len(one.up) == 2 and len(two.up) == 2)
    assert one.down == [(two.node_id, "for the test")]
    assert two.down[0][0] == one.node_id


async def test_silence_is_death(make: Make) -> None:
    one, two = await make(1, 0.3), await make(2, 0.3)
    one.sight(two)
    await wait_for(lambda: one.up and two.up)
    await asyncio.sleep(0.6)
    assert one.down == [] and two.down == []
    # The other's loop goes on, but it says nothing any more.
    two.mesh._timer.cancel()
    await wait_for(lambda: one.down)
    assert one.down == [(two.node_id, "no heartbeat for 0.3 s")]
    assert one.mesh.stalled >= 0


async def test_once_the_view_is_formed_only_members_are_kept(make: Make) -> None:
    one, two, three = await make(1), await make(2), await make(3)
    one.sight(two)
    one.sight(three)
    await wait_for(lambda: len(one.up) == 2)
    one.mesh.keep([two.node_id])
    await wait_for(lambda: one.down)
    assert one.down[0][0] == three.node_id
    assert list(one.mesh.links) == [two.node_id]
    # A newcomer is heard of, told something by whoever listens, and let go.
    four = await make(4)
    one.mesh._on_up = lambda peer: one.mesh.send(peer, Vote(5))
    four.sight(one)
    await wait_for(lambda: (one.node_id, Vote(5)) in four.heard)
    await wait_for(lambda: four.down)
    await wait_for(lambda: list(one.mesh.links) == [two.node_id])


async def test_rule_breakers_are_cut_off(make: Make) -> None:
    one, two = await make(1), await make(2)
    one.sight(two)
    await wait_for(lambda: one.up and two.up)
    two.mesh.send(one.node_id, Vote(99))
    await wait_for(lambda: one.down)
    assert one.down == [(two.node_id, "bad message: 99")]
    await wait_for(lambda: len(one.up) == 2 and len(two.up) == 2)
    two.mesh.send(one.node_id, Adopt())
    await wait_for(lambda: len(one.down) == 2)
    assert one.down[1][1] == "bad message: Adopt is not this node's to say"


async def test_other_versions_are_told_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    one = await make(1, package="1.0", torch="2.13.0", python="3.11.2")
    two = await make(2, package="1.1", torch="", python="3.11.9")
    one.sight(two)
    await wait_for(lambda: one.up and two.up)
    one.mesh.drop(two.node_id, "again")
    await wait_for(lambda: len(one.up) == 2 and len(two.up) == 2)
    said = "node n2 has other versions: p2pdpt 1.1 there, 1.0 here; torch none there, 2.13.0 here"
    assert caplog.text.count(said) == 1
    assert len(caplog.records) == 2


async def test_closing_sends_what_is_left(make: Make) -> None:
    one, two = await make(1), await make(2)
    one.sight(two)
    await wait_for(lambda: one.up and two.up)
    one.mesh.send(two.node_id, Vote(3))
    await one.mesh.close(1.0)
    await wait_for(lambda: two.heard)
    assert two.heard == [(one.node_id, Vote(3))]
    assert two.down == [(one.node_id, "the connection was closed")]
