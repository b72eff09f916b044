"""Nodes for tests: some on one loop, or each in a process of its own, to be killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from p2pdpt.config import NodeConfig
from p2pdpt.group import Group
from p2pdpt.runtime.node import Node

_COUNT = itertools.count()

PROGRAM = """
import asyncio, json, os, sys, time
from p2pdpt import ADD, Node, NodeConfig, P2PError
from p2pdpt.dtypes import DTYPES
CONFIG = json.loads(sys.argv[1])
RUN, MIN, UVLOOP = CONFIG.pop("run"), CONFIG.pop("min_nodes"), CONFIG.pop("uvloop")

def say(**what):
    print(json.dumps(what), flush=True)

async def body(node, group):
{body}

async def main():
    async with Node(NodeConfig(**CONFIG)) as node:
        group = await node.join(RUN, min_nodes=MIN, wait=60)
        say(rank=group.rank, members=[str(m) for m in group.view.members], address=node.address)
        await body(node, group)

try:
    if UVLOOP:
        import uvloop
        uvloop.run(main())
    else:
        asyncio.run(main())
except P2PError as error:
    say(error=type(error).__name__, text=str(error), at=time.monotonic())
    sys.exit(1)
"""


class Program:
    """One running node; ``read`` returns what it says, line by line."""

    def __init__(self, body: str, config: dict[str, Any]) -> None:
        code = PROGRAM.replace("{body}", textwrap.indent(textwrap.dedent(body), "    "))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, json.dumps(config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={key: value for key, value in os.environ.items() if "P2PDPT" not in key},
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the program ended: {self.end()[1]}")
        return dict(json.loads(line))

    def kill(self) -> None:
        """Kill it as ``kill -9`` does."""
        self.process.kill()

    def end(self) -> tuple[int, str]:
        """Wait for the end and return the exit code and what was written to stderr."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def run_name() -> str:
    """Return a run that no other test on this machine is in."""
    return f"test-{os.getpid()}-{next(_COUNT)}"


@pytest.fixture
def programs(run_name: str) -> Iterator[Callable[..., list[Program]]]:
    """Start `count` nodes of one run, each in a process, running `body`."""
    started: list[Program] = []

    def start(body: str, count: int, *, uvloop: bool = False, **config: Any) -> list[Program]:
        said = {"run": run_name, "min_nodes": count, "uvloop": uvloop, **config}
        new = [Program(body, {"name": f"n{index}", **said}) for index in range(count)]
        started.extend(new)
        return new

    yield start
    for program in started:
        program.kill()
        program.process.communicate()


@pytest.fixture
async def groups(run_name: str) -> AsyncIterator[Callable[..., Any]]:
    """Start `count` nodes of one run on this loop, and return their groups in rank order."""
    nodes: list[Node] = []

    async def start(count: int, *, topology: str = "ring", **config: Any) -> list[Group]:
        new = [Node(NodeConfig(name=f"n{index}", **config)) for index in range(count)]
        nodes.extend(new)
        for node in new:
            await node.start()
        joined = await asyncio.gather(
            *(node.join(run_name, min_nodes=count, topology=topology, wait=30) for node in new)
        )
        return sorted(joined, key=lambda group: group.rank)

    yield start
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*(node.close() for node in nodes))
