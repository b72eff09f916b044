"""One node's part of ``p2pdpt bench lag``: does the event loop answer while it works?

The loop wakes every 5 ms and notes how late it was, while the node sums a large bucket again and
again and a training thread computes beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Lag", "LagTask", "percentile"]

PERIOD_S: Final = 0.005


class LagTask(msgspec.Struct, frozen=True):
    """What to do meanwhile.

    Attributes:
        nbytes: of float32 to sum.
        seconds: how long, about.
        train: whether a thread trains a small network beside it.
    """

    nbytes: int
    seconds: float
    train: bool = True


class Lag(msgspec.Struct, frozen=True):
    """How late one node's loop was, in seconds.

    Attributes:
        name: of the node.
        transport: what carried the sums.
        median_s, p99_s, worst_s: of how late the loop woke.
        samples: how often it was to wake.
        reductions: sums done meanwhile, and how many seconds they took together.
        training_steps: steps of the thread beside it.
    """

    name: str
    transport: str
    median_s: float
    p99_s: float
    worst_s: float
    samples: int
    reductions: int
    seconds: float
    training_steps: int


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return the value below which `fraction` of a sorted, not empty sequence lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


class _Training:
    """A thread that trains a small convolutional network until told to stop."""

    def __init__(self) -> None:
        self.steps = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train, name="bench-training")

    def start(self) -> None:
        # Importing torch holds the interpreter for long, which is not what is measured.
        import torch

        torch.set_num_threads(1)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _train(self) -> None:
        import torch
        from torch import nn

        model = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 24 * 24, 10),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        images, labels = torch.randn(16, 1, 28, 28), torch.randint(0, 10, (16,))
        while not self._stop.is_set():
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            self.steps += 1


async def _sample(late: list[float], stop: asyncio.Event) -> None:
    while not stop.is_set():
        due = time.perf_counter() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        late.append(max(0.0, time.perf_counter() - due))


async def _work(task: LagTask) -> None:
    from p2pdpt.config import NodeConfig, RunConfig, read_environ
    from p2pdpt.dtypes import dtype_named
    from p2pdpt.runtime.node import Node

    environ = read_environ(os.environ)
    async with Node(NodeConfig(**environ.node)) as node:
        group = await node.join(RunConfig(**environ.run))
        memory = group.allocate(dtype_named("float32"), task.nbytes // 4)
        memory.mine.fill(1)
        took = 0.0
        for step in range(2):
            start = time.perf_counter()
            await group.exchange(memory, step=step, bucket=0)
            await group.seal(step)
            took = time.perf_counter() - start
        payload = json.dumps(took).encode()
        slowest = max(json.loads(each) for each in await group.all_gather(payload, name="bench"))
        # All members sum equally often.
        repeat = max(3, int(task.seconds / max(slowest, 1e-4)))
        training = _Training()
        if task.train:
            training.start()
        late: list[float] = []
        stop = asyncio.Event()
        sampling = asyncio.ensure_future(_sample(late, stop))
        start = time.perf_counter()
        for step in range(2, repeat + 2):
            await group.exchange(memory, step=step, bucket=0)
            await group.seal(step)
        seconds = time.perf_counter() - start
        stop.set()
        await sampling
        if task.train:
            training.stop()
        late.sort()
        lag = Lag(
            name=group.me.name,
            transport=group.transport,
            median_s=percentile(late, 0.5),
            p99_s=percentile(late, 0.99),
            worst_s=late[-1],
            samples=len(late),
            reductions=repeat,
            seconds=seconds,
            training_steps=training.steps,
        )
        found = await group.all_gather(msgspec.json.encode(lag), name="bench lag")
        if group.rank == 0:
            for each in found:
                print(each.decode(), flush=True)
        memory.close()
        await group.leave()


def _main() -> None:
    from p2pdpt.cli.loops import run_on_loop

    try:
        run_on_loop(_work(msgspec.json.decode(sys.argv[1], type=LagTask)))
    except BaseException as error:
        # For the launcher, which is to tell who failed from who followed.
        event = {"event": "failed", "error": str(error), "kind": type(error).__name__}
        os.write(int(os.environ["P2PDPT_REPORT_FD"]), json.dumps(event).encode() + b"\n")
        raise


if __name__ == "__main__":
    _main()
