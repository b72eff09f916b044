"""Replays static topologies in shared memory, in C, for members on one host.

Buckets are mapped read-only by every other member; each member folds straight from its peers'
memory into its own. One worker thread per node runs the C executor and holds no Python lock
while it does; the event loop only starts rounds and hears of their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from p2pdpt.errors import (
    ChannelClosedError,
    P2PError,
    PeerFailedError,
    SessionError,
    TopologyError,
    UnavailableError,
)
from p2pdpt.protocol.recorder import Unplannable, record
from p2pdpt.runtime.drivers.programs import MOST_SOURCES, Program, compile_plan
from p2pdpt.runtime.drivers.shared_buckets import Share, SharedBucket, SharedBuckets
from p2pdpt.topology import Bucket, Facts

if TYPE_CHECKING:
    from p2pdpt.memory import BucketMemory
    from p2pdpt.protocol.plan import Plan
    from p2pdpt.protocol.weighting import Reduction
    from p2pdpt.runtime.drivers.asyncio_driver import RoundKey
    from p2pdpt.topology import Combine, Topology

__all__ = ["NativeDriver", "unavailable"]

ABI: Final = 3
"""The declarations this module calls; see ``executor.h``."""
SEGMENT: Final = 1 << 15
"""Elements folded between two looks at the other ranks."""
SPINS: Final = 3000
"""Pauses before the processor is given away, where every rank has one of its own."""
YIELDS: Final = 20
AT_ONCE: Final = 1 << 16
"""Elements of a bucket that the event loop may reduce itself: some ten microseconds of folds."""
BRIEF_SPINS: Final = 1000
"""Pauses of the event loop before it leaves a round to the worker: about 0.1 ms."""
BRIEF_YIELDS: Final = 2
"""Few, because on a busy machine each may take as long as another's share of the processor."""


@dataclass(eq=False)
class _Job:
    """A round that the executor runs; `superseded` if its bucket is being shared anew.

    The result of `future` is the error that ended the round, if any: one error ends many rounds,
    and raising it would let it keep what the frames of each refer to.
    """

    attached: SharedBucket
    topology: Topology
    bucket: Bucket
    reduction: Reduction
    future: asyncio.Future[BaseException | None]
    loop: asyncio.AbstractEventLoop
    program: Program
    round: Any
    expected: Any
    cancelled: bool = False
    superseded: bool = False


def unavailable() -> str:
    """Return why rounds cannot be replayed in this process, or an empty text."""
    if os.environ.get("P2PDPT_NATIVE") == "off":
        return "the compiled module is switched off (P2PDPT_NATIVE=off)"
    try:
        from p2pdpt import _native
    except ImportError as error:
        return f"the compiled module is missing: {error}"
    found = getattr(_native.lib, "P2PDPT_EXECUTOR_ABI", None)
    if found != ABI:
        return f"the compiled module is stale ({found} instead of {ABI}); build it again"
    return ""


