"""Digests of tensors and of state: equal exactly when names, shapes, types and bits are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from p2pdpt.training.buffers import persistent_buffers

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["module_digest", "named_state", "state_digest", "tensor_digest"]


def tensor_digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the SHA-256 over names, types, shapes and bits in the order given, as hex."""
    sha = hashlib.sha256()
    for name, tensor in named:
        sha.update(name.encode() + b"\0")
        _tensor(sha, tensor)
    return sha.hexdigest()


def named_state(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, then buffers that belong to the state, of each module in turn.

    Names have the module's number before them if there are several; tied tensors come once.
    """
    listed = list(modules)
    for index, module in enumerate(listed):
        prefix = f"{index}." if len(listed) > 1 else ""
        for name, parameter in module.named_parameters():
            yield prefix + name, parameter
        for ref in persistent_buffers(module):
            yield prefix + ref.name, ref.tensor


def module_digest(modules: Iterable[torch.nn.Module]) -> str:
    """Return the digest of all parameters and of the buffers that belong to the state."""
    return tensor_digest(named_state(modules))


def state_digest(state: object) -> str:
    """Return the digest of a ``state_dict``: nested mappings, sequences, tensors and scalars.

    Objects of other types count with their type's name only.
    """
    sha = hashlib.sha256()
    _state(sha, state)
    return sha.hexdigest()


def _tensor(sha: _Hash, tensor: torch.Tensor) -> None:
    sha.update(f"{tensor.dtype} {tuple(tensor.shape)}\0".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        sha.update(flat.view(torch.uint8).numpy().data)


def _state(sha: _Hash, state: Any) -> None:
    if isinstance(state, torch.Tensor):
        sha.update(b"t")
        _tensor(sha, state)
    elif isinstance(state, Mapping):
        sha.update(f"m{len(state)}\0".encode())
        for key, value in state.items():
            _state(sha, key)
            _state(sha, value)
    elif isinstance(state, (list, tuple)):
        sha.update(f"s{len(state)}\0".encode())
        for value in state:
            _state(sha, value)
    elif state is None or isinstance(state, (bool, int, float, str, bytes)):
        sha.update(f"{type(state).__name__} {state!r}\0".encode())
    else:
        sha.update(f"o{type(state).__qualname__}\0".encode())
