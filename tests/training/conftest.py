"""Groups without a network: members in threads of one process, and sessions over them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from p2pdpt.dtypes import DType
from p2pdpt.errors import P2PError, PeerFailedError, PeerLeftError
from p2pdpt.group import Group, GroupCounters
from p2pdpt.memory import BucketMemory, allocate
from p2pdpt.protocol.view import Member, View
from p2pdpt.topology import Combine
from p2pdpt.training.agreement import Agreement
from p2pdpt.training.buckets import area_tensor
from p2pdpt.training.connection import Connection
from p2pdpt.training.loop_thread import LoopThread
from p2pdpt.training.sessions import Session
from p2pdpt.training.waiting import Waiting

PATIENCE_S = 30.0


class Hub:
    """Where the members of one group meet; thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.places: dict[Any, dict[int, Any]] = {}
        self.events: dict[Any, list[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]]] = {}
        self.left: dict[int, PeerFailedError] = {}
        self.log: list[tuple[Any, int]] = []

    async def meet(self, key: Any, rank: int, value: Any) -> dict[int, Any]:
        """Return everybody's value, when all have come."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self.lock:
            self.log.append((key, rank))
            present = self.places.setdefault(key, {})
            assert rank not in present, f"rank {rank} came twice to {key}"
            present[rank] = value
            if self.left and not self.left.keys() <= present.keys():
                raise self.failure()
            self.events.setdefault(key, []).append((loop, future))
            if len(present) == self.size:
                for other, waiter in self.events.pop(key):
                    other.call_soon_threadsafe(_settle, waiter, None)
        await future
        return self.places[key]

    def failure(self) -> PeerFailedError:
        """Return a new error about the first who left: tracebacks hold on to memory."""
        return next(iter(self.left.values())).during("", None)

    def leave(self, rank: int, error: PeerFailedError) -> None:
        with self.lock:
            self.left.setdefault(rank, error)
            for key in list(self.events):
                if rank in self.places[key]:
                    continue
                for loop, waiter in self.events.pop(key):
                    if not loop.is_closed():
                        loop.call_soon_threadsafe(_settle, waiter, self.failure())


def _settle(future: asyncio.Future[Any], error: P2PError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


class HubGroup(Group):
    """A member of a hub; exchanges give the exact weighted mean, added in rank order."""

    run = "test"
    topology = "hub"

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank = hub, rank
        self.view = View(
            1,
            tuple(
                Member(f"{each:016x}", f"node{each}", f"test:{each}") for each in range(hub.size)
            ),
        )
        self.calls: dict[str, int] = {}
        self.sent = 0
        self.memories: list[BucketMemory] = []

    @property
    def transport(self) -> str:
        return "hub"

    @property
    def counters(self) -> GroupCounters:
        return GroupCounters(self.sent, self.sent, 0, 0)

    @property
    def failure(self) -> P2PError | None:
        return self.hub.failure() if self.hub.left else None

    def allocate(self, dtype: DType, length: int) -> BucketMemory:
        memory = allocate(dtype, length)
        self.memories.append(memory)
        return memory

    async def exchange(
        self,
        memory: BucketMemory,
        *,
        step: int,
        bucket: int,
        attempt: int = 0,
        weight: float = 1.0,
    ) -> None:
        assert memory.dtype.inexact
        self.sent += memory.length * memory.dtype.itemsize
        key = ("exchange", step, attempt, bucket)
        met = await self.hub.meet(key, self.rank, (memory.mine.copy(), weight))
        assert {values.shape for values, _ in met.values()} == {memory.mine.shape}
        parts = [area_tensor(met[rank][0], memory.dtype).double() for rank in range(self.size)]
        weights = [met[rank][1] for rank in range(self.size)]
        total = sum(weights)
        mean = sum(
            (part * own for part, own in zip(parts, weights, strict=True) if own),
            torch.zeros(memory.length, dtype=torch.float64),
        )
        area_tensor(memory.result, memory.dtype).copy_(mean / total if total else mean)

    async def seal(self, step: int, attempt: int = 0) -> None:
        await self.hub.meet(("seal", step, attempt), self.rank, None)

    def _key(self, kind: str, name: str) -> Any:
        count = self.calls[kind + name] = self.calls.get(kind + name, 0) + 1
        return kind, name, count

    async def all_reduce(
        self, memory: BucketMemory, combine: Combine, *, name: str, mean: bool = False
    ) -> None:
        raise NotImplementedError

    async def broadcast(self, memory: BucketMemory, *, root: int = 0, name: str) -> None:
        met = await self.hub.meet(self._key("broadcast", name), self.rank, memory.mine.copy())
        np.copyto(memory.result, met[root])

    async def all_gather(self, payload: bytes, *, name: str) -> list[bytes]:
        assert len(payload) <= 8 << 20
        met = await self.hub.meet(self._key("gather", name), self.rank, payload)
        return [met[rank] for rank in range(self.size)]

    async def leave(self, error: str | None = None) -> None:
        me = str(self.me)
        kind = PeerLeftError if error is None else PeerFailedError
        self.hub.leave(self.rank, kind(me, self.me.address, error or "ended its script"))


class HubConnection(Connection):
    """A hub's group on a loop thread of its own."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.loop = LoopThread(f"loop-{rank}")
        self.group = HubGroup(hub, rank)

    def open(self) -> Group:
        self.loop.start()
        return self.group

    def close(self, error: str | None = None) -> None:
        if self.loop.running:
            self.loop.call(self.group.leave(error))
            self.loop.stop()
            for memory in self.group.memories:
                memory.close()


Body = Callable[[int], Any]


def in_threads(size: int, body: Body) -> list[Any]:
    """Return what `body(rank)` returns or raises, from a thread for each rank."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a member hangs"
    return results


class Parts:
    """What the small parts of a session are made with."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting, self.agreement = waiting, Agreement(waiting)


class Arena:
    """Makes hubs and sessions, and runs members."""

    def __init__(self) -> None:
        self.hub = Hub(1)

    def connection(self, rank: int) -> HubConnection:
        """Return a connection of `rank` to the hub of this run."""
        return HubConnection(self.hub, rank)

    def member(self, rank: int, body: Callable[[Parts], Any]) -> Any:
        """Return what `body` returns, given the small parts of a member of this run's hub."""
        connection = self.connection(rank)
        waiting = Waiting(connection.loop, connection.open())
        waiting.start()
        try:
            return body(Parts(waiting))
        finally:
            waiting.stop()
            connection.close()

    def session(self, rank: int, *arguments: Any, **options: Any) -> Session:
        """Return a session of `rank` in the hub of this run."""
        # The hub is no topology that could be asked.
        options.setdefault("exact", True)
        return Session(self.connection(rank), *arguments, **options)

    def outcomes(self, size: int, body: Body) -> list[Any]:
        """Run `body(rank)` for all; return results and errors."""
        self.hub = Hub(size)
        return in_threads(size, body)

    def run(self, size: int, body: Body) -> list[Any]:
        """Run `body(rank)` for all; return results, or raise the first error."""
        results = self.outcomes(size, body)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


@pytest.fixture(scope="session", autouse=True)
def _first_loop() -> None:
    """Let uvloop open what it keeps as long as the process lives."""
    thread = LoopThread()
    thread.start()
    thread.stop()


@pytest.fixture
def arena() -> Arena:
    torch.set_num_threads(1)
    return Arena()


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    thread.start()
    yield thread
    thread.stop()
