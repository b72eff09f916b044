"""What members of one host say to each other to share memory, and how they prove themselves.

A view shares memory only if every pair of its members can. So each member first says where it
stands, over the control connections; then each pair makes a connection that can carry
descriptors, and proves that what one side writes the other reads; and at last the outcome of
every pair is told to all. Whoever holds the same answers decides alike.

The tokens are random, made for one view, and told over control connections only, so a proof
(HMAC-SHA256, RFC 2104) shows that its sender is a member; the names of both sides are in it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

from p2pdpt.errors import FrameError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "MESSAGE_BYTES",
    "PAYLOAD_BYTES",
    "PROBE_BYTES",
    "Announce",
    "Hand",
    "Hello",
    "HostMessage",
    "Refusal",
    "Standing",
    "Welcome",
    "decode",
    "encode",
    "obstacle",
    "prove",
    "told",
    "verdict",
]

PAYLOAD_BYTES: Final = 1 << 12
"""The most bytes that a member says about memory that it shares."""
MESSAGE_BYTES: Final = 1 << 13
"""The longest message."""
PROBE_BYTES: Final = 64
"""Random bytes in the memory that proves the sharing."""

_T = TypeVar("_T")
_Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
_Proof = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Text = Annotated[str, msgspec.Meta(max_length=1000)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Standing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a member stands.

    Attributes:
        reason: why it cannot share memory; empty if it can.
        required: whether it was told to use shared memory and nothing else.
        version: of the compiled executor; all must have the same.
        user: the number of its user.
        address: name of its abstract socket.
        token: 32 random bytes that prove whoever connects to it.
    """

    reason: _Text
    required: bool
    version: Annotated[int, msgspec.Meta(ge=0)] = 0
    user: Annotated[int, msgspec.Meta(ge=0)] = 0
    address: Annotated[bytes, msgspec.Meta(max_length=100)] = b""
    token: Annotated[bytes, msgspec.Meta(max_length=32)] = b""


class HostMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of what is said on a connection that carries descriptors."""


class Hello(HostMessage, frozen=True, tag=1):
    """Who connects; comes with the dialer's probe."""

    node_id: _Id
    proof: _Proof


class Welcome(HostMessage, frozen=True, tag=2):
    """The acceptor has read the dialer's probe; comes with its own."""

    proof: _Proof


class Refusal(HostMessage, frozen=True, tag=3):
    """Why the acceptor closes the connection."""

    reason: _Text


class Announce(HostMessage, frozen=True, tag=4):
    """The sender shares memory under a name.

    Attributes:
        name: equal on all members, and never used twice.
        payload: what it says about it.
    """

    name: _Name
    payload: Annotated[bytes, msgspec.Meta(max_length=PAYLOAD_BYTES)]


class Hand(HostMessage, frozen=True, tag=5):
    """The descriptors of a name; sent to who has announced it, too."""

    name: _Name


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Hello | Welcome | Refusal | Announce | Hand)


def encode(message: HostMessage) -> bytes:
    """Return a message's bytes; each is sent as one datagram."""
    data = _ENCODER.encode(message)
    if len(data) > MESSAGE_BYTES:
        raise FrameError(f"{type(message).__name__} of {len(data)} bytes exceeds {MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> HostMessage:
    """Return a message.

    Raises:
        FrameError: the bytes are none; the connection must be closed.
    """
    try:
        message: HostMessage = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"bad message between members of one host: {error}") from None
    return message


def told(payload: bytes, kind: type[_T]) -> _T:
    """Return what a member told all others.

    Raises:
        FrameError: it is something else.
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"a member says what cannot be read: {error}") from None


def prove(token: bytes, view: int, sender: str, receiver: str, probe: bytes = b"") -> bytes:
    """Return the proof that `sender` is a member and, with `probe`, has read its bytes.

    Args:
        token: the receiver's.
        view: number of the view.
        sender, receiver: node ids.
        probe: what the receiver wrote into its memory.
    """
    said = b"|".join((b"p2pdpt shared memory", b"%d" % view, sender.encode(), receiver.encode()))
    return hmac.new(token, said + b"|" + probe, hashlib.sha256).digest()


def obstacle(
    names: Sequence[str], hosts: Sequence[int], standings: Sequence[Standing], topology: str
) -> str:
    """Return why these members need not try to share memory, or an empty text.

    Args:
        names, hosts, standings: of the members, by rank.
        topology: why buckets could not be exchanged so, or empty.
    """
    for name, standing in zip(names, standings, strict=True):
        if standing.reason:
            return f"{name}: {standing.reason}"
    first = standings[0]
    for rank, standing in enumerate(standings):
        pair = f"{names[0]} and {names[rank]}"
        if hosts[rank] != hosts[0]:
            return f"{pair} are on different hosts"
        if standing.user != first.user:
            return f"{pair} belong to different users ({first.user} and {standing.user})"
        if standing.version != first.version:
            return f"{pair} have different compiled modules"
    return topology


def verdict(names: Sequence[str], failures: Sequence[Mapping[int, str]]) -> str:
    """Return the first reason why a pair cannot share memory, or an empty text.

    Args:
        names: of the members, by rank.
        failures: for each rank, why it cannot share with those that it has connected to.
    """
    for rank, failed in enumerate(failures):
        for other in sorted(failed):
            if 0 <= other < len(names):
                return f"{names[rank]} and {names[other]}: {failed[other]}"
    return ""
