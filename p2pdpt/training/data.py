"""This node's part of the data: every node runs the same number of iterations.

The loader's batch is the global batch: its samples are dealt to the nodes in contiguous parts,
in an order that depends on the seed and the epoch only, so that the same script alone and on N
nodes is the same training. A node for which a batch has no sample repeats an earlier one with
weight 0, so that it takes part in everything.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from p2pdpt.errors import SessionError
from p2pdpt.training.batches import batch_length, cut

__all__ = [
    "IndexBatches",
    "Local",
    "Randomness",
    "Split",
    "check_loader",
    "explicit_generator",
    "mix_seed",
    "part",
    "rebuilds",
]

Hand = Callable[[float], None]
_END: Final = object()
# The generators are the process's, whichever thread trains.
_GLOBAL = threading.RLock()


def mix_seed(*parts: object) -> int:
    """Return 63 bits that depend on all parts."""
    text = "/".join(str(each) for each in parts).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def part(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range of a batch of `length` samples that belongs to `rank` of `size`."""
    return length * rank // size, length * (rank + 1) // size


class Randomness:
    """A state of the global random generators (torch, random, numpy) of its own.

    Inside ``with`` the generators continue where the last such block ended; outside they are
    what they were.
    """

    def __init__(self, seed: int) -> None:
        self._states: tuple[Any, Any, Any] | None = None
        self._outside: tuple[Any, Any, Any] | None = None
        self._seed = seed

    @staticmethod
    def _read() -> tuple[Any, Any, Any]:
        return torch.get_rng_state(), random.getstate(), np.random.get_state()

    @staticmethod
    def _write(states: tuple[Any, Any, Any]) -> None:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])

    def __enter__(self) -> None:
        _GLOBAL.acquire()
        self._outside = self._read()
        if self._states is not None:
            self._write(self._states)
            return
        # Not torch.manual_seed, which would reset the generators of other devices too.
        torch.default_generator.manual_seed(self._seed)
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)

    def __exit__(self, *_: object) -> None:
        self._states = self._read()
        assert self._outside is not None
        self._write(self._outside)
        _GLOBAL.release()


def _under(randomness: Randomness, iterable: Iterable[Any]) -> Iterator[Any]:
    """Iterate with the generators of `randomness`."""
    with randomness:
        iterator = iter(iterable)
    while True:
        with randomness:
            item = next(iterator, _END)
        if item is _END:
            return
        yield item


def rebuilds(loader: object) -> bool:
    """Return whether a loader can be rebuilt with other batches of indices.

    Others (iterable datasets, batching done by the dataset, loaders with an ``__iter__`` of their
    own, plain iterables) yield whole global batches, which are cut.
    """
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and type(loader).__iter__ is DataLoader.__iter__
    )


