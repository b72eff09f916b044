"""Sessions over a hub in one process: the promises made to a script."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(24, 4, generator=generator),
        torch.randn(24, 2, generator=generator),
    )


def distance(one: nn.Module, other: nn.Module) -> float:
    """Return the relative 2-norm of the difference, in float64."""
    a = torch.cat([p.detach().double().reshape(-1) for p in one.parameters()])
    b = torch.cat([p.detach().double().reshape(-1) for p in other.parameters()])
    return float((a - b).norm() / a.norm())


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Return whether parameters and buffers are equal, bit by bit."""
    return all(
        torch.equal(a, b)
        for a, b in zip(
            [*one.parameters(), *one.buffers()],
            [*other.parameters(), *other.buffers()],
            strict=True,
        )
    )


def test_nodes_together_are_one_training(arena: Any) -> None:
    x, y = data()
    start = [model(rank) for rank in range(3)]

    def train(rank: int) -> nn.Module:
        net = start[rank]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        with arena.session(rank, net, optimizer, bucket_mb=0.0001) as s:
            for _ in range(20):
                for a, b in s.split([(x, y)]):
                    nn.functional.mse_loss(net(a), b).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert s.step == 20
        return net

    nets = arena.run(3, train)
    alone = model(0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        nn.functional.mse_loss(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(alone, nets[0]) < 1e-6
    assert all(equal(nets[0], other) for other in nets[1:])
