"""Cutting a batch into parts along its first dimension, whatever containers it is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from p2pdpt.errors import SessionError

__all__ = ["batch_length", "cut"]


def batch_length(batch: Any) -> int:
    """Return how many samples a batch has: the first dimension of its first tensor or array.

    A batch without any is a sequence of samples, and its length counts.

    Raises:
        SessionError: there is nothing to count.
    """
    found = _first_length(batch)
    if found is None and isinstance(batch, Sequence):
        found = len(batch)
    if found is None:
        raise SessionError(
            f"cannot tell how many samples a batch of type {type(batch).__name__} has; "
            "yield tensors, or tuples, lists or dicts of them, whose first dimension is the batch"
        )
    return found


def _first_length(batch: Any) -> int | None:
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return int(batch.shape[0]) if batch.ndim else None
    for item in _items(batch):
        found = _first_length(item)
        if found is not None:
            return found
    return None


def _items(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple)):
        return list(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, each.name) for each in fields(batch)]
    return []


def cut(batch: Any, start: int, stop: int, length: int | None = None) -> Any:
    """Return samples `start` to `stop` (exclusive) of a batch, in the same containers.

    Tensors and arrays are views. Lists and tuples of `length` plain values are cut like tensors;
    other containers are gone into; values without a first dimension are kept whole.

    Args:
        length: samples in the batch; counted if not given.

    Raises:
        SessionError: a tensor has another first dimension than `length`, or cannot be cut.
    """
    whole = batch_length(batch) if length is None else length
    if isinstance(batch, torch.nn.utils.rnn.PackedSequence):
        raise SessionError(
            "a PackedSequence cannot be cut into parts; yield padded tensors and lengths, and "
            "pack inside the training loop"
        )
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        if not batch.ndim:
            return batch
        if batch.shape[0] != whole:
            raise SessionError(
                f"a batch holds tensors with first dimensions {whole} and {batch.shape[0]}, so "
                "it cannot be cut by samples; use a map-style dataset, or "
                "s.split(loader, per_node=True)"
            )
        return batch[start:stop]
    if isinstance(batch, Mapping):
        parts = {key: cut(value, start, stop, whole) for key, value in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        if _first_length(batch) is None:
            return batch[start:stop] if len(batch) == whole else batch
        items = [cut(value, start, stop, whole) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if is_dataclass(batch) and not isinstance(batch, type):
        values = {each.name: getattr(batch, each.name) for each in fields(batch)}
        return replace(batch, **{k: cut(v, start, stop, whole) for k, v in values.items()})
    return batch
