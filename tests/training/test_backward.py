"""The hard cases of backward, each against one process that has all samples."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from p2pdpt.errors import PeerFailedError, SchemaError, SessionError

Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]
TINY = 0.0002
"""MiB of a bucket: a few parameters each."""


def batch(step: int, size: int = 12, width: int = 4) -> torch.Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(step))


def seeded(make: Build, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, yours = [*one.state_dict().values()], [*other.state_dict().values()]
    return all(torch.equal(a, b) for a, b in zip(mine, yours, strict=True))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def compare(
    arena: Any,
    build: Build,
    loss: Loss,
    *,
    size: int = 3,
    steps: int = 6,
    zero: Callable[[torch.optim.Optimizer, int], None] = lambda o, step: o.zero_grad(),
    backward: Callable[[torch.Tensor], None] = lambda value: value.backward(),
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    before: Callable[[nn.Module, int], None] = lambda model, step: None,
    **options: Any,
) -> tuple[nn.Module, list[Any]]:
    """Train on `size` nodes and alone, and compare; return a node's model and the sessions."""
    models = [seeded(build, seed) for seed in range(size)]
    sessions = []

    def train(rank: int) -> None:
        model = models[rank]
        optim = optimizer(model)
        s = arena.session(rank, model, optim, bucket_mb=TINY, **options)
        sessions.append(s)
        with s:
            for step in range(steps):
                for (x,) in s.split([(batch(step),)]):
                    before(model, step)
                    backward(loss(model, x, step))
                    optim.step()
                    zero(optim, step)

    alone = copy.deepcopy(models[0])
    arena.run(size, train)
    optim = optimizer(alone)
    for step in range(steps):
        before(alone, step)
        backward(loss(alone, batch(step), step))
        optim.step()
        zero(optim, step)
    assert all(same(models[0], model) for model in models[1:])
    assert float((flat(models[0]) - flat(alone)).norm() / flat(alone).norm()) < 1e-6
    for one, other in zip(models[0].parameters(), alone.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
    return models[0], sessions


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def plain(model: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
    out: torch.Tensor = model(x)
    return (out**2).mean()


@pytest.mark.parametrize("to_none", [True, False])
def test_both_ways_of_zeroing(arena: Any, to_none: bool) -> None:
    compare(arena, mlp, plain, zero=lambda o, step: o.zero_grad(set_to_none=to_none))


def test_without_zeroing_gradients_add_up(arena: Any) -> None:
    compare(arena, mlp, plain, zero=lambda o, step: o.zero_grad() if step % 3 == 2 else None)


def test_zeroing_and_clipping_in_place_between_backwards(arena: Any) -> None:
    def clip(model: nn.Module, step: int) -> None:
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        elif step:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()

    compare(arena, mlp, plain, zero=lambda o, step: None, before=clip)


def test_gradients_assigned_by_hand_count(arena: Any) -> None:
    def assign(model: nn.Module, step: int) -> None:
        first = next(model.parameters())
        first.grad = torch.full_like(first, 0.1)

    compare(arena, mlp, plain, before=assign)


def test_overlap_off_gives_the_same(arena: Any) -> None:
    compare(arena, mlp, plain, overlap=False)


def test_buckets_leave_while_backward_runs(arena: Any) -> None:
    _, sessions = compare(arena, mlp, plain)
    log = [key for key, rank in arena.hub.log if rank == 0 and key[0] in ("exchange", "seal")]
    # Step 0 learns; from then on all but the last bucket leave early, in order of backward.
    later = [key[3] for key in log if key[0] == "exchange" and key[1] == 3]
    assert later == sorted(later) and len(later) > 1
    assert sessions[0].rounds == 6


def test_unused_parameters_keep_no_gradient_and_are_named_once(
    arena: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Aux(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.aux = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.body(x)
            return out

    with caplog.at_level(logging.WARNING):
        model, _ = compare(arena, Aux, plain)
    assert model.aux.weight.grad is None  # type: ignore[union-attr]
    (note,) = [r.getMessage() for r in caplog.records]
    assert "step 0 for aux.weight, aux.bias" in note


def test_strict_unused_is_an_error_in_the_same_backward(arena: Any) -> None:
    models = [nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)]) for _ in range(2)]

    def train(rank: int) -> None:
        with arena.session(rank, models[rank], strict_unused=True):
            models[rank][0](batch(0)).sum().backward()

    for outcome in arena.outcomes(2, train):
        assert isinstance(outcome, SessionError | PeerFailedError)
        assert "no gradient in step 0 for 1.weight, 1.bias" in str(outcome)


def test_parameters_used_on_some_nodes_only(arena: Any) -> None:
    """One process with both kinds of samples sees zeros for the others."""
    models = [nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)}) for _ in range(2)]
    alone = copy.deepcopy(models[0])
    x = batch(0)

    def train(rank: int) -> None:
        model = models[rank]
        optim = sgd(model)
        with arena.session(rank, model, optim):
            for _ in range(4):
                model["ab"[rank]](x).mean().backward()
                optim.step()
                optim.zero_grad()

    arena.run(2, train)
    optim = sgd(alone)
    for _ in range(4):
        ((alone["a"](x).mean() + alone["b"](x).mean()) / 2).backward()
        optim.step()
        optim.zero_grad()
    assert same(*models)
    assert float((flat(models[0]) - flat(alone)).norm()) < 1e-6


