"""Buckets whose memory all members have mapped: who shares what, and where it lies.

Each member shares one page of signals (its bell and a line for each bucket) and, for each bucket,
the areas of :mod:`p2pdpt.memory`. Others map them read-only.

A bucket is shared when it is first exchanged, and again whenever a member comes with other memory
for it or has given up a round of it. Members share under the name of the round, so that whoever
has begun the round with the old memory is told by the name, and begins it anew. If a member has
a reason not to exchange a bucket so, then no member does, from then on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np

from p2pdpt.errors import FrameError, TopologyError
from p2pdpt.memory import Area, expect_sealed
from p2pdpt.protocol.recorder import Unplannable
from p2pdpt.protocol.round_io import MINE, RESULT, WIDE

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from p2pdpt.memory import BucketMemory
    from p2pdpt.runtime.drivers.programs import Program

__all__ = ["Share", "SharedBucket", "SharedBuckets"]

LINE_BYTES: Final = 64
SIGNAL_BYTES: Final = 1 << 16
"""A bell and the lines of up to 1023 buckets."""
LINES: Final = SIGNAL_BYTES // LINE_BYTES


class Share(Protocol):
    """Exchanges descriptors with all members of the view."""

    async def __call__(
        self, name: str, payload: bytes, descriptors: Sequence[int]
    ) -> list[tuple[bytes, list[int]] | None]:
        """Give `payload` and `descriptors` to every other member that calls with `name`.

        Returns theirs in rank order, None at the own place; the descriptors are the caller's to
        close.

        Raises:
            PeerFailedError: a member failed.
        """


class _Shape(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What must be equal about a bucket, where the sender's line is, and why it is not shared."""

    dtype: str
    length: int
    line: int
    against: str


class Mapped:
    """One area of a peer, mapped read-only.

    Attributes:
        address: where it lies.
    """

    def __init__(self, descriptor: int, nbytes: int, native: Any) -> None:
        """Map `nbytes`; the descriptor stays the caller's.

        Raises:
            FrameError: the memory is smaller, or its owner could take it away.
            MemoryError: the system does not map it.
        """
        expect_sealed(descriptor, nbytes)
        self._native, self._nbytes = native, max(nbytes, 1)
        self._map = native.lib.p2pdpt_map(descriptor, self._nbytes)
        if self._map == native.ffi.NULL:
            reason = os.strerror(native.ffi.errno)
            raise MemoryError(f"cannot map {nbytes} shared bytes: {reason}")
        self.address = int(native.ffi.cast("uintptr_t", self._map))

    def close(self) -> None:
        """Unmap; nobody may be reading it. May be called twice."""
        if self._nbytes:
            self._native.lib.p2pdpt_unmap(self._map, self._nbytes)
            self._nbytes = 0


@dataclass(eq=False)
class SharedBucket:
    """A bucket that all members have mapped.

    Attributes:
        memory: this member's areas; `wide` is that of partial sums, for half precision.
        mapped: the areas of the others.
        addresses: for each rank, where each area begins.
        lines, bases, line: the progress of all ranks, where they stood when the last round
            ended, and the own line, which has the number `place`.
        number: of the last round.
        programs: plans of this bucket, with addresses.
        broken: whether a round of it was given up, so that it must be shared anew.
    """

    memory: BucketMemory
    wide: Area | None = None
    place: int = 0
    lines: Any = None
    bases: Any = None
    line: Any = None
    number: int = 0
    mapped: list[Mapped] = field(default_factory=list)
    addresses: list[dict[int, int]] = field(default_factory=list)
    programs: dict[tuple[object, ...], Program] = field(default_factory=dict)
    broken: bool = False

    def close(self) -> None:
        """Unmap what is not the caller's. May be called twice."""
        for mapped in self.mapped:
            mapped.close()
        self.mapped.clear()
        self.programs.clear()
        if self.wide is not None:
            self.wide.close()


