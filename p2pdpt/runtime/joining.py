"""How a node comes into a run: it looks for the others, agrees on the view, and links up."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import random
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from p2pdpt import registry
from p2pdpt.config import SHARED
from p2pdpt.errors import (
    FrameError,
    GroupError,
    NotEnoughNodesError,
    P2PError,
    PeerFailedError,
    RunStartedError,
    UnavailableError,
    UsageError,
)
from p2pdpt.protocol.formation import Formation
from p2pdpt.protocol.messages import (
    Control,
    Decide,
    Gather,
    Propose,
    Started,
    Status,
    Vote,
    Withdraw,
)
from p2pdpt.protocol.view import Member, View
from p2pdpt.runtime.group import MeshGroup
from p2pdpt.runtime.mesh import Mesh
from p2pdpt.topology import Facts

if TYPE_CHECKING:
    from p2pdpt.channel import Channel, Listener, Transport
    from p2pdpt.config import NodeConfig, RunConfig
    from p2pdpt.protocol.handshake import Identity
    from p2pdpt.runtime.background import Background
    from p2pdpt.runtime.discovery import Discovery
    from p2pdpt.runtime.door import NodeDoor

__all__ = ["Joining", "host_digest"]

logger = logging.getLogger(__name__)
LINK_S: Final = 30.0
"""How long the bulk connections of a view may take, in seconds."""
EARLY_BYTES: Final = 64 << 20
"""How much is kept of members that have begun before this one."""
_FORMING: Final = (Status, Propose, Vote, Withdraw, Decide, Started)


def host_digest() -> str:
    """Return what is equal for all nodes on this machine, and differs from other machines'.

    Containers with a network of their own count as machines: that is how their nodes meet.
    """
    boot, network = socket.gethostname(), ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = os.readlink("/proc/self/ns/net")
    return hashlib.sha256(f"{boot} {network}".encode()).hexdigest()[:16]


class Joining:
    """One node's way into one run, and what must be closed when the run ends."""

    def __init__(
        self,
        config: NodeConfig,
        run: RunConfig,
        door: NodeDoor,
        identity: Identity,
        background: Background,
    ) -> None:
        self._config, self._run, self._door = config, run, door
        self._identity, self._background = identity, background
        self._transports: dict[str, Transport] = {}
        self._listeners: list[Listener] = []
        self._sources: list[Discovery] = []
        self._unavailable: list[str] = []
        self._searches: list[asyncio.Task[None]] = []
        self._group: MeshGroup | None = None
        self._early: list[tuple[str, Control]] = []
        self._early_bytes = 0
        self._came: dict[str, Channel] = {}
        self._event = asyncio.Event()
        self._broken: P2PError | None = None
        self._flushing = False
        self._loop = asyncio.get_running_loop()
        seed = run.seed if run.seed is not None else random.SystemRandom().getrandbits(63)
        status = Status(
            version=0,
            name=door.me.name,
            address=door.address,
            host=host_digest(),
            min_nodes=run.min_nodes,
            topology=run.topology,
            seed=seed,
            sees=(),
            settled=False,
        )
        self._formation = Formation(door.me.node_id, status)
        self._mesh = Mesh(
            door,
            identity,
            background,
            config.patience,
            on_up=self._up,
            on_down=self._down,
            on_message=self._receive,
            on_change=self._change,
        )

    async def join(self) -> MeshGroup:
        """Return this node's group, with all links up.

        Raises:
            NotEnoughNodesError: too few nodes came in time.
            RunStartedError: the run has begun without this node.
            HandshakeError: all nodes named to join are of another version, cluster or run.
            PeerFailedError: a member failed before all links were up.
            UsageError: a plugin, an option or an address is wrong.
        Cancellation, like every error, leaves nothing behind.
        """
        run = self._run
        registry.create_topology(run.topology)
        try:
            await self._listen()
            view = await self._form()
            group = await self._link(view)
        except BaseException:
            await self.close()
            raise
        logger.info("joined run %s as rank %d of %d", run.run, group.rank, group.size)
        return group

    def broke(self, what: str, error: Exception) -> None:
        """Note that something of this node itself failed in the background."""
        if self._group is not None:
            self._group.broke(what, error)
            return
        self._broken = GroupError(f"{what} failed: {type(error).__name__}: {error}")
        self._broken.__cause__ = error
        self._event.set()

    async def close(self) -> None:
        """Close everything but the door. May be called twice."""
        for task in self._searches:
            task.cancel()
        await self._mesh.close()
        await self._finish()

    async def _finish(self) -> None:
        for source in self._sources:
            with contextlib.suppress(OSError):
                await source.close()
        for listener in self._listeners:
            await listener.close()
        for channel in self._came.values():
            channel.abort()
        self._came.clear()

    # Forming the view.

    async def _listen(self) -> None:
        endpoints = {}
        # Shared memory is no way to send messages; what is not exchanged so, goes the usual way.
        names = [name for name in self._config.transports if name != SHARED] or ["tcp"]
        for name in names if self._door.address else ():
            kind = registry.load_transport(name)
            available = kind.availability()
            if not available.ok:
                raise UnavailableError(f"transport {name!r} cannot be used: {available.reason}")
            transport = kind(self._door)
            listener = await transport.listen(self._take)
            self._transports[transport.name] = transport
            self._listeners.append(listener)
            endpoints[transport.name] = listener.endpoint
        self._door.publish(endpoints)

    def _take(self, channel: Channel) -> None:
        """Keep a channel that a peer opened, until the view says whether it is a member."""
        old = self._came.get(channel.peer.node_id)
        if old is not None or self._group is not None:
            channel.abort()
            return
        self._came[channel.peer.node_id] = channel
        self._event.set()

    async def _form(self) -> Decide:
        run = self._run
        self._door.run = run.run
        self._mesh.open()
        await self._search()
        self._change()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(run.wait):
                while not self._decided():
                    self._event.clear()
                    await self._event.wait()
        if not self._decided():
            raise NotEnoughNodesError(self._missing())
        for task in self._searches:
            task.cancel()
        # Whoever is no member must have been told before its connection is let go.
        self._flush()
        view = self._formation.view
        if view is not None:
            return view
        late = self._formation.late
        assert late is not None
        names = ", ".join(member.name for member in late.members)
        raise RunStartedError(
            f"run {run.run!r} has begun without this node; its members are {names}. Wait until "
            "it has ended, or give this one another name with --run"
        )

    async def _search(self) -> None:
        for name in self._config.discovery if self._door.address else ():
            kind = registry.load_discovery(name)
            available = kind.availability()
            if not available.ok:
                self._unavailable.append(f"{name}: not available: {available.reason}")
                continue
            source = kind(self._config, self._door.me, self._run.run)
            self._sources.append(source)
            try:
                await source.start()
            except (UnavailableError, OSError) as error:
                self._unavailable.append(f"{name}: {error}")
                continue
            work = source.search(self._mesh.sight, self._mesh.expect_sweep())
            self._searches.append(self._background.start(work, f"discovery {name}"))

    def _decided(self) -> bool:
        if self._broken is not None:
            raise self._broken
        if self._mesh.refusal is not None:
            raise self._mesh.refusal
        return self._formation.view is not None or self._formation.late is not None

    def _missing(self) -> str:
        statuses = [self._formation.status, *filter(None, self._formation.peers.values())]
        wanted = max(status.min_nodes for status in statuses)
        here = ", ".join(
            f"{status.name} ({status.address})" if status.address else status.name
            for status in statuses
        )
        tried = [source.describe() for source in self._sources]
        reasons = "; ".join([*tried, *self._unavailable, *self._mesh.errors()]) or "no discovery"
        after = f"after {self._run.wait:g} s: {here}. {reasons}"
        if len(statuses) >= wanted:
            return (
                f"run {self._run.run!r} has {len(statuses)} of {wanted} nodes, but has not begun "
                f"{after}. Check the addresses given with --join: one of them must be reached"
            )
        return (
            f"run {self._run.run!r} has {len(statuses)} of {wanted} nodes {after}. Start the "
            "missing nodes with the same run name and secret, tell them an address with --join, "
            "or lower --min-nodes"
        )

    # What the mesh tells.

    def _up(self, peer: str) -> None:
        self._formation.connected(peer)
        if self._formation.view is not None:
            # A newcomer, which the mesh lets go as soon as this returns.
            self._flush()
        self._change()

    def _down(self, peer: str, reason: str) -> None:
        self._formation.lost(peer)
        if self._group is not None:
            self._group.lost(peer, reason)
        self._event.set()
        self._change()

    def _receive(self, peer: str, message: Control) -> None:
        if isinstance(message, _FORMING):
            self._formation.receive(peer, message)
            self._change()
        elif self._group is not None:
            self._group.receive(peer, message)
        else:
            # A member may have its view, and its links, before this one.
            self._early.append((peer, message))
            self._early_bytes += len(message.payload) if isinstance(message, Gather) else 128
            if self._early_bytes > EARLY_BYTES:
                raise FrameError("bad message: too many before the run has begun here")

    def _change(self) -> None:
        """Tell all that happens in one turn of the loop together, as it ends."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        self._flushing = False
        self._formation.settle(self._mesh.settled)
        self._flush()
        if self._mesh.refusal is not None:
            self._event.set()

    def _flush(self) -> None:
        for peer, message in self._formation.messages():
            self._mesh.send(peer, message)
        if self._formation.view is not None or self._formation.late is not None:
            self._event.set()

    # Linking the members.

    async def _link(self, decided: Decide) -> MeshGroup:
        mesh, me = self._mesh, self._door.me.node_id
        members = tuple(Member(m.node_id, m.name, m.address) for m in decided.members)
        view = View(decided.number, members, Facts(hosts=tuple(m.host for m in decided.members)))
        mesh.keep([member.node_id for member in members])
        rank = view.rank_of(me)
        if decided.topology != self._run.topology:
            logger.warning(
                "run %s uses topology %s, as its first member %s was told; this node was told %s",
                self._run.run,
                decided.topology,
                members[0].name,
                self._run.topology,
            )
        topology = registry.create_topology(decided.topology)
        channels = await self._connect(view, mesh)
        group = MeshGroup(
            run=self._run.run,
            view=view,
            rank=rank,
            topology=topology,
            spec=decided.topology,
            seed=decided.seed,
            mesh=mesh,
            channels=channels,
            finish=self._finish,
        )
        self._group = group
        early, self._early = self._early, []
        for peer, message in early:
            try:
                group.receive(peer, message)
            except P2PError as error:
                mesh.drop(peer, str(error))
        for member in members:
            if member.node_id not in (*mesh.links, me):
                group.lost(member.node_id, "the connection was closed")
        try:
            await group.share_memory(self._config.transports)
        except BaseException as error:
            # All members come to the same usage error by themselves; of others they are told.
            told = None if isinstance(error, UsageError) else f"it could not join the run: {error}"
            await group.leave(told)
            raise
        return group

    async def _connect(self, view: View, mesh: Mesh) -> list[Channel | None]:
        """Return a bulk channel to each member.

        The node that opened the control connection opens this one, too: that way is known to
        be passable.
        """
        members = [m for m in view.members if m.node_id != self._door.me.node_id]
        works = {asyncio.ensure_future(self._channel(member, mesh)): member for member in members}
        try:
            pending = set(works)
            async with asyncio.timeout(LINK_S):
                while pending:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
                    for work in done:
                        work.result()
        except TimeoutError:
            late = ", ".join(str(works[work]) for work in pending)
            raise GroupError(
                f"no bulk connection with {late} within {LINK_S:g} s; is something between the "
                "nodes that lets only some connections pass?"
            ) from None
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            made = {
                member.node_id: work.result()
                for work, member in works.items()
                if not work.cancelled() and work.exception() is None
            }
            self._came.update(made)
        channels = [self._came.pop(member.node_id, None) for member in view.members]
        for stranger in self._came.values():
            stranger.abort()
        self._came.clear()
        return channels

    async def _channel(self, member: Member, mesh: Mesh) -> Channel:
        link = mesh.links.get(member.node_id)
        if link is None:
            raise self._gone(member, "the connection was closed")
        if not link.dialed:
            while (channel := self._came.get(member.node_id)) is None:
                if link.closed.done():
                    raise self._gone(member, link.reason)
                self._event.clear()
                await self._event.wait()
            return channel
        peer = dataclasses.replace(link.peer, addresses=(link.address,))
        failed = []
        for name, transport in self._transports.items():
            if name in peer.transports:
                try:
                    return await transport.connect(peer)
                except P2PError as error:
                    failed.append(f"{name}: {error}")
        if link.closed.done():
            raise self._gone(member, link.reason)
        offered = ", ".join(peer.transports) or "none"
        raise GroupError(
            f"no bulk connection with {member}: it offers {offered}; "
            f"{'; '.join(failed) or 'this node offers ' + ', '.join(self._transports)}"
        )

    def _gone(self, member: Member, reason: str) -> PeerFailedError:
        for peer, message in self._early:
            error = getattr(message, "error", None)
            if peer == member.node_id and error:
                reason = error
        return PeerFailedError(str(member), member.address, reason, operation="joining the run")
