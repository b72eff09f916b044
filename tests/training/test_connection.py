"""A session's own node: opened, joined, left, closed, whatever happens."""

from __future__ import annotations

import asyncio
import time

import pytest

from p2pdpt.config import NodeConfig, RunConfig
from p2pdpt.errors import NotEnoughNodesError, SessionError
from p2pdpt.training.connection import LEAVE_S, NodeConnection, bounded

ALONE = NodeConfig(name="node0", discovery=())


def test_alone_there_is_a_group_of_one() -> None:
    connection = NodeConnection(ALONE, RunConfig(run="alone"))
    group = connection.open()
    assert (group.size, group.rank, group.me.name) == (1, 0, "node0")
    assert connection.loop.call(group.all_gather(b"x", name="test")) == [b"x"]
    connection.close()
    connection.close()
    assert not connection.loop.running


def test_a_failed_join_leaves_nothing_running() -> None:
    config = NodeConfig(name="node0", discovery=("local",))
    connection = NodeConnection(config, RunConfig(run="nobody", min_nodes=2, wait=0.2))
    with pytest.raises(NotEnoughNodesError):
        connection.open()
    assert not connection.loop.running
    connection.close("late")


def test_leaving_with_an_error() -> None:
    connection = NodeConnection(ALONE, RunConfig(run="alone"))
    group = connection.open()
    loop = connection.loop
    connection.close("ValueError: on purpose")
    with pytest.raises(SessionError, match="not running"):
        loop.call(group.all_gather(b"", name="test"))


def test_what_does_not_end_is_cancelled_in_time() -> None:
    connection = NodeConnection(ALONE, RunConfig(run="alone"))
    connection.open()
    cancelled = []

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    begun = time.monotonic()
    connection.loop.call(bounded(stubborn(), 0.05))
    assert cancelled == [True]
    assert time.monotonic() - begun < LEAVE_S
    connection.close()


def test_errors_while_leaving_are_kept_quiet() -> None:
    connection = NodeConnection(ALONE, RunConfig(run="alone"))
    connection.open()

    async def fail() -> None:
        raise ValueError("on purpose")

    connection.loop.call(bounded(fail(), 1.0))
    connection.close()
