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

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from p2pdpt import kernels as kernel_module
from p2pdpt.channel import EAGER_BYTES, Meta
from p2pdpt.dtypes import dtype_named
from p2pdpt.errors import DeadlockError, MismatchError, P2PError, PeerFailedError, TopologyError
from p2pdpt.memory import BucketMemory
from p2pdpt.protocol.round import Round
from p2pdpt.protocol.round_io import RoundIO, Slice
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.runtime.drivers.round_memory import RoundMemory, StagingPool
from p2pdpt.topology import ADD, Bucket, Combine, Facts

if TYPE_CHECKING:
    from p2pdpt.topology import Kernel, Message, Store, Topology

__all__ = ["Network", "Outcome", "simulate"]

_HEADER_BYTES = 72
"""What a frame costs on the wire besides its elements."""


@dataclass(frozen=True)
class Network:
    """How the simulated network behaves.

    Attributes:
        latency_s: least and most seconds of one frame; drawn for each, so messages overtake.
        bandwidth: bytes per second of each node's outgoing link; 0 means no limit.
        frame_elements: least and most elements of one frame; drawn for each.
        drop: numbers of the frames (counted over all nodes, from 0) that never arrive.
        partition: sets of ranks that cannot reach each other ...
        partitioned_s: ... from and until these seconds; frames wait until it heals.
        kill: for a rank, the second at which its process ends.
        detect_s: how long the survivors take to notice.
    """

    latency_s: tuple[float, float] = (20e-6, 200e-6)
    bandwidth: float = 0.0
    frame_elements: tuple[int, int] = (1, 1 << 18)
    drop: frozenset[int] = frozenset()
    partition: tuple[frozenset[int], ...] = ()
    partitioned_s: tuple[float, float] = (0.0, 0.0)
    kill: dict[int, float] = field(default_factory=dict)
    detect_s: float = 0.1


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
    return _Simulation(
        topology,
        contributions,
        dtype,
        combine,
        reduction,
        weights,
        facts or Facts(),
        network or Network(),
        seed,
        in_place,
        run_ahead,
        kernels,
        store,
    ).run()


class _Transfer:
    """One message under way: pushed by its sender, granted and taken by its receiver."""

    __slots__ = (
        "busy",
        "granted",
        "length",
        "opened",
        "posted",
        "pushed",
        "queue",
        "taken",
        "total",
    )

    def __init__(self) -> None:
        self.queue: list[tuple[Slice | bytes, Meta]] = []
        self.opened: int | None = None
        self.posted: int | None = None
        self.granted = 0
        self.pushed = 0
        self.taken = 0
        self.busy = False
        self.total = 0
        self.length = 0


class _Node(RoundIO):
    """One simulated rank: its memory, its round, and its side of the network."""

    def __init__(self, simulation: _Simulation, rank: int, memory: BucketMemory) -> None:
        self.simulation = simulation
        self.rank = rank
        self.memory = RoundMemory(memory, simulation.kernels, StagingPool())
        self.round: Round
        self.link_free_at = 0.0
        self.bytes_sent = 0
        self.messages_sent = 0
        self.dead = False
        self.error: P2PError | None = None

    def open_send(self, peer: int, ordinal: int, length: int) -> None:
        self.messages_sent += 1
        transfer = self.simulation.transfer(self.rank, peer, ordinal)
        transfer.opened = length
        self.simulation.check(self.rank, peer, ordinal)

    def push(self, peer: int, ordinal: int, data: Slice, meta: Meta) -> None:
        transfer = self.simulation.transfer(self.rank, peer, ordinal)
        transfer.queue.append((data, meta))
        self.simulation.send(self.rank, peer, ordinal)

    def push_bytes(self, peer: int, ordinal: int, payload: bytes) -> None:
        transfer = self.simulation.transfer(self.rank, peer, ordinal)
        transfer.queue.append((payload, Meta()))
        self.simulation.send(self.rank, peer, ordinal)

    def open_receive(self, peer: int, ordinal: int, length: int) -> None:
        transfer = self.simulation.transfer(peer, self.rank, ordinal)
        transfer.posted = length
        self.simulation.check(peer, self.rank, ordinal)
        self.simulation.send(peer, self.rank, ordinal)

    def cancel_receive(self, peer: int, ordinal: int) -> None:
        self.simulation.transfers.pop((peer, self.rank, ordinal), None)

    def grant(self, peer: int, ordinal: int, upto: int) -> None:
        transfer = self.simulation.transfer(peer, self.rank, ordinal)
        transfer.granted = max(transfer.granted, upto)
        self.simulation.send(peer, self.rank, ordinal)

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

        self.simulation.later(self.simulation.jitter(), self.rank, run)

    def apply(
        self, shard: int, message: Message, data: Sequence[Slice], done: Callable[[], None]
    ) -> None:
        store = self.simulation.store
        if store is None:
            raise TopologyError("this run has no store to apply a message to")

        def run() -> None:
            store.apply(shard, message, [self.memory.buffer(each) for each in data])
            done()

        self.simulation.later(self.simulation.jitter(), self.rank, run)

    def scratch(self, area: int, length: int) -> None:
        self.memory.scratch(area, length)

    def drop(self, area: int) -> None:
        self.memory.drop(area)

    def staging(self, length: int) -> tuple[int, int]:
        return self.memory.staging(length)

    def release(self, areas: tuple[int, int]) -> None:
        self.memory.release(areas)

    def now(self) -> float:
        return self.simulation.clock

    def wake_at(self, when: float) -> None:
        delay = max(0.0, when - self.simulation.clock)
        self.simulation.later(delay, self.rank, self.round.tick)


