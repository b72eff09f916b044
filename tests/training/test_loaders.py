"""Loaders of a session: compared, kept, and drawn in a common order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from p2pdpt.errors import SessionError
from p2pdpt.training.loaders import Loaders
from p2pdpt.training.weights import SampleLedger


def numbers(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=4, **options)


def with_loaders(arena: Any, size: int, body: Any, seed: int = 1) -> list[Any]:
    """Return the outcomes of ``body(loaders, ledger, rank)`` on all members."""

    def run(rank: int) -> Any:
        def inside(parts: Any) -> Any:
            ledger = SampleLedger()
            return body(Loaders(parts.agreement, rank, size, ledger, seed), ledger, rank)

        return arena.member(rank, inside)

    found: list[Any] = arena.outcomes(size, run)
    return found


def test_loaders_that_differ_are_named_on_all(arena: Any) -> None:
    def body(loaders: Loaders, ledger: SampleLedger, rank: int) -> None:
        next(iter(loaders.split(numbers(10 + rank), per_node=False, train=True)))

    for outcome in with_loaders(arena, 2, body):
        assert isinstance(outcome, SessionError)
        assert "different numbers of samples: 10 on node0, 11 on node1" in str(outcome)


def test_evaluation_is_compared_with_nobody(arena: Any) -> None:
    def body(loaders: Loaders, ledger: SampleLedger, rank: int) -> int:
        seen = 0
        if rank == 0:
            for (x,) in loaders.split(numbers(10), per_node=False, train=False):
                seen += len(x)
            assert ledger.take() == 1.0
        return seen

    assert with_loaders(arena, 2, body) == [5, 0]


def test_batches_handed_out_weigh(arena: Any) -> None:
    def body(loaders: Loaders, ledger: SampleLedger, rank: int) -> list[float]:
        return [ledger.take() for _ in loaders.split(numbers(10), per_node=False, train=True)]

    assert with_loaders(arena, 3, body) == [[1, 1, 0], [1, 1, 1], [2, 2, 1]]


def test_the_order_depends_on_seed_epoch_and_use(arena: Any) -> None:
    def body(loaders: Loaders, ledger: SampleLedger, rank: int) -> list[list[int]]:
        loader = numbers(16, shuffle=True)
        orders = []
        for epoch in (0, 0, 1):
            loaders.epoch = epoch
            split = loaders.split(loader, per_node=False, train=True)
            orders.append([int(each) for (x,) in split for each in x])
        return orders

    (first,) = with_loaders(arena, 1, body)
    assert len({tuple(order) for order in first}) == 3
    assert with_loaders(arena, 1, body) == [first]
    assert with_loaders(arena, 1, body, seed=2) != [first]


def test_the_first_members_explicit_seed_counts(arena: Any) -> None:
    def body(loaders: Loaders, ledger: SampleLedger, rank: int) -> list[int]:
        generator = torch.Generator().manual_seed(rank)
        loader = numbers(8, shuffle=True, generator=generator)
        split = loaders.split(loader, per_node=False, train=True)
        return [int(each) for (x,) in split for each in x]

    one, two = with_loaders(arena, 2, body)
    assert sorted(one + two) == list(range(8))


def test_a_dataloaders_split_is_kept_as_long_as_it(arena: Any) -> None:
    def body(loaders: Loaders, ledger: SampleLedger, rank: int) -> None:
        loader = numbers(8)
        split = loaders.split(loader, per_node=False, train=True)
        assert loaders.split(loader, per_node=False, train=True) is split
        assert loaders.split(loader, per_node=False, train=False) is not split
        assert loaders.split([torch.ones(2)], per_node=False, train=True) is not split

    assert with_loaders(arena, 1, body) == [None]


@pytest.mark.parametrize("counts", [(3, 1), (1, 3)])
def test_local_data(arena: Any, counts: tuple[int, int]) -> None:
    def body(loaders: Loaders, ledger: SampleLedger, rank: int) -> list[float]:
        batches = [torch.ones(2 + rank)] * counts[rank]
        return [ledger.take() for _ in loaders.local(batches)]

    expected = [[2.0 + rank] * counts[rank] + [0.0] * (3 - counts[rank]) for rank in range(2)]
    assert with_loaders(arena, 2, body) == expected
