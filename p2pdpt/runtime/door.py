"""The node's door: one listening socket, through which every stream comes, after a handshake."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import secrets
import socket
from typing import TYPE_CHECKING, Final

import msgspec

from p2pdpt.address import Address, is_loopback, is_wildcard, parse_address
from p2pdpt.channel import Door, PeerInfo, Stream
from p2pdpt.errors import ChannelClosedError, ConfigError, HandshakeError, P2PError
from p2pdpt.protocol.handshake import NONCE_BYTES, Handshake, Identity, Refusal, Role
from p2pdpt.runtime.sockets import bind, connect, outward_hosts, resolve, track

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from p2pdpt.runtime.background import Background

__all__ = ["HANDSHAKE_S", "NodeDoor", "NodeStream"]

logger = logging.getLogger(__name__)
HANDSHAKE_S: Final = 5.0
"""How long a connection may take to be made and proved, in seconds."""
HALF_OPEN: Final = 128
"""How many connections may be in their handshake at once; others wait in the backlog."""
ACCEPT_PAUSE_S: Final = 0.1
_COMPLAINTS: Final = 256


class NodeStream(Stream):
    """A socket whose handshake is done; not one byte after it has been read."""

    def __init__(self, sock: socket.socket, identity: Identity, address: str) -> None:
        self.identity = identity
        self.peer = PeerInfo(
            identity.node_id, identity.name, identity.addresses, dict(identity.transports)
        )
        self.address = address
        self.local = is_loopback(parse_address(address).host)
        self._sock: socket.socket | None = sock

    async def attach(self, protocol: asyncio.BufferedProtocol) -> asyncio.Transport:
        sock, self._sock = self._sock, None
        if sock is None:
            raise ChannelClosedError(f"the stream to {self.peer} has been used or closed")
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: protocol, sock=sock
            )
        except BaseException:
            sock.close()
            raise
        return transport

    def abort(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


class NodeDoor(Door):
    """Makes and accepts the streams of one node.

    Attributes:
        me: this node, as its peers know it.
        run: the run that streams belong to; empty until the node joins one.
        address: where it listens, for people; empty if it does not.
    """

    def __init__(
        self,
        me: Identity,
        secret: bytes | None,
        background: Background,
        on_error: Callable[[str, Exception], None],
    ) -> None:
        """Make a door that is closed until ``start``.

        Args:
            me: what to say of this node; run, kind and addresses are filled in.
            secret: of the cluster, if it has one.
            background: where streams are served.
            on_error: told of what `accept` functions raise.
        """
        self.me = PeerInfo(me.node_id, me.name)
        self.run = ""
        self.address = ""
        self._identity, self._secret = me, secret
        self._background, self._on_error = background, on_error
        self._listener: socket.socket | None = None
        self._serving: dict[str, Callable[[Stream], Awaitable[None]]] = {}
        self._arriving: set[socket.socket] = set()
        self._complaints: set[str] = set()

    async def start(self, listen: str) -> None:
        """Listen.

        Raises:
            AddressInUseError: the port is taken.
            ConfigError: this machine has no such address, or it can be reached from elsewhere
                and there is no secret.
        """
        wanted = parse_address(listen, what="listen")
        try:
            family, place = (await resolve(wanted))[0]
        except OSError as error:
            raise ConfigError(f"listen {listen!r}: {error.strerror}") from None
        if self._secret is None and not is_loopback(place[0]):
            raise ConfigError(
                f"listen {listen!r} can be reached by others, and this node has no secret: give "
                "all nodes the same secret file (openssl rand -hex 32 > FILE; chmod 600 FILE), "
                "or listen on 127.0.0.1"
            )
        self._listener = bind(wanted, family, place)
        host, port = self._listener.getsockname()[:2]
        hosts = [host]
        if is_wildcard(host):
            hosts = outward_hosts(family) or ["::1" if family == socket.AF_INET6 else "127.0.0.1"]
        addresses = tuple(str(Address(each, port)) for each in hosts)
        self.address = addresses[0]
        self.me = dataclasses.replace(self.me, addresses=addresses)
        self._watch()

    def publish(self, transports: dict[str, str]) -> None:
        """Tell peers from now on which transports this node offers."""
        self.me = dataclasses.replace(self.me, transports=transports)

    def serve(self, kind: str, accept: Callable[[Stream], Awaitable[None]]) -> None:
        self._serving[kind] = accept

    def close(self, kind: str) -> None:
        self._serving.pop(kind, None)

    def shut(self) -> None:
        """Listen no more; streams that are open stay. May be called twice."""
        self._serving.clear()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None

    async def open(self, peer: PeerInfo, kind: str) -> NodeStream:
        reasons = []
        refused: P2PError | None = None
        for address in peer.addresses:
            try:
                return await self.dial(address, kind, peer.node_id)
            except HandshakeError as error:
                refused = error
            except P2PError as error:
                reasons.append(str(error))
        if refused is not None:
            raise refused
        tried = "; ".join(reasons) or "it has no address"
        raise ChannelClosedError(f"node {peer} cannot be reached: {tried}")

    async def dial(self, address: str, kind: str, expected: str = "") -> NodeStream:
        """Open an authenticated stream to whoever is at `address`.

        Args:
            address: ``host:port``.
            kind: what the stream is for.
            expected: the node that must be there; empty if that is not known.

        Raises:
            HandshakeError: it refused, or is somebody else.
            ChannelClosedError: it could not be reached.
        Cancellation closes what was half open.
        """
        wanted = parse_address(address)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                places = await resolve(wanted)
        except TimeoutError:
            raise ChannelClosedError(f"{address}: its name was not resolved in time") from None
        except OSError as error:
            raise ChannelClosedError(f"{address}: {error.strerror}") from None
        reason = "no address"
        for family, place in places:
            sock = socket.socket(family, socket.SOCK_STREAM)
            track(sock)
            stream = None
            try:
                sock.setblocking(False)
                async with asyncio.timeout(HANDSHAKE_S):
                    await connect(sock, place)
                if sock.getsockname() == sock.getpeername():
                    # The kernel may connect a socket to itself where nobody listens.
                    raise ConnectionRefusedError(errno.ECONNREFUSED, "itself")
                stream = await self._shake(sock, "dialer", address, kind, expected)
                return stream
            except TimeoutError:
                reason = f"no answer within {HANDSHAKE_S:g} s"
            except OSError as error:
                # The loop's own text hides the cause.
                reason = os.strerror(error.errno) if error.errno else str(error)
            finally:
                if stream is None:
                    sock.close()
        raise ChannelClosedError(f"{address}: {reason}")

    def _watch(self) -> None:
        """Take connections, unless too many are in their handshake: these wait in the backlog."""
        if self._listener is not None:
            loop = asyncio.get_running_loop()
            if len(self._arriving) < HALF_OPEN:
                loop.add_reader(self._listener.fileno(), self._accept)
            else:
                loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, place = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors, or the connection is gone again: others may still come.
            self._complain("accept", f"cannot accept a connection: {error.strerror}")
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(ACCEPT_PAUSE_S, self._watch)
            return
        track(sock)
        sock.setblocking(False)
        where = str(Address(*place[:2]))
        self._arriving.add(sock)
        self._watch()
        task = self._background.start(self._receive(sock, where), f"a connection from {where}")
        # Also where the task is cancelled before it begins.
        task.add_done_callback(lambda _: self._arrived(sock, failed=True))

    def _arrived(self, sock: socket.socket, *, failed: bool) -> None:
        """Note that a handshake has ended."""
        if sock in self._arriving:
            self._arriving.discard(sock)
            if failed:
                sock.close()
            self._watch()

    async def _receive(self, sock: socket.socket, where: str) -> None:
        try:
            stream = await self._shake(sock, "acceptor", where)
        except (P2PError, OSError) as error:
            if type(error) is HandshakeError or isinstance(error, OSError):
                # Nodes that start together knock before the door is open.
                logger.info("a connection was closed: %s", error)
            else:
                host = parse_address(where).host
                self._complain(
                    f"{host} {type(error).__name__}", f"a connection was closed: {error}"
                )
            return
        self._arrived(sock, failed=False)
        accept = self._serving.get(stream.identity.kind)
        if accept is None:
            stream.abort()
            return
        try:
            await accept(stream)
        except P2PError as error:
            stream.abort()
            logger.info("a stream of %s ended: %s", stream.peer, error)
        except Exception as error:
            stream.abort()
            logger.error("accepting %s of %s failed", stream.identity.kind, stream.peer)
            self._on_error(f"accepting {stream.identity.kind} of {stream.peer}", error)
        except BaseException:
            stream.abort()
            raise

    async def _shake(
        self, sock: socket.socket, role: Role, where: str, kind: str = "", expected: str = ""
    ) -> NodeStream:
        """Do the handshake on a connected socket, which stays the caller's when this raises."""
        identity = msgspec.structs.replace(
            self._identity,
            run=self.run,
            kind=kind,
            expected=expected,
            addresses=self._addresses(sock),
            transports=dict(self.me.transports),
        )
        nonce = secrets.token_bytes(NONCE_BYTES)
        shake = Handshake(role, identity, self._secret, nonce, where=where, admit=self._admit)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                while True:
                    if data := shake.data_to_send():
                        await loop.sock_sendall(sock, data)
                    if shake.done:
                        break
                    # Never more than is wanted: what follows belongs to the stream's user.
                    if data := await loop.sock_recv(sock, shake.wanted):
                        shake.receive(data)
                    else:
                        shake.end()
        except TimeoutError:
            shake.expire(HANDSHAKE_S)
        except ConnectionError:
            shake.end()
        if shake.error is not None:
            raise shake.error
        assert shake.peer is not None
        return NodeStream(sock, shake.peer, where)

    def _addresses(self, sock: socket.socket) -> tuple[str, ...]:
        """Return where the peer at the other end of `sock` reaches this node, best first."""
        addresses = list(self.me.addresses)
        if self._listener is None:
            return ()
        host, port = self._listener.getsockname()[:2]
        near = is_loopback(sock.getpeername()[0])
        if is_wildcard(host):
            # The address that this very connection uses is the surest.
            addresses.insert(0, str(Address(sock.getsockname()[0], port)))
        return tuple(
            each
            for each in dict.fromkeys(addresses)
            if near or not is_loopback(parse_address(each).host)
        )[:16]

    def _admit(self, peer: Identity) -> Refusal | None:
        if peer.kind not in self._serving:
            return Refusal("other", f"this node takes no {peer.kind!r} streams now")
        return None

    def _complain(self, key: str, text: str) -> None:
        """Log once for each key; strangers must not fill the log."""
        if key not in self._complaints and len(self._complaints) < _COMPLAINTS:
            self._complaints.add(key)
            logger.warning("%s", text)
