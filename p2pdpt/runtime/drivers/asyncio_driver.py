"""Runs topologies on an event loop, over the channels of any transport.

All decisions are those of :class:`~p2pdpt.protocol.round.Round`; this driver gives it memory
and channels. Folds run on the loop, in C and a segment (at most 256 KiB) at a time, because
handing them to a thread costs more than they take.
"""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from p2pdpt.channel import Channel, Incoming, Landing, Meta, Outgoing, Tag
from p2pdpt.errors import ChannelClosedError, P2PError, PeerFailedError, TopologyError
from p2pdpt.protocol.round import Round
from p2pdpt.protocol.round_io import RoundIO, Slice
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.runtime.drivers.round_memory import RoundMemory, StagingPool
from p2pdpt.topology import ADD, Bucket, Combine, Facts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from p2pdpt.kernels import Kernels
    from p2pdpt.memory import BucketMemory
    from p2pdpt.topology import Kernel, Message, Store, Topology

__all__ = ["AsyncioDriver", "Reduction", "RoundKey"]


class RoundKey(NamedTuple):
    """Which round it is; equal on all members. See :class:`p2pdpt.channel.Tag`."""

    view: int
    stream: int
    step: int
    attempt: int
    bucket: int

    def tag(self, ordinal: int) -> Tag:
        """Return the tag of one of its messages."""
        return Tag(self.view, self.stream, self.step, self.attempt, self.bucket, ordinal)


class AsyncioDriver:
    """Runs the rounds of one member of one view, any number at once."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        channels: Sequence[Channel | None],
        kernels: Kernels,
        facts: Facts | None = None,
        seed: int = 0,
        store: Store | None = None,
        on_lost: Callable[[int, Exception], None] | None = None,
    ) -> None:
        """Drive over `channels`, one for each rank; None at the own place.

        Args:
            rank, size, facts: of the view.
            channels: bulk connections, which stay the caller's to close.
            kernels: arithmetic.
            seed: of ``links.rng``, the same on all members.
            store: for topologies that apply messages to one.
            on_lost: called when a channel closes under a round, with the rank and why, perhaps
                more than once; it must call ``abort`` soon. By default the round fails at once.
        """
        if len(channels) != size:
            raise TopologyError(f"a view of {size} members needs {size} channels")
        self.rank, self.size = rank, size
        self.facts = facts or Facts()
        self.channels = list(channels)
        self.kernels = kernels
        self.seed = seed
        self.store = store
        self.pool = StagingPool()
        # Stands for this driver in what buckets remember, without keeping it alive.
        self.token = object()
        self._on_lost = on_lost
        self._running: set[_Running] = set()
        self._error: BaseException | None = None
        self._executor: ThreadPoolExecutor | None = None
        for peer, channel in enumerate(self.channels):
            if channel is not None:
                channel.on_closed(functools.partial(self._closed, peer))

    async def run(
        self,
        topology: Topology,
        memory: BucketMemory,
        key: RoundKey,
        *,
        combine: Combine = ADD,
        reduction: Reduction = Reduction.MEAN,
        weight: float = 1.0,
    ) -> None:
        """Run one round: everybody's ``mine`` into ``memory.result``.

        Args:
            topology: the same, with the same options, on all members.
            memory: equal in type and length on all members.
            key: equal on all members, never used twice in a view.
            combine: what the bucket asks the topology to join with.
            reduction: what becomes of a complete fold.
            weight: of this contribution.

        Raises:
            PeerFailedError: a channel closed; or whatever ``abort`` was given.
            TopologyError: the topology broke a rule, here or at a peer.
        Cancellation, like every error, returns only when nothing of this round touches memory
        any more: `mine` is unharmed, `result` undefined.
        """
        if self._error is not None:
            raise self._named(self._error, topology, key)
        running = _Running(self, topology, memory, key, combine, reduction, weight)
        self._running.add(running)
        try:
            running.begin()
            await running.future
        finally:
            await running.end()
            self._running.discard(running)

    def abort(self, error: BaseException) -> None:
        """Make every running and every later round raise `error`."""
        if self._error is None:
            self._error = error
        for running in list(self._running):
            running.fail(self._named(error, running.topology, running.key))

    async def close(self) -> None:
        """Fail what runs and free the threads; the channels stay open."""
        self.abort(ChannelClosedError("the group has left"))
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)

    def stuck(self) -> list[str]:
        """Return what running rounds wait for, an operation a line."""
        return [
            f"bucket {running.key.bucket} of step {running.key.step}: {line}"
            for running in self._running
            for line in running.round.stuck()
        ]

    def executor(self) -> ThreadPoolExecutor:
        """Return the thread for plugins' kernels and stores, started when first needed."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="p2pdpt-local")
        return self._executor

    def lost(self, peer: int, error: Exception, running: _Running) -> None:
        """Act on a message that will never complete."""
        if not isinstance(error, ChannelClosedError):
            running.fail(error)
        elif self._on_lost is not None:
            self._on_lost(peer, error)
        else:
            channel = self.channels[peer]
            assert channel is not None
            failed = PeerFailedError(str(channel.peer), channel.address, str(error))
            running.fail(self._named(failed, running.topology, running.key))

    def _closed(self, peer: int, error: Exception | None) -> None:
        """Fail what runs: a closed connection ends the round, whoever needed it."""
        for running in list(self._running):
            self.lost(peer, error or ChannelClosedError("closed by this node"), running)

    def _named(self, error: BaseException, topology: Topology, key: RoundKey) -> BaseException:
        if isinstance(error, PeerFailedError):
            step = key.step if key.stream == 0 else None
            return error.during(f"exchange of bucket {key.bucket} ({topology.describe()})", step)
        return error


