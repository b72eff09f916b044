"""What members say to each other on control connections, and how it is framed.

A frame is one byte of kind, four of length, and a msgpack array. The kind bounds the length
before anything is read, and names the type that the body must have exactly; whatever is unknown
or malformed ends the connection with the reason.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec

from p2pdpt.errors import FrameError

__all__ = [
    "GATHER_BYTES",
    "Abandoned",
    "Adopt",
    "Control",
    "Decide",
    "Farewell",
    "Gather",
    "Heartbeat",
    "MemberEntry",
    "MessageReader",
    "Ok",
    "Peers",
    "Place",
    "Propose",
    "Released",
    "Started",
    "Status",
    "Vote",
    "Withdraw",
    "encode",
]

HEAD: Final = struct.Struct("!BI")
GATHER_BYTES: Final = 8 << 20
"""The most bytes of one member's payload of ``all_gather``."""

_Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
_MaybeId = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")]
_Short = Annotated[str, msgspec.Meta(max_length=256)]
_Addresses = Annotated[tuple[_Short, ...], msgspec.Meta(max_length=16)]
_Ids = Annotated[tuple[_Id, ...], msgspec.Meta(max_length=4096)]
_Topology = Annotated[str, msgspec.Meta(max_length=1024)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Control(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of all control messages."""


class Heartbeat(Control, frozen=True):
    """Say that this node's loop is running."""


class Adopt(Control, frozen=True):
    """Use this connection: of several between two nodes, the smaller id chooses one."""


class Place(Control, frozen=True):
    """Where a node may be reached.

    Attributes:
        node_id: who.
        addresses: ``host:port``, best first.
    """

    node_id: _Id
    addresses: _Addresses


class Peers(Control, frozen=True):
    """Tell which other nodes of the run this one is connected to."""

    places: Annotated[tuple[Place, ...], msgspec.Meta(max_length=4096)]


class Status(Control, frozen=True):
    """What a node brings to the forming of a view, and what it sees now.

    Attributes:
        version: counts the changes of `sees` and `settled`.
        name: what people call it.
        address: where it is reached.
        host: a digest that is equal for nodes on one machine.
        min_nodes: how many nodes it waits for, itself included.
        topology: what it was told to use.
        seed: what it was told to use, or drew.
        sees: the nodes that it is connected to.
        settled: whether it has tried to connect to all nodes that it knows of.
        bound: whose proposal it has voted for, if any.
    """

    version: _Count
    name: _Short
    address: _Short
    host: _Short
    min_nodes: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    topology: _Topology
    seed: _Count
    sees: _Ids
    settled: bool
    bound: _MaybeId = ""


class Propose(Control, frozen=True):
    """Ask the members named to form a view.

    Attributes:
        number: counts this proposer's proposals.
        members: who.
        versions: of each member's status that this builds on.
    """

    number: _Count
    members: _Ids
    versions: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=4096)]


class Vote(Control, frozen=True):
    """Agree to a proposal, and to no other until it is withdrawn or its proposer is lost."""

    number: _Count


class Withdraw(Control, frozen=True):
    """Take a proposal back; its voters are free."""

    number: _Count


class MemberEntry(Control, frozen=True):
    """One member of a view that was decided, in rank order."""

    node_id: _Id
    name: _Short
    address: _Short
    host: Annotated[int, msgspec.Meta(ge=0, lt=4096)]


class Decide(Control, frozen=True):
    """The view: sent by its proposer once all members have voted for it.

    Attributes:
        number: of the view.
        members: in rank order.
        seed: of the run.
        topology: of the run, as a person would write it.
    """

    number: _Count
    members: Annotated[tuple[MemberEntry, ...], msgspec.Meta(min_length=1, max_length=4096)]
    seed: _Count
    topology: _Topology


class Started(Control, frozen=True):
    """Tell a node that the run has its view; it may be a member that missed ``Decide``."""

    view: Decide


