"""Parameters in flat buckets: gradients are views of them, and leave as one piece.

A bucket holds parameters of one element type, in reverse order of registration (about the order
in which backward finishes them), then one flag for each: whether this member has a gradient for
it. The flags travel inside the reduced data, so afterwards everybody knows what anybody used.
The first bucket is small so that the exchange begins early, as in PyTorch DDP (Li et al., VLDB
2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from p2pdpt.dtypes import DTYPES, DType
from p2pdpt.errors import SessionError
from p2pdpt.training.schema import dense_strides

if TYPE_CHECKING:
    from p2pdpt.memory import BucketMemory

__all__ = ["GradientBucket", "Planned", "Slot", "area_tensor", "carrier", "plan_buckets"]

FIRST_BYTES: Final = 1 << 20
ALIGN_BYTES: Final = 16
_COMPLEX: Final = {"complex64": "float32", "complex128": "float64"}

Allocate = Callable[[DType, int], "BucketMemory"]


@dataclass(frozen=True, slots=True)
class Planned:
    """Where one tensor lies: item `index` of the list planned, at `offset` elements of a bucket."""

    index: int
    offset: int
    length: int


def carrier(name: str, dtype: torch.dtype) -> DType:
    """Return the element type in which a tensor's values travel; complex ones as pairs.

    Raises:
        SessionError: values of `dtype` have no mean or cannot be exchanged; names the tensor.
    """
    plain = str(dtype).removeprefix("torch.")
    found = DTYPES.get(_COMPLEX.get(plain, plain))
    if found is None or not found.inexact:
        raise SessionError(
            f"parameter {name} is of type {plain}, whose gradients cannot be averaged; "
            f"use {', '.join(key for key, value in DTYPES.items() if value.inexact)} "
            f"or {' or '.join(_COMPLEX)}, or freeze it"
        )
    return found


def plan_buckets(
    tensors: Sequence[tuple[DType, int]], limit: int, first: int = FIRST_BYTES
) -> list[tuple[DType, list[Planned]]]:
    """Divide tensors into buckets; a pure function, the same on every member.

    Args:
        tensors: for each, its element type and length in elements, in order of registration.
        limit: bytes after which a bucket is closed; a larger tensor has one to itself.
        first: the same for the first bucket of each element type.
    Returns buckets in the order in which backward is expected to fill them.
    """
    done: list[tuple[DType, list[Planned]]] = []
    open_: dict[DType, list[Planned]] = {}
    used: dict[DType, int] = {}
    budgets: dict[DType, int] = {}
    for index in reversed(range(len(tensors))):
        dtype, length = tensors[index]
        align = max(ALIGN_BYTES // dtype.itemsize, 1)
        offset = -(-used.get(dtype, 0) // align) * align
        budget = budgets.setdefault(dtype, min(first, limit))
        if open_.get(dtype) and (offset + length) * dtype.itemsize > budget:
            done.append((dtype, open_.pop(dtype)))
            budgets[dtype] = limit
            offset = 0
        open_.setdefault(dtype, []).append(Planned(index, offset, length))
        used[dtype] = offset + length
    done.extend(open_.items())
    return done


def area_tensor(array: Any, dtype: DType) -> torch.Tensor:
    """Return the flat tensor that shares the memory of an area's numpy array."""
    tensor: torch.Tensor = torch.from_numpy(array)
    wanted: torch.dtype = getattr(torch, dtype.name)
    return tensor if tensor.dtype == wanted else tensor.view(wanted)


def _shaped(area: torch.Tensor, planned: Planned, like: torch.Tensor) -> torch.Tensor:
    """Return the part of `area` as a tensor shaped and laid out like `like`."""
    part = area[planned.offset : planned.offset + planned.length]
    if like.is_complex():
        part = part.view(like.dtype)
    return part.as_strided(tuple(like.shape), dense_strides(like), part.storage_offset())


