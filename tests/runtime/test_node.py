from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from p2pdpt.config import NodeConfig, RunConfig
from p2pdpt.errors import (
    AuthenticationError,
    ConfigError,
    GroupError,
    HandshakeError,
    NotEnoughNodesError,
    PluginError,
    RunStartedError,
    SessionError,
    WrongRunError,
)
from p2pdpt.runtime.node import Node

Start = Callable[..., Any]


async def test_alone_at_once_without_a_listener(run_name: str) -> None:
    async with Node(NodeConfig(discovery=(), name="me")) as node:
        assert node.address == "" and node.name == "me"
        group = await node.join(run_name)
        assert (group.size, group.rank, group.run, group.topology) == (1, 0, run_name, "ring")
        assert await group.all_gather(b"x", name="n") == [b"x"]


@pytest.mark.parametrize("size", [2, 4])
async def test_nodes_of_one_machine_find_each_other(groups: Start, size: int) -> None:
    joined = await groups(size)
    assert [group.rank for group in joined] == list(range(size))
    assert len({group.view for group in joined}) == 1
    assert [member.name for member in joined[0].view.members] == [f"n{i}" for i in range(size)]
    assert joined[0].view.facts.hosts == (0,) * size
    assert len({group.seed for group in joined}) == 1
    found = await asyncio.gather(
        *(group.all_gather(bytes([group.rank]), name="n") for group in joined)
    )
    assert found == [[bytes([rank]) for rank in range(size)]] * size


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
async def test_one_known_address_is_enough(run_name: str, listen: str) -> None:
    discovery = ("static",)
    async with Node(NodeConfig(discovery=discovery, listen=listen, name="first")) as first:
        config = NodeConfig(discovery=discovery, listen=listen, join=(first.address,))
        others = [Node(config) for _ in range(3)]
        for node in others:
            await node.start()
        joined = await asyncio.gather(
            *(node.join(run_name, min_nodes=4, wait=30) for node in (first, *others))
        )
        assert len({group.view for group in joined}) == 1
        if listen.startswith("["):
            assert first.address.startswith("[::1]:")
        await asyncio.gather(*(node.close() for node in others))


async def test_the_known_node_may_come_late(run_name: str, unused_port: int) -> None:
    seed = f"127.0.0.1:{unused_port}"
    early = Node(NodeConfig(discovery=("static",), join=(seed,)))
    await early.start()
    joining = asyncio.create_task(early.join(run_name, min_nodes=2, wait=30))
    await asyncio.sleep(0.3)
    async with Node(NodeConfig(discovery=("static",), listen=seed)) as late:
        group = await late.join(run_name, min_nodes=2, wait=30)
        assert (await joining).view == group.view
        await early.close()


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def test_with_a_secret(groups: Start) -> None:
    joined = await groups(2, secret=b"0123456789abcdef")
    assert joined[0].size == 2


async def test_the_nodes_never_come(run_name: str) -> None:
    nowhere = "127.0.0.1:1"
    async with Node(NodeConfig(name="me", join=(nowhere,))) as node:
        with pytest.raises(NotEnoughNodesError) as caught:
            await node.join(run_name, min_nodes=3, wait=0.3)
    text = str(caught.value)
    assert f"run '{run_name}' has 1 of 3 nodes after 0.3 s: me ({node.address})." in text
    assert f"static: looked at {nowhere}" in text
    assert "local: found no other node of this user and run on this machine" in text
    assert f"{nowhere}: Connect" in text
    assert "lower --min-nodes" in text


async def test_who_was_told_to_join_others_does_not_begin_alone(run_name: str) -> None:
    async with Node(NodeConfig(join=("127.0.0.1:1",))) as node:
        with pytest.raises(NotEnoughNodesError) as caught:
            await node.join(run_name, wait=0.3)
    assert "has 1 of 1 nodes, but has not begun after 0.3 s" in str(caught.value)
    assert "127.0.0.1:1: Connection refused. Check the addresses given with" in str(caught.value)


