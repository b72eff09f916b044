"""Who is at the other end: what two nodes say before anything else, on every connection.

    dialer                                   acceptor
    hello  (64 bytes: magic, version, nonce)  →
                                            ←  hello
    proof  HMAC(secret, "dialer", hellos)     →
                                            ←  proof  HMAC(secret, "acceptor", hellos, proof)
    identity, with its HMAC                   →
                                            ←  identity, with its HMAC

The hello keeps its length and layout in all versions of the protocol, so that nodes of different
versions can name each other's. Neither side tells its name or its run before the other has
proved that it holds the secret; without a secret (on loopback only) the key is empty. Each proof
covers both nonces and the role, so that neither replay nor reflection helps. What follows the
acceptor's identity belongs to whoever asked for the connection.

No clock, no socket, no randomness: the nonce is an argument, and the shell watches the deadline.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from p2pdpt.errors import (
    AuthenticationError,
    FrameError,
    HandshakeError,
    P2PError,
    VersionError,
    WrongRunError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["BODY_BYTES", "HELLO_BYTES", "PROTOCOL", "Handshake", "Identity", "Refusal", "Role"]

PROTOCOL: Final = 1
"""Version of everything that is said on a connection."""
MAGIC: Final = b"\x9fp2pdpt\n"
_HELLO: Final = struct.Struct("!8sHH20s32s")
HELLO_BYTES: Final = _HELLO.size
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
_HEAD: Final = struct.Struct("!BH")
BODY_BYTES: Final = 16 << 10
"""The longest message of the handshake after the hello."""
_WITH_SECRET: Final = 1
_PROOF, _IDENTITY, _REFUSAL = 1, 2, 3

Role = Literal["dialer", "acceptor"]
_Short = Annotated[str, msgspec.Meta(max_length=256)]


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself, once its peer has proved itself.

    Attributes:
        cluster: the nodes that may talk to each other.
        run: the run it takes part in; empty if in none.
        kind: what the stream is for; the dialer chooses.
        node_id: 16 hexadecimal digits, new for each incarnation.
        name: what people call it.
        package: version of p2pdpt.
        torch: version of torch; empty if it is not installed.
        python: version of Python.
        addresses: where it accepts connections, best first.
        transports: the endpoint of each transport that it offers.
        expected: the dialer: the node that it wants; empty if it knows only the address.
    """

    cluster: _Short
    node_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    run: _Short = ""
    kind: _Short = ""
    name: _Short = ""
    package: _Short = ""
    torch: _Short = ""
    python: _Short = ""
    addresses: Annotated[tuple[_Short, ...], msgspec.Meta(max_length=16)] = ()
    transports: Annotated[dict[_Short, _Short], msgspec.Meta(max_length=16)] = {}
    expected: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""


class Refusal(msgspec.Struct, frozen=True):
    """Why a connection is refused.

    Attributes:
        code: which error the refused side raises: ``secret``, ``run`` or ``other``.
        text: one line for people.
    """

    code: _Short
    text: Annotated[str, msgspec.Meta(max_length=2000)]


_REFUSED: Final[dict[str, type[HandshakeError]]] = {
    "secret": AuthenticationError,
    "run": WrongRunError,
}


