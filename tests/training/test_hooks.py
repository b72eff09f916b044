"""What torch's engine does with hooks, case by case, and what is made of it."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from p2pdpt.errors import SessionError
from p2pdpt.training.hooks import BackwardHooks, tensors_in


class Record:
    """A listener that notes what it is told."""

    def __init__(self, exchanges: bool = True) -> None:
        self.told: list[Any] = []
        self.exchanges = exchanges
        self.fails_at: str = ""

    def _tell(self, what: Any) -> None:
        self.told.append(what)
        if what == self.fails_at:
            raise SessionError(f"asked to fail at {what}")

    def begin(self) -> bool:
        self._tell("begin")
        return self.exchanges

    def before(self, index: int) -> None:
        self._tell(("before", index))

    def after(self, index: int) -> None:
        self._tell(("after", index))

    def end(self) -> None:
        self._tell("end")

    def drop(self) -> None:
        self._tell("drop")

    def take(self) -> list[Any]:
        told, self.told = self.told, []
        return told


def once(*indices: int) -> list[Any]:
    """Return what an ordinary backward tells for parameters in the order they fire."""
    return ["begin", *(x for i in indices for x in (("before", i), ("after", i))), "end"]


def watched(model: nn.Module, record: Record | None = None) -> tuple[Record, BackwardHooks]:
    record = record or Record()
    return record, BackwardHooks(list(model.parameters()), [model], record)


class Two(nn.Module):
    """Two parameters used one after the other: 0 first in forward, so last in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([2.0]))
        self.b = nn.Parameter(torch.tensor([3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.a * self.b


X = torch.ones(1)


def fired(told: list[Any]) -> list[int]:
    return [entry[1] for entry in told if entry[0] == "after"]


def test_a_backward_begins_fires_each_parameter_once_and_ends() -> None:
    model = Two()
    record, _ = watched(model)
    model(X).sum().backward()
    told = record.take()
    assert told[0] == "begin" and told[-1] == "end"
    assert sorted(fired(told)) == [0, 1]
    assert told.index(("before", 0)) < told.index(("after", 0))


def test_a_parameter_used_often_fires_once() -> None:
    model = Two()
    record, _ = watched(model)
    (model(X) + model(X) * model.a).sum().backward()
    assert sorted(fired(record.take())) == [0, 1]


def test_an_unused_parameter_does_not_fire() -> None:
    model = Two()
    record, _ = watched(model)
    (X * model.a).sum().backward()
    assert record.take() == once(0)


def test_each_backward_of_a_retained_graph_counts() -> None:
    model = Two()
    record, _ = watched(model)
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    first = record.take()
    loss.backward()
    assert record.take() == first


def test_two_losses_in_one_call_are_one_backward() -> None:
    model = Two()
    record, _ = watched(model)
    y = model(X)
    torch.autograd.backward([y.sum(), (y * 2).sum()])
    told = record.take()
    assert told.count("begin") == told.count("end") == 1
    assert sorted(fired(told)) == [0, 1]


def test_autograd_grad_is_ignored_and_the_backward_after_it_is_not() -> None:
    model = Two()
    record, _ = watched(model)
    x = torch.ones(1, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    torch.autograd.grad(model(x).sum(), [model.a])
    assert record.take() == []
    (slope**2).sum().backward()
    assert sorted(fired(record.take())) == [0, 1]


def test_backward_into_chosen_inputs() -> None:
    model = Two()
    record, _ = watched(model)
    x = torch.ones(1, requires_grad=True)
    model(x).sum().backward(inputs=[x])
    assert record.take() == []
    model(x).sum().backward(inputs=[model.a])
    assert record.take() == once(0)


def test_a_backward_that_uses_no_parameter_is_told_by_the_output() -> None:
    class Sometimes(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    record, _ = watched(Sometimes())
    model = Sometimes()
    record, _ = watched(model)
    model(torch.ones(1, requires_grad=True)).sum().backward()
    assert record.take() == ["begin", "end"]


@pytest.mark.parametrize("shape", ["tuple", "dict", "dataclass", "nested"])
def test_outputs_in_containers_are_found(shape: str) -> None:
    @dataclass
    class Out:
        logits: torch.Tensor
        note: str = ""

    class Wraps(Two):
        def forward(self, x: torch.Tensor) -> Any:
            y = x * 2
            forms: dict[str, Any] = {
                "tuple": (y, None),
                "dict": {"y": y},
                "dataclass": Out(y),
                "nested": [{"deep": (y,)}],
            }
            return forms[shape]

    model = Wraps()
    record, _ = watched(model)
    (found,) = tensors_in(model(torch.ones(1, requires_grad=True)))
    found.sum().backward()
    assert record.take() == ["begin", "end"]


def test_tensors_are_found_in_order_and_nothing_else() -> None:
    a, b = torch.ones(1), torch.ones(2)
    assert [*tensors_in(OrderedDict(x=a, y=("text", 1, None, [b])))] == [a, b]
    assert [*tensors_in(object())] == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_the_model_end_with_the_outermost_backward(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)
            self.head = nn.Linear(2, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=reentrant)
            out: torch.Tensor = self.head(x)
            return out

    model = Checkpointed()
    record, _ = watched(model)
    model(torch.ones(3, 2, requires_grad=True)).sum().backward()
    told = record.take()
    assert told.count("begin") == told.count("end") == 1
    assert told[-1] == "end"
    # With reentrant checkpoints the shared layer fires in each inner backward.
    assert fired(told).count(0) == (2 if reentrant else 1)


def test_a_reentrant_checkpoint_around_the_whole_model_is_refused_by_name() -> None:
    model = Two()
    record, _ = watched(model)
    out = checkpoint(model, torch.ones(1, requires_grad=True), use_reentrant=True)
    with pytest.raises(SessionError, match="use_reentrant=False"):
        out.sum().backward()
    assert record.take() == ["begin", "drop"]


def test_local_backwards_fire_without_an_end() -> None:
    model = Two()
    record, _ = watched(model, Record(exchanges=False))
    out = checkpoint(model, torch.ones(1, requires_grad=True), use_reentrant=True)
    out.sum().backward()
    told = record.take()
    assert "end" not in told and "drop" not in told
    assert sorted(fired(told)) == [0, 1]


def test_an_exception_in_backward_is_dropped_at_the_next_forward_or_backward() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("broken on purpose")

    model = Two()
    record, _ = watched(model)

    def broken() -> torch.Tensor:
        y: torch.Tensor = Breaks.apply(X * model.a)  # type: ignore[no-untyped-call]
        return (y * model.b).sum()

    with pytest.raises(ValueError, match="on purpose"):
        broken().backward()
    told = record.take()
    assert told[0] == "begin" and "end" not in told
    out = model(X)
    assert record.take() == ["drop"]
    out.sum().backward()
    assert sorted(fired(record.take())) == [0, 1]
    # Without a forward of the model in between.
    with pytest.raises(ValueError, match="on purpose"):
        broken().backward()
    record.take()
    (X * model.a).sum().backward()
    assert record.take() == ["drop", *once(0)]


def test_a_custom_function_that_returns_none_fires() -> None:
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return x * w

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0], None

    model = Two()
    record, _ = watched(model)
    y: torch.Tensor = Stops.apply(X * model.b, model.a)  # type: ignore[no-untyped-call]
    y.sum().backward()
    told = record.take()
    assert ("after", 1) in told
    assert model.a.grad is None


def test_hooks_survive_freezing_and_can_be_put_on_frozen_parameters() -> None:
    model = Two()
    model.a.requires_grad_(False)
    record, _ = watched(model)
    assert not model.a.requires_grad
    model(X).sum().backward()
    assert record.take() == once(1)
    model.a.requires_grad_(True)
    model.b.requires_grad_(False)
    model(X).sum().backward()
    assert record.take() == once(0)


def test_sparse_gradients_fire() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    record, _ = watched(model)
    model(torch.tensor([1, 1])).sum().backward()
    assert record.take() == once(0)


@pytest.mark.parametrize("moment", ["begin", "end"])
def test_what_a_listener_raises_is_raised_by_backward(moment: str) -> None:
    model = Two()
    record, _ = watched(model)
    record.fails_at = moment
    with pytest.raises(SessionError, match=f"fail at {moment}"):
        model(X).sum().backward()
    record.fails_at = ""
    record.take()
    model(X).sum().backward()
    told = record.take()
    assert told[-1] == "end" and sorted(fired(told)) == [0, 1]


def test_nothing_is_told_after_removal() -> None:
    model = Two()
    record, hooks = watched(model)
    kept = model(X).sum()
    hooks.remove()
    kept.backward()
    model(X).sum().backward()
    assert record.take() == []


def test_forward_without_gradients_puts_no_hooks() -> None:
    model = Two()
    record, _ = watched(model)
    with torch.no_grad():
        assert model(X).item() == 6.0
    assert record.take() == []


def test_copies_of_a_model_are_not_watched() -> None:
    model = Two()
    record, _ = watched(model)
    model(X).sum().backward()
    record.take()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(X).sum().backward()
        other(torch.ones(1, requires_grad=True)).sum().backward()
    assert record.take() == []


def test_a_compiled_model_is_watched_like_its_own() -> None:
    model = Two()
    record, _ = watched(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(X).sum().backward()
        told = record.take()
        assert told[0] == "begin" and told[-1] == "end"
        assert sorted(fired(told)) == [0, 1]
