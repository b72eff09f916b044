"""Descriptors between members on one host: SCM_RIGHTS over abstract unix sockets (Linux).

Each member listens at a random abstract name while its view forms; of each pair the lower rank
connects. Both sides look at the user that the kernel names (SO_PEERCRED), prove themselves, and
read each other's memory (:mod:`p2pdpt.protocol.sharing`). Nothing is in any file system, and the
kernel closes everything with the process.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import copy
import errno
import functools
import hmac
import mmap
import os
import secrets
import socket
import struct
import sys
from collections import deque
from typing import TYPE_CHECKING, Final

from p2pdpt.errors import ChannelClosedError, FrameError, P2PError, UnavailableError
from p2pdpt.memory import Area, expect_sealed
from p2pdpt.protocol.sharing import (
    MESSAGE_BYTES,
    PROBE_BYTES,
    Announce,
    Hand,
    Hello,
    HostMessage,
    Refusal,
    Standing,
    Welcome,
    decode,
    encode,
    prove,
)
from p2pdpt.runtime.sockets import track

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["HostDoor"]

PAIR_S: Final = 5.0
"""How long a pair may take to prove that it shares memory, in seconds."""
DESCRIPTORS: Final = 8
"""The most descriptors of one message."""
AHEAD: Final = 4096
"""How many names a member may announce that this one has not shared yet."""
GIVEN_UP: Final = 256
"""How many names this member remembers that it has given up."""
HALF_OPEN: Final = 128
"""How many connections may be unproven at once."""
_RETRY_S: Final = 0.01


class _Link:
    """One connection: messages with descriptors, each whole."""

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[_Link, HostMessage, list[int]], None],
        on_closed: Callable[[_Link, P2PError], None],
    ) -> None:
        self.rank = -1
        self._sock: socket.socket | None = sock
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_closed = on_message, on_closed
        self._queue: deque[tuple[bytes, Sequence[int], Callable[[], None] | None]] = deque()
        self._writing = False
        self._loop.add_reader(sock.fileno(), self._read)

    def user(self) -> int:
        """Return the number of the user at the other end, as the kernel knows it."""
        assert self._sock is not None
        size = struct.calcsize("3i")
        found = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack("iII", found)[1])

    def send(
        self,
        message: HostMessage,
        descriptors: Sequence[int] = (),
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Send, now or later; the descriptors must stay open until `sent` is called."""
        self._queue.append((encode(message), descriptors, sent))
        if not self._writing:
            self._flush()

    def forget(self, descriptors: Sequence[int]) -> None:
        """Do not send what still waits with these very `descriptors`."""
        self._queue = deque(each for each in self._queue if each[1] is not descriptors)

    def close(self, error: P2PError | None = None) -> None:
        """Close; with `error`, tell why. May be called twice."""
        sock, self._sock = self._sock, None
        if sock is None:
            return
        self._loop.remove_reader(sock.fileno())
        if self._writing:
            self._loop.remove_writer(sock.fileno())
        sock.close()
        self._queue.clear()
        if error is not None:
            self._on_closed(self, error)

    def _flush(self) -> None:
        sock = self._sock
        while sock is not None and self._queue:
            data, descriptors, sent = self._queue[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            try:
                sock.sendmsg([data], rights if descriptors else (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._write_later(sock, True)
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    # So many descriptors are under way that the kernel wants them read first.
                    self._write_later(sock, False)
                    self._loop.call_later(_RETRY_S, self._flush)
                    return
                self.close(ChannelClosedError(f"connection lost: {error.strerror}"))
                return
            self._queue.popleft()
            if sent is not None:
                sent()
        if sock is not None:
            self._write_later(sock, False)

    def _write_later(self, sock: socket.socket, wait: bool) -> None:
        if wait and not self._writing:
            self._loop.add_writer(sock.fileno(), self._flush)
        elif self._writing and not wait:
            self._loop.remove_writer(sock.fileno())
        self._writing = wait

    def _read(self) -> None:
        # A few at a time, so that others have their turn.
        for _ in range(16):
            sock = self._sock
            if sock is None:
                return
            try:
                data, rights, flags, _ = sock.recvmsg(
                    MESSAGE_BYTES, socket.CMSG_SPACE(DESCRIPTORS * 4), socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.close(ChannelClosedError(f"connection lost: {error.strerror}"))
                return
            descriptors = array.array("i")
            for level, kind, content in rights:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    whole = len(content) // descriptors.itemsize * descriptors.itemsize
                    descriptors.frombytes(content[:whole])
            received = list(descriptors)
            try:
                if not data:
                    raise ChannelClosedError("the connection was closed")
                if flags & socket.MSG_CTRUNC:
                    raise FrameError(
                        "descriptors of shared memory were lost: this process has too many files "
                        "open; raise the limit (ulimit -n)"
                    )
                if flags & socket.MSG_TRUNC:
                    raise FrameError(f"a message has more than {MESSAGE_BYTES} bytes")
                # Whoever takes descriptors takes them out of the list.
                self._on_message(self, decode(data), received)
            except (OSError, P2PError) as error:
                failed = error if isinstance(error, P2PError) else FrameError(str(error))
                self.close(failed)
                return
            finally:
                _close_all(received)


class _Call:
    """One name that members share memory under."""

    def __init__(self) -> None:
        self.announced: dict[int, bytes] = {}
        self.handed: dict[int, list[int]] = {}
        self.descriptors: list[int] = []
        self.future: asyncio.Future[None] | None = None
        self.unsent = 0


class HostDoor:
    """One member's connections to all others of its view, all on its host.

    Attributes:
        on_announced: called with a name when another member begins to share it.
    """

    def __init__(
        self,
        rank: int,
        ids: Sequence[str],
        view: int,
        on_lost: Callable[[int, P2PError], None],
    ) -> None:
        """Make a door that is closed until ``listen``.

        Args:
            rank: this member's place.
            ids: node ids of the members, by rank.
            view: number of the view.
            on_lost: called with rank and reason when a connection ends, once ``begin`` was called.

        Raises:
            UnavailableError: this machine cannot do it; the text says why.
        """
        if reason := _unavailable():
            raise UnavailableError(reason)
        self.on_announced: Callable[[str], None] | None = None
        self._rank, self._ids, self._view, self._on_lost = rank, list(ids), view, on_lost
        self._loop = asyncio.get_running_loop()
        self._token = secrets.token_bytes(32)
        self._tokens: list[bytes] = []
        self._listener: socket.socket | None = None
        self._unproven: set[_Link] = set()
        self._links: dict[int, _Link] = {}
        self._lost: dict[int, P2PError] = {}
        self._calls: dict[str, _Call] = {}
        self._ahead = [0] * len(ids)
        self._given_up: deque[str] = deque(maxlen=GIVEN_UP)
        self._begun = False
        self._error: BaseException | None = None
        self._probe = Area(PROBE_BYTES, "p2pdpt-probe")
        if not self._probe.sealed:
            self._probe.close()
            raise UnavailableError("this kernel cannot share memory read-only; Linux 5.1 can")
        self._probe.buffer[:] = secrets.token_bytes(PROBE_BYTES)

    def listen(self) -> tuple[bytes, bytes]:
        """Listen; return the address and the token that others need.

        Raises:
            UnavailableError: the kernel refuses.
        """
        address = b"\0p2pdpt-" + secrets.token_hex(16).encode()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        track(sock)
        try:
            sock.setblocking(False)
            sock.bind(address)
            sock.listen(HALF_OPEN)
        except OSError as error:
            sock.close()
            raise UnavailableError(f"no abstract socket: {error.strerror}") from None
        self._listener = sock
        return address, self._token

    async def connect(self, standings: Sequence[Standing]) -> dict[int, str]:
        """Connect to all higher ranks; return why it failed, for each where it did.

        Args:
            standings: of all members, by rank.
        """
        self._tokens = [standing.token for standing in standings]
        # Whoever connected before waits in the backlog: now its greeting can be answered.
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)
        others = range(self._rank + 1, len(self._ids))
        found = await asyncio.gather(*(self._pair(other, standings[other]) for other in others))
        return {other: reason for other, reason in zip(others, found, strict=True) if reason}

    def begin(self) -> None:
        """All pairs are connected: accept nobody else, and tell of losses from now on."""
        self._shut()
        self._begun = True
        for rank, error in self._lost.items():
            self._on_lost(rank, error)

    async def share(
        self, name: str, payload: bytes, descriptors: Sequence[int]
    ) -> list[tuple[bytes, list[int]] | None]:
        """Give `payload` and `descriptors` to every other member that calls with `name`.

        Any number of names may be shared at once, and in any order. `descriptors` must stay open
        until this returns; those returned are the caller's to close.

        Args:
            name: 1 to 256 characters, never used twice.
            payload: up to ``PAYLOAD_BYTES``.
            descriptors: up to ``DESCRIPTORS``.
        Returns what the others gave, in rank order, None at the own place.

        Raises:
            PeerFailedError: whatever ``fail`` was given.
        Cancellation closes what was received; the others wait for a member that never comes.
        """
        if self._error is not None:
            raise copy.copy(self._error) from self._error.__cause__
        call = self._calls.setdefault(name, _Call())
        if call.future is not None:
            raise ChannelClosedError(f"{name} is being shared already")
        call.future = self._loop.create_future()
        call.descriptors = list(descriptors)
        call.unsent = len(self._ids) - 1
        for rank in call.announced:
            self._ahead[rank] -= 1
        try:
            for link in list(self._links.values()):
                link.send(Announce(name, payload))
            for rank in list(call.announced):
                self._hand(name, call, rank)
            self._settle(call)
            await call.future
        except BaseException:
            self._given_up.append(name)
            for received in call.handed.values():
                _close_all(received)
            raise
        finally:
            del self._calls[name]
            for link in self._links.values():
                link.forget(call.descriptors)
        return [
            (call.announced[rank], call.handed[rank]) if rank != self._rank else None
            for rank in range(len(self._ids))
        ]

    def fail(self, error: BaseException) -> None:
        """Make all that wait and all that share later raise `error`."""
        if self._error is None:
            self._error = error
        for call in self._calls.values():
            if call.future is not None and not call.future.done():
                call.future.set_exception(copy.copy(error))

    def close(self) -> None:
        """Close all connections; whoever waits raises. May be called twice."""
        self._begun = False
        self.fail(ChannelClosedError("the group has left"))
        self._shut()
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._probe.close()

    # Proving pairs.

    def _shut(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        for link in self._unproven:
            link.close()
        self._unproven.clear()

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                # None is left, or this process has no descriptor for it: the dialer will tell.
                return
            track(sock)
            sock.setblocking(False)
            if len(self._unproven) >= HALF_OPEN:
                sock.close()
                continue
            self._unproven.add(_Link(sock, self._greet, self._gone))

    def _greet(self, link: _Link, message: HostMessage, descriptors: list[int]) -> None:
        """Answer the first message of whoever has connected, then take the others."""
        if link not in self._unproven:
            self._receive(link, message, descriptors)
            return
        if not isinstance(message, Hello) or len(descriptors) != 1:
            raise FrameError("bad message: a member says hello first")
        me = self._ids[self._rank]
        rank = self._ids.index(message.node_id) if message.node_id in self._ids else -1
        reason = ""
        proof = prove(self._token, self._view, message.node_id, me)
        if not hmac.compare_digest(proof, message.proof) or not 0 <= rank < self._rank:
            reason = "it is not the member that it says it is"
        elif rank in self._links:
            reason = "it is connected already"
        elif link.user() != os.geteuid():
            reason = f"it belongs to user {link.user()}, not to {os.geteuid()}"
        else:
            try:
                probe = _read_probe(descriptors[0])
            except (OSError, P2PError) as error:
                reason = f"its memory cannot be read: {error}"
        if reason:
            link.send(Refusal(reason))
            raise FrameError(f"refused: {reason}")
        self._unproven.discard(link)
        link.rank = rank
        self._links[rank] = link
        answer = prove(self._tokens[rank], self._view, me, message.node_id, probe)
        link.send(Welcome(answer), [self._probe.fd])

    async def _pair(self, other: int, standing: Standing) -> str:
        """Connect to one member; return why that failed, or an empty text."""
        answer: asyncio.Future[tuple[HostMessage, bytes]] = self._loop.create_future()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        track(sock)
        sock.setblocking(False)
        link: _Link | None = None

        def take(link: _Link, message: HostMessage, descriptors: list[int]) -> None:
            if answer.done():
                self._receive(link, message, descriptors)
            else:
                answer.set_result((message, _read_probe(descriptors[0]) if descriptors else b""))

        def end(link: _Link, error: P2PError) -> None:
            if not answer.done():
                answer.set_exception(error)
            else:
                self._gone(link, error)

        me, peer = self._ids[self._rank], self._ids[other]
        try:
            async with asyncio.timeout(PAIR_S):
                # A full backlog does not tell when it has room again.
                while (code := sock.connect_ex(standing.address)) == errno.EAGAIN:  # noqa: ASYNC110
                    await asyncio.sleep(_RETRY_S)
                if code == errno.ECONNREFUSED:
                    return (
                        "the socket of the one cannot be seen by the other; containers that are "
                        "to share memory need one network namespace"
                    )
                if code:
                    return os.strerror(code)
                link = _Link(sock, take, end)
                if link.user() != standing.user:
                    return f"somebody else answers there, user {link.user()}"
                proof = prove(standing.token, self._view, me, peer)
                link.send(Hello(me, proof), [self._probe.fd])
                message, probe = await answer
            if isinstance(message, Refusal):
                return message.reason
            expected = prove(self._token, self._view, peer, me, bytes(self._probe.buffer))
            if not isinstance(message, Welcome) or not hmac.compare_digest(expected, message.proof):
                return "somebody else answers there"
            if len(probe) != PROBE_BYTES:
                return "no memory came with the answer"
            link.rank = other
            self._links[other] = link
            return ""
        except TimeoutError:
            return f"no answer within {PAIR_S:g} s"
        except (OSError, P2PError) as error:
            return str(error)
        finally:
            if answer.done() and not answer.cancelled():
                answer.exception()
            if other not in self._links:
                if link is not None:
                    link.close()
                sock.close()

    def _gone(self, link: _Link, error: P2PError) -> None:
        if link in self._unproven:
            self._unproven.discard(link)
        elif self._begun:
            self._on_lost(link.rank, error)
        else:
            self._lost[link.rank] = error

    # Sharing.

    def _receive(self, link: _Link, message: HostMessage, descriptors: list[int]) -> None:
        rank = link.rank
        if isinstance(message, Announce):
            if message.name in self._given_up:
                return
            call = self._calls.setdefault(message.name, _Call())
            if rank in call.announced:
                raise FrameError(f"bad message: {message.name} is announced twice")
            call.announced[rank] = message.payload
            if call.future is not None:
                self._hand(message.name, call, rank)
                return
            self._ahead[rank] += 1
            if self._ahead[rank] > AHEAD:
                raise FrameError(f"bad message: more than {AHEAD} names ahead of this member")
            if self.on_announced is not None:
                self.on_announced(message.name)
        elif isinstance(message, Hand):
            found = self._calls.get(message.name)
            # Whoever has given up a name is still handed what is under way; it is closed.
            if found is not None and found.future is not None and rank not in found.handed:
                found.handed[rank] = descriptors[:]
                descriptors.clear()
                self._settle(found)
        else:
            raise FrameError(f"bad message: {type(message).__name__} between proven members")

    def _hand(self, name: str, call: _Call, rank: int) -> None:
        """Give a member our descriptors, now that it is known to expect them."""
        if rank in self._links:
            sent = functools.partial(self._handed, call)
            self._links[rank].send(Hand(name), call.descriptors, sent)

    def _handed(self, call: _Call) -> None:
        call.unsent -= 1
        self._settle(call)

    def _settle(self, call: _Call) -> None:
        others = len(self._ids) - 1
        if call.unsent or len(call.handed) < others or len(call.announced) < others:
            return
        if call.future is not None and not call.future.done():
            call.future.set_result(None)


def _unavailable() -> str:
    """Return why this platform cannot share memory between processes, or an empty text."""
    if sys.platform != "linux":
        return f"shared memory needs Linux, not {sys.platform}"
    return ""


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    descriptors.clear()


def _read_probe(descriptor: int) -> bytes:
    """Return what another member wrote into its memory.

    Raises:
        FrameError: it could be changed under our hands, or is too small.
    """
    expect_sealed(descriptor, PROBE_BYTES)
    with mmap.mmap(descriptor, PROBE_BYTES, prot=mmap.PROT_READ) as mapped:
        return mapped[:]
