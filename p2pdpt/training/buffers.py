"""Buffers that training changes, such as BatchNorm's running statistics, kept equal everywhere.

After each exchanged backward every floating-point buffer of the models' state that changed on
some member becomes the weighted mean over the members, by the same weights as the gradients.
Buffers that nobody changes are neither sent nor touched. Integer buffers start as the first
member's and are left alone: they count the same things everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _NormBase

from p2pdpt.errors import SessionError
from p2pdpt.training.buckets import Allocate, area_tensor, carrier, plan_buckets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from p2pdpt.dtypes import DType
    from p2pdpt.memory import BucketMemory

__all__ = ["BufferBucket", "BufferRef", "ModelBuffers", "persistent_buffers"]


@dataclass(frozen=True, slots=True, eq=False)
class BufferRef:
    """Where a model keeps a buffer; the tensor itself may be replaced there at any time."""

    name: str
    module: torch.nn.Module
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """The buffer as it is now.

        Raises:
            SessionError: it has become None.
        """
        tensor = self.module._buffers.get(self.key)
        if tensor is None:
            raise SessionError(f"buffer {self.name} was removed while the session ran")
        return tensor


class _Place:
    """One buffer's place in a bucket, and the value that all members hold of it."""

    def __init__(self, ref: BufferRef, mine: torch.Tensor, result: torch.Tensor) -> None:
        self.ref, self.mine, self.result = ref, mine, result
        self.agreed = ref.tensor.detach().clone(memory_format=torch.contiguous_format)
        # A buffer that joins because it changed has no value yet that all members hold.
        self.fresh = True

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` as flat real numbers."""
        flat = tensor.reshape(-1)
        return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


class BufferBucket:
    """Buffers of one element type, then a flag for each: whether it changed here.

    Attributes:
        number: of the bucket in the step.
        memory: its two areas.
    """

    def __init__(
        self,
        number: int,
        dtype: DType,
        refs: Sequence[tuple[BufferRef, int, int]],
        allocate: Allocate,
    ) -> None:
        """Allocate a bucket for buffers, each with its offset and length in elements."""
        self.number = number
        self._data = max(offset + length for _, offset, length in refs)
        self.memory: BucketMemory = allocate(dtype, self._data + len(refs))
        mine = area_tensor(self.memory.mine, dtype)
        result = mine if self.memory.in_place else area_tensor(self.memory.result, dtype)
        self._places = [
            _Place(ref, mine[offset : offset + length], result[offset : offset + length])
            for ref, offset, length in refs
        ]
        self._contribution = mine
        self._flags, self._changed = mine[self._data :], result[self._data :]

    @torch.no_grad()
    def settle(self, *, counts: bool = True) -> None:
        """Copy the buffers into the contribution; zeros, if it has weight 0 and does not count.

        Raises:
            SessionError: a buffer changed its type or shape since it was first seen.
        """
        flags = []
        if not counts:
            self._contribution.zero_()
            return
        for place in self._places:
            tensor = place.ref.tensor
            if tensor.shape != place.agreed.shape or tensor.dtype != place.agreed.dtype:
                raise SessionError(
                    f"buffer {place.ref.name} was {tuple(place.agreed.shape)} "
                    f"{place.agreed.dtype} and is {tuple(tensor.shape)} {tensor.dtype} now; "
                    "change the model before p2pdpt.session(...)"
                )
            flags.append(float(place.fresh or not torch.equal(tensor, place.agreed)))
            place.mine.copy_(place.values(tensor.detach()))
        self._flags.copy_(torch.tensor(flags))

    @torch.no_grad()
    def publish(self) -> None:
        """Give the buffers that anybody changed their mean, and the others the value they had.

        The means of equal numbers can differ from them in the last bit, so unchanged buffers
        must not take theirs.
        """
        for place, changed in zip(self._places, self._changed.ne(0).tolist(), strict=True):
            if changed:
                place.values(place.agreed).copy_(place.result)
                place.fresh = False
            # Not seen by autograd: batch statistics do not depend on the running ones, and a
            # graph that is kept for another backward must stay valid.
            place.ref.tensor.data.copy_(place.agreed)


class ModelBuffers:
    """The floating-point buffers of the models, and which of them are being averaged.

    Attributes:
        buckets: those that are exchanged in each step.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self.buckets: list[BufferBucket] = []
        self._idle: dict[str, BufferRef] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self._known: list[str] = []
        seen: set[int] = set()
        for number, model in enumerate(modules):
            prefix = f"{number}." if len(modules) > 1 else ""
            for ref in persistent_buffers(model):
                tensor = ref.tensor
                if id(tensor) in seen or not _averages(tensor):
                    continue
                seen.add(id(tensor))
                name = prefix + ref.name
                self._idle[name] = BufferRef(name, ref.module, ref.key)
                if isinstance(ref.module, _NormBase):
                    # Its forward writes the statistics without counting versions.
                    self._known.append(name)
        self.remember()

    @property
    def known(self) -> list[str]:
        """The buffers that training is known to change, to be averaged from the start."""
        return list(self._known)

    def remember(self) -> None:
        """Take the idle buffers as they are for unchanged."""
        self._versions = {name: _version(ref) for name, ref in self._idle.items()}

    def changed(self) -> list[str]:
        """Return the names of idle buffers that changed since ``remember``."""
        return [name for name, ref in self._idle.items() if _version(ref) != self._versions[name]]

    def grow(
        self, names: Iterable[str], number: int, limit: int, allocate: Allocate
    ) -> list[BufferBucket]:
        """Begin to average more buffers; return the new buckets, numbered from `number`.

        Names that are averaged already or unknown here are passed over.
        """
        wanted = set(names)
        refs = [ref for name, ref in self._idle.items() if name in wanted]
        for ref in refs:
            del self._idle[ref.name]
        sizes = [
            (
                carrier(ref.name, ref.tensor.dtype),
                ref.tensor.numel() * (2 if ref.tensor.is_complex() else 1),
            )
            for ref in refs
        ]
        grown = [
            BufferBucket(
                number + place,
                dtype,
                [(refs[item.index], item.offset, item.length) for item in planned],
                allocate,
            )
            for place, (dtype, planned) in enumerate(plan_buckets(sizes, limit, limit))
        ]
        self.buckets.extend(grown)
        return grown


def persistent_buffers(model: torch.nn.Module) -> Iterator[BufferRef]:
    """Yield the buffers that are part of the model's state, each once.

    Others (``persistent=False``) are caches of what can be computed, and may differ by member.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is None or key in module._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield BufferRef(f"{path}.{key}" if path else key, module, key)


def _averages(tensor: torch.Tensor) -> bool:
    """Return whether there is a mean of such buffers."""
    return str(tensor.dtype).removeprefix("torch.") in {
        "float32",
        "float64",
        "bfloat16",
        "float16",
        "complex64",
        "complex128",
    }


def _version(ref: BufferRef) -> tuple[int, int]:
    tensor = ref.module._buffers.get(ref.key)
    if tensor is None:
        return 0, 0
    return id(tensor), 0 if tensor.is_inference() else tensor._version