class SharedBuckets:
    """Shares and maps the buckets of one member of a view."""

    def __init__(self, rank: int, size: int, share: Share, native: Any) -> None:
        """`native` is the compiled module."""
        self._rank, self._size, self._share, self._native = rank, size, share, native
        self._signals = Area(SIGNAL_BYTES, "p2pdpt-signals")
        self._address = address_of(self._signals.map)
        self._peers: list[Mapped | None] = [None] * size
        self._free = list(range(LINES - 1, 0, -1))
        self._shared: dict[tuple[int, int], SharedBucket] = {}
        self._against: dict[tuple[int, int], str] = {}
        self._announced: set[str] = set()
        self._sharing: set[str] = set()

    async def open(self) -> list[int]:
        """Share the signals of all members; return the addresses of their bells, by rank.

        Raises:
            PeerFailedError: a member failed meanwhile.
            FrameError: a member shared something else.
        """
        shared = await self._share("signals", b"", [self._signals.fd])
        bells = []
        try:
            for rank, each in enumerate(shared):
                if each is None:
                    bells.append(self._address)
                    continue
                if len(each[1]) != 1:
                    raise FrameError(f"rank {rank} shares {len(each[1])} descriptors instead of 1")
                self._peers[rank] = mapped = Mapped(each[1][0], SIGNAL_BYTES, self._native)
                bells.append(mapped.address)
        finally:
            _close_descriptors(shared)
        return bells

    def close(self) -> None:
        """Unmap everything; nobody may be using it. May be called twice."""
        for bucket in self._shared.values():
            bucket.close()
        self._shared.clear()
        for peer in self._peers:
            if peer is not None:
                peer.close()
        self._peers = [None] * self._size
        self._signals.close()

    def announced(self, name: str) -> bool:
        """Note that another member shares under `name`; tell whether that is news."""
        if name in self._sharing:
            return False
        self._announced.add(name)
        return True

    async def get(
        self, memory: BucketMemory, place: tuple[int, int], name: str, against: str
    ) -> SharedBucket:
        """Return a bucket as it is to be used in the round called `name`.

        No round of it may be running here.

        Args:
            place: stream and number of the bucket.
            against: why this member cannot exchange it so.

        Raises:
            Unplannable: a member has a reason, now or before; all raise this.
            TopologyError: its type or length differs from another member's.
            PeerFailedError: a member failed meanwhile.
            MemoryError: the system does not map it.
        Cancellation leaves it to be shared anew.
        """
        if place in self._against:
            raise Unplannable(self._against[place])
        found = self._shared.get(place)
        if (
            found is not None
            and found.memory is memory
            and not (found.broken or against or name in self._announced)
        ):
            return found
        self._announced.discard(name)
        self._sharing.add(name)
        try:
            made = await self._map(memory, name, against)
        except BaseException:
            if found is not None:
                found.broken = True
            raise
        finally:
            self._sharing.discard(name)
        if found is not None:
            # All members have shared anew, so none of them reads the old memory or line.
            self._free.append(found.place)
            found.close()
        if isinstance(made, str):
            self._against[place] = made
            self._shared.pop(place, None)
            raise Unplannable(made)
        self._shared[place] = made
        return made

    async def _map(self, memory: BucketMemory, name: str, against: str) -> SharedBucket | str:
        """Return the bucket, or the first reason of a member against it."""
        against = against or self._obstacle(memory)
        dtype, length = memory.dtype, memory.length
        bucket = SharedBucket(memory)
        try:
            if not against:
                bucket.wide = Area(length * 4, "p2pdpt-wide") if dtype.half else None
                bucket.place = self._free.pop()
                bucket.line = self._line(self._address, bucket.place)
                # A line is used again, and begins anew.
                bucket.line.count = bucket.line.entered = 0
            shape = _Shape(dtype.name, length, bucket.place, against[:1000])
            areas = [] if against else [*memory.areas, *filter(None, (bucket.wide,))]
            shared = await self._share(
                name, msgspec.msgpack.encode(shape), [area.fd for area in areas]
            )
            try:
                against = self._attach(bucket, name, shape, shared)
            finally:
                _close_descriptors(shared)
        except BaseException:
            # The line is not used again: another member may have been told of it.
            bucket.close()
            raise
        if not against:
            return bucket
        if bucket.line is not None:
            self._free.append(bucket.place)
        bucket.close()
        return against

    def _obstacle(self, memory: BucketMemory) -> str:
        if any(area.fd < 0 for area in memory.areas):
            return "its memory has been closed"
        return "" if self._free else f"{LINES - 1} buckets are shared already"

    def _attach(
        self,
        bucket: SharedBucket,
        name: str,
        shape: _Shape,
        shared: Sequence[tuple[bytes, list[int]] | None],
    ) -> str:
        """Map what all members have shared, or return why not, alike on all members."""
        ffi, dtype = self._native.ffi, bucket.memory.dtype
        shapes = {
            rank: _decode(each[0], rank) for rank, each in enumerate(shared) if each is not None
        }
        for rank, theirs in shapes.items():
            if (theirs.dtype, theirs.length) != (shape.dtype, shape.length):
                raise TopologyError(
                    f"{name} has {shape.length} {shape.dtype} here and "
                    f"{theirs.length} {theirs.dtype} on rank {rank}"
                )
        for rank in range(self._size):
            if reason := shapes.get(rank, shape).against:
                return reason
        bucket.lines = ffi.new("p2pdpt_line *[]", self._size)
        bucket.bases = ffi.new("uint64_t[]", self._size)
        own = {
            MINE: address_of(bucket.memory.areas[0].map),
            RESULT: address_of(bucket.memory.areas[-1].map),
        }
        sizes = {MINE: shape.length * dtype.itemsize, RESULT: shape.length * dtype.itemsize}
        if bucket.wide is not None:
            own[WIDE] = address_of(bucket.wide.map)
            sizes[WIDE] = shape.length * 4
        for rank, each in enumerate(shared):
            if each is None:
                bucket.addresses.append(own)
                bucket.lines[rank] = bucket.line
                continue
            descriptors, peer = each[1], self._peers[rank]
            assert peer is not None
            if len(descriptors) != len(sizes):
                raise FrameError(f"rank {rank} shares {len(descriptors)} areas, not {len(sizes)}")
            areas = {}
            for (area, nbytes), descriptor in zip(sizes.items(), descriptors, strict=True):
                bucket.mapped.append(Mapped(descriptor, nbytes, self._native))
                areas[area] = bucket.mapped[-1].address
            bucket.addresses.append(areas)
            bucket.lines[rank] = self._line(peer.address, shapes[rank].line)
        return ""

    def _line(self, base: int, place: int) -> Any:
        return self._native.ffi.cast("p2pdpt_line *", base + place * LINE_BYTES)


def _decode(payload: bytes, rank: int) -> _Shape:
    try:
        shape = msgspec.msgpack.decode(payload, type=_Shape)
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrameError(f"rank {rank} shares a bucket that cannot be told: {error}") from None
    if not 0 <= shape.line < LINES or not (shape.line or shape.against):
        raise FrameError(f"rank {rank} has no line {shape.line}")
    return shape


def _close_descriptors(shared: Sequence[tuple[bytes, list[int]] | None]) -> None:
    for each in shared:
        for descriptor in each[1] if each is not None else ():
            os.close(descriptor)


def address_of(buffer: mmap.mmap) -> int:
    """Return where a mapping lies."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address