class NativeDriver:
    """Runs the rounds of one member whose peers are all on its host.

    Attributes:
        bytes_read: what complete rounds have read of the others' memory.
        bytes_lent: what the others have read of this member's, by the plans.
    """

    def __init__(self, *, rank: int, size: int, share: Share, facts: Facts | None = None) -> None:
        """Prepare; nothing is shared before ``open``.

        Raises:
            UnavailableError: the compiled module cannot be used; the text says why.
        """
        if reason := unavailable():
            raise UnavailableError(reason)
        from p2pdpt import _native

        self._ffi: Any = _native.ffi
        self._lib: Any = _native.lib
        self.rank, self.size = rank, size
        self.facts = facts or Facts()
        self.bytes_read = self.bytes_lent = 0
        self._buckets = SharedBuckets(rank, size, share, _native)
        self._busy: set[tuple[int, int]] = set()
        self._rounds: dict[str, _Job] = {}
        self._plans: dict[tuple[object, ...], Plan | str] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        ffi = self._ffi
        self._abort = ffi.new("uint32_t *")
        self._poke = ffi.new("uint32_t *")
        self._bells = ffi.new("p2pdpt_bell *[]", size)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        spare = size <= cores
        waits = {
            "bells": self._bells,
            "abort": self._abort,
            "poke": self._poke,
            "size": size,
            "rank": rank,
            "spins": SPINS if spare else 0,
            "yields": YIELDS,
            "path": self._lib.p2pdpt_best_path(),
            "segment": SEGMENT,
        }
        self._executor = ffi.new("p2pdpt_executor *", waits)
        # The event loop's own, for short rounds: the worker's bell and abort, but never asleep.
        self._unpoked = ffi.new("uint32_t *")
        waits |= {
            "poke": self._unpoked,
            "brief": True,
            "spins": BRIEF_SPINS if spare else 0,
            "yields": BRIEF_YIELDS,
        }
        self._brief = ffi.new("p2pdpt_executor *", waits)
        self._one = ffi.new("p2pdpt_round *[]", 1)
        self._which = ffi.new("uint32_t *")

    async def open(self) -> None:
        """Share the signals of all members.

        Raises:
            PeerFailedError: a member failed meanwhile.
        """
        for rank, address in enumerate(await self._buckets.open()):
            self._bells[rank] = self._ffi.cast("p2pdpt_bell *", address)

    def reason_against(
        self, topology: Topology, memory: BucketMemory, combine: Combine, reduction: Reduction
    ) -> str:
        """Return why a round cannot be replayed here, or an empty text; equal on all members.

        Raises:
            TopologyError: the topology broke a rule, or raised something itself.
        """
        if memory.in_place:
            return "its bucket is in place"
        if not all(area.sealed for area in memory.areas):
            return "its memory cannot be shared read-only"
        if not topology.static:
            return "it is not static"
        plan = self._plan(topology, _bucket(memory, combine), memory, reduction, fuse=True)
        return plan if isinstance(plan, str) else ""

    async def run(
        self,
        topology: Topology,
        memory: BucketMemory,
        key: RoundKey,
        *,
        combine: Combine,
        reduction: Reduction,
        weight: float = 1.0,
        against: str = "",
    ) -> None:
        """Run one round; see :meth:`p2pdpt.runtime.drivers.AsyncioDriver.run`.

        A bucket that comes with the same memory as before costs nothing but the round; with
        other memory it is shared anew.

        Args:
            against: a reason of the caller's not to run it here.

        Raises:
            PeerFailedError: whatever ``abort`` was given.
            Unplannable: a member has a reason against it (``reason_against``): all raise this,
                and are to use another driver.
            SessionError: a round of this bucket is running.
            TopologyError: another member's bucket has another type or length.
        Cancellation returns when the executor has let go of the round.
        """
        if self._error is not None:
            raise self._named(self._error, topology, key)
        place = (key.stream, key.bucket)
        if place in self._busy:
            raise SessionError(f"bucket {key.bucket} is being exchanged already")
        against = against or self.reason_against(topology, memory, combine, reduction)
        self._busy.add(place)
        bucket = _bucket(memory, combine)
        # A member that shares the bucket anew does so under the name of the round, which others
        # may have begun with the memory of before: they leave it, and begin again.
        if key.stream:
            name = f"collective {key.stream:08x}, call {key.step}"
        else:
            name = f"bucket {key.bucket}, step {key.step}, attempt {key.attempt}"
        try:
            while True:
                attached = await self._buckets.get(memory, place, name, against)
                if await self._replay(attached, topology, bucket, reduction, name, weight):
                    return
        except PeerFailedError as error:
            raise self._named(error, topology, key) from error.__cause__
        finally:
            self._busy.discard(place)

    async def _replay(
        self,
        attached: SharedBucket,
        topology: Topology,
        bucket: Bucket,
        reduction: Reduction,
        name: str,
        weight: float,
    ) -> bool:
        """Run one round to its end; False if its bucket must be shared anew."""
        if self._error is not None:
            raise _again(self._error)
        program = self._program(attached, topology, bucket, reduction, fuse=True)
        loop = asyncio.get_running_loop()
        ffi = self._ffi
        attached.number += 1
        expected = ffi.new("double[]", program.weights)
        job = _Job(
            attached,
            topology,
            bucket,
            reduction,
            loop.create_future(),
            loop,
            program,
            None,
            expected,
        )
        job.round = ffi.new(
            "p2pdpt_round *",
            {
                "lines": attached.lines,
                "bases": attached.bases,
                "weights": expected,
                "number": attached.number,
                "size": self.size,
                "rank": self.rank,
                "dtype": attached.memory.dtype.code,
            },
        )
        self._load(job, program)
        self._lib.p2pdpt_enter(self._executor, attached.line, attached.number, weight)
        if self._at_once(job):
            self.bytes_read += job.program.bytes_read
            self.bytes_lent += job.program.bytes_lent
            return True
        self._start()
        self._rounds[name] = job
        self._jobs.put(job)
        self._rouse()
        try:
            error = await asyncio.shield(job.future)
        except asyncio.CancelledError:
            attached.broken = True
            await self._let_go(job)
            raise
        finally:
            del self._rounds[name]
        attached.broken = job.superseded or error is not None
        if error is not None:
            raise _again(error) from error.__cause__
        if job.superseded:
            return False
        self.bytes_read += job.program.bytes_read
        self.bytes_lent += job.program.bytes_lent
        return True

    def _at_once(self, job: _Job) -> bool:
        """Run a short round here and now, if the others are as far; return whether it is done.

        Handing a round to the worker and hearing of its end costs more than a short round
        takes. What is not done within some ten microseconds goes to the worker as it stands.
        """
        if self._rounds or job.bucket.length > AT_ONCE:
            return False
        lib = self._lib
        self._one[0] = job.round
        while True:
            reason = lib.p2pdpt_advance(self._brief, self._one, 1, self._which)
            if reason == lib.P2PDPT_DONE:
                self._advance_bases(job)
                return True
            if reason != lib.P2PDPT_WEIGHTS:
                return False
            self._reweigh(job)

    def _advance_bases(self, job: _Job) -> None:
        """Note where all members stand after a round."""
        for rank in range(self.size):
            job.attached.bases[rank] += job.program.totals[rank]

    async def _let_go(self, job: _Job) -> None:
        """Return when the executor does not touch a round any more, however often cancelled."""
        job.cancelled = True
        self._rouse()
        while not job.future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([job.future])

    def announced(self, name: str) -> None:
        """Note that another member shares under `name`; see ``HostDoor.on_announced``."""
        if self._buckets.announced(name) and name in self._rounds:
            job = self._rounds[name]
            job.superseded = job.cancelled = True
            self._rouse()

    def abort(self, error: BaseException) -> None:
        """Make every running and every later round raise `error`; back within milliseconds."""
        if self._error is None:
            self._error = error
        self._abort[0] = 1
        self._lib.p2pdpt_rouse(self._executor)

    def close(self) -> None:
        """Abort what runs, end the worker and unmap everything. May be called twice."""
        self.abort(ChannelClosedError("the group has left"))
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            self._rouse()
            thread.join()
        self._buckets.close()

    # Plans and programs.

    def _plan(
        self,
        topology: Topology,
        bucket: Bucket,
        memory: BucketMemory,
        reduction: Reduction,
        *,
        fuse: bool,
    ) -> Plan | str:
        key = (id(topology), bucket, reduction, fuse)
        found = self._plans.get(key)
        if found is None:
            try:
                found = record(
                    topology,
                    bucket,
                    memory.dtype,
                    size=self.size,
                    facts=self.facts,
                    reduction=reduction,
                    fuse=fuse,
                )
                if any(len(f.sources) > MOST_SOURCES for each in found.folds for f in each):
                    found = f"a fold has more than {MOST_SOURCES} sources"
            except Unplannable as error:
                found = str(error)
            except P2PError:
                raise
            except Exception as error:
                raise TopologyError(f"{topology.describe()} raised {error!r}") from error
            self._plans[key] = found
        return found

    def _program(
        self,
        attached: SharedBucket,
        topology: Topology,
        bucket: Bucket,
        reduction: Reduction,
        *,
        fuse: bool,
    ) -> Program:
        key = (id(topology), bucket.combine, reduction, fuse)
        found = attached.programs.get(key)
        if found is None:
            plan = self._plan(topology, bucket, attached.memory, reduction, fuse=fuse)
            if isinstance(plan, str):
                raise Unplannable(plan)
            found = attached.programs[key] = compile_plan(
                plan, self.rank, attached.addresses, attached.memory.dtype, self._ffi
            )
        return found

    def _load(self, job: _Job, program: Program) -> None:
        """Let a round begin with a program."""
        job.program = program
        round_ = job.round
        round_.steps, round_.totals = program.steps, program.totals
        round_.step_count = program.count
        round_.state = round_.step = round_.offset = 0
        for rank, weight in enumerate(program.weights):
            job.expected[rank] = weight

    # The worker.

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="p2pdpt-native", daemon=True)
            self._thread.start()

    def _rouse(self) -> None:
        self._poke[0] = 1
        self._lib.p2pdpt_rouse(self._executor)

    def _work(self) -> None:
        """Run rounds until told to end; whatever goes wrong, nobody waits for ever."""
        active: list[_Job] = []
        try:
            self._replay_all(active)
        except BaseException as error:
            if self._error is None:
                self._error = error
            for each in active:
                _settle(each, self._error)
            while (job := self._jobs.get()) is not None:
                _settle(job, self._error)

    def _replay_all(self, active: list[_Job]) -> None:
        """Replay what comes; holds no lock while the executor does."""
        lib = self._lib
        which = self._ffi.new("uint32_t *")
        rounds = self._ffi.new("p2pdpt_round *[]", 1)
        while True:
            self._poke[0] = 0
            while not active or not self._jobs.empty():
                job = self._jobs.get()
                if job is None:
                    for each in active:
                        _settle(each, self._error)
                    return
                active.append(job)
            for job in [each for each in active if each.cancelled]:
                active.remove(job)
                _settle(job, None)
            if not active:
                continue
            if len(rounds) < len(active):
                rounds = self._ffi.new("p2pdpt_round *[]", 2 * len(active))
            for index, each in enumerate(active):
                rounds[index] = each.round
            reason = lib.p2pdpt_advance(self._executor, rounds, len(active), which)
            if reason == lib.P2PDPT_DONE:
                job = active.pop(which[0])
                self._advance_bases(job)
                _settle(job, None)
            elif reason == lib.P2PDPT_WEIGHTS:
                job = active[which[0]]
                try:
                    self._reweigh(job)
                except Exception as error:
                    active.remove(job)
                    _settle(job, error)
            elif reason == lib.P2PDPT_ABORTED:
                for job in active:
                    _settle(job, self._error)
                active.clear()

    def _reweigh(self, job: _Job) -> None:
        """Begin a round anew with the weights that its members have brought."""
        weights = [job.expected[rank] for rank in range(self.size)]
        program = self._program(
            job.attached, job.topology, job.bucket, job.reduction, fuse=len(set(weights)) == 1
        )
        if program.weights != weights:
            program.weigh(weights)
        self._load(job, program)

    def _named(self, error: BaseException, topology: Topology, key: RoundKey) -> BaseException:
        if isinstance(error, PeerFailedError):
            return error.during(
                f"exchange of bucket {key.bucket} ({topology.describe()})",
                key.step if key.stream == 0 else None,
            )
        return _again(error)


def _again(error: BaseException) -> BaseException:
    """Return a copy to raise, which refers to no frame of others."""
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again


def _settle(job: _Job, error: BaseException | None) -> None:
    """Tell the event loop that a round has ended."""

    def settle() -> None:
        if not job.future.done():
            job.future.set_result(error)

    try:
        job.loop.call_soon_threadsafe(settle)
    except RuntimeError:
        pass  # the loop has closed, and with it whoever waited


def _bucket(memory: BucketMemory, combine: Combine) -> Bucket:
    return Bucket(memory.length, memory.dtype.name, combine)
