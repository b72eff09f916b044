"""The network between simulated nodes: frames, grants, latency, loss and partitions."""

from __future__ import annotations

import functools
import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from p2pdpt.channel import EAGER_BYTES
from p2pdpt.errors import MismatchError
from p2pdpt.protocol.round_io import Slice

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from p2pdpt.channel import Meta
    from p2pdpt.protocol.round import Round
    from p2pdpt.runtime.drivers.round_memory import RoundMemory

__all__ = ["HEADER_BYTES", "Host", "Network", "Schedule", "Wire"]

HEADER_BYTES: Final = 72
"""What a frame costs on the wire besides its elements."""


@dataclass(frozen=True)
class Network:
    """How the simulated network behaves.

    Attributes:
        latency_s: least and most seconds from a frame's last byte on the link to its arrival; drawn
            for each, so messages overtake. Grants take no time.
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


class Schedule:
    """Virtual time, and what happens when.

    Attributes:
        clock: seconds.
    """

    def __init__(self, chance: random.Random) -> None:
        self.clock = 0.0
        self._chance = chance
        self._events: list[tuple[float, float, int, int, Callable[[], None]]] = []
        self._count = 0

    def later(self, delay: float, rank: int, action: Callable[[], None]) -> None:
        """Do something on a rank (-1: whichever lives) after `delay` seconds.

        Of what happens at one time, chance decides the order.
        """
        self._count += 1
        event = (self.clock + delay, self._chance.random(), self._count, rank, action)
        heapq.heappush(self._events, event)

    def next(self) -> tuple[int, Callable[[], None]] | None:
        """Move the clock to the next event and return it, or None if there is none."""
        if not self._events:
            return None
        self.clock, _, _, rank, action = heapq.heappop(self._events)
        return rank, action


class Host:
    """What the network knows of one simulated node.

    Attributes:
        memory: where its frames are read and placed.
        round: what is told about them.
        dead: whether its process has ended.
        link_free_at: when its outgoing link has sent all it was given, in seconds.
        bytes_sent, messages_sent: so far, headers included.
    """

    memory: RoundMemory
    round: Round

    def __init__(self) -> None:
        self.dead = False
        self.link_free_at = 0.0
        self.bytes_sent = 0
        self.messages_sent = 0


class Transfer:
    """One message under way: pushed by its sender, granted and taken by its receiver.

    Attributes:
        opened, posted: elements its sender and its receiver announced, or None.
        granted: elements it may send.
        queue: what was pushed and is not yet cut into frames.
        cut: elements cut into frames.
        frames: cut, and not yet read from memory: number, where, count, meta.
        read: elements read from memory.
        air: what has left and not arrived: payload, meta.
        early: what arrived before it was posted.
        landed: elements that have arrived.
        lost: whether a frame was dropped, so that nothing after it arrives either.
        withdrawn: whether the receiver does not want it any more.
        leaves, arrives: when the last frame does, in seconds.
    """

    __slots__ = (
        "air",
        "arrives",
        "cut",
        "early",
        "frames",
        "granted",
        "landed",
        "leaves",
        "lost",
        "opened",
        "posted",
        "queue",
        "read",
        "withdrawn",
    )

    def __init__(self) -> None:
        self.queue: deque[tuple[Slice | bytes, Meta]] = deque()
        self.frames: deque[tuple[int, Slice | bytes, int, Meta]] = deque()
        self.air: deque[tuple[Any, Meta]] = deque()
        self.early: list[tuple[Any, Meta]] = []
        self.opened: int | None = None
        self.posted: int | None = None
        self.granted = self.cut = self.read = self.landed = 0
        self.leaves = self.arrives = 0.0
        self.lost = self.withdrawn = False


class Wire:
    """Carries the messages of one round.

    Attributes:
        frames: how many were sent.
    """

    def __init__(
        self, network: Network, hosts: Sequence[Host], schedule: Schedule, chance: random.Random
    ) -> None:
        self.frames = 0
        self._network = network
        self._hosts = hosts
        self._schedule = schedule
        self._chance = chance
        self._transfers: dict[tuple[int, int, int], Transfer] = {}

    def jitter(self) -> float:
        """Draw a latency."""
        return self._chance.uniform(*self._network.latency_s)

    # What a node asks for.

    def open_send(self, source: int, to: int, ordinal: int, length: int) -> None:
        """Open an outgoing message."""
        self._hosts[source].messages_sent += 1
        transfer = self._transfer(source, to, ordinal)
        transfer.opened = length
        self._check(transfer, source, to, ordinal)

    def push(self, source: int, to: int, ordinal: int, data: Slice | bytes, meta: Meta) -> None:
        """Append elements to it."""
        self._transfer(source, to, ordinal).queue.append((data, meta))
        self._send(source, to, ordinal)

    def open_receive(self, source: int, to: int, ordinal: int, length: int) -> None:
        """Post a receive; what came ahead is placed before this returns, as by a channel."""
        transfer = self._transfer(source, to, ordinal)
        transfer.posted = length
        self._check(transfer, source, to, ordinal)
        early, transfer.early = transfer.early, []
        for payload, meta in early:
            self._take(source, to, ordinal, payload, meta)

    def grant(self, source: int, to: int, ordinal: int, upto: int) -> None:
        """Allow the sender to send the elements below `upto`."""
        transfer = self._transfer(source, to, ordinal)
        transfer.granted = max(transfer.granted, upto)
        self._send(source, to, ordinal)

    def withdraw(self, source: int, to: int, ordinal: int) -> None:
        """Forget a posted receive."""
        self._transfer(source, to, ordinal).withdrawn = True

    def check_end(self, alive: Sequence[bool]) -> None:
        """Refuse messages between living nodes that nobody received.

        Raises:
            MismatchError: there is one.
        """
        for (source, to, ordinal), transfer in self._transfers.items():
            missed = transfer.posted is None or transfer.withdrawn
            if transfer.opened is not None and missed and alive[source] and alive[to]:
                raise MismatchError(
                    f"{_named(source, to, ordinal)} was sent, but the topology never receives it"
                )

    # How it travels.

    def _transfer(self, source: int, to: int, ordinal: int) -> Transfer:
        found = self._transfers.get((source, to, ordinal))
        if found is None:
            found = self._transfers[source, to, ordinal] = Transfer()
        return found

    def _check(self, transfer: Transfer, source: int, to: int, ordinal: int) -> None:
        if None not in (transfer.opened, transfer.posted) and transfer.opened != transfer.posted:
            raise MismatchError(
                f"{_named(source, to, ordinal)}: "
                f"{transfer.opened} elements are sent, {transfer.posted} are expected"
            )

    def _send(self, source: int, to: int, ordinal: int) -> None:
        """Cut what may go of a message into frames, and put them on the wire."""
        transfer = self._transfer(source, to, ordinal)
        host, clock = self._hosts[source], self._schedule.clock
        while transfer.queue and not host.dead:
            data, meta = transfer.queue[0]
            if isinstance(data, bytes):
                whole, width = len(data), 1
            else:
                whole, width = data.stop - data.start, host.memory.view(data).itemsize
            count = min(whole, self._chance.randint(*self._network.frame_elements))
            if (transfer.opened or 0) * width > EAGER_BYTES:
                count = min(count, transfer.granted - transfer.cut)
                if count <= 0:
                    return
            transfer.queue.popleft()
            frame, rest = _split(data, count)
            if count < whole:
                transfer.queue.appendleft((rest, meta))
            transfer.cut += count
            transfer.frames.append((self.frames, frame, count, meta))
            self.frames += 1
            nbytes = count * width + HEADER_BYTES
            host.bytes_sent += nbytes
            sent = max(clock, host.link_free_at)
            if self._network.bandwidth:
                sent += nbytes / self._network.bandwidth
                host.link_free_at = sent
            latency = self.jitter()
            arrival = sent + latency
            # Memory is read as late as may be, not when it was pushed; and frames of one message
            # stay in order, while those of different messages overtake each other.
            transfer.leaves = max(transfer.leaves, sent + latency * self._chance.random())
            leave = functools.partial(self._leave, source, to, ordinal, arrival)
            self._schedule.later(transfer.leaves - clock, source, leave)

    def _leave(self, source: int, to: int, ordinal: int, arrival: float) -> None:
        transfer = self._transfer(source, to, ordinal)
        number, data, count, meta = transfer.frames.popleft()
        host, clock = self._hosts[source], self._schedule.clock
        if isinstance(data, bytes):
            payload: Any = np.frombuffer(data, np.uint8)
        else:
            payload = host.memory.view(data).copy()
        transfer.read += count
        transfer.lost |= number in self._network.drop
        if not transfer.lost:
            begun, healed = self._network.partitioned_s
            if begun <= clock < healed and self._cut(source, to):
                arrival = healed + self.jitter()
            transfer.arrives = max(transfer.arrives, arrival)
            transfer.air.append((payload, meta))
            arrive = functools.partial(self._arrive, source, to, ordinal)
            self._schedule.later(transfer.arrives - clock, to, arrive)
        if not isinstance(data, bytes):
            host.round.drained(to, ordinal, transfer.read)

    def _arrive(self, source: int, to: int, ordinal: int) -> None:
        transfer = self._transfer(source, to, ordinal)
        payload, meta = transfer.air.popleft()
        if transfer.posted is None:
            transfer.early.append((payload, meta))
        else:
            self._take(source, to, ordinal, payload, meta)

    def _take(self, source: int, to: int, ordinal: int, payload: Any, meta: Meta) -> None:
        """Place a frame that has arrived, in as many pieces as the round asks for."""
        transfer = self._transfer(source, to, ordinal)
        host = self._hosts[to]
        done = 0
        while done < len(payload) and not transfer.withdrawn:
            left = len(payload) - done
            place = host.round.land(source, ordinal, transfer.landed, left, payload.itemsize, meta)
            if isinstance(place, memoryview):
                count = len(place)
                place[:] = payload[done : done + count].tobytes()
            else:
                target = host.memory.view(place)
                count = len(target)
                target[:] = payload[done : done + count]
            done += count
            transfer.landed += count
            host.round.arrived(source, ordinal, count, meta)

    def _cut(self, source: int, to: int) -> bool:
        for side in self._network.partition:
            if (source in side) != (to in side):
                return True
        return False


def _split(data: Slice | bytes, count: int) -> tuple[Slice | bytes, Slice | bytes]:
    """Cut after `count` elements."""
    if isinstance(data, bytes):
        return data[:count], data[count:]
    middle = data.start + count
    return Slice(data.area, data.start, middle), Slice(data.area, middle, data.stop)


def _named(source: int, to: int, ordinal: int) -> str:
    return f"operation {ordinal} from rank {source} to rank {to}"