class Handshake:
    """One side of a handshake.

    Feed it with ``receive``, send what ``data_to_send`` gives, until ``done``. Nothing here
    raises for what a peer does; see ``error``.

    Attributes:
        peer: the other side, once it has been admitted.
        error: why the connection must be closed, if so; send what is left first.
        done: whether nothing more is to be read.
    """

    def __init__(
        self,
        role: Role,
        me: Identity,
        secret: bytes | None,
        nonce: bytes,
        *,
        where: str,
        admit: Callable[[Identity], Refusal | None] = lambda peer: None,
    ) -> None:
        """Begin; the dialer has something to send at once.

        Args:
            role: who opened the connection.
            me: this node.
            secret: of the cluster, if it has one.
            nonce: 32 random bytes, never used before.
            where: address of the other side, for errors.
            admit: the acceptor's own conditions.
        """
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
        self.peer: Identity | None = None
        self.error: P2PError | None = None
        self.done = False
        self._role: Role = role
        self._me, self._key, self._where, self._admit = me, secret or b"", where, admit
        self._hello = _HELLO.pack(
            MAGIC,
            PROTOCOL,
            _WITH_SECRET if secret else 0,
            me.package.encode("ascii", "replace")[:20],
            nonce,
        )
        self._transcript = b""
        self._buffer = bytearray()
        self._out = bytearray()
        self._stage = "its hello"
        self._script = self._dial() if role == "dialer" else self._accept()
        self._wanted = next(self._script)

    @property
    def wanted(self) -> int:
        """How many more bytes to read before the next answer; 0 when done."""
        return 0 if self.done else self._wanted - len(self._buffer)

    def receive(self, data: bytes) -> None:
        """Take bytes from the peer; at most ``wanted`` of them."""
        if self.done:
            return
        self._buffer += data
        while not self.done and len(self._buffer) >= self._wanted:
            piece = bytes(self._buffer[: self._wanted])
            del self._buffer[: self._wanted]
            try:
                self._wanted = self._script.send(piece)
            except StopIteration:
                self.done = True
            except P2PError as error:
                self._fail(error)

    def end(self) -> None:
        """Note that the peer closed the connection."""
        if not self.done:
            self._fail(
                HandshakeError(
                    f"{self._where} closed the connection before it sent {self._stage}; "
                    "is it a p2pdpt node of this version?"
                )
            )

    def expire(self, seconds: float) -> None:
        """Note that the peer took too long."""
        if not self.done:
            self._fail(
                HandshakeError(f"{self._where} did not send {self._stage} within {seconds:g} s")
            )

    def data_to_send(self) -> bytes:
        """Return, once, what is to be sent."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def _fail(self, error: P2PError) -> None:
        self.error, self.done, self.peer = error, True, None

    def _dial(self) -> Generator[int, bytes, None]:
        self._out += self._hello
        theirs = yield HELLO_BYTES
        self._transcript = self._hello + theirs
        self._check_hello(theirs)
        self._stage = "its proof of the secret"
        self._prove("dialer")
        self._check_proof("acceptor", (yield from self._read(_PROOF)))
        self._stage = "its identity"
        self._introduce()
        self._meet("acceptor", (yield from self._read(_IDENTITY)))

    def _accept(self) -> Generator[int, bytes, None]:
        # The magic alone first: whoever speaks something else may never send 64 bytes.
        magic = yield len(MAGIC)
        self._check_magic(magic)
        theirs = magic + (yield HELLO_BYTES - len(MAGIC))
        self._out += self._hello
        self._transcript = theirs + self._hello
        self._check_hello(theirs)
        self._stage = "its proof of the secret"
        self._check_proof("dialer", (yield from self._read(_PROOF)))
        self._prove("acceptor")
        self._stage = "its identity"
        self._meet("dialer", (yield from self._read(_IDENTITY)))
        self._introduce()

    def _check_magic(self, magic: bytes) -> None:
        if magic != MAGIC:
            raise FrameError(f"{self._where} does not speak p2pdpt: it began with {magic!r}")

    def _check_hello(self, hello: bytes) -> None:
        magic, protocol, flags, package, _ = _HELLO.unpack(hello)
        self._check_magic(magic)
        if protocol != PROTOCOL:
            theirs = _printable(package.rstrip(b"\0").decode("ascii", "replace"))
            raise VersionError(
                f"protocol {protocol} (p2pdpt {theirs}) at {self._where}, {PROTOCOL} "
                f"(p2pdpt {self._me.package}) here; install the same version on both"
            )
        if bool(flags & _WITH_SECRET) != bool(self._key):
            has, lacks = ("this node", "it") if self._key else ("it", "this node")
            raise AuthenticationError(
                f"{self._where} is not of this cluster: {has} has a secret and {lacks} has none; "
                "give both the same secret file"
            )

    def _mac(self, label: str, body: bytes = b"") -> bytes:
        text = b"p2pdpt " + label.encode() + b"\0" + self._transcript + body
        return hmac.new(self._key, text, hashlib.sha256).digest()

    def _prove(self, role: Role) -> None:
        proof = self._mac(f"{role} proof")
        self._write(_PROOF, proof)
        # Whatever is said later covers the proofs, too.
        self._transcript += proof

    def _check_proof(self, role: Role, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._mac(f"{role} proof")):
            self._refuse("secret", "the secrets differ; give both nodes the same secret file")
            raise AuthenticationError(
                f"{self._where} does not hold this cluster's secret; give both nodes the same "
                "secret file"
            )
        self._transcript += proof

    def _introduce(self) -> None:
        body = msgspec.msgpack.encode(self._me)
        self._write(_IDENTITY, self._mac(f"{self._role} identity", body) + body)

    def _meet(self, role: Role, message: bytes) -> None:
        proof, body = message[:PROOF_BYTES], message[PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._mac(f"{role} identity", body)):
            raise AuthenticationError(f"the identity of {self._where} was changed on its way")
        try:
            peer = msgspec.msgpack.decode(body, type=Identity)
        except (msgspec.MsgspecError, ValueError) as error:
            raise FrameError(f"the identity of {self._where} cannot be read: {error}") from None
        for text in (peer.name, peer.package, peer.torch, peer.python, *peer.addresses):
            # They will be shown to people.
            if text != _printable(text):
                raise FrameError(f"the identity of {self._where} holds {text!r}")
        self._judge(peer)
        self.peer = peer

    def _judge(self, peer: Identity) -> None:
        me, shown = self._me, _printable(peer.name) or peer.node_id
        if peer.cluster != me.cluster:
            self._refuse(
                "run", f"this node belongs to cluster {me.cluster!r}, not {peer.cluster!r}"
            )
            raise WrongRunError(
                f"node {shown} at {self._where} belongs to cluster {_printable(peer.cluster)!r}, "
                f"this one to {me.cluster!r}"
            )
        if peer.run != me.run:
            said = f"belongs to run {me.run!r}, not {peer.run!r}" if me.run else "is in no run yet"
            self._refuse("run" if me.run else "other", f"this node {said}")
            theirs = f"belongs to run {_printable(peer.run)!r}" if peer.run else "is in no run yet"
            kind = WrongRunError if me.run and peer.run else HandshakeError
            raise kind(f"node {shown} at {self._where} {theirs}; this one is in {me.run!r}")
        wanted, found = (
            (me.expected, peer.node_id) if self._role == "dialer" else (peer.expected, me.node_id)
        )
        if wanted and wanted != found:
            self._refuse("other", f"this is node {me.node_id}, not the one that was expected")
            raise HandshakeError(f"{self._where} is node {found}, not {wanted}: it was restarted")
        if self._role == "acceptor" and (refusal := self._admit(peer)) is not None:
            self._refuse(refusal.code, refusal.text)
            raise HandshakeError(f"node {shown} at {self._where} was refused: {refusal.text}")

    def _refuse(self, code: str, text: str) -> None:
        self._write(_REFUSAL, msgspec.msgpack.encode(Refusal(code, text[:2000])))

    def _write(self, kind: int, body: bytes) -> None:
        if len(body) > BODY_BYTES:
            raise FrameError(f"this node's identity has {len(body)} bytes, more than {BODY_BYTES}")
        self._out += _HEAD.pack(kind, len(body)) + body

    def _read(self, kind: int) -> Generator[int, bytes, bytes]:
        found, length = _HEAD.unpack((yield _HEAD.size))
        limit = PROOF_BYTES if found == _PROOF else BODY_BYTES
        if found not in (kind, _REFUSAL) or length > limit or not length:
            raise FrameError(
                f"{self._where} sent message {found} of {length} bytes in place of {self._stage}"
            )
        body = yield length
        if found == _REFUSAL:
            try:
                refusal = msgspec.msgpack.decode(body, type=Refusal)
            except (msgspec.MsgspecError, ValueError):
                raise FrameError(f"{self._where} sent a refusal that cannot be read") from None
            refused = _REFUSED.get(refusal.code, HandshakeError)
            raise refused(f"{self._where} refused this node: {_printable(refusal.text)}")
        return body


def _printable(text: str) -> str:
    """Return what a peer wrote without anything that could steer a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text[:500])
