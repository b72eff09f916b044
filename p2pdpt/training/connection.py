"""How a session comes to its group: a node of its own, on a loop of its own."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from p2pdpt.training.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from p2pdpt.config import NodeConfig, RunConfig
    from p2pdpt.group import Group
    from p2pdpt.runtime.node import Node

__all__ = ["Connection", "NodeConnection", "bounded"]

LEAVE_S: Final = 5.0


class Connection(ABC):
    """A loop and a group on it.

    Attributes:
        loop: where the group's coroutines run.
    """

    loop: LoopThread

    @abstractmethod
    def open(self) -> Group:
        """Start the loop and return the group.

        Raises:
            NotEnoughNodesError: the nodes never came.
            P2PError: the node could not start or join.
        """

    @abstractmethod
    def close(self, error: str | None = None) -> None:
        """Leave the group, with `error` if this node failed, and stop the loop.

        May be called twice, and after a failed ``open``.
        """


class NodeConnection(Connection):
    """A node started for this session alone."""

    def __init__(self, node: NodeConfig, run: RunConfig) -> None:
        self.loop = LoopThread()
        self._node_config, self._run_config = node, run
        self._node: Node | None = None
        self._group: Group | None = None

    def open(self) -> Group:
        """Start a node, join the run and wait until its members are there."""
        self.loop.start()
        try:
            return self.loop.call(self._open())
        except BaseException:
            self.close()
            raise

    async def _open(self) -> Group:
        from p2pdpt.runtime.node import Node

        node = Node(self._node_config)
        self._node = await node.__aenter__()
        self._group = await node.join(self._run_config)
        return self._group

    def close(self, error: str | None = None) -> None:
        """Leave, close the node and stop the loop, within seconds."""
        if self.loop.running:
            try:
                self.loop.call(self._close(error))
            finally:
                self.loop.stop()

    async def _close(self, error: str | None) -> None:
        group, self._group = self._group, None
        node, self._node = self._node, None
        if group is not None:
            # A peer that does not listen must not hold up the end of this program.
            await bounded(group.leave(error), LEAVE_S)
        if node is not None:
            await bounded(node.__aexit__(None, None, None), LEAVE_S)


async def bounded(work: Coroutine[Any, Any, object], seconds: float) -> None:
    """Await `work` for at most `seconds`, then cancel it; what it raises is dropped."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=seconds)
    if task.done() and not task.cancelled():
        task.exception()
