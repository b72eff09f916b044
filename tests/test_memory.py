"""Buckets in memory."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from p2pdpt import memory
from p2pdpt.dtypes import DTYPES
from p2pdpt.errors import ConfigError, FrameError

if TYPE_CHECKING:
    from p2pdpt.dtypes import DType


@pytest.fixture(params=sorted(DTYPES))
def dtype(request: pytest.FixtureRequest) -> DType:
    return DTYPES[request.param]


def test_a_bucket_is_two_areas_of_zeros(dtype: DType) -> None:
    bucket = memory.allocate(dtype, 1000)
    assert not bucket.in_place
    for array in (bucket.mine, bucket.result):
        assert array.shape == (1000,)
        assert array.dtype == np.dtype(dtype.storage)
        assert not array.any()
        assert array.ctypes.data % mmap.PAGESIZE == 0
    bucket.mine[:] = 1
    assert not bucket.result.any()
    bucket.close()


def test_in_place_both_are_one() -> None:
    bucket = memory.allocate(DTYPES["float32"], 3, in_place=True)
    assert bucket.in_place and bucket.mine is bucket.result
    assert len(bucket.areas) == 1
    bucket.close()


def test_an_empty_bucket_has_empty_areas() -> None:
    bucket = memory.allocate(DTYPES["float64"], 0)
    assert len(bucket.mine) == 0 == len(bucket.areas[0].buffer)
    bucket.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this platform has no memfd")
def test_another_mapping_of_the_descriptor_sees_the_same_bytes() -> None:
    area = memory.Area(100, "p2pdpt-test")
    assert os.readlink(f"/proc/self/fd/{area.fd}").startswith("/memfd:p2pdpt-test")
    area.buffer[5] = 7
    with mmap.mmap(area.fd, 100, prot=mmap.PROT_READ) as other:
        assert other[5] == 7
    assert not os.get_inheritable(area.fd)
    area.close()


def test_closing_twice_is_harmless_and_views_keep_the_memory() -> None:
    bucket = memory.allocate(DTYPES["int32"], 4)
    mine = bucket.mine
    mine[:] = 9
    bucket.close()
    bucket.close()
    assert bucket.areas[0].fd == -1
    assert mine.tolist() == [9] * 4


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1 bytes"):
        memory.Area(-1)


def test_a_full_system_is_a_memory_error_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(fd: int, length: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("p2pdpt.memory.mmap.mmap", refuse)
    with pytest.raises(MemoryError, match="cannot allocate 64 bytes for a bucket"):
        memory.Area(64)


def test_works_where_there_is_no_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    area = memory.Area(10)
    assert area.fd == -1
    area.buffer[9] = 1
    area.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this platform has no memfd")
def test_nobody_else_can_write_or_resize_an_area() -> None:
    area = memory.Area(100)
    assert area.sealed
    memory.expect_sealed(area.fd, 100)
    with pytest.raises(PermissionError):
        mmap.mmap(area.fd, 100)
    with pytest.raises(PermissionError):
        os.pwrite(area.fd, b"x", 0)
    for size in (0, 200):
        with pytest.raises(PermissionError):
            os.ftruncate(area.fd, size)
    # Its owner still can write.
    area.buffer[0] = 1
    with pytest.raises(FrameError, match="has 100 bytes instead of 101"):
        memory.expect_sealed(area.fd, 101)
    area.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this platform has no memfd")
def test_what_is_not_sealed_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import fcntl

    def refuse(*arguments: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuse)
        area = memory.Area(100)
    assert not area.sealed
    with pytest.raises(FrameError, match="a shared area is not sealed"):
        memory.expect_sealed(area.fd, 100)
    area.close()
    with (tmp_path / "file").open("wb") as file:
        with pytest.raises(FrameError, match="a shared area is no memfd"):
            memory.expect_sealed(file.fileno(), 0)