async def test_other_runs_clusters_and_secrets_never_mix(run_name: str) -> None:
    configs = [
        (NodeConfig(), run_name),
        (NodeConfig(), run_name + "-other"),
        (NodeConfig(cluster="other"), run_name),
        (NodeConfig(secret=b"0123456789abcdef"), run_name),
        (NodeConfig(secret=b"fedcba9876543210"), run_name),
    ]
    nodes = [Node(config) for config, _ in configs]
    for node in nodes:
        await node.start()
    # One more makes a run of two, so that not all that are named are strangers.
    friends = [Node(config) for config, _ in configs]
    for friend in friends:
        await friend.start()
    addresses = tuple(node.address for node in (*nodes, *friends))
    for node in (*nodes, *friends):
        object.__setattr__(node.config, "join", addresses)
    joined = await asyncio.gather(
        *(
            node.join(name, min_nodes=2, wait=30)
            for node, (_, name) in zip((*nodes, *friends), configs * 2, strict=True)
        )
    )
    for index, group in enumerate(joined[:5]):
        members = {member.node_id for member in group.view.members}
        assert members == {nodes[index].node_id, friends[index].node_id}
    await asyncio.gather(*(node.close() for node in (*nodes, *friends)))


@pytest.mark.parametrize(
    ("config", "run", "error"),
    [
        (NodeConfig(secret=b"0123456789abcdef"), "", AuthenticationError),
        (NodeConfig(cluster="other"), "", WrongRunError),
        (NodeConfig(), "-other", WrongRunError),
    ],
)
async def test_who_can_never_join_is_told_at_once(
    run_name: str, config: NodeConfig, run: str, error: type[HandshakeError]
) -> None:
    async with Node(NodeConfig()) as first:
        waiting = asyncio.create_task(first.join(run_name, min_nodes=2, wait=30))
        await asyncio.sleep(0.05)
        async with Node(dataclasses.replace(config, join=(first.address,))) as other:
            with pytest.raises(error):
                await other.join(run_name + run, min_nodes=2, wait=30)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_who_comes_late_is_told_and_disturbs_nobody(groups: Start, run_name: str) -> None:
    joined = await groups(2)
    async with Node(NodeConfig(name="late")) as node:
        with pytest.raises(RunStartedError, match=f"run '{run_name}' has begun") as caught:
            await node.join(run_name, wait=10)
        assert "its members are n0, n1" in str(caught.value)
    found = await asyncio.gather(*(group.all_gather(b"", name="n") for group in joined))
    assert found == [[b"", b""]] * 2
    assert all(group.failure is None for group in joined)


async def test_options_of_the_run(run_name: str) -> None:
    async with Node(NodeConfig(discovery=())) as node:
        with pytest.raises(PluginError, match="no topology called 'rng'; did you mean ring"):
            await node.join(RunConfig(run=run_name, topology="rng"))
    async with Node(NodeConfig(discovery=())) as node:
        with pytest.raises(ConfigError, match="discovery names no way"):
            await node.join(run_name, min_nodes=2)
        group = await node.join(RunConfig(run=run_name, topology="mapreduce", seed=7))
        assert group.topology == "mapreduce" and group.seed == 7


async def test_the_first_members_topology_and_seed_count(
    run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Node(NodeConfig(name="b")) as two, Node(NodeConfig(name="a")) as one:
        joined = await asyncio.gather(
            one.join(run_name, min_nodes=2, topology="mapreduce", seed=1, wait=30),
            two.join(run_name, min_nodes=2, topology="ring", seed=2, wait=30),
        )
    assert [(g.topology, g.seed, g.rank) for g in joined] == [
        ("mapreduce", 1, 0),
        ("mapreduce", 1, 1),
    ]
    assert "uses topology mapreduce, as its first member a was told" in caplog.text


async def test_a_node_is_used_once_and_only_when_started(run_name: str) -> None:
    node = Node(NodeConfig(discovery=()))
    await node.close()
    with pytest.raises(SessionError, match="is not started"):
        await node.join(run_name)
    async with node:
        with pytest.raises(SessionError, match="is started once"):
            await node.start()
        await node.join(run_name)
        with pytest.raises(SessionError, match="joins one run in its life"):
            await node.join(run_name)
        with pytest.raises(SessionError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(node.join(run_name)))
    await node.close()


async def test_a_cancelled_join_leaves_nothing(run_name: str) -> None:
    async with Node(NodeConfig()) as node:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await node.join(run_name, min_nodes=2)


async def test_the_host_application_is_left_alone(groups: Start) -> None:
    def state() -> list[object]:
        loop = asyncio.get_running_loop()
        return [
            *(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)),
            asyncio.get_event_loop_policy(),
            logging.getLogger().level,
            tuple(logging.getLogger().handlers),
            multiprocessing.get_start_method(allow_none=True),
            sys.excepthook,
            getattr(loop, "_default_executor", None),
            loop.get_exception_handler(),
        ]

    before = state()
    joined = await groups(3)
    await asyncio.gather(*(group.all_gather(b"x", name="n") for group in joined))
    after = state()
    assert all(one is two or one == two for one, two in zip(before, after, strict=True))


