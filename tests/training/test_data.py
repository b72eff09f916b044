"""Dividing data: every sample counts once, in the same order alone and on N nodes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from p2pdpt.errors import SessionError
from p2pdpt.training.data import (
    IndexBatches,
    Local,
    Randomness,
    Split,
    check_loader,
    explicit_generator,
    mix_seed,
    part,
    rebuilds,
)


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def loader(count: int = 10, size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(numbers(count), batch_size=size, **options)


def split(
    source: Any, rank: int, size: int, seed: int = 0, **options: Any
) -> tuple[Split, list[float]]:
    weights: list[float] = []
    made = Split(source, rank, size, seed=lambda base: seed, hand=weights.append, **options)
    return made, weights


def dealt(source: Any, size: int, **options: Any) -> list[tuple[list[Any], list[float]]]:
    """Return each node's batches, as lists of their first elements, and their weights."""
    found = []
    for rank in range(size):
        made, weights = split(source, rank, size, **options)
        batches = [(b[0] if isinstance(b, (list, tuple)) else b).tolist() for b in made]
        found.append((batches, weights))
    return found


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [*chain.from_iterable(lists)]


class Stream(IterableDataset[Any]):
    """An iterable dataset of numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_seeds_depend_on_all_parts() -> None:
    assert len({mix_seed(1, 2), mix_seed(2, 1), mix_seed(12), mix_seed(1, 2, 0)}) == 4
    assert 0 <= mix_seed("x") < 2**63


def test_parts_cover_everything_once() -> None:
    for length in range(9):
        ranges = [range(*part(length, rank, 4)) for rank in range(4)]
        assert [each for one in ranges for each in one] == list(range(length))


def test_randomness_continues_and_leaves_the_outside_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)

    def draw() -> tuple[int, float, float]:
        return int(torch.randint(1 << 30, ())), random.random(), float(np.random.random())

    outside = draw()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    one, two = Randomness(5), Randomness(5)
    with one:
        first = draw()
    assert draw() == outside
    with two:
        assert draw() == first
        second = draw()
    with one:
        assert draw() == second


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_cut_into_contiguous_parts(workers: int) -> None:
    found = dealt(loader(num_workers=workers), 3)
    assert found == [
        # 4 samples over 3 nodes: 1, 1, 2; the last batch has 2: 0, 1, 1.
        ([[0], [4], [4]], [1, 1, 0]),
        ([[1], [5], [8]], [1, 1, 1]),
        ([[2, 3], [6, 7], [9]], [2, 2, 1]),
    ]


def test_alone_nothing_changes() -> None:
    assert dealt(loader(), 1) == [([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], [4, 4, 2])]


def test_the_order_is_the_same_at_any_number_of_nodes_and_differs_by_epoch() -> None:
    orders = {}
    for seed in (1, 2):
        for size in (1, 2, 4):
            found = dealt(loader(shuffle=True), size, seed=seed)
            batches = [joined(n[0][i] for n in found if n[1][i]) for i in range(3)]
            orders[seed, size] = batches
        assert orders[seed, 1] == orders[seed, 2] == orders[seed, 4]
    assert orders[1, 1] != orders[2, 1]
    assert sorted(joined(orders[1, 1])) == list(range(10))


def test_batches_smaller_than_the_number_of_nodes() -> None:
    found = dealt(loader(count=3, size=1), 2)
    # The first node never has one: it repeats whole batches.
    assert found == [([[0], [1], [2]], [0, 0, 0]), ([[0], [1], [2]], [1, 1, 1])]


def test_whole_batches_in_turn() -> None:
    found = dealt(loader(count=10, size=2), 3, per_node=True)
    assert found == [
        ([[0, 1], [6, 7]], [2, 2]),
        ([[2, 3], [8, 9]], [2, 2]),
        ([[4, 5], [4, 5]], [2, 0]),
    ]
    assert dealt(loader(count=2, size=2), 2, per_node=True)[1] == ([[0, 1]], [0])


def test_evaluation_sees_every_sample_once() -> None:
    for options in ({}, {"per_node": True}):
        found = dealt(loader(count=5, size=2), 4, train=False, **options)
        seen = [each for batches, _ in found for batch in batches for each in batch]
        assert sorted(seen) == list(range(5))


@pytest.mark.parametrize("size", [1, 3])
def test_iterables_of_whole_batches_are_cut(size: int) -> None:
    for source in (
        DataLoader(Stream(), batch_size=4),
        [torch.arange(4), torch.arange(4, 8), torch.arange(8, 10)],
    ):
        found = dealt(source, size)
        for index, batch in enumerate(([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])):
            assert joined(n[0][index] for n in found if n[1][index]) == batch
            assert sum(node[1][index] for node in found) == len(batch)


def test_random_iterables_are_the_same_on_all_nodes() -> None:
    class Noise(IterableDataset[Any]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(4):
                yield torch.rand(())

    source = DataLoader(Noise(), batch_size=2)
    one, two = dealt(source, 2)
    whole = dealt(source, 1)[0][0]
    assert [a + b for a, b in zip(one[0], two[0], strict=True)] == whole


def test_custom_samplers_draw_from_the_common_seed() -> None:
    class Mine(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            order = list(range(6))
            random.shuffle(order)
            yield from order
            yield int(torch.randint(6, ()))

        def __len__(self) -> int:
            return 7

    def build() -> DataLoader[Any]:
        return DataLoader(numbers(6), batch_size=4, sampler=Mine())

    found = dealt(build(), 2)
    whole = dealt(build(), 1)[0][0]
    assert [found[0][0][i] + found[1][0][i] for i in range(2)] == whole


def test_custom_batch_samplers_and_collation() -> None:
    batches = BatchSampler(RandomSampler(range(6)), batch_size=3, drop_last=True)
    source: DataLoader[Any] = DataLoader(
        numbers(6), batch_sampler=batches, collate_fn=lambda rows: torch.stack([r[0] for r in rows])
    )
    found = dealt(source, 2)
    assert sorted(each for node in found for batch in node[0] for each in batch) == list(range(6))


def test_an_explicit_generator_gives_the_seed() -> None:
    bases: list[int | None] = []
    generator = torch.Generator().manual_seed(77)
    source = loader(shuffle=True, generator=generator)
    assert explicit_generator(source) is generator
    assert explicit_generator(loader()) is None

    def seed(base: int | None) -> int:
        bases.append(base)
        return 3

    made = Split(source, 0, 1, seed=seed, hand=lambda _: None)
    first, second = ([batch[0].tolist() for batch in made] for _ in range(2))
    assert bases == [77, 77]
    assert first == second


def test_lengths() -> None:
    assert len(split(loader(), 0, 3)[0]) == 3
    assert len(split(loader(size=2), 0, 3, per_node=True)[0]) == 2
    with pytest.raises(TypeError):
        len(split(DataLoader(Stream(), batch_size=4), 0, 3)[0])


def test_which_loaders_are_rebuilt() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([])

    assert rebuilds(loader())
    assert not rebuilds(DataLoader(Stream(), batch_size=2))
    assert not rebuilds(DataLoader(numbers(4), batch_size=None))
    assert not rebuilds(Own(numbers(4)))
    assert not rebuilds([1, 2])


def test_loaders_that_divide_themselves_are_refused() -> None:
    source = loader(sampler=DistributedSampler(numbers(10), num_replicas=2, rank=0))
    with pytest.raises(SessionError, match="has a DistributedSampler"):
        check_loader(source)


class Slow(Dataset[Any]):
    """A dataset that tells which process reads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        info = torch.utils.data.get_worker_info()
        return torch.tensor([index, -1 if info is None else info.id])


