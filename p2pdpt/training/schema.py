"""What the members' models must agree on, and how to say where they differ.

Gradients travel as flat buckets without names, so every member must hold the same parameters in
the same order, of the same shapes, types and memory layouts. A schema lists them; members
compare digests first and lists only when those differ.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

__all__ = ["Entry", "Schema", "dense_strides", "differences", "schema_of"]

LIMIT: Final = 10


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One parameter or buffer.

    Attributes:
        kind: ``parameter`` or ``buffer``.
        name: as in ``named_parameters``, with the model's number before it if there are several.
        shape: sizes.
        dtype: torch's name without the prefix.
        trainable: whether it wants gradients.
        strides: of the dense memory layout, empty for row-major.
        tied: the first name of the same tensor, empty if it is the first.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    strides: tuple[int, ...] = ()
    tied: str = ""

    def describe(self) -> str:
        """Return all but the name as a person would write it."""
        if self.tied:
            return f"tied to {self.tied}"
        text = f"{_sizes(self.shape)} {self.dtype}"
        if self.kind == "buffer":
            text += " buffer"
        elif not self.trainable:
            text += " frozen"
        if self.strides:
            text += f" with strides {_sizes(self.strides)}"
        return text


class Schema(msgspec.Struct, frozen=True, array_like=True):
    """A model's entries in order, and the settings that must agree."""

    entries: tuple[Entry, ...]
    settings: dict[str, str] = {}

    def encode(self) -> bytes:
        """Return msgpack; the same bytes for equal schemas."""
        return msgspec.msgpack.encode(self, order="sorted")

    def digest(self) -> bytes:
        """Return 32 bytes that are equal for equal schemas only."""
        return hashlib.sha256(self.encode()).digest()


def _sizes(numbers: Sequence[int]) -> str:
    return "(" + ",".join(str(number) for number in numbers) + ")"


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return strides, in elements, that fill exactly ``numel`` elements, like `tensor` if it does.

    A tensor with gaps or overlaps gets row-major strides.
    """
    row_major = [1] * tensor.dim()
    for dim in range(tensor.dim() - 2, -1, -1):
        row_major[dim] = row_major[dim + 1] * max(tensor.shape[dim + 1], 1)
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tuple(row_major)
    expected = 1
    for stride, size in sorted(
        (tensor.stride(dim), tensor.shape[dim]) for dim in range(tensor.dim())
    ):
        if size == 1:
            continue
        if stride != expected:
            return tuple(row_major)
        expected *= size
    return tuple(tensor.stride())


def schema_of(
    modules: Sequence[torch.nn.Module], settings: Mapping[str, str] | None = None
) -> Schema:
    """Return the schema of the modules' parameters and buffers, tied ones included."""
    entries: list[Entry] = []
    first: dict[int, str] = {}
    for kind, name, tensor in _named(modules):
        tied = first.setdefault(id(tensor), name)
        strides = dense_strides(tensor)
        plain = tensor.is_contiguous() or strides != tuple(tensor.stride())
        entries.append(
            Entry(
                kind=kind,
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                trainable=tensor.requires_grad,
                strides=() if plain else strides,
                tied="" if tied == name else tied,
            )
        )
    return Schema(tuple(entries), dict(settings or {}))


def _named(modules: Sequence[torch.nn.Module]) -> Iterable[tuple[str, str, torch.Tensor]]:
    for index, module in enumerate(modules):
        prefix = f"{index}." if len(modules) > 1 else ""
        for name, tensor in module.named_parameters(remove_duplicate=False):
            yield "parameter", prefix + name, tensor
        for name, buffer in module.named_buffers(remove_duplicate=False):
            yield "buffer", prefix + name, buffer


def differences(schemas: Mapping[str, Schema], limit: int = LIMIT) -> list[str]:
    """Return at most `limit` lines that say how the nodes' schemas differ, and how many more.

    Args:
        schemas: by node name, in rank order.
    Equal schemas give an empty list.
    """
    settings = _setting_differences({node: schema.settings for node, schema in schemas.items()})
    entries = _entry_differences(schemas)
    # Parameters in another order come to an optimizer in another order, too: the cause first.
    lines = [*settings, *entries] if entries else [*_order_differences(schemas), *settings]
    if len(lines) > limit:
        lines = [*lines[: limit - 1], f"and {len(lines) - limit + 1} more differences"]
    return lines


def _grouped(described: Mapping[str, str]) -> str:
    """Return ``text on node0, node1 vs text on node2``."""
    groups: dict[str, list[str]] = {}
    for node, text in described.items():
        groups.setdefault(text, []).append(node)
    return " vs ".join(f"{text} on {', '.join(nodes)}" for text, nodes in groups.items())


def _setting_differences(settings: Mapping[str, Mapping[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for values in settings.values() for key in values)
    lines = []
    for key in keys:
        described = {node: values.get(key, "absent") for node, values in settings.items()}
        if len(set(described.values())) > 1:
            lines.append(f"{key}: {_grouped(described)}")
    return lines


def _entry_differences(schemas: Mapping[str, Schema]) -> list[str]:
    tables = {
        node: {(entry.kind, entry.name): entry.describe() for entry in schema.entries}
        for node, schema in schemas.items()
    }
    keys = dict.fromkeys(key for table in tables.values() for key in table)
    lines = []
    for kind, name in keys:
        described = {node: table.get((kind, name), "absent") for node, table in tables.items()}
        if len(set(described.values())) > 1:
            lines.append(f"{name}: {_grouped(described)}")
    return lines


def _order_differences(schemas: Mapping[str, Schema]) -> list[str]:
    lines = []
    for kind in ("parameter", "buffer"):
        orders = {
            node: [entry.name for entry in schema.entries if entry.kind == kind]
            for node, schema in schemas.items()
        }
        for index, names in enumerate(zip(*orders.values(), strict=False)):
            if len(set(names)) > 1:
                by_node = dict(zip(orders, names, strict=True))
                plain = " vs ".join(dict.fromkeys(names))
                lines.append(
                    f"{kind} order differs at index {index}: {plain} ({_grouped(by_node)})"
                )
                break
    return lines
