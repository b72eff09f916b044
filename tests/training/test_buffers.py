"""Buffers: which are averaged, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from p2pdpt.errors import SessionError
from p2pdpt.memory import allocate
from p2pdpt.training.buffers import BufferBucket, ModelBuffers, persistent_buffers

LIMIT = 1 << 20
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Odd(nn.Module):
    """A model with a buffer of each kind."""

    mask: torch.Tensor | None
    seen: torch.Tensor
    count: torch.Tensor
    waves: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("waves", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("nothing", None)
        self.register_buffer("again", self.mask)
        self.register_buffer("cache", torch.zeros(1), persistent=False)


def grown(buffers: ModelBuffers, *names: str) -> list[BufferBucket]:
    return buffers.grow(names, 5, LIMIT, allocate)


def exchange(bucket: BufferBucket, result: list[float]) -> None:
    bucket.memory.result[:] = result


def test_running_statistics_are_known_and_the_rest_is_idle() -> None:
    buffers = ModelBuffers([Odd()])
    assert buffers.known == ["norm.running_mean", "norm.running_var"]
    assert buffers.changed() == []
    assert ModelBuffers([nn.BatchNorm1d(1), nn.BatchNorm1d(1)]).known[2] == "1.running_mean"


def test_idle_buffers_that_change_are_noticed_until_they_are_averaged() -> None:
    model = Odd()
    buffers = ModelBuffers([model])
    model.seen += 1
    model.mask = torch.zeros(3)
    model.count += 1
    model.cache = torch.ones(9)
    assert buffers.changed() == ["mask", "seen"]
    assert [bucket.number for bucket in grown(buffers, "mask", "seen", "unknown")] == [5, 6]
    assert buffers.changed() == []
    assert grown(buffers, "mask") == []
    assert len(buffers.buckets) == 2


def test_state_is_told_from_caches() -> None:
    names = [ref.name for ref in persistent_buffers(Odd())]
    assert names[:3] == ["mask", "seen", "count"]
    assert names[3:] == ["waves", *(f"norm.{name}" for name in STATISTICS)]
    model = Odd()
    buffers = ModelBuffers([model])
    model.mask = None
    del model.seen
    assert buffers.changed() == ["mask", "seen"]


def test_the_mean_is_taken_where_somebody_changed() -> None:
    model = Odd()
    buffers = ModelBuffers([model])
    (bucket,) = grown(buffers, *buffers.known)
    for changed, mean in ((True, 0.25), (False, 0.0)):
        model.norm(torch.randn(4, 2))
        assert model.norm.running_mean is not None
        own = model.norm.running_mean.clone()
        bucket.settle()
        data = bucket.memory.length - 2
        assert bucket.memory.mine[data:].tolist() == [1, 1]
        # Order: reverse registration; variance, padding, mean.
        exchange(bucket, [2.0] * 4 + [mean] * 2 + [float(changed)] * 2)
        bucket.publish()
        assert not torch.equal(model.norm.running_mean, own)
        # Unchanged for all that count: what was agreed before, not this result.
        assert model.norm.running_mean.tolist() == [0.25, 0.25]


def test_unchanged_buffers_keep_every_bit() -> None:
    model = Odd()
    buffers = ModelBuffers([model])
    (bucket,) = grown(buffers, *buffers.known)
    for flag in (1.0, 0.0):
        bucket.settle()
        exchange(bucket, [0.3] * 4 + [0.1] * 2 + [flag] * 2)
        bucket.publish()
    bucket.settle()
    assert bucket.memory.mine[-2:].tolist() == [0, 0]
    assert model.norm.running_mean is not None
    assert torch.equal(model.norm.running_mean, torch.full((2,), 0.1))


def test_writes_are_not_seen_by_kept_graphs() -> None:
    model = Odd()
    buffers = ModelBuffers([model])
    (bucket,) = grown(buffers, *buffers.known)
    loss = model.norm(torch.randn(4, 2, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    bucket.settle()
    exchange(bucket, [1.0] * bucket.memory.length)
    bucket.publish()
    loss.backward()


def test_complex_buffers_travel_as_pairs() -> None:
    model = Odd()
    buffers = ModelBuffers([model])
    model.waves = torch.tensor([1 + 2j, 3j])
    (bucket,) = grown(buffers, "waves")
    bucket.settle()
    assert bucket.memory.mine.tolist() == [1, 2, 0, 3, 1]
    exchange(bucket, [5, 6, 7, 8, 1])
    bucket.publish()
    assert model.waves.tolist() == [5 + 6j, 7 + 8j]


def test_a_buffer_of_another_shape_or_none_is_refused_by_name() -> None:
    model = Odd()
    buffers = ModelBuffers([model])
    (bucket,) = grown(buffers, "mask")
    model.mask = torch.ones(4)
    with pytest.raises(SessionError, match=r"buffer mask was \(3,\) torch.float32 and is \(4,\)"):
        bucket.settle()
    model.mask = None
    with pytest.raises(SessionError, match="buffer mask was removed"):
        bucket.settle()


def test_statistics_are_equal_after_every_step(arena: Any) -> None:
    models = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(3)]
    snapshots: list[list[torch.Tensor]] = [[], [], []]

    def train(rank: int) -> None:
        model = models[rank]
        generator = torch.Generator().manual_seed(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with arena.session(rank, model, optimizer) as s:
            for step in range(4):
                model.train(step != 2)
                batch = torch.randn(2 + rank, 3, generator=generator)
                s.weight(len(batch))
                model(batch).square().mean().backward()
                snapshots[rank].append(torch.cat([b.double().reshape(-1) for b in model.buffers()]))
                optimizer.step()

    arena.run(3, train)
    for step in range(4):
        assert torch.equal(snapshots[0][step], snapshots[1][step])
        assert torch.equal(snapshots[0][step], snapshots[2][step])
    # In evaluation mode nothing moved.
    assert torch.equal(snapshots[0][1], snapshots[0][2])
    assert not torch.equal(snapshots[0][2], snapshots[0][3])


def test_other_buffers_join_when_they_change(arena: Any) -> None:
    class Counts(nn.Module):
        ema: torch.Tensor
        mask: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))
            self.register_buffer("ema", torch.zeros(1))
            self.register_buffer("mask", torch.full((1,), 0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.ema.mul_(0.5).add_(x.mean())
            return x * self.w

    models = [Counts() for _ in range(3)]
    seen: list[list[float]] = [[], [], []]

    def train(rank: int) -> None:
        with arena.session(rank, models[rank]):
            for _ in range(3):
                models[rank](torch.full((1,), float(rank))).sum().backward()
                seen[rank].append(float(models[rank].ema))

    arena.run(3, train)
    assert seen[0] == seen[1] == seen[2] == [1.0, 1.5, 1.75]
    assert all(torch.equal(m.mask, torch.full((1,), 0.1)) for m in models)
