"""Addresses that a person gave, for instance with ``--join``; one of them is enough."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from p2pdpt.channel import Availability
from p2pdpt.runtime.discovery import Discovery, Sighting

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.channel import PeerInfo
    from p2pdpt.config import NodeConfig

__all__ = ["StaticDiscovery"]


class StaticDiscovery(Discovery):
    """The addresses of ``NodeConfig.join``, tried for as long as the run forms."""

    name: ClassVar[str] = "static"

    def __init__(self, config: NodeConfig, me: PeerInfo, run: str) -> None:
        self._addresses = config.join

    @classmethod
    def availability(cls) -> Availability:
        return Availability(True, "needs nothing")

    async def start(self) -> None:
        """Do nothing: whoever knows the address finds this node."""

    async def search(self, found: Callable[[Sighting], None], swept: Callable[[], None]) -> None:
        for address in self._addresses:
            found(Sighting((address,), lasting=True))
        swept()
        await asyncio.get_running_loop().create_future()

    def describe(self) -> str:
        return f"static: looked at {', '.join(self._addresses) or 'nothing, no --join was given'}"

    async def close(self) -> None:
        """Do nothing: nothing was opened."""
