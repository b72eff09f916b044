"""One node's part of ``p2pdpt bench allreduce``; a process of its own, started by the command.

The methods take turns between barriers, so that whatever else the machine does falls on all of
them alike. A repetition takes as long as its slowest member; of short all-reduces it is several in
a row, because members leave a barrier up to a few hundred microseconds apart.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import msgspec

from p2pdpt.errors import P2PError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from p2pdpt.group import Group
    from p2pdpt.memory import BucketMemory

__all__ = ["Row", "Task", "measure"]

LEAST, MOST = 7, 300
"""Repetitions of each method, unless told."""

ROW_S, MOST_IN_A_ROW = 0.005, 20
"""How long a repetition is to take at least, and the most all-reduces that it has for it."""

BUDGET_S = 2.0
"""Seconds that the repetitions of one method at one size may take, beyond the least number."""


class Task(msgspec.Struct, frozen=True):
    """What to measure.

    Attributes:
        sizes: bytes of float32 to reduce, one after the other.
        against: other libraries to measure beside, for instance ``gloo``.
        repeat: repetitions of each method, or None to choose by their time.
    """

    sizes: list[int]
    against: list[str] = []
    repeat: int | None = None


class Row(msgspec.Struct, frozen=True):
    """A line of the result.

    Attributes:
        nodes: how many took part.
        bytes: of each node's contribution.
        method: ``gloo``, or the name of our transport; ``shm`` is our own memory, out of place.
        median_s: seconds of one all-reduce, of the slowest member.
        ratio_to_gloo: how many times faster than gloo, in medians; above 1 is faster.
        cpu_s: processor seconds of one all-reduce, over all members.
        repeats: how many were measured.
    """

    nodes: int
    bytes: int
    method: str
    median_s: float
    ratio_to_gloo: float | None
    cpu_s: float
    repeats: int


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class _Method:
    """One way to all-reduce one size, with what it took so far."""

    def __init__(
        self, name: str, call: Callable[[], Awaitable[None]], check: Callable[[], bool]
    ) -> None:
        self.name, self._call, self._check = name, call, check
        self.seconds: list[float] = []
        self.cpu_s = 0.0

    async def once(self, calls: int = 1) -> float:
        cpu, start = _cpu_seconds(), time.perf_counter()
        for _ in range(calls):
            await self._call()
        took = (time.perf_counter() - start) / calls
        self.cpu_s += (_cpu_seconds() - cpu) / calls
        self.seconds.append(took)
        return took

    async def warm_up(self) -> float:
        """Call it six times, look at the result of the first, and return the best time."""
        await self._call()
        if not self._check():
            raise P2PError(f"{self.name} did not sum right")
        best = min([await self.once() for _ in range(5)])
        self.seconds.clear()
        self.cpu_s = 0.0
        return best


async def measure(
    group: Group,
    methods: list[_Method],
    nbytes: int,
    repeat: int | None,
) -> list[Row]:
    """Return a row for each method, the same on all members.

    Args:
        group: of those that take part; every member calls this.
        methods: in the order in which they take turns.
        nbytes: of a contribution.
        repeat: how often, or None to choose.
    """

    async def gather(value: object) -> list[Any]:
        payload = json.dumps(value).encode()
        return [json.loads(part) for part in await group.all_gather(payload, name="bench")]

    best = [await method.warm_up() for method in methods]
    slowest = [max(each) for each in zip(*await gather(best), strict=True)]
    calls = [max(1, min(MOST_IN_A_ROW, int(ROW_S / max(each, 1e-6)))) for each in slowest]
    if repeat is None:
        longest = max(each * count for each, count in zip(slowest, calls, strict=True))
        repeat = max(LEAST, min(MOST, int(BUDGET_S / max(longest, 1e-6))))
    for _ in range(repeat):
        for method, count in zip(methods, calls, strict=True):
            # What one method leaves in the event loop must not run in the other's time.
            await asyncio.sleep(0)
            await group.all_gather(b"", name="bench barrier")
            await method.once(count)
    medians, cpu = {}, {}
    for method in methods:
        all_seconds = await gather(method.seconds)
        medians[method.name] = statistics.median(
            max(repetition) for repetition in zip(*all_seconds, strict=True)
        )
        cpu[method.name] = sum(await gather(method.cpu_s)) / repeat
    gloo = medians.get("gloo")
    return [
        Row(
            nodes=group.size,
            bytes=nbytes,
            method=name,
            median_s=median,
            ratio_to_gloo=gloo / median if gloo else None,
            cpu_s=cpu[name],
            repeats=repeat,
        )
        for name, median in medians.items()
    ]


def _ours(group: Group, name: str, memory: BucketMemory) -> _Method:
    from p2pdpt.topology import ADD

    memory.mine.fill(group.rank + 1)

    async def call() -> None:
        await group.all_reduce(memory, ADD, name="bench allreduce")

    def check() -> bool:
        return bool((memory.result == _expected(group.size)).all())

    return _Method(name, call, check)


def _gloo(group: Group, length: int) -> _Method:
    import torch
    import torch.distributed as dist

    tensor = torch.full((length,), float(group.rank + 1))

    async def call() -> None:
        dist.all_reduce(tensor)

    def check() -> bool:
        right = bool((tensor == _expected(group.size)).all())
        # In place: repeated sums would run to infinity.
        tensor.zero_()
        return right

    return _Method("gloo", call, check)


def _expected(size: int) -> int:
    return size * (size + 1) // 2


async def _start_gloo(group: Group) -> None:
    """Make the members a process group of torch.distributed over loopback."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise UnavailableError(f"gloo comes with torch, which does not import: {error}") from error
    if not (dist.is_available() and dist.is_gloo_available()):
        raise UnavailableError("this torch was built without gloo")
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The first member's store has a thread of its own; the others learn where it is.
    first = group.rank == 0
    store_type: Any = vars(dist)["TCPStore"]  # there, but not in the module's typed face
    store = store_type("127.0.0.1", 0, None, True, wait_for_workers=False) if first else None
    ports = await group.all_gather(
        str(store.port if store is not None else 0).encode(), name="bench store"
    )
    if not first:
        store = store_type("127.0.0.1", int(ports[0]), None, False)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)


