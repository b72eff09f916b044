"""The beginning of a session: the same model, seed and state on every member.

Schemas are compared before anything is sent; then the first member's parameters and buffers go
to all, bit by bit, so that different seeds at construction do no harm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from p2pdpt.dtypes import DTYPES
from p2pdpt.errors import SchemaError, SessionError
from p2pdpt.training.buckets import area_tensor
from p2pdpt.training.digest import state_digest
from p2pdpt.training.schema import Schema, differences

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from p2pdpt.training.agreement import Agreement
    from p2pdpt.training.waiting import Waiting

__all__ = ["agree_on_model", "agree_on_state", "spread_tensors"]

WAIT: Final = "p2pdpt.session(...), initial parameters"
STAGE_BYTES: Final = 16 << 20
# What one member may send in one gather, with room for what is around it.
LISTED_BYTES: Final = 7 << 20


class _Hello(msgspec.Struct, array_like=True):
    """What a member says first.

    Attributes:
        schema: digest of its schema.
        seed: it would use.
        state: digests of optimizer and other state, by name.
    """

    schema: bytes
    seed: int
    state: dict[str, str]


def agree_on_model(agreement: Agreement, schema: Schema, seed: int, state: dict[str, Any]) -> int:
    """Compare the members' models and state; return the first member's seed.

    Args:
        schema: of this member's models.
        seed: that this member would use.
        state: objects with ``state_dict()``, by the name that a person would know them by.

    Raises:
        SchemaError: models or settings differ; lists at most 10 differences.
        SessionError: optimizer or other state differs; names it.
    All members raise the same.
    """
    digests = {name: state_digest(thing.state_dict()) for name, thing in state.items()}
    hello = _Hello(schema.digest(), seed, digests)
    heard = agreement.gather("p2pdpt.session(...)", hello, _Hello)
    names = agreement.names
    if len({item.schema for item in heard}) > 1:
        schemas = agreement.gather("p2pdpt.session(...), models", _bounded(schema), Schema)
        found = differences(dict(zip(names, schemas, strict=True)))
        listed = "\n  ".join(found or ["beyond the first entries, which are equal"])
        raise SchemaError(
            f"the nodes' models differ:\n  {listed}\n"
            "Start the same script with the same options on every node"
        )
    agree_on_state(names, [item.state for item in heard])
    return heard[0].seed


def agree_on_state(names: Sequence[str], digests: Sequence[dict[str, str]]) -> None:
    """Check digests of state, given by node in rank order.

    Raises:
        SessionError: they differ; says which and on whom.
    """
    for what in digests[0]:
        groups: dict[str, list[str]] = {}
        for name, found in zip(names, digests, strict=True):
            groups.setdefault(found.get(what, ""), []).append(name)
        if len(groups) > 1:
            sides = " from that of ".join(", ".join(nodes) for nodes in groups.values())
            raise SessionError.of_all(
                f"the state of {what} differs at the start: that of {sides}. Load the same "
                "checkpoint into it on every node before p2pdpt.session(...), or on none"
            )


def _bounded(schema: Schema) -> Schema:
    """Return the schema, or as much of its beginning as may be sent."""
    entries = schema.entries
    while len(entries) > 1 and len(Schema(entries, schema.settings).encode()) > LISTED_BYTES:
        entries = entries[: len(entries) // 2]
    return Schema(entries, schema.settings)


def spread_tensors(waiting: Waiting, tensors: Iterable[torch.Tensor]) -> None:
    """Give every member the first member's values, bit by bit.

    Args:
        tensors: of equal types and shapes in equal order on all members, in any memory layout.

    Raises:
        PeerFailedError: a member failed; some tensors may have the new values.
    """
    listed = [tensor for tensor in tensors if tensor.numel()]
    group = waiting.group
    total = sum(tensor.numel() * tensor.element_size() for tensor in listed)
    if total == 0 or group.size == 1:
        return
    memory = group.allocate(DTYPES["uint8"], min(total, STAGE_BYTES))
    mine = area_tensor(memory.mine, memory.dtype)
    result = area_tensor(memory.result, memory.dtype)
    room, filled = memory.length, 0
    pieces: list[tuple[torch.Tensor, int]] = []

    def send() -> None:
        nonlocal filled
        waiting.wait(WAIT, "", group.broadcast(memory, root=0, name="start"))
        for piece, offset in pieces:
            piece.copy_(result[offset : offset + piece.numel()])
        pieces.clear()
        filled = 0

    with torch.no_grad():
        unpacked: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in listed:
            plain = tensor.detach().contiguous()
            if plain.data_ptr() != tensor.data_ptr():
                unpacked.append((tensor, plain))
            flat = plain.reshape(-1).view(torch.uint8)
            start = 0
            while start < flat.numel():
                take = min(room - filled, flat.numel() - start)
                piece = flat[start : start + take]
                mine[filled : filled + take].copy_(piece)
                pieces.append((piece, filled))
                start += take
                filled += take
                if filled == room:
                    send()
        if filled:
            send()
        for tensor, plain in unpacked:
            tensor.detach().copy_(plain)
    # The root is done before its data has arrived; nobody goes on to wait for something else.
    waiting.wait(WAIT, "", group.all_gather(b"", name="start"))
