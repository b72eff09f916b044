"""Watching backward: which parameters get gradients, and when the outermost backward ends.

Each parameter has a tensor hook, which runs before its gradient is accumulated, and a
post-accumulate hook. The first hook of a backward opens it and queues a callback of the engine,
which runs after the last accumulation and before ``backward()`` returns. Hooks on the outputs of
the models open backwards that use no parameter.

What the engine does to us, and what is done about it: a checkpoint with ``use_reentrant=True``
runs backwards inside a backward, and only the end of the outermost counts; ``autograd.grad``
fires tensor hooks without accumulating anything, and is ignored; a backward that raised never
runs its callback, so what it opened is dropped when the next one begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.autograd import Variable, graph
from torch.utils.hooks import unserializable_hook

from p2pdpt.errors import SessionError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["BackwardHooks", "BackwardListener", "tensors_in"]

_ENGINE = graph._engine_run_backward.__code__


class BackwardListener(Protocol):
    """Who is told; an error raised by any of these is raised by ``backward()``."""

    def begin(self) -> bool:
        """Note that an outermost backward began; return whether to be told of its end."""

    def before(self, index: int) -> None:
        """Prepare parameter `index`, whose gradient is about to be accumulated."""

    def after(self, index: int) -> None:
        """Note that parameter `index` has been accumulated; it may come again."""

    def end(self) -> None:
        """Note that the outermost backward has accumulated everything."""

    def drop(self) -> None:
        """Note that the backward which began last has failed before its end."""


class _Nobody:
    """Listens when hooks have been removed."""

    def begin(self) -> bool:
        return False

    def before(self, index: int) -> None:
        pass

    def after(self, index: int) -> None:
        pass

    def end(self) -> None:
        pass

    def drop(self) -> None:
        pass


class _ForwardHook:
    """A hook that does not go along when its model is copied or pickled."""

    def __init__(self, told: Callable[..., None]) -> None:
        self._told = told

    def __call__(self, module: torch.nn.Module, inputs: Any, *output: Any) -> None:
        # Compiled code needs none of this: its parameters' own hooks fire.
        if not torch.compiler.is_compiling():
            self._told(*output)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> Any:
        return _no_hook_instead, ()


def _no_hook_instead() -> Callable[..., None]:
    return no_hook


def no_hook(*_: Any) -> None:
    """Stand where a session's hook was in a model that has been copied."""


class _Run(NamedTuple):
    """One call of the engine that is on this thread's stack."""

    accumulates: bool
    inputs: tuple[Any, ...]


def _engine_runs() -> list[_Run]:
    """Return the engine's calls on this thread's stack, innermost first."""
    runs = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _ENGINE:
            local = frame.f_locals
            positional = local.get("args", ())
            inputs = positional[3] if len(positional) > 3 else ()
            accumulates = bool(local.get("kwargs", {}).get("accumulate_grad", True))
            runs.append(_Run(accumulates, tuple(inputs or ())))
        frame = frame.f_back  # type: ignore[assignment]
    return runs


def tensors_in(value: Any, depth: int = 8) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and objects with attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, (str, bytes, int, float)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name, None), depth - 1)


class BackwardHooks:
    """Hooks on parameters and on the outputs of models, until ``remove``."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        modules: Sequence[torch.nn.Module],
        listener: BackwardListener,
    ) -> None:
        self._parameters = list(parameters)
        self._listener: BackwardListener = listener
        self._handles: list[RemovableHandle] = []
        # Graph tasks seen since the outermost began: whether hooks in them matter.
        self._tasks: dict[int, bool] = {}
        self._open = False
        self._generation = 0
        for index, parameter in enumerate(self._parameters):
            self._watch(index, parameter)
        for module in modules:
            before, after = _ForwardHook(self._forward_begins), _ForwardHook(self._forward_ended)
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after))

    def remove(self) -> None:
        """Take all hooks away; graphs that still hold some call into nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._generation += 1
        self._open = False
        self._tasks.clear()
        self._parameters = []
        # Graphs may live on, in frames of an error for instance; the session must not with them.
        self._listener = _Nobody()

    def _watch(self, index: int, parameter: torch.Tensor) -> None:
        # Hooks survive freezing but cannot be put on a frozen parameter.
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)

        def before(_: torch.Tensor) -> None:
            if self._counts():
                self._listener.before(index)

        def after(_: torch.Tensor) -> None:
            if self._counts():
                self._listener.after(index)

        for hook in (before, after):
            # A model may be saved whole; torch need not warn that they stay behind.
            unserializable_hook(hook)
        self._handles.append(parameter.register_hook(before))
        self._handles.append(parameter.register_post_accumulate_grad_hook(after))
        if frozen:
            parameter.requires_grad_(False)

    def _forward_begins(self) -> None:
        if self._open and not _engine_runs():
            self._discard()

    def _forward_ended(self, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._output_reached)

    def _output_reached(self, _: torch.Tensor) -> None:
        self._counts()

    def _counts(self) -> bool:
        """Return whether the hook that runs belongs to a backward that matters."""
        task = torch._C._current_graph_task_id()
        known = self._tasks.get(task)
        if known is None:
            known = self._enter(task)
        return known

    def _enter(self, task: int) -> bool:
        if not self._parameters:
            return False
        runs = _engine_runs()
        if len(runs) > 1:
            if not self._open:
                self._begin_nested()
            self._tasks[task] = True
            return True
        self._tasks.clear()
        if self._open:
            self._discard()
        matters = not runs or (runs[0].accumulates and self._reaches(runs[0].inputs))
        self._tasks[task] = matters
        if matters and self._listener.begin():
            self._generation += 1
            self._open = True
            generation = self._generation
            Variable._execution_engine.queue_callback(lambda: self._ended(generation))
        return matters

    def _begin_nested(self) -> None:
        if self._listener.begin():
            self._listener.drop()
            raise SessionError(
                "a backward inside a backward reached the model before the outer one did, so its "
                "end cannot be told; use torch.utils.checkpoint with use_reentrant=False, or "
                "checkpoint inside the model's forward rather than around the whole model"
            )

    def _reaches(self, inputs: tuple[Any, ...]) -> bool:
        """Return whether ``backward(inputs=...)`` accumulates into one of ours."""
        if not inputs:
            return True
        ours = {id(parameter) for parameter in self._parameters}
        return any(id(item) in ours for item in inputs)

    def _discard(self) -> None:
        self._open = False
        self._generation += 1
        self._listener.drop()

    def _ended(self, generation: int) -> None:
        if self._open and generation == self._generation:
            self._open = False
            self._tasks.clear()
            self._listener.end()
