"""What the scripts of scenarios begin with: models, numbers, and a node to be part of."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from p2pdpt import Node, NodeConfig, P2PError, RunConfig, read_environ
from p2pdpt.dtypes import dtype_named
from p2pdpt.group import Group


def name() -> str:
    """Return what this node is called."""
    return os.environ["P2PDPT_NAME"]


def index() -> int:
    """Return the number in this node's name."""
    return int(name()[1:])


def say(**what: Any) -> None:
    """Tell the test something, with the time."""
    print(json.dumps({**what, "at": time.monotonic()}), flush=True)  # noqa: T201


def await_file(path: str, limit: float = 60.0) -> None:
    """Wait until the test has made a file."""
    deadline = time.monotonic() + limit
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.01)


# P(r) of the scenarios: whole numbers, exact in float32 in any order of addition, with another sum
# for every subset of the ranks.


def pattern(rank: int, length: int) -> np.ndarray[Any, Any]:
    """Return P(rank)."""
    values: np.ndarray[Any, Any] = 3000 * 2**rank + np.arange(length) % 997
    return values.astype("float32")


def pattern_sum(ranks: int, length: int) -> np.ndarray[Any, Any]:
    """Return the sum of P(r) over the first `ranks` ranks."""
    whole = sum(3000 * 2**rank for rank in range(ranks)) + ranks * (np.arange(length) % 997)
    return np.asarray(whole).astype("float32")


def fill(group: Group, length: int) -> Any:
    """Return a bucket that holds P(rank)."""
    memory = group.allocate(dtype_named("float32"), length)
    memory.mine[:] = pattern(group.rank, length)
    return memory


# Models.


def m1(hidden: int = 4) -> nn.Sequential:
    """Return M1 of the scenarios."""
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def m2() -> nn.Sequential:
    """Return M2 of the scenarios."""
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))


def batch(step: int, samples: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch for M1, another one for each step."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(samples, 8, generator=generator)
    return x, x.sum(dim=1, keepdim=True)


def part(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return a rank's part of a batch."""
    return tensor[len(tensor) * rank // size : len(tensor) * (rank + 1) // size]


def hash_of(*tensors: Any) -> str:
    """Return a digest of tensors' bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def furthest(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between two models' parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(
        float((a.detach().double() - b.detach().double()).abs().max())
        for a, b in pairs
        if a.numel()
    )


# A node in an asyncio program.


def configuration() -> tuple[NodeConfig, RunConfig]:
    """Return what the environment says, and what the test said besides."""
    said = read_environ(os.environ)
    node = NodeConfig(**said.node)
    node = dataclasses.replace(node, **json.loads(os.environ.get("SCENARIO_NODE", "{}")))
    return node, RunConfig(**said.run)


def main(body: Callable[[Node, Any], Awaitable[object]]) -> None:
    """Join the run, say so, and do `body`; an error is said, too, and is exit code 1."""

    async def stay() -> None:
        config, run = configuration()
        async with Node(config) as node:
            group = await node.join(run)
            say(
                joined=group.rank,
                size=group.size,
                id=node.node_id,
                address=node.address,
                members=[str(member) for member in group.view.members],
                transport=group.transport,
            )
            await body(node, group)

    try:
        if os.environ.get("SCENARIO_LOOP") == "uvloop":
            import uvloop

            uvloop.run(stay())
        else:
            asyncio.run(stay())
    except P2PError as error:
        say(error=type(error).__name__, text=str(error), cause=repr(error.__cause__))
        sys.exit(1)
