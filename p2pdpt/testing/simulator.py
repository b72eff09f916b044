"""Runs a topology on any number of simulated nodes, in virtual time, from a seed.

No event loop, no socket, no thread: one call runs every rank's part of one round with the code
that the asyncio driver uses, over a modelled network that delays, permutes, cuts, drops and
partitions, and kills nodes. The same seed gives the same run. Memory is read as late as a real
network might read it, so that a wrong hazard shows as a wrong number::

    outcome = simulate(Ring(), [numpy.ones(10, "float32")] * 4, seed=7)
    outcome.results[0]          # the mean, on rank 0
    outcome.bytes_sent[0]       # what rank 0 sent
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from p2pdpt import kernels as kernel_module
from p2pdpt.channel import Meta
from p2pdpt.dtypes import dtype_named
from p2pdpt.errors import DeadlockError, P2PError, PeerFailedError, TopologyError
from p2pdpt.memory import BucketMemory
from p2pdpt.protocol.round import Round
from p2pdpt.protocol.round_io import RoundIO, Slice
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.runtime.drivers.round_memory import RoundMemory, StagingPool
from p2pdpt.testing.network import Host, Network, Schedule, Wire
from p2pdpt.topology import ADD, Bucket, Combine, Facts

if TYPE_CHECKING:
    from p2pdpt.topology import Kernel, Message, Store, Topology

__all__ = ["Network", "Outcome", "Simulation", "simulate"]


@dataclass
class Outcome:
    """What a simulated round did.

    Attributes:
        results: for each rank, its result, shape of its contribution; None where it failed.
        errors: for each rank, what its exchange raised, or None.
        seconds: virtual time at which the last rank was done.
        bytes_sent: for each rank, bytes on the wire, headers included.
        messages_sent: for each rank, messages (one per operation and receiver).
        frames_sent: frames of all ranks together.
    """

    results: list[Any]
    errors: list[P2PError | None]
    seconds: float
    bytes_sent: list[int]
    messages_sent: list[int]
    frames_sent: int


def simulate(
    topology: Topology | Sequence[Topology],
    contributions: Sequence[Any],
    *,
    dtype: str | None = None,
    combine: Combine = ADD,
    reduction: Reduction = Reduction.MEAN,
    weights: Sequence[float] | None = None,
    facts: Facts | None = None,
    network: Network | None = None,
    seed: int = 0,
    in_place: bool = False,
    run_ahead: bool = True,
    kernels: str = "off",
    store: Store | None = None,
) -> Outcome:
    """Run one round of `topology` on ``len(contributions)`` simulated nodes.

    Args:
        topology: one for all ranks, or one for each.
        contributions: for each rank a flat array, all of one length and type; not changed
            unless `in_place`.
        dtype: the element type; needed for ``bfloat16`` (arrays of ``uint16`` bits).
        combine: what the bucket asks the topology to join with.
        reduction: what becomes of the complete fold.
        weights: of the contributions; default 1 each.
        facts: agreed facts.
        network: how messages travel; the default permutes them mildly.
        seed: of every random choice; equal seeds give equal runs.
        in_place: whether `mine` and `result` are one area.
        run_ahead: whether static topologies run ahead, as on real nodes.
        kernels: ``off`` for numpy, ``auto`` or ``require`` for the compiled ones.
        store: for topologies that apply messages to one.

    Returns:
        What every rank ended with. Failures of killed nodes and of the network are reported
        there; mistakes of the topology are raised.

    Raises:
        DeadlockError: nothing can move any more; the text lists the stuck operations.
        TopologyError: the topology broke a rule.
    """
    return Simulation(
        topology,
        contributions,
        dtype=dtype,
        combine=combine,
        reduction=reduction,
        weights=weights,
        facts=facts,
        network=network,
        seed=seed,
        in_place=in_place,
        run_ahead=run_ahead,
        kernels=kernels,
        store=store,
    ).run()


class _Node(RoundIO, Host):
    """One simulated rank: its memory, its round, and its side of the network."""

    def __init__(self, simulation: Simulation, rank: int, bucket: BucketMemory) -> None:
        super().__init__()
        self.simulation = simulation
        self.rank = rank
        self.bucket = bucket
        self.memory = RoundMemory(bucket, simulation.kernels, simulation.pool)
        self.error: P2PError | None = None

    def open_send(self, peer: int, ordinal: int, length: int) -> None:
        self.simulation.wire.open_send(self.rank, peer, ordinal, length)

    def push(self, peer: int, ordinal: int, data: Slice, meta: Meta) -> None:
        self.simulation.wire.push(self.rank, peer, ordinal, data, meta)

    def push_bytes(self, peer: int, ordinal: int, payload: bytes) -> None:
        self.simulation.wire.push(self.rank, peer, ordinal, payload, Meta())

    def open_receive(self, peer: int, ordinal: int, length: int) -> None:
        self.simulation.wire.open_receive(peer, self.rank, ordinal, length)

    def cancel_receive(self, peer: int, ordinal: int) -> None:
        self.simulation.wire.withdraw(peer, self.rank, ordinal)

    def grant(self, peer: int, ordinal: int, upto: int) -> None:
        self.simulation.wire.grant(peer, self.rank, ordinal, upto)

    def fold(
        self,
        out: Slice,
        sources: Sequence[Slice],
        combine: Combine,
        scales: Sequence[float] | None,
        divisor: float | None,
    ) -> None:
        self.memory.fold(out, sources, combine, scales, divisor)

    def local(
        self, kernel: Kernel, src: Sequence[Slice], dst: Slice, done: Callable[[], None]
    ) -> None:
        def run() -> None:
            self.memory.run(kernel, src, dst)
            done()

        self.simulation.off_loop(self.rank, run)

    def apply(
        self, shard: int, message: Message, data: Sequence[Slice], done: Callable[[], None]
    ) -> None:
        store = self.simulation.store
        if store is None:
            raise TopologyError("this run has no store to apply a message to")

        def run() -> None:
            store.apply(shard, message, [self.memory.buffer(each) for each in data])
            done()

        self.simulation.off_loop(self.rank, run)

    def scratch(self, area: int, length: int) -> None:
        self.memory.scratch(area, length)

    def drop(self, area: int) -> None:
        self.memory.drop(area)

    def staging(self, length: int) -> tuple[int, int]:
        return self.memory.staging(length)

    def release(self, areas: tuple[int, int]) -> None:
        self.memory.release(areas)

    def now(self) -> float:
        return self.simulation.schedule.clock

    def wake_at(self, when: float) -> None:
        schedule = self.simulation.schedule
        schedule.later(max(0.0, when - schedule.clock), self.rank, self.round.tick)


class Simulation:
    """One round on simulated nodes, and its replays; see :func:`simulate` for the arguments."""

    def __init__(
        self,
        topology: Topology | Sequence[Topology],
        contributions: Sequence[Any],
        *,
        dtype: str | None = None,
        combine: Combine = ADD,
        reduction: Reduction = Reduction.MEAN,
        weights: Sequence[float] | None = None,
        facts: Facts | None = None,
        network: Network | None = None,
        seed: int = 0,
        in_place: bool = False,
        run_ahead: bool = True,
        kernels: str = "off",
        store: Store | None = None,
    ) -> None:
        arrays = [np.ascontiguousarray(each).reshape(-1) for each in contributions]
        size = len(arrays)
        element = dtype_named(dtype or str(arrays[0].dtype))
        if any(len(each) != len(arrays[0]) or each.dtype != element.storage for each in arrays):
            raise TopologyError("contributions differ in length or type")
        listed = list(topology) if isinstance(topology, Sequence) else [topology] * size
        self.kernels = kernel_module.load(kernels)  # type: ignore[arg-type]
        self.pool = StagingPool()
        self.store = store
        self._network = network or Network()
        self._random = random.Random(seed)
        self._nodes: list[_Node] = []
        bucket = Bucket(len(arrays[0]), element.name, combine)
        for rank, mine in enumerate(arrays):
            result = mine if in_place else _poisoned(mine)
            node = _Node(self, rank, BucketMemory(element, len(mine), mine, result, ()))
            node.round = Round(
                listed[rank],
                bucket,
                element,
                node,
                rank=rank,
                size=size,
                facts=facts or Facts(),
                reduction=reduction,
                weight=1.0 if weights is None else weights[rank],
                in_place=in_place,
                seed=seed,
                run_ahead=run_ahead,
            )
            self._nodes.append(node)

    def run(self) -> Outcome:
        """Run the round, once. Raises as :func:`simulate`."""
        return self._run([node.round.begin for node in self._nodes])

    def replay(
        self, contributions: Sequence[Any], weights: Sequence[float] | None = None
    ) -> Outcome:
        """Run the recorded operations again, as the next step of training does.

        Args:
            contributions: for each rank; copied over the arrays of the round before, while the
                results of that round are overwritten.
            weights: of the contributions; default 1 each.

        Raises:
            TopologyError: the round before did not finish, or is not static.
        """
        begins = []
        for node, each in zip(self._nodes, contributions, strict=True):
            if not node.round.replayable:
                raise TopologyError(f"rank {node.rank} has no finished static round to replay")
            if node.bucket.result is not node.bucket.mine:
                node.bucket.result[...] = _poisoned(node.bucket.mine)
            node.bucket.mine[...] = np.asarray(each).reshape(-1)
            Host.__init__(node)
            weight = 1.0 if weights is None else weights[node.rank]
            begins.append(functools.partial(node.round.replay, node, weight))
        return self._run(begins)

    def _run(self, begins: Sequence[Callable[[], None]]) -> Outcome:
        nodes = self._nodes
        self.schedule = schedule = Schedule(self._random)
        self.wire = Wire(self._network, nodes, schedule, self._random)
        low, high = self._network.latency_s
        for rank, begin in enumerate(begins):
            schedule.later(self._random.uniform(0.0, high - low), rank, begin)
        for rank, when in self._network.kill.items():
            schedule.later(when, -1, functools.partial(self._kill, rank))
        ended = 0.0
        try:
            while (event := schedule.next()) is not None:
                rank, action = event
                if rank < 0:
                    action()
                elif not nodes[rank].dead and nodes[rank].error is None:
                    running = not nodes[rank].round.finished
                    action()
                    if running and nodes[rank].round.finished:
                        ended = schedule.clock
            self._check_end()
        finally:
            for node in nodes:
                node.round.abort(DeadlockError("the simulation ended"))
        return Outcome(
            [
                node.bucket.result if node.round.finished and node.error is None else None
                for node in nodes
            ],
            [node.error for node in nodes],
            ended,
            [node.bytes_sent for node in nodes],
            [node.messages_sent for node in nodes],
            self.wire.frames,
        )

    def off_loop(self, rank: int, action: Callable[[], None]) -> None:
        """Do something a little later, as a thread would."""
        self.schedule.later(self.wire.jitter(), rank, action)

    def _kill(self, rank: int) -> None:
        self._nodes[rank].dead = True
        for node in self._nodes:
            if not node.dead:
                delay = self._network.detect_s * self._random.uniform(0.5, 1.0)
                self.schedule.later(delay, node.rank, functools.partial(self._notice, node, rank))

    def _notice(self, node: _Node, rank: int) -> None:
        if node.round.finished:
            return
        node.error = PeerFailedError(
            f"rank {rank}", "simulated", "its process ended", operation="exchange"
        )
        node.round.abort(node.error)

    def _check_end(self) -> None:
        alive = [not node.dead and node.error is None for node in self._nodes]
        stuck = [node for node in self._nodes if alive[node.rank] and not node.round.finished]
        if stuck:
            lines = [
                f"rank {node.rank}: {line}"
                for node in stuck
                for line in node.round.stuck() or ["its exchange has not returned"]
            ]
            raise DeadlockError(
                f"{len(stuck)} of {len(self._nodes)} ranks wait for ever:\n  " + "\n  ".join(lines)
            )
        self.wire.check_end(alive)


def _poisoned(mine: Any) -> Any:
    """Return an array like `mine` full of values that would be noticed in a result."""
    poison = np.empty_like(mine)
    poison.view(np.uint8).fill(0xA5)
    return poison