def test_a_node_whose_backward_uses_no_parameter_takes_part(arena: Any) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
            out: torch.Tensor = x * 2 if skip else self.layer(x)
            return out

    models = [Skips() for _ in range(2)]

    def train(rank: int) -> torch.Tensor:
        with arena.session(rank, models[rank]):
            x = batch(0).requires_grad_(True)
            models[rank](x, rank == 1).sum().backward()
            grad = models[rank].layer.bias.grad
        assert grad is not None
        return grad

    assert [grad.tolist() for grad in arena.run(2, train)] == [[6.0] * 4] * 2


def test_tied_parameters_travel_once(arena: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Linear(4, 6, bias=False)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate: torch.Tensor = torch.tanh(self.emb(x)).mean(1, keepdim=True)
            out: torch.Tensor = gate * self.head(x)
            return out

    model, _ = compare(arena, Tied, plain, size=2)
    assert model.get_parameter("emb.weight") is model.head.weight  # type: ignore[union-attr]
    # 24 weights, a flag and a control element.
    lengths = {key for key, _ in arena.hub.log if key[0] == "exchange" and key[1] == 1}
    assert len(lengths) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_with_a_shared_layer(arena: Any, reentrant: bool) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_(True)
            for _ in range(3):
                x = torch.tanh(checkpoint(self.layer, x, use_reentrant=reentrant))
            out: torch.Tensor = self.head(x)
            return out

    compare(arena, Deep, plain)


def test_a_second_firing_after_leaving_is_refused_by_name(arena: Any) -> None:
    class Late(nn.Module):
        reentrant = False

        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if self.reentrant:
                x = checkpoint(self.layer, x, use_reentrant=True)
            out: torch.Tensor = self.layer(x)
            return out

    models = [Late() for _ in range(2)]

    def train(rank: int) -> None:
        model = models[rank]
        with arena.session(rank, model, sgd(model), bucket_mb=TINY / 4):
            for reentrant in (False, False, True):
                model.reentrant = reentrant
                model(batch(0)).sum().backward()

    for outcome in arena.outcomes(2, train):
        assert isinstance(outcome, SessionError | PeerFailedError)
        assert "second gradient in one backward" in str(outcome)


def test_retained_graph_and_two_losses(arena: Any) -> None:
    def both(value: torch.Tensor) -> None:
        value.backward(retain_graph=True)
        (value * 0.5).backward()

    _, sessions = compare(arena, mlp, plain, backward=both)
    assert sessions[0].rounds == 12


def test_create_graph(arena: Any) -> None:
    with pytest.warns(UserWarning, match="create_graph"):
        compare(arena, mlp, plain, backward=lambda value: value.backward(create_graph=True), size=2)


def test_gradient_penalty_with_autograd_grad(arena: Any) -> None:
    def penalty(model: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
        x = x.clone().requires_grad_(True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        value: torch.Tensor = (out**2).mean() + (slope**2).sum(1).mean()
        return value

    compare(arena, mlp, penalty)


def test_sparse_embedding_gradients(arena: Any) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(10, 3, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.emb((x.abs() * 3).long().clamp(max=9)).sum((1, 2))
            return out

    compare(
        arena, Words, plain, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    )


# Buckets keep the layout that parameters had at the start; torch mentions the difference.
@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("when", ["before", "after"])
def test_channels_last(arena: Any, when: str) -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 2)
            if when == "before":
                self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.reshape(-1, 2, 2, 1).expand(-1, 2, 2, 3)
            out: torch.Tensor = self.conv(x)
            return out

    def change(model: nn.Module, step: int) -> None:
        if when == "after" and step == 3:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    compare(
        arena,
        Images,
        plain,
        before=change,
        zero=lambda o, step: o.zero_grad(set_to_none=False),
    )


def test_complex_parameters(arena: Any) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Parameter(torch.randn(3))
            self.w = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = (x.to(torch.complex64) @ self.w).abs() + self.real[:2]
            return out

    models = [seeded(Waves, seed) for seed in range(2)]
    alone = copy.deepcopy(models[0])

    def train(rank: int) -> None:
        with arena.session(rank, models[rank]) as s:
            for (x,) in s.split([(batch(0),)]):
                plain(models[rank], x, 0).backward()

    arena.run(2, train)
    plain(alone, batch(0), 0).backward()
    for a, b in zip(models[0].parameters(), alone.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_and_mixtures(arena: Any, dtype: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.other = nn.Linear(4, 4), nn.Linear(4, 1).to(dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.other(self.wide(x).to(dtype)).float()
            return out

    models = [seeded(Mixed, seed) for seed in range(2)]
    alone = copy.deepcopy(models[0])

    def train(rank: int) -> None:
        with arena.session(rank, models[rank]) as s:
            for (x,) in s.split([(batch(0),)]):
                plain(models[rank], x, 0).backward()

    arena.run(2, train)
    plain(alone, batch(0), 0).backward()
    for a, b in zip(models[0].parameters(), alone.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and a.grad.dtype == b.grad.dtype
        torch.testing.assert_close(a.grad, b.grad)


def test_empty_and_scalar_parameters(arena: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.zeros(3, 0))
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x) * self.scale + self.none.sum()
            return out

    model, _ = compare(arena, Odd, plain, zero=lambda o, step: o.zero_grad(set_to_none=False))
    assert model.none.grad is not None and model.none.grad.shape == (3, 0)


def test_frozen_for_a_while_then_unfrozen(arena: Any) -> None:
    def frozen() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)  # type: ignore[index]
        return model

    def thaw(model: nn.Module, step: int) -> None:
        if step == 3:
            model[0].requires_grad_(True)  # type: ignore[index]

    compare(arena, frozen, plain, before=thaw)
    used = {step: set() for step in range(6)}  # type: dict[int, set[int]]
    for key, _ in arena.hub.log:
        if key[0] == "exchange":
            used[key[1]].add(key[3])
    # No bucket of its own before, one or more from the step on in which it was unfrozen.
    assert used[0] == used[2] < used[3] == used[5]


def test_unfreezing_on_one_node_only_names_parameter_and_nodes(arena: Any) -> None:
    models = [mlp() for _ in range(2)]
    for model in models:
        model[0].requires_grad_(False)  # type: ignore[index]

    def train(rank: int) -> None:
        model = models[rank]
        optim = sgd(model)
        with arena.session(rank, model, optim):
            for step in range(4):
                if step == 2 and rank == 0:
                    model[0].requires_grad_(True)  # type: ignore[index]
                plain(model, batch(step), step).backward()
                optim.step()

    for outcome in arena.outcomes(2, train):
        assert isinstance(outcome, SchemaError)
        told = str(outcome)
        assert "parameter 0.bias is trainable on node0 and frozen on node1 at step 2" in told


def test_freezing_and_unfreezing_in_turn(arena: Any) -> None:
    def alternate(model: nn.Module, step: int) -> None:
        model[0].requires_grad_(step % 2 == 0)  # type: ignore[index]

    compare(arena, mlp, plain, before=alternate)


def test_an_exception_in_the_first_backward_leaves_the_next_one_whole(arena: Any) -> None:
    class Breaks(torch.autograd.Function):
        broken = True

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("broken on purpose")

    models = [mlp() for _ in range(2)]

    def train(rank: int) -> None:
        model = models[rank]
        with arena.session(rank, model) as s:
            hidden = model[0](batch(0))  # type: ignore[index]
            broken = Breaks.apply(hidden)  # type: ignore[no-untyped-call]
            loss = model[2](broken).sum()  # type: ignore[index]
            with pytest.raises(ValueError, match="on purpose"):
                loss.backward()
            for parameter in model.parameters():
                parameter.grad = None
            plain(model, batch(1), 1).backward()
            assert s.rounds == 1

    arena.run(2, train)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_accumulation_exchanges_once(arena: Any) -> None:
    models = [seeded(mlp, seed) for seed in range(2)]
    alone = copy.deepcopy(models[0])
    local: list[torch.Tensor] = []

    def train(rank: int) -> int:
        model = models[rank]
        optim = sgd(model)
        with arena.session(rank, model, optim) as s:
            for step in range(5):
                for micro, (x,) in enumerate(s.split([(batch(step * 4 + m),) for m in range(4)])):
                    loss = plain(model, x, step) / 4
                    if micro < 3:
                        with s.accumulate():
                            loss.backward()
                        if rank == 0 and step == 0 and micro == 0:
                            grad = next(model.parameters()).grad
                            assert grad is not None
                            local.append(grad.clone())
                    else:
                        loss.backward()
                optim.step()
                optim.zero_grad()
            rounds: int = s.rounds
            return rounds

    assert arena.run(2, train) == [5, 5]
    optim = sgd(alone)
    for step in range(5):
        for micro in range(4):
            (plain(alone, batch(step * 4 + micro), step) / 4).backward()
        optim.step()
        optim.zero_grad()
    assert same(*models)
    assert float((flat(models[0]) - flat(alone)).norm() / flat(alone).norm()) < 1e-6
    model = seeded(mlp, 0)
    (plain(model, batch(0)[:6], 0) / 4).backward()
    own = next(model.parameters()).grad
    assert own is not None
    torch.testing.assert_close(local[0], own)


def test_a_change_of_type_is_refused_by_name(arena: Any) -> None:
    model = mlp()

    def train(rank: int) -> None:
        with arena.session(rank, model):
            model.double()
            plain(model, batch(0).double(), 0).backward()

    (outcome,) = arena.outcomes(1, train)
    assert isinstance(outcome, SessionError)
    assert "torch.float64 now; change the model before p2pdpt.session" in str(outcome)


def test_without_trainable_parameters_a_backward_still_meets(arena: Any) -> None:
    def train(rank: int) -> int:
        model = mlp().requires_grad_(False)
        with arena.session(rank, model) as s:
            plain(model, batch(0).requires_grad_(True), 0).backward()
            rounds: int = s.rounds
            return rounds

    assert arena.run(2, train) == [1, 1]


def test_gradients_outlive_the_session(arena: Any) -> None:
    model = mlp()

    def train(rank: int) -> None:
        with arena.session(rank, model):
            plain(model, batch(0), 0).backward()

    arena.run(1, train)
    other = copy.deepcopy(model)
    other.zero_grad()
    plain(other, batch(0), 0).backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_hundreds_of_small_tensors(arena: Any) -> None:
    def many() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))

    compare(arena, many, lambda m, x, step: m(x).abs().mean(), size=2, steps=3)
