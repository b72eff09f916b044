"""Buckets in memory: allocated once by the node, at a fixed address, in two areas.

``mine`` is this node's contribution and is written by no round; ``result`` is what rounds
produce. Each lies in a memfd (anonymous memory where there is none), page-aligned and touched
once, so that transports can register or share it; the kernel frees it with the process. Whoever
gets the descriptor can only read: the memfd is sealed once this process has mapped it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from p2pdpt.errors import ConfigError, FrameError

if TYPE_CHECKING:
    from p2pdpt.dtypes import DType

__all__ = ["Area", "BucketMemory", "allocate", "expect_sealed"]

# Of Linux 5.1; not in Python's fcntl module. Maps made before it can write, later ones cannot.
_F_SEAL_FUTURE_WRITE: Final = 0x0010


class Area:
    """One block of page-aligned shared memory.

    Attributes:
        nbytes: usable bytes.
        fd: the memfd, or -1 where the platform has none.
        sealed: whether nobody can map the memfd writable, or change its size, any more.
        buffer: the memory; keeps its address until ``close``.
    """

    def __init__(self, nbytes: int, name: str = "p2pdpt") -> None:
        """Allocate `nbytes` of zeros.

        Raises:
            MemoryError: the system has not got them.
        """
        if nbytes < 0:
            raise ConfigError(f"an area cannot have {nbytes} bytes")
        self.nbytes = nbytes
        size = max(nbytes, 1)
        self.fd = -1
        try:
            if hasattr(os, "memfd_create"):
                self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.ftruncate(self.fd, size)
            self.map = mmap.mmap(self.fd, size)
            self.sealed = self.fd >= 0 and _seal(self.fd)
        except OSError as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise MemoryError(f"cannot allocate {nbytes} bytes for a bucket: {error}") from error
        self.buffer = memoryview(self.map)[:nbytes]
        # A bucket that was dropped without `close` gives its descriptor back all the same.
        self._finalizer = weakref.finalize(self, _close_descriptor, self.fd)

    def close(self) -> None:
        """Unmap, if nothing refers to the memory any more, and close the descriptor.

        Arrays and tensors that still look into it keep the mapping alive. May be called twice.
        """
        self.buffer.release()
        self._finalizer()
        self.fd = -1
        try:
            self.map.close()
        except BufferError:
            # Somebody holds a view: the mapping goes with the last of them.
            pass


def _seal(fd: int) -> bool:
    import fcntl

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        # An older kernel: the memory serves this process all the same.
        return False
    return True


def expect_sealed(fd: int, nbytes: int) -> None:
    """Check that another process's memory can be mapped without danger.

    Raises:
        FrameError: it is no memfd, has fewer than `nbytes`, or could shrink or be written to.
    """
    import fcntl

    needed = fcntl.F_SEAL_SHRINK | _F_SEAL_FUTURE_WRITE
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise FrameError(f"a shared area is no memfd: {error.strerror}") from None
    if seals & needed != needed:
        raise FrameError("a shared area is not sealed")
    size = os.fstat(fd).st_size
    if size < nbytes:
        raise FrameError(f"a shared area has {size} bytes instead of {nbytes}")


def _close_descriptor(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


@dataclass(frozen=True, slots=True, eq=False)
class BucketMemory:
    """One bucket's two areas as flat numpy arrays in the type's storage.

    Attributes:
        dtype: the element type.
        length: elements.
        mine: this node's contribution, shape ``(length,)``.
        result: what rounds produce, shape ``(length,)``; the same array as `mine` in place.
        areas: the memory behind them.
        plans: what drivers remember about rounds of this bucket.
    """

    dtype: DType
    length: int
    mine: Any
    result: Any
    areas: tuple[Area, ...]
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def in_place(self) -> bool:
        """Whether rounds overwrite the contribution."""
        return self.mine is self.result

    def close(self) -> None:
        """Give the memory back, as far as nothing refers to it."""
        for area in self.areas:
            area.close()


def allocate(dtype: DType, length: int, *, in_place: bool = False) -> BucketMemory:
    """Allocate a bucket of `length` zeros.

    Args:
        dtype: the element type.
        length: elements, 0 or more.
        in_place: use one area for both, at the price that a failed round cannot be retried.

    Raises:
        MemoryError: the system has not got the memory.
    """
    import numpy as np

    areas = []
    arrays = []
    for name in ("mine",) if in_place else ("mine", "result"):
        area = Area(length * dtype.itemsize, f"p2pdpt-{name}")
        areas.append(area)
        array = np.frombuffer(area.map, dtype=dtype.storage, count=length)
        array.fill(0)
        arrays.append(array)
    return BucketMemory(dtype, length, arrays[0], arrays[-1], tuple(areas))