def same_memory(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Return whether two tensors are the same elements in the same layout.

    Identity is no criterion: ``module.to(memory_format=...)`` exchanges a gradient's memory
    behind the same object.
    """
    return (
        tensor.layout == torch.strided
        and tensor.data_ptr() == view.data_ptr()
        and tensor.dtype == view.dtype
        and tensor.shape == view.shape
        and tensor.stride() == view.stride()
    )


class Slot:
    """One parameter's place in a bucket.

    Gradients are aliases of the views kept here, never the views themselves: whoever has a
    gradient may exchange its memory, and ``module.to(...)`` does.

    Attributes:
        name: of the parameter.
        parameter: whose gradient lives here.
        number: of the slot in its bucket.
        mine: view of the contribution, in the parameter's shape.
        result: view of the result; shares memory with `mine` in a bucket that works in place.
    """

    __slots__ = ("in_place", "mine", "name", "number", "parameter", "result")

    def __init__(
        self,
        name: str,
        parameter: torch.Tensor,
        number: int,
        mine: torch.Tensor,
        result: torch.Tensor,
        in_place: bool,
    ) -> None:
        self.name, self.parameter, self.number = name, parameter, number
        self.mine, self.result, self.in_place = mine, result, in_place

    def before(self) -> None:
        """Take a sealed gradient back as the base of what backward is about to add."""
        grad = self.parameter.grad
        if grad is not None and not self.in_place and same_memory(grad, self.result):
            self.mine.copy_(grad)
            self.parameter.grad = self.mine.detach()

    def absorb(self) -> bool:
        """Bring the gradient, wherever it is, into ``mine``; return whether there is one.

        Raises:
            SessionError: the parameter changed its type or shape since the session began.
        """
        grad = self.parameter.grad
        if grad is None:
            return False
        if same_memory(grad, self.mine):
            return True
        if grad.dtype != self.mine.dtype or grad.shape != self.mine.shape:
            raise SessionError(
                f"parameter {self.name} was {tuple(self.mine.shape)} {self.mine.dtype} when the "
                f"session began and is {tuple(grad.shape)} {grad.dtype} now; change the model "
                "before p2pdpt.session(...)"
            )
        if grad.is_sparse:
            self.mine.zero_().add_(grad.detach())
        else:
            self.mine.copy_(grad.detach())
        self.parameter.grad = self.mine.detach()
        return True

    def clear(self) -> None:
        """Contribute nothing."""
        self.mine.zero_()

    def release(self) -> None:
        """Let the parameter keep its gradient outside of the bucket."""
        grad = self.parameter.grad
        if grad is not None and (same_memory(grad, self.mine) or same_memory(grad, self.result)):
            self.parameter.grad = grad.clone()

    def publish(self, used: bool) -> None:
        """Show the result, or that nobody has a gradient, in ``parameter.grad``."""
        self.parameter.grad = self.result.detach() if used else None


@dataclass(eq=False)
class GradientBucket:
    """One bucket of gradients.

    Attributes:
        number: of the bucket in the step.
        memory: its two areas.
        slots: the parameters.
        waiting: how many parameters have not fired in the backward that runs.
        launched: whether it has left in the backward that runs.
    """

    number: int
    memory: BucketMemory
    slots: list[Slot]
    extra: int
    waiting: int = 0
    launched: bool = field(default=False)

    @classmethod
    def build(
        cls,
        number: int,
        dtype: DType,
        planned: Iterable[Planned],
        parameters: Sequence[tuple[str, torch.Tensor]],
        allocate: Allocate,
        extra: int = 0,
    ) -> GradientBucket:
        """Allocate a bucket for planned parameters, with `extra` elements after the flags."""
        listed = list(planned)
        data = max((item.offset + item.length for item in listed), default=0)
        memory = allocate(dtype, data + len(listed) + extra)
        mine = area_tensor(memory.mine, dtype)
        result = mine if memory.in_place else area_tensor(memory.result, dtype)
        slots = []
        for place, item in enumerate(listed):
            name, parameter = parameters[item.index]
            view = _shaped(mine, item, parameter)
            other = view if memory.in_place else _shaped(result, item, parameter)
            slots.append(Slot(name, parameter, place, view, other, memory.in_place))
        bucket = cls(number, memory, slots, extra)
        bucket._mine, bucket._result, bucket._data = mine, result, data
        return bucket

    _mine: torch.Tensor = field(init=False, repr=False)
    _result: torch.Tensor = field(init=False, repr=False)
    _data: int = field(init=False, default=0)

    def open(self) -> None:
        """Begin a backward."""
        self.waiting = len(self.slots)
        self.launched = False

    @torch.no_grad()
    def settle(self, extra: Sequence[float] = (), *, counts: bool = True) -> None:
        """Complete the contribution: every gradient in place, zeros elsewhere, and the flags.

        Args:
            extra: elements after the flags.
            counts: False for a contribution of weight 0: zeros, since infinities times 0 are not.
        """
        if not counts:
            self._mine.zero_()
            return
        flags = []
        for slot in self.slots:
            slot.before()
            present = slot.absorb()
            if not present:
                slot.clear()
            flags.append(float(present))
        tail = self._mine[self._data :]
        tail.copy_(torch.tensor([*flags, *extra], dtype=torch.float32))

    def publish(self) -> None:
        """Point the gradients at the sealed result."""
        end = self._data + len(self.slots)
        used = self._result[self._data : end].ne(0).tolist()
        for slot, anybody in zip(self.slots, used, strict=True):
            slot.publish(anybody)

    def read_extra(self) -> list[float]:
        """Return the reduced elements after the flags."""
        values: list[float] = self._result[self._data + len(self.slots) :].float().tolist()
        return values