def check_loader(loader: object) -> None:
    """Refuse a loader that would divide the data a second time.

    Raises:
        SessionError: its sampler is a ``DistributedSampler``.
    """
    samplers = [getattr(loader, "sampler", None)]
    samplers.append(getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    if any(isinstance(each, DistributedSampler) for each in samplers):
        raise SessionError(
            "the loader has a DistributedSampler, which divides the data already; give the "
            "loader shuffle=True instead, s.split does the rest"
        )


def explicit_generator(loader: object) -> torch.Generator | None:
    """Return the generator that the user gave to the loader or its sampler, if any."""
    inner = getattr(loader, "batch_sampler", None)
    for holder in (loader, getattr(loader, "sampler", None), getattr(inner, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


class IndexBatches:
    """A batch sampler with this node's part of another's batches.

    Attributes:
        weights: for each batch drawn and not yet taken, its number of samples, 0 if repeated.
    """

    def __init__(
        self, inner: Iterable[Sequence[Any]], rank: int, size: int, *, per_node: bool, train: bool
    ) -> None:
        """Divide `inner` among `size` nodes.

        Args:
            inner: batches of indices, the same on all nodes.
            per_node: deal whole batches in turn, rather than parts of each.
            train: repeat batches so that all nodes have the same number.
        """
        self.weights: deque[int] = deque()
        self._inner, self._rank, self._size = inner, rank, size
        self._per_node, self._train = per_node, train
        self._randomness = Randomness(0)

    def seed(self, seed: int) -> None:
        """Begin a new epoch with the randomness of `seed`."""
        self.weights.clear()
        self._randomness = Randomness(seed)

    def __len__(self) -> int:
        """Return how many batches this node gets; for evaluation at most so many."""
        return _divided(len(self._inner), self._size, self._per_node)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        whole = (list(batch) for batch in _under(self._randomness, self._inner))
        dealt = _deal(whole, self._rank, self._size, self._per_node, self._train, _cut_list, len)
        for batch, weight in dealt:
            self.weights.append(weight)
            yield batch


def _divided(count: int, size: int, per_node: bool) -> int:
    return -(-count // size) if per_node else count


def _cut_list(batch: list[Any], start: int, stop: int) -> list[Any]:
    return batch[start:stop]


def _deal(
    batches: Iterable[Any],
    rank: int,
    size: int,
    per_node: bool,
    train: bool,
    cutter: Callable[[Any, int, int], Any],
    measure: Callable[[Any], int],
) -> Iterator[tuple[Any, int]]:
    """Yield this node's batches with their weights."""
    last: Any = _END
    if per_node:
        iterator = iter(batches)
        while row := list(itertools.islice(iterator, size)):
            if rank < len(row):
                last = row[rank]
                yield last, measure(last)
            elif train:
                yield (row[0] if last is _END else last), 0
        return
    for batch in batches:
        length = measure(batch)
        start, stop = part(length, rank, size)
        if stop > start:
            last = cutter(batch, start, stop)
            yield last, stop - start
        elif train and length:
            yield (batch if last is _END else last), 0


class Split:
    """An iterable over this node's part of a loader; each iteration is another epoch of it.

    Attributes:
        loader: what is divided.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        rank: int,
        size: int,
        *,
        seed: Callable[[int | None], int],
        hand: Hand,
        per_node: bool = False,
        train: bool = True,
    ) -> None:
        """Prepare to divide `loader` among `size` nodes.

        Args:
            seed: called at the beginning of each iteration with the seed that the loader's own
                generator began with, if it has one; must return the same on all nodes.
            hand: told the number of samples of each batch before it is yielded.
            per_node: deal whole batches in turn, rather than parts of each.
            train: repeat batches with weight 0 so that all nodes have the same number.
        """
        check_loader(loader)
        self.loader = loader
        self._rank, self._size = rank, size
        self._seed, self._hand = seed, hand
        self._per_node, self._train = per_node, train
        self._generator = explicit_generator(loader)
        self._base = None if self._generator is None else self._generator.initial_seed()
        self._rebuilt: tuple[DataLoader[Any], IndexBatches] | None = None

    def __len__(self) -> int:
        """Return the number of iterations; for evaluation no node has more.

        Raises:
            TypeError: the loader has no length.
        """
        return _divided(len(self.loader), self._size, self._per_node)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        seed = self._seed(self._base)
        if self._generator is not None:
            self._generator.manual_seed(seed)
        if rebuilds(self.loader):
            yield from self._rebuild(seed)
            return
        batches = _under(Randomness(seed), self.loader)
        for batch, weight in _deal(
            batches, self._rank, self._size, self._per_node, self._train, cut, batch_length
        ):
            self._hand(weight)
            yield batch

    def _rebuild(self, seed: int) -> Iterator[Any]:
        if self._rebuilt is None:
            self._rebuilt = self._make()
        loader, batches = self._rebuilt
        batches.seed(seed)
        # Workers draw their seeds from it; different ones on each node.
        loader.generator.manual_seed(mix_seed(seed, self._rank))
        for batch in loader:
            self._hand(batches.weights.popleft())
            yield batch

    def _make(self) -> tuple[DataLoader[Any], IndexBatches]:
        old: Any = self.loader
        batches = IndexBatches(
            old.batch_sampler,
            self._rank,
            self._size,
            per_node=self._per_node,
            train=self._train,
        )
        options: dict[str, Any] = {}
        if old.num_workers:
            options["prefetch_factor"] = old.prefetch_factor
            options["persistent_workers"] = old.persistent_workers
            options["multiprocessing_context"] = old.multiprocessing_context
        loader: DataLoader[Any] = DataLoader(
            old.dataset,
            batch_sampler=batches,
            num_workers=old.num_workers,
            collate_fn=old.collate_fn,
            pin_memory=old.pin_memory,
            timeout=old.timeout,
            worker_init_fn=old.worker_init_fn,
            generator=torch.Generator(),
            **options,
        )
        return loader, batches


class Local:
    """An iterable over data of this node's own, as long as any node has some.

    Nodes may have different numbers and sizes of batches: one that has no more repeats its last
    with weight 0 until all are done.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        rank: int,
        *,
        agree: Callable[[bool], Sequence[bool]],
        names: Sequence[str],
        hand: Hand,
    ) -> None:
        """Prepare to iterate.

        Args:
            agree: called before each batch with whether this node has one; returns the same
                about all nodes in rank order.
            names: of the nodes.
            hand: told the number of samples of each batch before it is yielded.
        """
        self.loader = loader
        self._rank, self._names = rank, list(names)
        self._agree, self._hand = agree, hand

    def __iter__(self) -> Iterator[Any]:
        """Yield batches.

        Raises:
            SessionError: some node has no batch at all, so that it has nothing to repeat.
        """
        iterator = iter(self.loader)
        last: Any = _END
        first = True
        while True:
            batch = next(iterator, _END)
            present = self._agree(batch is not _END)
            if not any(present):
                return
            if first and not all(present):
                empty = [name for name, has in zip(self._names, present, strict=True) if not has]
                raise SessionError(
                    f"s.local: no batch at all on {', '.join(empty)}; every node needs at least "
                    "one batch, or use s.split, which divides one loader among all nodes"
                )
            first = False
            if batch is _END:
                self._hand(0)
            else:
                last = batch
                self._hand(batch_length(batch))
            yield last
