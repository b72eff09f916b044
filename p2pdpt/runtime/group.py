"""A group on a mesh: rounds over bulk channels, everything small over control connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import os
from typing import TYPE_CHECKING, Any, Final

import p2pdpt.kernels
from p2pdpt.config import SHARED
from p2pdpt.errors import (
    ChannelClosedError,
    ConfigError,
    FrameError,
    GroupError,
    P2PError,
    PeerFailedError,
    SessionError,
)
from p2pdpt.group import Group, GroupCounters
from p2pdpt.memory import allocate
from p2pdpt.protocol.messages import (
    GATHER_BYTES,
    Abandoned,
    Control,
    Farewell,
    Gather,
    Ok,
    Released,
)
from p2pdpt.protocol.step import Act, StepTransaction
from p2pdpt.protocol.weighting import HEAVIEST, LIGHTEST, is_weight
from p2pdpt.runtime.departures import Departures
from p2pdpt.runtime.drivers.asyncio_driver import AsyncioDriver, Reduction, RoundKey
from p2pdpt.runtime.drivers.collectives import Broadcast
from p2pdpt.runtime.gathers import Gathers
from p2pdpt.runtime.rounds import Rounds
from p2pdpt.runtime.shared_memory import SharedMemory
from p2pdpt.topology import ADD, MAX, MIN, PROD

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from p2pdpt.channel import Channel
    from p2pdpt.dtypes import DType
    from p2pdpt.memory import BucketMemory
    from p2pdpt.protocol.view import View
    from p2pdpt.runtime.mesh import Mesh
    from p2pdpt.topology import Combine, Topology

__all__ = ["MeshGroup"]

logger = logging.getLogger(__name__)

NO_BUCKET: Final = 2**32 - 1
"""Stands for what is no bucket among the rounds before the first step."""
VERDICT_S: Final = 0.5
"""How long a closed bulk channel waits for the control connection to tell why, in seconds."""
GRACE_S: Final = 1.0
"""How long a leaving member waits for the others to have read its farewell, in seconds."""
GONE_S: Final = 10.0
"""How long rounds may go on, with what it gave, after a member has left, in seconds."""
RELEASE_S: Final = 5.0
"""How long it waits for them to finish the collectives that it has finished, in seconds."""


class MeshGroup(Group):
    """See :class:`p2pdpt.group.Group`.

    Attributes:
        seed: of the run, the same on all members.
    """

    def __init__(
        self,
        *,
        run: str,
        view: View,
        rank: int,
        topology: Topology,
        spec: str,
        seed: int,
        mesh: Mesh,
        channels: Sequence[Channel | None],
        finish: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Make a group whose links are all up.

        Args:
            run, view, seed: as agreed.
            rank: this member's place.
            topology: what buckets are exchanged with.
            spec: its name and options, as a person would write them.
            mesh: control connections to all members.
            channels: a bulk connection for each rank, None at the own place.
            finish: closes what the group does not know of, when it has left.
        """
        self.run, self.view, self.rank, self.topology = run, view, rank, spec
        self.seed = seed
        self.started = -1
        self._topology, self._mesh, self._finish = topology, mesh, finish
        self._channels = list(channels)
        self._pid = os.getpid()
        self._failure: P2PError | None = None
        self._culprit = ""
        self._leaving: asyncio.Task[None] | None = None
        self._steps = StepTransaction(view.number, view.size, rank)
        self._sealing: asyncio.Future[None] | None = None
        self._gathers = Gathers(rank, view.size, self._tell)
        self._made: dict[int, int] = {}
        self._turns: dict[int, asyncio.Lock] = {}
        self._departures = Departures(view, self._send)
        self._names: dict[int, str] = {}
        self._rounds = Rounds()
        self._memories: list[BucketMemory] = []
        self._loop = asyncio.get_running_loop()
        self._driver = AsyncioDriver(
            rank=rank,
            size=view.size,
            facts=view.facts,
            channels=self._channels,
            kernels=p2pdpt.kernels.default(),
            seed=seed,
            on_lost=self._channel_lost,
        )
        self._sharing = SharedMemory(view, rank, self._channel_closed)
        for other, channel in enumerate(self._channels):
            if channel is not None:
                channel.on_closed(functools.partial(self._channel_closed, other))

    async def share_memory(self, transports: Sequence[str]) -> None:
        """Exchange buckets in shared memory if all members can; all call it once.

        Args:
            transports: which this member was told to use.

        Raises:
            UnavailableError: a member was told to use nothing else, and it cannot be.
            PeerFailedError: a member failed meanwhile.
        """
        if self.size == 1:
            return
        operation = "joining the run"

        async def gather(payload: bytes, name: str) -> list[bytes]:
            return await self.all_gather(payload, name=name)

        async def needing_all(work: Coroutine[Any, Any, None]) -> None:
            await self._round(operation, RoundKey(self.view.number, 0, 0, 0, NO_BUCKET), work)

        self._check(operation, None)
        try:
            await self._sharing.open(gather, needing_all, self._topology, transports)
        except PeerFailedError as error:
            raise error.during(operation, None) from error.__cause__

    # What a program calls.

    @property
    def transport(self) -> str:
        if self._sharing.active:
            return SHARED
        names = {channel.transport for channel in self._channels if channel is not None}
        return ", ".join(sorted(names))

    @property
    def unshared(self) -> str:
        """Why the members do not share memory, in words; empty if they do."""
        return self._sharing.reason

    @property
    def counters(self) -> GroupCounters:
        sent, received, messages_sent, messages_received = self._mesh.counters()
        for channel in self._channels:
            if channel is not None:
                sent += channel.counters.bytes_sent
                received += channel.counters.bytes_received
                messages_sent += channel.counters.frames_sent
                messages_received += channel.counters.frames_received
        sent += self._sharing.bytes_sent
        received += self._sharing.bytes_received
        return GroupCounters(sent, received, messages_sent, messages_received)

    @property
    def failure(self) -> P2PError | None:
        return self._failure

    def allocate(self, dtype: DType, length: int) -> BucketMemory:
        memory = allocate(dtype, length)
        self._memories.append(memory)
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
        operation = f"exchange of bucket {bucket} ({self.topology})"
        self._check(operation, step)
        if not memory.dtype.inexact:
            raise ConfigError(f"a mean of {memory.dtype.name} elements does not exist")
        if not 0 <= bucket < NO_BUCKET:
            raise ConfigError(f"{operation}: buckets have numbers from 0 to {NO_BUCKET - 1}")
        if not is_weight(weight):
            raise ConfigError(
                f"{operation}: a contribution weighs 0, or from {LIGHTEST:g} to {HEAVIEST:g}, "
                f"not {weight!r}"
            )
        self._steps.open(step, attempt)
        self._rounds.sealed(self._steps.done)
        self.started = step
        key = RoundKey(self.view.number, 0, step, attempt, bucket)
        work = self._run(memory, key, ADD, Reduction.MEAN, weight)
        await self._round(operation, key, work)

    async def seal(self, step: int, attempt: int = 0) -> None:
        operation = f"seal ({self.topology})"
        self._check(operation, step)
        decision = self._steps.hold(step, attempt)
        self._tell(Ok(self.view.number, step, attempt))
        if decision.act is Act.TELL_AND_WAKE:
            return
        future = self._sealing = self._loop.create_future()
        for rank in self._departures.left:
            self._miss_ok(rank)
        try:
            await future
        except PeerFailedError as error:
            raise error.during(operation, step) from error.__cause__
        finally:
            if self._sealing is future:
                self._sealing = None

    async def all_reduce(
        self, memory: BucketMemory, combine: Combine, *, name: str, mean: bool = False
    ) -> None:
        if combine not in (ADD, MIN, MAX, PROD):
            raise ConfigError(f"all_reduce joins with ADD, MIN, MAX or PROD, not {combine!r}")
        if mean and not memory.dtype.inexact:
            raise ConfigError(f"a mean of {memory.dtype.name} elements does not exist")
        if mean and combine is not ADD:
            raise ConfigError(f"a mean needs ADD, not {combine.name}")
        reduction = Reduction.MEAN if mean else Reduction.SUM
        if combine is not ADD:
            reduction = Reduction.NONE
        # What the group has not allocated may come and go, and sharing it costs more than it gains.
        own = any(memory is each for each in self._memories)
        against = "" if own else "its memory was not allocated by the group"

        async def run(key: RoundKey) -> None:
            await self._run(memory, key, combine, reduction, against=against)

        await self._collective(f"all_reduce {name!r} ({self.topology})", name, run)

    async def broadcast(self, memory: BucketMemory, *, root: int = 0, name: str) -> None:
        if not 0 <= root < self.size:
            raise ConfigError(f"root {root} is not a rank from 0 to {self.size - 1}")
        topology = Broadcast(root)

        async def run(key: RoundKey) -> None:
            await self._driver.run(topology, memory, key, combine=ADD, reduction=Reduction.NONE)

        await self._collective(f"broadcast {name!r}", name, run)

    async def all_gather(self, payload: bytes, *, name: str) -> list[bytes]:
        self._check(f"all_gather {name!r}", None)
        if len(payload) > GATHER_BYTES:
            raise ConfigError(
                f"all_gather {name!r}: a payload of {len(payload)} bytes exceeds {GATHER_BYTES}"
            )
        return await self._gathers.gather(bytes(payload), _name(name))

    async def leave(self, error: str | None = None) -> None:
        if self._pid != os.getpid():
            return
        if self._leaving is None:
            self._leaving = self._loop.create_task(self._leave(error), name="p2pdpt leaving")
        # A cancelled caller does not keep the links from being closed.
        with contextlib.suppress(Exception):
            await asyncio.shield(self._leaving)

    # What the mesh tells.

    def receive(self, peer: str, message: Control) -> None:
        """Take a member's message.

        Raises:
            FrameError: it broke a rule; its connection must be closed.
        """
        rank = self.view.rank_of(peer)
        if rank < 0:
            return
        match message:
            case Gather():
                self._gathers.receive(rank, message)
            case Ok():
                decision = self._steps.ok(rank, message.view, message.step, message.attempt)
                if decision.act is Act.REFUSE:
                    raise FrameError(f"bad message: {decision.reason}")
                if decision.act is Act.WAKE and self._sealing is not None:
                    if not self._sealing.done():
                        self._sealing.set_result(None)
            case Farewell():
                self._take_leave(rank, message)
            case Released():
                self._departures.released(rank)
            case Abandoned():
                self._take_abandoned(rank, message)
            case _:
                raise FrameError(f"bad message: {type(message).__name__} in a group")

    def lost(self, peer: str, reason: str) -> None:
        """Note that the connection to a member has ended."""
        rank = self.view.rank_of(peer)
        if rank in self._departures.left:
            # What it gave is here, unless the members did not call the same things.
            if keys := self._rounds.keys:
                self._loop.call_later(GONE_S, self._miss_rounds, rank, keys)
        elif rank >= 0:
            self._fail_peer(rank, reason)
        self._departures.released(rank)

    def broke(self, what: str, error: Exception) -> None:
        """Note that something of this node itself failed in the background."""
        failure = GroupError(f"{what} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._fail(failure)

    # What becomes of it.

    def _send(self, rank: int, message: Control) -> None:
        self._mesh.send(self.view.members[rank].node_id, message)

    def _tell(self, message: Control) -> None:
        for rank in range(self.size):
            # Those that have left only wait to be released.
            if rank != self.rank and rank not in self._departures.left:
                self._send(rank, message)

    def _check(self, operation: str, step: int | None) -> None:
        if self._pid != os.getpid():
            raise SessionError(f"node belongs to pid {self._pid}, not to pid {os.getpid()}")
        if self._failure is not None:
            raise self._told(operation, step)
        if self._leaving is not None:
            raise SessionError(f"{operation}: this node has left the run")

    def _told(self, operation: str, step: int | None) -> P2PError:
        """Return the group's failure as `operation` sees it, an error of its own."""
        failure = self._failure
        assert failure is not None
        told: P2PError
        if isinstance(failure, PeerFailedError):
            told = failure.during(operation, failure.step if step is None else step)
        else:
            told = type(failure)(*failure.args)
        told.__cause__ = failure.__cause__
        return told

    async def _round(self, operation: str, key: RoundKey, work: Coroutine[Any, Any, None]) -> None:
        """Await a round, and name what fails it; tell the others if it ends here without result."""
        with contextlib.closing(work), self._rounds.running(key, operation):
            for rank in self._departures.left:
                self._miss_round(rank, key)
            try:
                await work
            except (PeerFailedError, ChannelClosedError) as error:
                at = key.step if key.stream == 0 else None
                if self._failure is not None:
                    raise self._told(operation, at) from self._failure.__cause__
                if isinstance(error, PeerFailedError):
                    raise error.during(operation, at) from error.__cause__
                raise
            except BaseException as error:
                self._abandon(key, error)
                raise

    def _abandon(self, key: RoundKey, error: BaseException) -> None:
        """Tell the members that wait for this one in a round not to."""
        if self._failure is not None or self._leaving is not None or key in self._rounds.given_up:
            return
        cancelled = isinstance(error, asyncio.CancelledError)
        reason = "" if cancelled else f"{type(error).__name__}: {error}"[:1000]
        self._tell(Abandoned(*key, reason))

    async def _run(
        self,
        memory: BucketMemory,
        key: RoundKey,
        combine: Combine,
        reduction: Reduction,
        weight: float = 1.0,
        against: str = "",
    ) -> None:
        """Run a round of the group's topology in shared memory, or else over the channels."""
        topology = self._topology
        if not await self._sharing.run(
            topology,
            memory,
            key,
            combine=combine,
            reduction=reduction,
            weight=weight,
            against=against,
        ):
            await self._driver.run(
                topology, memory, key, combine=combine, reduction=reduction, weight=weight
            )

    async def _collective(
        self, operation: str, name: str, run: Callable[[RoundKey], Coroutine[Any, Any, None]]
    ) -> None:
        self._check(operation, None)
        stream = self._stream(_name(name))
        count = self._made.get(stream, 0)
        self._made[stream] = count + 1
        key = RoundKey(self.view.number, stream, count, 0, 0)
        try:
            await self._round(operation, key, self._in_turn(stream, run(key)))
        finally:
            self._departures.over(stream, count + 1)

    async def _in_turn(self, stream: int, run: Coroutine[Any, Any, None]) -> None:
        """Run one of several collectives of one name, in the order of their calls."""
        with contextlib.closing(run):
            async with self._turns.setdefault(stream, asyncio.Lock()):
                await run

    def _stream(self, name: str) -> int:
        digest = hashlib.sha256(name.encode()).digest()
        # 0 is training's.
        stream = int.from_bytes(digest[:4], "big") or 1
        if self._names.setdefault(stream, name) != name:
            raise ConfigError(
                f"collectives {name!r} and {self._names[stream]!r} cannot be told apart; "
                "rename one of them"
            )
        return stream

    def _fail_peer(self, rank: int, reason: str) -> None:
        member = self.view.members[rank]
        self._culprit = self._culprit or member.node_id
        self._fail(PeerFailedError(str(member), member.address, reason, step=self._steps.done))

    def _fail(self, failure: P2PError) -> None:
        if self._failure is not None or self._leaving is not None:
            return
        self._failure = failure
        self._steps.freeze(str(failure))
        self._sharing.abort(failure)
        self._driver.abort(failure)
        self._gathers.fail(lambda operation: self._told(operation, None))
        if self._sealing is not None and not self._sealing.done():
            self._sealing.set_exception(failure)

    def _take_leave(self, rank: int, farewell: Farewell) -> None:
        member = self.view.members[rank]
        if farewell.error is not None:
            if farewell.culprit == self.me.node_id:
                self._fail_peer(rank, f"it lost this node: {farewell.reason}")
            elif farewell.culprit and (culprit := self.view.rank_of(farewell.culprit)) >= 0:
                self._fail_peer(culprit, f"{farewell.reason}, as {member} reports")
            else:
                self._fail_peer(rank, farewell.error)
        # Whatever closes from now on is no news.
        self._departures.take(rank, farewell)
        self._gathers.leave(rank, lambda operation: self._departures.error(rank, operation, None))
        self._miss_ok(rank)
        for key in self._rounds.keys:
            self._miss_round(rank, key)

    def _miss_ok(self, rank: int) -> None:
        """End the seal that waits if a member left without its ok."""
        place, sealing = self._steps.place, self._sealing
        if sealing is None or sealing.done():
            return
        if not self._steps.has_ok(rank, place.step, place.attempt):
            sealing.set_exception(self._departures.error(rank, "seal", place.step))

    def _miss_round(self, rank: int, key: RoundKey) -> None:
        """End the group's rounds if this one needs a member that has left."""
        if self._departures.misses(rank, key.stream, key.step):
            self._fail(self._departures.error(rank, "", key.step if key.stream == 0 else None))

    def _miss_rounds(self, rank: int, keys: Sequence[RoundKey]) -> None:
        """End the group's rounds if one of these still waits for a member that is gone."""
        if any(key in self._rounds.keys for key in keys):
            self._fail(self._departures.error(rank, "", None))

    def _take_abandoned(self, rank: int, message: Abandoned) -> None:
        if message.view != self.view.number:
            return
        key = RoundKey(message.view, message.stream, message.step, message.attempt, message.bucket)
        ended = self._made.get(key.stream, 0) if key.stream else self._steps.done
        if key.step >= ended or key in self._rounds.keys:
            self._rounds.abandoned(key, self.view.members[rank], message)

    def _channel_lost(self, rank: int, error: Exception) -> None:
        """Note that a round waits for what a closed channel will not bring."""
        self._channel_closed(rank, error, needed=True)

    def _channel_closed(self, rank: int, error: Exception | None, *, needed: bool = False) -> None:
        if (error is None and not needed) or self._leaving is not None:
            return

        def judge() -> None:
            if rank not in self._departures.left:
                self._fail_peer(rank, f"its bulk connection ended: {error}")
            elif needed:
                self._fail(self._departures.error(rank, "", None))

        # The control connection knows better why: it may be about to bring a farewell.
        self._loop.call_later(0 if rank in self._departures.left else VERDICT_S, judge)

    async def _leave(self, error: str | None) -> None:
        others = [
            rank
            for rank, member in enumerate(self.view.members)
            if member.node_id in self._mesh.links
        ]
        farewell = self._departures.farewell(
            self._steps.done, others, error, self._culprit, self._failure
        )
        for rank in others:
            self._send(rank, farewell)
        self._gathers.fail(lambda operation: SessionError(f"{operation}: this node has left"))
        self._steps.freeze("this member has left")
        if self._sealing is not None and not self._sealing.done():
            self._sealing.set_exception(SessionError("seal: this node has left the run"))
        channels = [channel for channel in self._channels if channel is not None]
        try:
            self._sharing.close()
            await self._driver.close()
            if error is None and self._failure is None:
                await self._departures.wait(RELEASE_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GRACE_S):
                        await asyncio.gather(*(channel.close() for channel in channels))
            await self._mesh.close(GRACE_S)
        except Exception:
            # Leaving never raises; what is still open is closed now.
            logger.exception("leaving run %s", self.run)
        finally:
            for channel in channels:
                channel.abort()
            await self._mesh.close()
            await self._finish()
            for memory in self._memories:
                memory.close()
            self._memories.clear()


def _name(name: str) -> str:
    if not 0 < len(name) <= 256:
        raise ConfigError(f"the name of a collective has 1 to 256 characters, not {len(name)}")
    return name