async def _work(task: Task) -> None:
    from p2pdpt.config import NodeConfig, RunConfig, read_environ
    from p2pdpt.dtypes import dtype_named
    from p2pdpt.runtime.node import Node

    environ = read_environ(os.environ)
    config = NodeConfig(**environ.node)
    float32 = dtype_named("float32")
    run = RunConfig(**environ.run)
    # One run for each transport, by the same members.
    over_tcp = dataclasses.replace(config, transports=("tcp",))
    sharing = dataclasses.replace(run, run=f"{run.run}-shm")
    async with Node(over_tcp) as first, Node(config) as second:
        group, shared = await asyncio.gather(first.join(run), second.join(sharing))
        ours = [group]
        if shared.transport == "shm":
            ours.insert(0, shared)
        elif group.rank == 0 and group.size > 1:
            print(f"no shared memory: {shared.unshared}", file=sys.stderr, flush=True)
        if "gloo" in task.against:
            await _start_gloo(group)
        for nbytes in task.sizes:
            length = nbytes // float32.itemsize
            memories = [each.allocate(float32, length) for each in ours]
            methods = [
                _ours(each, each.transport or "tcp", memory)
                for each, memory in zip(ours, memories, strict=True)
            ]
            if "gloo" in task.against:
                methods.insert(0, _gloo(group, length))
            rows = await measure(group, methods, nbytes, task.repeat)
            if group.rank == 0:
                for row in rows:
                    print(msgspec.json.encode(row).decode(), flush=True)
            methods.clear()
            for memory in memories:
                memory.close()
        await asyncio.gather(group.leave(), shared.leave())
    if "gloo" in task.against:
        import torch.distributed as dist

        dist.destroy_process_group()


def _main() -> None:
    from p2pdpt.cli.loops import run_on_loop

    try:
        run_on_loop(_work(msgspec.json.decode(sys.argv[1], type=Task)))
    except BaseException as error:
        # For the launcher, which is to tell who failed from who followed.
        event = {"event": "failed", "error": str(error), "kind": type(error).__name__}
        os.write(int(os.environ["P2PDPT_REPORT_FD"]), json.dumps(event).encode() + b"\n")
        raise


if __name__ == "__main__":
    _main()