def test_workers_persist_from_epoch_to_epoch() -> None:
    source: DataLoader[Any] = DataLoader(
        Slow(), batch_size=2, num_workers=1, persistent_workers=True
    )
    made, weights = split(source, 0, 2)
    one = [batch.tolist() for batch in made]
    two = [batch.tolist() for batch in made]
    assert one == two == [[[0, 0]], [[2, 0]]]
    assert weights == [1, 1, 1, 1]
    del made


def test_leaving_an_epoch_early_does_not_shift_weights() -> None:
    made, weights = split(loader(count=7, size=4, num_workers=2), 0, 2)
    for _ in made:
        break
    weights.clear()
    assert len(list(made)) == 2
    assert weights == [2, 1]


def test_index_batches_are_a_batch_sampler() -> None:
    batches = IndexBatches([[0, 1, 2], [3]], 1, 2, per_node=False, train=True)
    assert len(batches) == 2
    assert list(batches) == [[1, 2], [3]]
    assert list(batches.weights) == [2, 1]
    batches.seed(3)
    assert list(batches.weights) == []


def local(
    sizes: list[int], others: list[list[bool]], rank: int = 0
) -> tuple[list[list[float]], list[float]]:
    weights: list[float] = []
    rounds = iter(others)

    def agree(has: bool) -> list[bool]:
        told = next(rounds)
        told[rank] = has
        return told

    source = [torch.arange(float(size)) for size in sizes]
    made = Local(source, rank, agree=agree, names=["node0", "node1"], hand=weights.append)
    return [batch.tolist() for batch in made], weights


def test_local_data_goes_on_until_all_are_done() -> None:
    batches, weights = local([2, 1], [[True, True]] * 3 + [[True, False]])
    assert batches == [[0, 1], [0], [0]]
    assert weights == [2, 1, 0]


def test_a_node_without_any_local_data_is_named_on_all() -> None:
    with pytest.raises(SessionError, match="no batch at all on node1"):
        local([2], [[True, False]])
    with pytest.raises(SessionError, match="no batch at all on node0"):
        local([], [[True, True]])
    assert local([], [[True, False]]) == ([], [])
