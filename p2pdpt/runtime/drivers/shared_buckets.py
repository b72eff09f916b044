"""Buckets whose memory all members have mapped: who shares what, and where it lies.

Each member shares one page of signals (its bell and a line for each bucket) and, for each bucket,
the areas of :mod:`p2pdpt.memory`. Others map them read-only.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np

from p2pdpt.errors import ConfigError, FrameError, TopologyError
from p2pdpt.memory import Area
from p2pdpt.protocol.round_io import MINE, RESULT, WIDE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from p2pdpt.memory import BucketMemory
    from p2pdpt.runtime.drivers.programs import Program

__all__ = ["SharedBucket", "SharedBuckets", "Share"]

LINE_BYTES: Final = 64
SIGNAL_BYTES: Final = 1 << 16
"""A bell and the lines of up to 1023 buckets."""


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


class _Shape(msgspec.Struct, array_like=True):
    """What must be equal about a bucket, and where the sender's line is."""

    dtype: str
    length: int
    line: int


class Mapped:
    """One area of a peer, mapped read-only."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        try:
            size = os.fstat(descriptor).st_size
            if size < nbytes:
                raise FrameError(f"a shared area has {size} bytes instead of {nbytes}")
            self.map = mmap.mmap(descriptor, max(nbytes, 1), prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._array = np.frombuffer(self.map, np.uint8)
        self.address: int = self._array.__array_interface__["data"][0]

    def close(self) -> None:
        """Unmap."""
        del self._array
        self.map.close()


@dataclass(eq=False)
class SharedBucket:
    """A bucket that all members have mapped.

    Attributes:
        memory: this member's areas; `wide` is that of partial sums, for half precision.
        mapped: the areas of the others.
        addresses: for each rank, where each area begins.
        lines, bases, line: the progress of all ranks, where they stood when the last round
            ended, and the own line.
        number: of the last round.
        programs: plans of this bucket, with addresses.
        broken: why it cannot be exchanged any more, or empty.
    """

    memory: BucketMemory
    wide: Area | None
    mapped: list[Mapped]
    addresses: list[dict[int, int]]
    lines: Any
    bases: Any
    number: int
    line: Any
    programs: dict[tuple[object, ...], Program]
    broken: str = ""


class SharedBuckets:
    """Shares and maps the buckets of one member of a view."""

    def __init__(self, rank: int, size: int, share: Share, ffi: Any) -> None:
        self._rank, self._size, self._share, self._ffi = rank, size, share, ffi
        self._signals = Area(SIGNAL_BYTES, "p2pdpt-signals")
        self._address = address_of(self._signals.map)
        self._peers: list[Mapped | None] = [None] * size
        self._next_line = 1
        self._shared: dict[int, SharedBucket] = {}
        self._mapping: dict[int, asyncio.Future[SharedBucket]] = {}

    async def open(self) -> list[int]:
        """Share the signals of all members; return the addresses of their bells, by rank."""
        bells = []
        for rank, each in enumerate(await self._share("signals", b"", [self._signals.fd])):
            if each is None:
                bells.append(self._address)
            else:
                self._peers[rank] = mapped = Mapped(each[1][0], SIGNAL_BYTES)
                bells.append(mapped.address)
        return bells

    def close(self) -> None:
        """Unmap everything; nobody may be using it. May be called twice."""
        for bucket in self._shared.values():
            for mapped in bucket.mapped:
                mapped.close()
            if bucket.wide is not None:
                bucket.wide.close()
        self._shared.clear()
        for peer in self._peers:
            if peer is not None:
                peer.close()
        self._peers = [None] * self._size
        self._signals.close()

    async def get(self, memory: BucketMemory, number: int) -> SharedBucket:
        """Return bucket `number`, mapped by all members when they first ask for it.

        Raises:
            ConfigError: the number came with other memory before.
            TopologyError: its type or length differs from another member's.
            PeerFailedError: a member failed meanwhile.
        """
        found = self._shared.get(number)
        if found is None:
            waiting = self._mapping.get(number)
            if waiting is None:
                waiting = asyncio.ensure_future(self._map(memory, number))
                self._mapping[number] = waiting
            found = await asyncio.shield(waiting)
        if found.memory is not memory:
            raise ConfigError(
                f"bucket {number} was exchanged with other memory before; "
                "give each memory a bucket number of its own"
            )
        return found

    async def _map(self, memory: BucketMemory, number: int) -> SharedBucket:
        if self._next_line * LINE_BYTES >= SIGNAL_BYTES:
            raise ConfigError(f"a group exchanges {SIGNAL_BYTES // LINE_BYTES - 1} buckets at most")
        index, self._next_line = self._next_line, self._next_line + 1
        dtype = memory.dtype
        wide = Area(memory.length * 4, "p2pdpt-wide") if dtype.half else None
        own = {
            MINE: memory.mine.__array_interface__["data"][0],
            RESULT: memory.result.__array_interface__["data"][0],
        }
        descriptors = [area.fd for area in memory.areas]
        if wide is not None:
            own[WIDE] = address_of(wide.map)
            descriptors.append(wide.fd)
        shape = _Shape(dtype.name, memory.length, index)
        shared = await self._share(f"bucket {number}", msgspec.msgpack.encode(shape), descriptors)
        lines = self._ffi.new("p2pdpt_line *[]", self._size)
        mapped: list[Mapped] = []
        addresses: list[dict[int, int]] = []
        for rank, each in enumerate(shared):
            if each is None:
                addresses.append(own)
                base, place = self._address, index
            else:
                payload, received = each
                theirs = msgspec.msgpack.decode(payload, type=_Shape)
                peer = self._peers[rank]
                assert peer is not None
                base, place = peer.address, theirs.line
                if (theirs.dtype, theirs.length) != (shape.dtype, shape.length):
                    for descriptor in received:
                        os.close(descriptor)
                    raise TopologyError(
                        f"bucket {number} has {shape.length} {shape.dtype} here and "
                        f"{theirs.length} {theirs.dtype} on rank {rank}"
                    )
                if not 0 < place < SIGNAL_BYTES // LINE_BYTES:
                    raise FrameError(f"rank {rank} has no line {place}")
                sizes = [memory.length * dtype.itemsize] * 2 + [memory.length * 4]
                areas = [
                    Mapped(descriptor, size)
                    for descriptor, size in zip(received, sizes, strict=False)
                ]
                mapped += areas
                addresses.append(
                    {
                        area: found.address
                        for area, found in zip((MINE, RESULT, WIDE), areas, strict=False)
                    }
                )
            lines[rank] = self._ffi.cast("p2pdpt_line *", base + place * LINE_BYTES)
        attached = SharedBucket(
            memory,
            wide,
            mapped,
            addresses,
            lines,
            self._ffi.new("uint64_t[]", self._size),
            0,
            lines[self._rank],
            {},
        )
        self._shared[number] = attached
        return attached


def address_of(buffer: mmap.mmap) -> int:
    """Return where a mapping lies."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address
