"""The tcp transport: a channel is one stream of the door, with nothing added to it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from p2pdpt.channel import Availability, Transport
from p2pdpt_transports.tcp.channel import TcpChannel
from p2pdpt_transports.tcp.listener import TcpListener

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.channel import Channel, Door, Listener, PeerInfo

__all__ = ["TcpTransport"]


class TcpTransport(Transport):
    """Carries bulk over TCP; works wherever Python does."""

    name = "tcp"

    def __init__(self, door: Door) -> None:
        """Build on `door`."""
        self._door = door

    @classmethod
    def availability(cls) -> Availability:
        """Tell that it can always be used."""
        return Availability(True, "works everywhere")

    async def listen(self, accept: Callable[[Channel], None]) -> Listener:
        """Accept channels from peers; the door is the endpoint."""
        return TcpListener(self._door, accept)

    async def connect(self, peer: PeerInfo) -> Channel:
        """Open a channel to a peer that listens.

        Raises:
            ChannelClosedError: it could not be reached.
            HandshakeError: it refused.
        Cancellation closes what was half open.
        """
        stream = await self._door.open(peer, self.name)
        channel = TcpChannel(stream.peer, stream.address, asyncio.get_running_loop())
        try:
            await stream.attach(channel)
        except BaseException:
            stream.abort()
            channel.abort()
            raise
        return channel