class _Simulation:
    def __init__(
        self,
        topology: Topology | Sequence[Topology],
        contributions: Sequence[Any],
        dtype: str | None,
        combine: Combine,
        reduction: Reduction,
        weights: Sequence[float] | None,
        facts: Facts,
        network: Network,
        seed: int,
        in_place: bool,
        run_ahead: bool,
        kernels: str,
        store: Store | None,
    ) -> None:
        arrays = [np.ascontiguousarray(each).reshape(-1) for each in contributions]
        size = len(arrays)
        element = dtype_named(dtype or str(arrays[0].dtype))
        if any(len(each) != len(arrays[0]) or each.dtype != element.storage for each in arrays):
            raise TopologyError("contributions differ in length or type")
        listed = list(topology) if isinstance(topology, Sequence) else [topology] * size
        self.kernels = kernel_module.load(kernels)  # type: ignore[arg-type]
        self.network = network
        self.random = random.Random(seed)
        self.store = store
        self.clock = 0.0
        self.frames = 0
        self.transfers: dict[tuple[int, int, int], _Transfer] = {}
        self._events: list[tuple[float, float, int, int, Callable[[], None]]] = []
        self._sequence = 0
        self.nodes: list[_Node] = []
        self.memories: list[BucketMemory] = []
        bucket = Bucket(len(arrays[0]), element.name, combine)
        for rank, mine in enumerate(arrays):
            result = mine if in_place else _poisoned(mine)
            memory = BucketMemory(element, len(mine), mine, result, ())
            node = _Node(self, rank, memory)
            node.round = Round(
                listed[rank],
                bucket,
                element,
                node,
                rank=rank,
                size=size,
                facts=facts,
                reduction=reduction,
                weight=1.0 if weights is None else weights[rank],
                in_place=in_place,
                seed=seed,
                run_ahead=run_ahead,
            )
            self.nodes.append(node)
            self.memories.append(memory)

    def run(self) -> Outcome:
        for node in self.nodes:
            self.later(self.jitter(), node.rank, node.round.begin)
        for rank, when in self.network.kill.items():
            self.later(when, -1, lambda rank=rank: self._kill(rank))  # type: ignore[misc]
        ended = 0.0
        try:
            while self._events:
                self.clock, _, _, rank, action = heapq.heappop(self._events)
                if rank >= 0 and (self.nodes[rank].dead or self.nodes[rank].error is not None):
                    continue
                running = rank >= 0 and not self.nodes[rank].round.finished
                action()
                if running and self.nodes[rank].round.finished:
                    ended = self.clock
            self._check_end()
        finally:
            for node in self.nodes:
                node.round.abort(DeadlockError("the simulation ended"))
        return Outcome(
            [
                memory.result if node.round.finished and node.error is None else None
                for node, memory in zip(self.nodes, self.memories, strict=True)
            ],
            [node.error for node in self.nodes],
            ended,
            [node.bytes_sent for node in self.nodes],
            [node.messages_sent for node in self.nodes],
            self.frames,
        )

    def later(self, delay: float, rank: int, action: Callable[[], None]) -> None:
        """Do something on a rank after `delay` virtual seconds, unless it has died."""
        self._sequence += 1
        heapq.heappush(
            self._events,
            (self.clock + delay, self.random.random(), self._sequence, rank, action),
        )

    def jitter(self) -> float:
        """Draw a latency."""
        return self.random.uniform(*self.network.latency_s)

    def transfer(self, source: int, to: int, ordinal: int) -> _Transfer:
        """Return the message `ordinal` of an ordered pair."""
        found = self.transfers.get((source, to, ordinal))
        if found is None:
            found = self.transfers[source, to, ordinal] = _Transfer()
        return found

    def check(self, source: int, to: int, ordinal: int) -> None:
        """Refuse a send and a receive of different lengths."""
        transfer = self.transfer(source, to, ordinal)
        if None not in (transfer.opened, transfer.posted) and transfer.opened != transfer.posted:
            raise MismatchError(
                f"operation {ordinal} from rank {source} to rank {to}: "
                f"{transfer.opened} elements are sent, {transfer.posted} are expected"
            )

    def send(self, source: int, to: int, ordinal: int) -> None:
        """Put the next frame of a message on the wire, if there is one and it may go."""
        transfer = self.transfer(source, to, ordinal)
        if transfer.busy or not transfer.queue or self.nodes[source].dead:
            return
        data, _meta = transfer.queue[0]
        whole = len(data) if isinstance(data, bytes) else data.stop - data.start
        count = min(whole, self.random.randint(*self.network.frame_elements))
        width = 1 if isinstance(data, bytes) else self.nodes[source].memory.view(data).itemsize
        if transfer.taken + count > transfer.granted:
            eager = (transfer.opened or 0) * width <= EAGER_BYTES
            count = transfer.granted - transfer.taken if not eager else count
            if count <= 0 or transfer.posted is None:
                return
        transfer.busy = True
        node = self.nodes[source]
        nbytes = count * width + _HEADER_BYTES
        start = max(self.clock, node.link_free_at)
        if self.network.bandwidth:
            node.link_free_at = start + nbytes / self.network.bandwidth
        node.bytes_sent += nbytes
        number = self.frames
        self.frames += 1
        # The frame is read from memory when it leaves the link, not when it was pushed.
        leaves = max(start, node.link_free_at) - self.clock + self.jitter() / 2
        self.later(leaves, source, lambda: self._leave(source, to, ordinal, count, number))

    def _leave(self, source: int, to: int, ordinal: int, count: int, number: int) -> None:
        transfer = self.transfer(source, to, ordinal)
        data, meta = transfer.queue[0]
        node = self.nodes[source]
        if isinstance(data, bytes):
            payload: Any = np.frombuffer(data[:count], np.uint8)
            rest: Slice | bytes = data[count:]
            empty = not rest
        else:
            payload = node.memory.view(Slice(data.area, data.start, data.start + count)).copy()
            rest = Slice(data.area, data.start + count, data.stop)
            empty = rest.start == rest.stop
        if empty:
            transfer.queue.pop(0)
        else:
            transfer.queue[0] = (rest, meta)
        start = transfer.taken
        transfer.taken += count
        transfer.busy = False
        if number not in self.network.drop:
            self._deliver(source, to, ordinal, start, payload, meta)
        self.send(source, to, ordinal)
        if not isinstance(data, bytes):
            node.round.drained(to, ordinal, transfer.taken)

    def _deliver(
        self, source: int, to: int, ordinal: int, start: int, payload: Any, meta: Meta
    ) -> None:
        delay = self.jitter()
        begun, healed = self.network.partitioned_s
        if begun <= self.clock < healed and self._cut(source, to):
            delay += healed - self.clock
        transfer = self.transfer(source, to, ordinal)

        def arrive() -> None:
            # Frames of one message stay in order; different messages overtake each other.
            if start != transfer.total:
                self.later(self.jitter(), to, arrive)
                return
            node = self.nodes[to]
            done = 0
            while done < len(payload):
                place = node.round.land(
                    source, ordinal, start + done, len(payload) - done, payload.itemsize, meta
                )
                if isinstance(place, memoryview):
                    place[:] = payload[done : done + len(place)].tobytes()
                    count = len(place)
                else:
                    target = node.memory.view(place)
                    count = len(target)
                    target[:] = payload[done : done + count]
                done += count
                transfer.total += count
                node.round.arrived(source, ordinal, count, meta)

        self.later(delay, to, arrive)

    def _cut(self, source: int, to: int) -> bool:
        for side in self.network.partition:
            if (source in side) != (to in side):
                return True
        return False

    def _kill(self, rank: int) -> None:
        self.nodes[rank].dead = True
        for node in self.nodes:
            if not node.dead:
                self.later(
                    self.network.detect_s * self.random.uniform(0.5, 1.0),
                    node.rank,
                    lambda node=node: self._notice(node, rank),  # type: ignore[misc]
                )

    def _notice(self, node: _Node, rank: int) -> None:
        if node.round.finished:
            return
        node.error = PeerFailedError(
            f"rank {rank}", "simulated", "its process ended", operation="exchange"
        )
        node.round.abort(node.error)

    def _check_end(self) -> None:
        alive = [node for node in self.nodes if not node.dead and node.error is None]
        stuck = [node for node in alive if not node.round.finished]
        if stuck:
            lines = [
                f"rank {node.rank}: {line}"
                for node in stuck
                for line in node.round.stuck() or ["its exchange has not returned"]
            ]
            raise DeadlockError(
                f"{len(stuck)} of {len(self.nodes)} ranks wait for ever:\n  " + "\n  ".join(lines)
            )
        for (source, to, ordinal), transfer in self.transfers.items():
            nodes = (self.nodes[source], self.nodes[to])
            if any(node.dead or node.error is not None for node in nodes):
                continue
            if transfer.opened is not None and transfer.posted is None:
                raise MismatchError(
                    f"operation {ordinal} from rank {source} to rank {to} was sent, "
                    "but the topology never receives it"
                )


def _poisoned(mine: Any) -> Any:
    """Return an array like `mine` full of values that would be noticed in a result."""
    poison = np.empty_like(mine)
    poison.view(np.uint8).fill(0xA5)
    return poison
