"""Groups that share memory: who does, what they compute, and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from p2pdpt.config import NodeConfig
from p2pdpt.dtypes import DTYPES
from p2pdpt.errors import FrameError, PeerFailedError, TopologyError, UnavailableError
from p2pdpt.memory import allocate
from p2pdpt.protocol.view import Member, View
from p2pdpt.runtime.drivers.native_driver import unavailable
from p2pdpt.runtime.group import MeshGroup
from p2pdpt.runtime.node import Node
from p2pdpt.runtime.shared_memory import SharedMemory
from p2pdpt.topology import ADD, MAX, Bucket, Links
from p2pdpt_plugins.ring import Ring

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

Start = Callable[..., Any]
Programs = Callable[..., list[Any]]
F32 = DTYPES["float32"]


def shared_files() -> set[str]:
    """Return what lies in /dev/shm, but for what multiprocessing and torch put there."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "torch_"))}


async def together(groups: list[MeshGroup], work: Callable[[MeshGroup], Any]) -> list[Any]:
    return await asyncio.gather(*map(work, groups))


# Who shares.


async def test_members_on_one_host_share(groups: Start) -> None:
    joined = await groups(3)
    assert [(group.transport, group.unshared) for group in joined] == [("shm", "")] * 3

    async def work(group: MeshGroup) -> float:
        memory = group.allocate(F32, 1000)
        for step in range(3):
            memory.mine[:] = group.rank + step
            await group.exchange(memory, step=step, bucket=0)
            await group.seal(step)
        return float(memory.result[7])

    before = [group.counters for group in joined]
    assert await together(joined, work) == [3.0] * 3
    for group, counters in zip(joined, before, strict=True):
        # Everybody folds its third of two others, and reads the two other thirds.
        read = group.counters.bytes_received - counters.bytes_received
        assert 3 * 4 * 4 * 333 <= read < 3 * 4 * 4 * 334 + 2000
        assert group._sharing.bytes_sent > 0
        # Nothing of it went through the channels.
        for channel in group._channels:
            assert channel is None or channel.counters.frames_sent == 0


@pytest.mark.parametrize(
    ("transports", "said"),
    [(("tcp",), "n0: it was told to use tcp"), (("shm", "tcp"), ""), (("shm",), "")],
)
async def test_people_choose(groups: Start, transports: tuple[str, ...], said: str) -> None:
    joined = await groups(2, transports=transports)
    assert {group.unshared for group in joined} == {said}
    assert {group.transport for group in joined} == {"tcp" if said else "shm"}
    memories = [group.allocate(F32, 10) for group in joined]
    for group, memory in zip(joined, memories, strict=True):
        memory.mine[:] = group.rank
    await asyncio.gather(
        *(g.exchange(m, step=0, bucket=0) for g, m in zip(joined, memories, strict=True))
    )
    assert all((memory.result == 0.5).all() for memory in memories)


async def join_each(run_name: str, *transports: tuple[str, ...]) -> list[Any]:
    """Let nodes with different transports join one run; return groups or errors."""
    nodes = [
        Node(NodeConfig(name=f"n{index}", transports=each)) for index, each in enumerate(transports)
    ]
    try:
        for node in nodes:
            await node.start()
        return await asyncio.gather(
            *(node.join(run_name, min_nodes=len(nodes), wait=30) for node in nodes),
            return_exceptions=True,
        )
    finally:
        for node in nodes:
            await node.close()


async def test_one_that_must_not_keeps_all_from_it(run_name: str) -> None:
    ends = await join_each(run_name, ("shm", "tcp"), ("tcp",))
    assert {end.unshared for end in ends} == {"n1: it was told to use tcp"}


async def test_one_that_must_share_where_others_cannot(run_name: str) -> None:
    ends = await join_each(run_name, ("shm",), ("tcp",), ("shm", "tcp"))
    assert [type(end) for end in ends] == [UnavailableError] * 3
    assert str(ends[0]) == (
        "transport shm cannot be used, and n0 was told to use no other: n1: it was told to use tcp"
    )