class Gather(Control, frozen=True):
    """One member's payload of one ``all_gather``.

    Attributes:
        name: of the collective.
        sequence: how many of that name came before.
        payload: up to ``GATHER_BYTES``.
    """

    name: _Short
    sequence: _Count
    payload: Annotated[bytes, msgspec.Meta(max_length=GATHER_BYTES)]


class Ok(Control, frozen=True):
    """The sender holds the complete result of a step."""

    view: _Count
    step: _Count
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]


class Abandoned(Control, frozen=True):
    """The sender has ended a round without its result: whoever is in it waits in vain.

    Attributes:
        view, stream, step, attempt, bucket: which round.
        reason: the error that ended it there; empty if it was cancelled.
    """

    view: _Count
    stream: _Count
    step: _Count
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    bucket: _Count
    reason: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class Farewell(Control, frozen=True):
    """A member's last message.

    Attributes:
        steps: how many steps it has sealed.
        finished: for each collective's stream, how many it has finished.
        error: why it ends, if it failed.
        culprit: the member whose failure made it fail, if so.
        reason: the evidence against the culprit.
    """

    steps: _Count
    finished: Annotated[dict[_Count, _Count], msgspec.Meta(max_length=4096)] = {}
    error: Annotated[str, msgspec.Meta(max_length=4000)] | None = None
    culprit: _MaybeId = ""
    reason: Annotated[str, msgspec.Meta(max_length=4000)] = ""


class Released(Control, frozen=True):
    """The sender has finished every collective that a leaving member has finished.

    Until then what the leaver sent may still wait in its connections.
    """


_SMALL: Final = 1 << 10
_LISTS: Final = 1 << 20
_KINDS: Final[dict[int, tuple[type[Control], int]]] = {
    1: (Heartbeat, 8),
    2: (Adopt, 8),
    3: (Peers, _LISTS),
    4: (Status, _LISTS),
    5: (Propose, _LISTS),
    6: (Vote, _SMALL),
    7: (Withdraw, _SMALL),
    8: (Decide, _LISTS),
    9: (Started, _LISTS),
    10: (Gather, GATHER_BYTES + 4096),
    11: (Ok, _SMALL),
    12: (Farewell, 128 << 10),
    13: (Released, 8),
    14: (Abandoned, 8 << 10),
}
_NUMBERS: Final = {kind: number for number, (kind, _) in _KINDS.items()}
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final = {number: msgspec.msgpack.Decoder(kind) for number, (kind, _) in _KINDS.items()}


def encode(message: Control) -> bytes:
    """Return the frame of a message.

    Raises:
        FrameError: it is longer than its kind may be.
    """
    body = _ENCODER.encode(message)
    number = _NUMBERS[type(message)]
    limit = _KINDS[number][1]
    if len(body) > limit:
        name = type(message).__name__
        raise FrameError(f"a {name} message of {len(body)} bytes exceeds the limit of {limit}")
    return HEAD.pack(number, len(body)) + body


class MessageReader:
    """Turn bytes, split anyhow, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def receive(self, data: bytes | bytearray | memoryview) -> list[Control]:
        """Take bytes and return the messages that are complete.

        Raises:
            FrameError: the bytes are no messages; the connection must be closed.
        """
        buffer = self._buffer
        buffer += data
        messages: list[Control] = []
        start = 0
        while len(buffer) - start >= HEAD.size:
            number, length = HEAD.unpack_from(buffer, start)
            if number not in _KINDS:
                raise FrameError(f"bad message: there is no kind {number}")
            kind, limit = _KINDS[number]
            if length > limit:
                raise FrameError(
                    f"bad message: {kind.__name__} of {length} bytes exceeds the limit of {limit}"
                )
            end = start + HEAD.size + length
            if len(buffer) < end:
                break
            try:
                messages.append(_DECODERS[number].decode(bytes(buffer[start + HEAD.size : end])))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise FrameError(f"bad message: {kind.__name__}: {error}") from None
            start = end
        if start:
            del buffer[:start]
        return messages