async def test_what_fails_in_the_background_reaches_the_user(groups: Start) -> None:
    joined = await groups(2)
    waiting = asyncio.create_task(joined[0].all_gather(b"", name="n"))
    await asyncio.sleep(0)

    async def boom() -> None:
        gc.collect()
        raise RuntimeError("boom")

    # As a task of the node's own would.
    background = joined[0]._mesh._background
    background.start(boom(), "task of a plugin")
    with pytest.raises(GroupError, match="task of a plugin failed: RuntimeError: boom") as caught:
        await waiting
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(GroupError, match="boom"):
        await joined[0].all_gather(b"", name="n")


async def test_a_forked_child_may_not_use_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node(NodeConfig(discovery=())) as node:
        group = await node.join("alone")
        pid = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: pid + 1)
            with pytest.raises(SessionError, match=f"node belongs to pid {pid}, not to pid"):
                await node.join("alone")
            with pytest.raises(SessionError, match=f"node belongs to pid {pid}"):
                await group.all_gather(b"", name="n")
            await group.leave()
            await node.close()
        assert await group.all_gather(b"", name="n") == [b""]


@pytest.mark.parametrize("uvloop", [False, True])
def test_a_killed_member_is_reported_by_all(programs: Start, uvloop: bool) -> None:
    body = """
    memory = group.allocate(DTYPES["float32"], 400_000)
    step = 0
    while True:
        memory.mine[:] = step
        await group.exchange(memory, step=step, bucket=0)
        await group.seal(step)
        step += 1
        if step == 5:
            say(running=True)
    """
    nodes = programs(body, 3, uvloop=uvloop)
    members = [node.read()["members"] for node in nodes]
    assert all(node.read() == {"running": True} for node in nodes)
    killed = time.monotonic()
    nodes[1].kill()
    for node in (nodes[0], nodes[2]):
        said = node.read()
        assert said["error"] == "PeerFailedError"
        assert f"peer {members[0][1]} at 127.0.0.1:" in said["text"]
        assert "(ring) at step " in said["text"]
        assert "the connection was closed" in said["text"] or "connection lost" in said["text"]
        assert said["at"] - killed < 2.0
        code, errors = node.end()
        assert code == 1 and errors == ""


def test_a_stopped_member_is_reported_after_the_patience(programs: Start) -> None:
    body = """
    if group.rank == 1:
        say(pid=os.getpid())
        time.sleep(60)
    await group.all_gather(b"x", name="n")
    """
    survivor, stopped = programs(body, 2, patience=1.0)
    members = survivor.read()["members"]
    stopped.read(), stopped.read()
    begun = time.monotonic()
    said = survivor.read()
    assert f"peer {members[1]} at 127.0.0.1:" in said["text"]
    assert "during all_gather 'n' at step 0: no heartbeat for 1 s" in said["text"]
    assert said["at"] - begun < 3.0


def test_forked_children_do_not_hide_a_death(programs: Start) -> None:
    body = """
    if group.rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        say(child=child)
        await asyncio.sleep(60)
    # The survivor merely computes: `failure` shows it, and its next call raises.
    while group.failure is None:
        await asyncio.sleep(0.02)
    say(failure=str(group.failure), at=time.monotonic())
    await group.all_gather(b"x", name="n")
    """
    survivor, parent = programs(body, 2)
    survivor.read(), parent.read()
    child = parent.read()["child"]
    killed = time.monotonic()
    parent.kill()
    try:
        said = survivor.read()
        assert "the connection was closed" in said["failure"] and said["at"] - killed < 2.0
        said = survivor.read()
        assert said["error"] == "PeerFailedError" and "all_gather 'n'" in said["text"]
    finally:
        os.kill(child, signal.SIGKILL)
