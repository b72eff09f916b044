"""Where tcp channels come in: a kind of stream that the door serves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from p2pdpt.channel import Listener
from p2pdpt_transports.tcp.channel import TcpChannel

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.channel import Channel, Door, Stream

__all__ = ["TcpListener"]


class TcpListener(Listener):
    """Accepts tcp channels until it is closed."""

    endpoint = ""

    def __init__(self, door: Door, accept: Callable[[Channel], None]) -> None:
        """Serve the door's streams of kind ``tcp``, giving each channel to `accept`."""
        self._door = door
        self._accept = accept
        self._closed = False
        door.serve("tcp", self._serve)

    async def _serve(self, stream: Stream) -> None:
        channel = TcpChannel(stream.peer, stream.address, asyncio.get_running_loop())
        try:
            await stream.attach(channel)
            if self._closed:
                channel.abort()
            else:
                self._accept(channel)
        except BaseException:
            channel.abort()
            raise

    async def close(self) -> None:
        """Accept no more; channels that are open stay. May be called twice."""
        if not self._closed:
            self._closed = True
            self._door.close("tcp")
