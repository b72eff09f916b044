"""N nodes are one training: equal to a single process on the union of their batches.

Real nodes, each on a loop thread of its own, over tcp. Parameters after 20 steps lie within 1e-6
(relative 2-norm over all parameters, in float64; training is in float32), and all nodes hold the
same bits.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from p2pdpt.config import NodeConfig, RunConfig
from p2pdpt.training.connection import NodeConnection
from p2pdpt.training.digest import state_digest
from p2pdpt.training.loop_thread import LoopThread
from p2pdpt.training.sessions import Session

STEPS = 20
SAMPLES, BATCH = 44, 12
"""Batches of 12, 12, 12 and 8 samples: uneven over most numbers of nodes."""
JITTERED_STEPS = 60
JOIN_S = 60.0
runs = itertools.count()


class Cnn(nn.Module):
    """Convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(4, 6, 3), nn.Tanh()
        )
        self.head = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.features(x).flatten(1))
        return out


class Mlp(nn.Module):
    """An MLP with a head that nobody uses, and one weight used in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 2)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class Lstm(nn.Module):
    """An LSTM over packed sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        out: torch.Tensor = self.head(hidden[-1])
        return out


class Tree(nn.Module):
    """A network shaped like the tree that a number spells; another graph for each sample.

    Nodes at even and odd depth have weights of their own, and leaves too, so that small trees,
    and parts of batches, leave some unused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Embedding(2, 5)
        self.join = nn.ModuleList(nn.Linear(10, 5) for _ in range(3))
        self.head = nn.Linear(5, 3)

    def grow(self, seed: int, depth: int) -> torch.Tensor:
        leaf: torch.Tensor = self.leaf.weight[seed % 2]
        if depth == 3 or seed % 3 == 0:
            return leaf
        left, right = self.grow(seed // 3, depth + 1), self.grow(seed // 5, depth + 1)
        return torch.tanh(self.join[depth](torch.cat([left, right])))

    def forward(self, seeds: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.stack([self.grow(int(s), 0) for s in seeds]))
        return out


def data(kind: str) -> Dataset[Any]:
    """Return inputs for a kind of model, and classes."""
    generator = torch.Generator().manual_seed(11)
    classes = torch.randint(3, (SAMPLES,), generator=generator)
    if kind == "cnn":
        return TensorDataset(torch.randn(SAMPLES, 1, 8, 8, generator=generator), classes)
    if kind == "mlp":
        return TensorDataset(torch.randn(SAMPLES, 6, generator=generator), classes)
    if kind == "lstm":
        x = torch.randn(SAMPLES, 7, 4, generator=generator)
        return TensorDataset(x, torch.randint(1, 8, (SAMPLES,), generator=generator), classes)
    return TensorDataset(torch.randint(1 << 20, (SAMPLES,), generator=generator), classes)


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": Cnn, "mlp": Mlp, "lstm": Lstm, "tree": Tree}


@dataclass(frozen=True)
class Job:
    """One training, to be done alone or together."""

    kind: str
    model: nn.Module
    adam: bool = False
    jitter: random.Random | None = None

    def optimizer(self) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.Adam(self.model.parameters(), lr=0.01)
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(data(self.kind), batch_size=BATCH)

    def learn(self, batches: Iterator[Any]) -> str:
        """Take all steps of `batches`; return a digest of the optimizer's state."""
        optimizer = self.optimizer()
        for step, (*inputs, classes) in enumerate(batches):
            if self.jitter is not None and self.jitter.random() < 0.2:
                time.sleep(self.jitter.random() * 0.02)
            loss = nn.functional.cross_entropy(self.model(*inputs), classes)
            loss.backward()
            if step % 2:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 3 != 0)
        return state_digest(optimizer.state_dict())

    def vector(self) -> torch.Tensor:
        return torch.cat([p.detach().double().reshape(-1) for p in self.model.parameters()])


def together(jobs: list[Job], topology: str, steps: int = STEPS) -> list[str]:
    """Train each job on a node of its own, in one group; return digests of all that each holds."""
    run = f"equivalence-{next(runs)}"
    digests: list[Any] = [None] * len(jobs)

    def node(rank: int) -> None:
        job = jobs[rank]
        config = NodeConfig(name=f"node{rank}", discovery=("local",))
        joining = RunConfig(run=run, min_nodes=len(jobs), topology=topology, wait=JOIN_S)
        try:
            # Small buckets, so that there are several.
            session = Session(NodeConnection(config, joining), job.model, bucket_mb=0.0005)
            with session as s:
                split = s.split(job.loader())
                epochs = itertools.chain.from_iterable(split for _ in s.epochs(steps))
                optimizer = job.learn(itertools.islice(epochs, steps))
                digests[rank] = s.digest() + optimizer
        except BaseException as error:
            digests[rank] = error

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S + 30)
    for digest in digests:
        if isinstance(digest, BaseException):
            raise digest
    return digests


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute in one thread each, as nodes that share a machine do; start uvloop once."""
    first = LoopThread()
    first.start()
    first.stop()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("topology", ["ring", "mapreduce"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_nodes_together_equal_one_process(size: int, topology: str, kind: str) -> None:
    jobs = []
    for seed in range(size):
        torch.manual_seed(seed)
        jobs.append(Job(kind, MODELS[kind]()))
    # Ranks follow the order of joining: whoever is first, all start from its parameters.
    start = copy.deepcopy(jobs[0].model.state_dict())
    for job in jobs[1:]:
        job.model.load_state_dict(start)
    alone = Job(kind, copy.deepcopy(jobs[0].model))
    assert len(set(together(jobs, topology))) == 1
    alone.learn(itertools.islice(itertools.cycle(alone.loader()), STEPS))
    expected = alone.vector()
    for job in jobs:
        assert torch.equal(job.vector(), jobs[0].vector())
    distance = float((jobs[0].vector() - expected).norm() / expected.norm())
    assert math.isfinite(distance)
    assert distance < 1e-6


@pytest.mark.parametrize("topology", ["ring", "mapreduce"])
def test_replicas_of_uneven_speed_stay_identical_with_adam(topology: str) -> None:
    jobs = []
    for seed in range(5):
        torch.manual_seed(seed)
        jobs.append(Job("mlp", Mlp(), adam=True, jitter=random.Random(seed)))
    assert len(set(together(jobs, topology, JITTERED_STEPS))) == 1