class _Landing(Landing):
    """Where one message of a round goes."""

    __slots__ = ("_ordinal", "_peer", "_running")

    def __init__(self, running: _Running, peer: int, ordinal: int) -> None:
        self._running = running
        self._peer = peer
        self._ordinal = ordinal

    def buffer(self, start: int, count: int, width: int, meta: Meta) -> memoryview:
        running = self._running
        try:
            place = running.round.land(self._peer, self._ordinal, start, count, width, meta)
            if isinstance(place, memoryview):
                return place
            found = running.memory.buffer(place)
            if len(found) != width * (place.stop - place.start):
                raise TopologyError(
                    f"rank {self._peer} sends elements of {width} bytes for a bucket of "
                    f"{running.memory.dtype.name}"
                )
            return found
        except Exception as error:
            running.fail(error)
            return memoryview(bytearray(width))

    def arrived(self, start: int, count: int, meta: Meta) -> None:
        self._running.call_arrived(self._peer, self._ordinal, count, meta)

    def failed(self, error: Exception) -> None:
        running = self._running
        try:
            running.driver.lost(self._peer, error, running)
        except Exception as mistake:
            # Whatever went wrong in telling it: the round must not wait for what never comes.
            running.fail(mistake)


class _Nowhere(Outgoing, Incoming):
    """A message of a round that has ended, or of a channel that has: nothing moves."""

    def push(self, data: memoryview, count: int, meta: Meta) -> None:
        pass

    def grant(self, upto: int) -> None:
        pass

    def cancel(self) -> None:
        pass


_NOWHERE = _Nowhere()


