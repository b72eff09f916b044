"""A node: one incarnation, on one event loop, in at most one run.

It installs nothing and reads nothing: no signal handlers, no logging, no environment. Several
nodes may share a loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import platform
import secrets
import socket
from typing import TYPE_CHECKING

from p2pdpt.config import NodeConfig, RunConfig
from p2pdpt.errors import ConfigError, SessionError
from p2pdpt.protocol.handshake import Identity
from p2pdpt.runtime.background import Background
from p2pdpt.runtime.door import NodeDoor
from p2pdpt.runtime.joining import Joining

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from p2pdpt.channel import PeerInfo
    from p2pdpt.runtime.group import MeshGroup

__all__ = ["Node"]

logger = logging.getLogger(__name__)


class Node:
    """One node; use it as ``async with Node(config) as node``.

    Attributes:
        config: what it was told.
        node_id: 16 hexadecimal digits, new for each object.
    """

    def __init__(self, config: NodeConfig | None = None) -> None:
        """Make a node that is not started; nothing is opened yet."""
        self.config = config or NodeConfig()
        self.node_id = secrets.token_hex(8)
        self._name = self.config.name or socket.gethostname()[:64] or "node"
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._door: NodeDoor | None = None
        self._background: Background | None = None
        self._identity: Identity | None = None
        self._joining: Joining | None = None
        self._group: MeshGroup | None = None
        self._used = False

    @property
    def name(self) -> str:
        """What people call it."""
        return self._name

    @property
    def address(self) -> str:
        """``host:port`` where it listens; empty if it does not."""
        return self._door.address if self._door is not None else ""

    @property
    def peer_info(self) -> PeerInfo:
        """This node as its peers know it.

        Raises:
            SessionError: it is not started.
        """
        return self._started().me

    async def start(self) -> Self:
        """Listen, unless the configuration names no discovery.

        Raises:
            AddressInUseError: the port asked for is taken.
            ConfigError: the address or the secret cannot be used.
            SessionError: it was started before.
        """
        if self._loop is not None:
            raise SessionError("a node is started once; make a new one")
        secret = self.config.read_secret()
        self._loop = asyncio.get_running_loop()
        self._background = Background(self._broke)
        self._identity = Identity(
            cluster=self.config.cluster,
            node_id=self.node_id,
            name=self._name,
            package=_version("p2pdpt"),
            torch=_version("torch"),
            python=platform.python_version(),
        )
        self._door = NodeDoor(self._identity, secret, self._background, self._broke)
        if self.config.discovery:
            try:
                await self._door.start(self.config.listen)
            except BaseException:
                await self.close()
                raise
        return self

    async def join(
        self,
        run: str | RunConfig = "default",
        *,
        min_nodes: int = 1,
        topology: str = "ring",
        wait: float = 120.0,
        seed: int | None = None,
    ) -> MeshGroup:
        """Find the other nodes of a run, and return this one's group once all are linked.

        Args:
            run: the run's name, or everything about it (then nothing else is given).
            min_nodes: how many nodes, this one included, to wait for.
            topology: name and options; the first member's counts.
            wait: seconds to wait for the others.
            seed: of the run; None draws one. The first member's counts.

        Raises:
            NotEnoughNodesError: too few nodes came in time.
            RunStartedError: the run has begun without this node.
            HandshakeError: all nodes named to join are of another version, cluster or run.
            PeerFailedError: a member failed before all were linked.
            PluginError, ConfigError: a plugin or an option is wrong.
            SessionError: the node is not started, or has joined before.
        Cancellation, like every error, leaves nothing behind.
        """
        door = self._started()
        if not isinstance(run, RunConfig):
            run = RunConfig(run=run, min_nodes=min_nodes, topology=topology, wait=wait, seed=seed)
        if self._used:
            raise SessionError("a node joins one run in its life; make a new node")
        if run.min_nodes > 1 and not self.config.discovery:
            raise ConfigError(
                f"min_nodes is {run.min_nodes}, but discovery names no way to find other nodes; "
                "name static or local"
            )
        self._used = True
        assert self._identity is not None
        assert self._background is not None
        self._joining = Joining(self.config, run, door, self._identity, self._background)
        self._group = await self._joining.join()
        return self._group

    async def close(self, error: str | None = None) -> None:
        """Leave the run, with `error` if this node failed, and close everything.

        Never raises; may be called twice; a cancelled close still closes.
        """
        if self._pid != os.getpid() or self._door is None or self._background is None:
            return
        try:
            if self._group is not None:
                await self._group.leave(error)
            elif self._joining is not None:
                await self._joining.close()
        finally:
            self._door.shut()
            await self._background.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(None if error is None else f"{type(error).__name__}: {error}")

    def _started(self) -> NodeDoor:
        if self._pid != os.getpid():
            raise SessionError(
                f"node belongs to pid {self._pid}, not to pid {os.getpid()}; make a new node "
                "after forking"
            )
        if self._door is None:
            raise SessionError("the node is not started; use `async with Node(config) as node`")
        if asyncio.get_running_loop() is not self._loop:
            raise SessionError("the node belongs to another event loop")
        return self._door

    def _broke(self, what: str, error: Exception) -> None:
        """Let an exception of a background task reach whoever waits for this node."""
        if self._joining is not None:
            self._joining.broke(what, error)
        else:
            logger.error("%s failed", what, exc_info=error)


@functools.cache
def _version(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
