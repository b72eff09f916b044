"""Channels in memory between all nodes of one event loop, for tests of what runs over them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from p2pdpt.channel import Door, PeerInfo
from p2pdpt.testing.memory_transport import MemoryTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from p2pdpt.channel import Channel, Stream, Transport

__all__ = ["memory_mesh"]


class _Nameplate(Door):
    """All that the memory transport wants of a door."""

    def __init__(self, name: str) -> None:
        self.me = PeerInfo(name.encode().hex()[:16].zfill(16), name)

    def serve(self, kind: str, accept: Callable[[Stream], Awaitable[None]]) -> None:
        raise NotImplementedError("no stream leads to a node in memory")

    def close(self, kind: str) -> None:
        raise NotImplementedError("no stream leads to a node in memory")

    async def open(self, peer: PeerInfo, kind: str) -> Stream:
        raise NotImplementedError("no stream leads to a node in memory")


@asynccontextmanager
async def memory_mesh(
    size: int, transport: type[Transport] = MemoryTransport
) -> AsyncIterator[list[list[Channel | None]]]:
    """Connect nodes called ``0``, ``1``, ... with each other; close all channels at the end.

    Args:
        size: how many.
        transport: the memory transport, or one that is wrapped around it.

    Yields:
        For each node its channels, one for each node; None at its own place.
    """
    rows: list[list[Channel | None]] = [[None] * size for _ in range(size)]
    transports, listeners, peers = [], [], []
    for rank in range(size):
        door = _Nameplate(str(rank))
        transports.append(transport(door))

        def accept(channel: Channel, rank: int = rank) -> None:
            rows[rank][int(channel.peer.name)] = channel

        listeners.append(await transports[-1].listen(accept))
        endpoint = {transport.name: listeners[-1].endpoint}
        peers.append(PeerInfo(door.me.node_id, door.me.name, (), endpoint))
    for low in range(size):
        for high in range(low + 1, size):
            rows[low][high] = await transports[low].connect(peers[high])
    # The accepting ends come one turn later.
    await asyncio.sleep(0)
    try:
        yield rows
    finally:
        for row in rows:
            for channel in row:
                if channel is not None:
                    channel.abort()
        for listener in listeners:
            await listener.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