class _Running(RoundIO):
    """One round on this driver."""

    def __init__(
        self,
        driver: AsyncioDriver,
        topology: Topology,
        memory: BucketMemory,
        key: RoundKey,
        combine: Combine,
        reduction: Reduction,
        weight: float,
    ) -> None:
        self.driver = driver
        self.topology = topology
        self.key = key
        self.bucket = memory
        self.weight = weight
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self._outgoing: dict[tuple[int, int], Outgoing] = {}
        self._incoming: dict[tuple[int, int], Incoming] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._locals: set[asyncio.Future[None]] = set()
        self._ended = False
        self._plan_key = (driver.token, id(topology), combine, reduction, key.bucket)
        # A plan in use is taken out, so that a bucket exchanged twice at once cannot share it.
        plan = memory.plans.pop(self._plan_key, None)
        self.replays = plan is not None
        if plan is not None:
            self.memory: RoundMemory = plan[0]
            self.round: Round = plan[1]
            return
        self.memory = RoundMemory(memory, driver.kernels, driver.pool)
        self.round = Round(
            topology,
            Bucket(memory.length, memory.dtype.name, combine, key.bucket),
            memory.dtype,
            self,
            rank=driver.rank,
            size=driver.size,
            facts=driver.facts,
            reduction=reduction,
            weight=weight,
            in_place=memory.in_place,
            seed=_mix(driver.seed, key),
        )

    def begin(self) -> None:
        if self.replays:
            self._guard(self.round.replay, self, self.weight)
        else:
            self._guard(self.round.begin)

    def fail(self, error: BaseException) -> None:
        """End the round with `error`; nothing is placed in memory any more."""
        if self.future.done():
            return
        self.future.set_exception(error)
        self._stop(error)

    async def end(self) -> None:
        """Return when nothing of the round touches memory any more."""
        failed = self.future.cancelled() or not self.future.done() or self.future.exception()
        if failed:
            self.future.cancel()
            self._stop(ChannelClosedError("the round was cancelled"))
            for peer in {peer for peer, _ in self._outgoing}:
                channel = self.driver.channels[peer]
                if channel is not None:
                    await channel.quiesce()
            if self._locals:
                await asyncio.wait(self._locals)
        if self._timer is not None:
            self._timer.cancel()
        self.memory.close()
        # Calls back into this object must not keep it, and with it the bucket, until the
        # collector runs: a bucket's memory and descriptor go when its user lets go of it.
        self._outgoing.clear()
        self._incoming.clear()
        self.round.rest()
        if not failed and self.round.replayable:
            # The topology is kept alive with the plan, so that its id stays its own. One plan
            # is enough, since a bucket is exchanged the same way every step.
            self.bucket.plans.clear()
            self.bucket.plans[self._plan_key] = (self.memory, self.round, self.topology)

    def _stop(self, error: BaseException) -> None:
        if self._ended:
            return
        self._ended = True
        self.round.abort(error)
        for incoming in self._incoming.values():
            incoming.cancel()
        for outgoing in self._outgoing.values():
            outgoing.cancel()

    def _guard(self, call: Callable[..., None], *args: object) -> None:
        """Let the round go on, and see whether it ended."""
        if self._ended:
            return
        try:
            call(*args)
        except P2PError as error:
            self.fail(error)
        except Exception as error:
            # A plugin's own mistake reaches the caller of `run`, with the plugin named.
            wrapped = TopologyError(f"{self.topology.describe()} raised {error!r}")
            wrapped.__cause__ = error
            self.fail(wrapped)
        else:
            if self.round.finished and not self.future.done():
                self.future.set_result(None)

    def call_arrived(self, peer: int, ordinal: int, count: int, meta: Meta) -> None:
        """Pass on what a landing was told."""
        self._guard(self.round.arrived, peer, ordinal, count, meta)

    # What the round asks for.

    def open_send(self, peer: int, ordinal: int, length: int) -> None:
        channel = self._channel(peer)

        def drained(upto: int) -> None:
            self._guard(self.round.drained, peer, ordinal, upto)

        outgoing: Outgoing = _NOWHERE
        if not self._ended:
            try:
                outgoing = channel.send(self.key.tag(ordinal), length, drained)
            except ChannelClosedError as error:
                self.driver.lost(peer, error, self)
        self._outgoing[peer, ordinal] = outgoing

    def push(self, peer: int, ordinal: int, data: Slice, meta: Meta) -> None:
        outgoing = self._outgoing[peer, ordinal]
        outgoing.push(self.memory.buffer(data), data.stop - data.start, meta)

    def push_bytes(self, peer: int, ordinal: int, payload: bytes) -> None:
        self._outgoing[peer, ordinal].push(memoryview(payload), len(payload), Meta())

    def open_receive(self, peer: int, ordinal: int, length: int) -> None:
        channel = self._channel(peer)
        incoming: Incoming = _NOWHERE
        if not self._ended:
            landing = _Landing(self, peer, ordinal)
            try:
                incoming = channel.receive(self.key.tag(ordinal), length, landing)
            except ChannelClosedError as error:
                self.driver.lost(peer, error, self)
        self._incoming[peer, ordinal] = incoming
        if self._ended:
            # What came ahead was refused: the round ended within `receive`.
            incoming.cancel()

    def cancel_receive(self, peer: int, ordinal: int) -> None:
        self._incoming[peer, ordinal].cancel()

    def grant(self, peer: int, ordinal: int, upto: int) -> None:
        self._incoming[peer, ordinal].grant(upto)

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
        self._off_loop(lambda: self.memory.run(kernel, src, dst), done)

    def apply(
        self, shard: int, message: Message, data: Sequence[Slice], done: Callable[[], None]
    ) -> None:
        store = self.driver.store
        if store is None:
            raise TopologyError("this run has no store to apply a message to")
        buffers = [self.memory.buffer(each) for each in data]
        self._off_loop(lambda: store.apply(shard, message, buffers), done)

    def scratch(self, area: int, length: int) -> None:
        self.memory.scratch(area, length)

    def drop(self, area: int) -> None:
        self.memory.drop(area)

    def staging(self, length: int) -> tuple[int, int]:
        return self.memory.staging(length)

    def release(self, areas: tuple[int, int]) -> None:
        self.memory.release(areas)

    def now(self) -> float:
        return self.loop.time()

    def wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(when, self._guard, self.round.tick)

    def _channel(self, peer: int) -> Channel:
        channel = self.driver.channels[peer]
        if channel is None:
            raise TopologyError(f"rank {self.driver.rank} has no channel to rank {peer}")
        return channel

    def _off_loop(self, work: Callable[[], None], done: Callable[[], None]) -> None:
        future = self.loop.run_in_executor(self.driver.executor(), work)
        self._locals.add(future)

        def ended(future: asyncio.Future[None]) -> None:
            self._locals.discard(future)
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                self._guard(done)
            else:
                wrapped = TopologyError(f"a kernel of {self.topology.describe()} raised {error!r}")
                wrapped.__cause__ = error
                self.fail(wrapped)

        future.add_done_callback(ended)


def _mix(seed: int, key: RoundKey) -> int:
    """Return a seed for one round, the same in every process."""
    for part in key:
        seed = (seed * 6364136223846793005 + part + 1442695040888963407) % 2**64
    return seed