async def test_switched_off(groups: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PDPT_NATIVE", "off")
    joined = await groups(2)
    assert {group.transport for group in joined} == {"tcp"}
    assert {group.unshared for group in joined} == {
        "n0: the compiled module is switched off (P2PDPT_NATIVE=off)"
    }
    with pytest.raises(UnavailableError, match=r"transport shm cannot be used.*switched off"):
        raise (await join_each(f"{joined[0].run}-2", ("shm",), ("shm",)))[0]


async def test_a_lone_member_shares_with_nobody(groups: Start) -> None:
    (group,) = await groups(1, transports=("shm",))
    assert group.transport == ""
    await group.exchange(group.allocate(F32, 3), step=0, bucket=0)


class Dynamic(Ring):
    static: ClassVar[bool] = False


class Raises(Ring):
    async def exchange(self, links: Links, bucket: Bucket) -> None:
        raise KeyError(links.rank)


@pytest.mark.parametrize(
    ("topology", "said"),
    [(Dynamic(), "it is not static"), (Raises(), "raised KeyError(0)")],
)
async def test_topologies_that_cannot_be_replayed_go_the_other_way(
    groups: Start, monkeypatch: pytest.MonkeyPatch, topology: Ring, said: str
) -> None:
    monkeypatch.setattr("p2pdpt.registry.create_topology", lambda spec: topology)
    joined = await groups(2)
    assert {group.transport for group in joined} == {"tcp"}
    assert all(said in group.unshared for group in joined)
    memories = [group.allocate(F32, 10) for group in joined]
    ends = await asyncio.gather(
        *(g.exchange(m, step=0, bucket=0) for g, m in zip(joined, memories, strict=True)),
        return_exceptions=True,
    )
    wrong = isinstance(topology, Raises)
    assert [isinstance(end, TopologyError) for end in ends] == [wrong, wrong]


async def test_a_pair_that_cannot_is_named(groups: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(self: Any, standings: Any) -> dict[int, str]:
        return {2: "no answer"} if self._rank == 1 else {}

    monkeypatch.setattr("p2pdpt.runtime.host_door.HostDoor.connect", connect)
    joined = await groups(3)
    assert {group.unshared for group in joined} == {"n1 and n2: no answer"}


async def test_a_member_that_fails_to_join_is_named(
    run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(self: Any, standings: Any) -> dict[int, str]:
        if self._rank == 1:
            raise ValueError("broken")
        return {}

    monkeypatch.setattr("p2pdpt.runtime.host_door.HostDoor.connect", connect)
    one, two = await join_each(run_name, ("shm", "tcp"), ("shm", "tcp"))
    assert isinstance(two, ValueError)
    assert isinstance(one, PeerFailedError)
    assert one.reason == "it could not join the run: broken"
    assert one.operation == "joining the run"


async def test_lies_are_refused() -> None:
    view = View(1, tuple(Member(f"{rank:016x}", f"n{rank}", "") for rank in range(2)))

    for said in (b"\xc1", msgspec.msgpack.encode(["x"])):

        async def gather(payload: bytes, name: str, said: bytes = said) -> list[bytes]:
            return [payload, said]

        async def plainly(work: Coroutine[Any, Any, None]) -> None:
            await work

        sharing = SharedMemory(view, 0, lambda rank, error: None)
        with pytest.raises(FrameError, match="a member says what cannot be read"):
            await sharing.open(gather, plainly, Ring(), ("shm", "tcp"))
        assert not sharing.active
        sharing.close()


# What is computed.


async def test_collectives_share_what_the_group_has_allocated(groups: Start) -> None:
    joined = await groups(2)

    async def work(group: MeshGroup) -> list[float]:
        found = []
        total, most = group.allocate(F32, 7), group.allocate(DTYPES["int64"], 7)
        for count in range(3):
            total.mine[:], most.mine[:] = group.rank + count, group.rank - count
            await asyncio.gather(
                group.all_reduce(total, ADD, name="total"),
                group.all_reduce(most, MAX, name="most"),
            )
            found += [float(total.result[0]), float(most.result[6])]
        lent = group._sharing.bytes_sent
        assert lent > 0
        foreign = allocate(F32, 7)
        foreign.mine[:] = group.rank
        for _ in range(2):
            await group.all_reduce(foreign, ADD, name="foreign", mean=True)
            found.append(float(foreign.result[3]))
        assert group._sharing.bytes_sent == lent
        return found

    assert await together(joined, work) == [[1.0, 1.0, 3.0, 0.0, 5.0, -1.0, 0.5, 0.5]] * 2


async def test_buckets_in_place_go_the_other_way(groups: Start) -> None:
    joined = await groups(2)

    async def work(group: MeshGroup) -> bytes:
        # One member is enough to decide for all.
        memory = allocate(F32, 9, in_place=group.rank == 1)
        for step in range(2):
            memory.mine[:] = group.rank
            await group.exchange(memory, step=step, bucket=0)
            await group.seal(step)
        return bytes(memory.result.tobytes())

    assert await together(joined, work) == [np.full(9, 0.5, np.float32).tobytes()] * 2
    assert all(group._sharing.bytes_sent == 0 for group in joined)


async def test_different_lengths_are_an_error_on_all(groups: Start) -> None:
    joined = await groups(2)

    async def work(group: MeshGroup) -> str:
        with pytest.raises(TopologyError) as caught:
            await group.exchange(group.allocate(F32, 10 + group.rank), step=0, bucket=3)
        return str(caught.value)

    assert await together(joined, work) == [
        "bucket 3, step 0, attempt 0 has 10 float32 here and 11 float32 on rank 1",
        "bucket 3, step 0, attempt 0 has 11 float32 here and 10 float32 on rank 0",
    ]


async def test_new_memory_for_every_step(groups: Start) -> None:
    joined = await groups(2)

    async def work(group: MeshGroup) -> list[float]:
        found = []
        for step in range(5):
            # Longer every time, and on one member only every other time another object.
            memory = group.allocate(F32, 10 + step // 2)
            memory.mine[:] = group.rank + step
            await group.exchange(memory, step=step, bucket=0)
            await group.seal(step)
            found.append(float(memory.result[-1]))
        return found

    assert await together(joined, work) == [[0.5, 1.5, 2.5, 3.5, 4.5]] * 2


# How it ends.


async def test_a_member_that_leaves_ends_the_rounds(groups: Start) -> None:
    joined = await groups(3)

    async def work(group: MeshGroup) -> str:
        memory = group.allocate(F32, 10)
        await group.exchange(memory, step=0, bucket=0)
        await group.seal(0)
        if group.rank == 2:
            await group.leave()
            return ""
        with pytest.raises(PeerFailedError) as caught:
            await group.exchange(memory, step=1, bucket=0)
        return f"{caught.value.peer[:2]} {caught.value.reason} {caught.value.step}"

    assert await together(joined, work) == ["n2 its script ended after step 0 1"] * 2 + [""]


async def test_a_lost_socket_is_a_lost_member(groups: Start) -> None:
    joined = await groups(2)
    memory = joined[0].allocate(F32, 10)
    waiting = asyncio.create_task(joined[0].exchange(memory, step=0, bucket=0))
    await asyncio.sleep(0.05)
    joined[1]._sharing._door._links[0].close()
    with pytest.raises(PeerFailedError, match="the connection was closed"):
        await waiting


TRAIN = """
    import numpy as np
    memories = [group.allocate(DTYPES["float32"], 500_000 + bucket) for bucket in range(3)]
    for memory in memories:
        memory.mine[:] = group.rank
    say(transport=group.transport)
    step = 0
    try:
        while True:
            await asyncio.gather(
                *(group.exchange(m, step=step, bucket=b) for b, m in enumerate(memories))
            )
            await group.seal(step)
            step += 1
            if step == 5:
                say(step=step)
    except P2PError as error:
        def state():
            return [float(np.float64(a).sum()) for m in memories for a in (m.mine, m.result)]
        say(failed=type(error).__name__, peer=error.peer, operation=error.operation,
            step=error.step, reason=error.reason, at=time.monotonic(), state=state())
        await asyncio.sleep(1.5)
        say(state=state())
        raise
"""


@pytest.mark.parametrize("uvloop", [False, True])
def test_kill_9(programs: Programs, uvloop: bool) -> None:
    before = shared_files()
    nodes = programs(TRAIN, 3, uvloop=uvloop)
    for node in nodes:
        node.read()
        assert node.read() == {"transport": "shm"}
    for node in nodes:
        assert node.read() == {"step": 5}
    nodes[1].kill()
    killed = time.monotonic()
    for node in (nodes[0], nodes[2]):
        said = node.read()
        assert said["failed"] == "PeerFailedError" and said["peer"].startswith("n1 (")
        assert said["operation"].startswith(("exchange of bucket", "seal")) and said["step"] >= 4
        # The closed connection tells at once; patience would be 10 seconds.
        assert said["at"] - killed < 5
        assert node.read()["state"] == said["state"]
    for node in (nodes[0], nodes[2]):
        assert node.read()["error"] == "PeerFailedError"
        assert node.end()[0] == 1
    nodes[1].end()
    assert shared_files() == before


def test_a_stopped_member_that_wakes_later(programs: Programs) -> None:
    nodes = programs(TRAIN, 3, patience=1.0)
    for node in nodes:
        node.read()
        assert node.read() == {"transport": "shm"}
    for node in nodes:
        assert node.read() == {"step": 5}
    nodes[1].process.send_signal(signal.SIGSTOP)
    heard = [node.read() for node in (nodes[0], nodes[2])]
    for said in heard:
        assert said["failed"] == "PeerFailedError" and said["peer"].startswith("n1 (")
    # It goes on where it was: it finds itself cut off, and has written into nobody's memory.
    nodes[1].process.send_signal(signal.SIGCONT)
    woken = nodes[1].read()
    assert woken["failed"] in ("PeerFailedError", "PeerLeftError")
    for node, said in zip((nodes[0], nodes[2]), heard, strict=True):
        assert node.read()["state"] == said["state"]
    for node in nodes:
        node.end()


def test_a_member_killed_while_it_shares(programs: Programs) -> None:
    """The others have announced their memory, and wait for what never comes."""
    body = """
    memory = group.allocate(DTYPES["float32"], 1000)
    if group.rank == 1:
        say(ready=True)
        await asyncio.sleep(100)
    await group.exchange(memory, step=0, bucket=0)
    """
    nodes = programs(body, 3)
    for node in nodes:
        node.read()
    assert nodes[1].read() == {"ready": True}
    time.sleep(0.3)
    nodes[1].kill()
    for node in (nodes[0], nodes[2]):
        said = node.read()
        assert said["error"] == "PeerFailedError"
        assert "during exchange of bucket 0 (ring) at step 0" in said["text"]
        assert node.end()[0] == 1
    nodes[1].end()
