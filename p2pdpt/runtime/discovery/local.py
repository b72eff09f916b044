"""Nodes of one user and one run on one machine find each other, with no flag and no network.

Each node listens on a socket in Linux's abstract namespace, which leaves nothing on disk and
goes with the process; its name holds a digest of user, cluster and run, and the node's id.
``/proc/net/unix`` lists them. Who connects is told the node's addresses, if the kernel says that
both processes belong to one user. A node can be found before it looks, so of two that start
together at least one finds the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from p2pdpt.channel import Availability
from p2pdpt.errors import UnavailableError
from p2pdpt.runtime.discovery import Discovery, Sighting
from p2pdpt.runtime.sockets import track

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.channel import PeerInfo
    from p2pdpt.config import NodeConfig

__all__ = ["LocalDiscovery"]

_TABLE: Final = Path("/proc/net/unix")
_CREDENTIALS: Final = struct.Struct("3i")
_ANSWER_BYTES: Final = 4096
_ANSWER_S: Final = 2.0
SWEEP_S: Final = 0.5
"""Seconds between two looks."""


class LocalDiscovery(Discovery):
    """Abstract sockets, one for each node."""

    name: ClassVar[str] = "local"

    def __init__(self, config: NodeConfig, me: PeerInfo, run: str) -> None:
        key = "\0".join((str(os.getuid()), config.cluster, run)) if hasattr(os, "getuid") else run
        self._prefix = f"p2pdpt-{hashlib.sha256(key.encode()).hexdigest()[:24]}-"
        self._me = me
        self._socket: socket.socket | None = None
        self._met: set[str] = set()
        self._failed = ""

    @classmethod
    def availability(cls) -> Availability:
        if not (sys.platform == "linux" and hasattr(socket, "SO_PEERCRED")):
            return Availability(False, f"{sys.platform} has no abstract sockets")
        if not os.access(_TABLE, os.R_OK):
            return Availability(False, f"{_TABLE} cannot be read")
        return Availability(True, "abstract sockets of this user")

    async def start(self) -> None:
        available = self.availability()
        if not available.ok:
            raise UnavailableError(f"discovery 'local' cannot be used: {available.reason}")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        track(self._socket)
        self._socket.bind(f"\0{self._prefix}{self._me.node_id}".encode())
        self._socket.listen(128)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._answer)

    async def search(self, found: Callable[[Sighting], None], swept: Callable[[], None]) -> None:
        while True:
            for node_id in self._names():
                with contextlib.suppress(OSError, TimeoutError, msgspec.MsgspecError, ValueError):
                    addresses = await self._ask(node_id)
                    self._met.add(node_id)
                    found(Sighting(addresses, node_id))
            swept()
            await asyncio.sleep(SWEEP_S)

    def describe(self) -> str:
        if self._failed:
            return f"local: {self._failed}"
        count = len(self._met)
        nodes = {0: "no other node", 1: "1 other node"}.get(count, f"{count} other nodes")
        return f"local: found {nodes} of this user and run on this machine"

    async def close(self) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            asyncio.get_running_loop().remove_reader(sock.fileno())
            sock.close()

    def _names(self) -> list[str]:
        try:
            table = _TABLE.read_text(errors="replace")
        except OSError as error:
            self._failed = f"{_TABLE}: {error.strerror}"
            return []
        found = re.findall(rf"@{self._prefix}([0-9a-f]{{16}})$", table, re.MULTILINE)
        return sorted({each for each in found if each != self._me.node_id})

    def _answer(self) -> None:
        """Tell whoever connects where this node is; a few bytes, which always fit the buffer."""
        assert self._socket is not None
        with contextlib.suppress(OSError):
            sock, _ = self._socket.accept()
            with sock:
                sock.setblocking(False)
                if _same_user(sock):
                    sock.send(msgspec.msgpack.encode(self._me.addresses))

    async def _ask(self, node_id: str) -> tuple[str, ...]:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            track(sock)
            sock.setblocking(False)
            # Connecting to a local socket is done at once, or fails.
            sock.connect(f"\0{self._prefix}{node_id}".encode())
            if not _same_user(sock):
                raise PermissionError("the socket belongs to another user")
            data = b""
            async with asyncio.timeout(_ANSWER_S):
                while part := await loop.sock_recv(sock, _ANSWER_BYTES - len(data)):
                    data += part
        return msgspec.msgpack.decode(data, type=tuple[str, ...])


def _same_user(sock: socket.socket) -> bool:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())
