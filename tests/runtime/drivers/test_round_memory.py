from __future__ import annotations

import numpy as np
import pytest

from p2pdpt import kernels
from p2pdpt.dtypes import DTYPES
from p2pdpt.memory import BucketMemory
from p2pdpt.protocol.round_io import MINE, RESULT, WIDE, WINDOW, Slice
from p2pdpt.runtime.drivers.round_memory import RoundMemory, StagingPool
from p2pdpt.topology import ADD, COPY


def made(
    name: str = "float32", length: int = 6, pool: StagingPool | None = None
) -> tuple[RoundMemory, BucketMemory]:
    dtype = DTYPES[name]
    bucket = BucketMemory(
        dtype, length, np.zeros(length, dtype.storage), np.ones(length, dtype.storage), ()
    )
    return RoundMemory(bucket, kernels.load("off"), pool or StagingPool()), bucket


def test_slices_look_into_the_bucket() -> None:
    memory, bucket = made()
    memory.view(Slice(RESULT, 1, 3))[:] = 7.0
    assert bucket.result.tolist() == [1, 7, 7, 1, 1, 1]
    assert memory.view(Slice(MINE, 0, 2)).base is bucket.mine
    assert bytes(memory.buffer(Slice(RESULT, 1, 2))) == np.float32(7).tobytes()
    assert len(memory.buffer(Slice(RESULT, 2, 2))) == 0


def test_partial_sums_of_half_precision_appear_when_first_asked_for() -> None:
    memory, bucket = made("float16")
    wide = memory.view(Slice(WIDE, 2, 4))
    assert (wide.dtype, wide.shape) == (np.float32, (2,))
    wide[:] = 3.5
    assert memory.view(Slice(WIDE, 0, 6))[2] == 3.5
    memory.fold(Slice(RESULT, 2, 4), [Slice(WIDE, 2, 4)], COPY, None, None)
    assert bucket.result[2] == 3.5
    with pytest.raises(AssertionError, match="no area 9"):
        memory.view(Slice(9, 0, 1))


def test_folds_go_through_the_kernels() -> None:
    memory, bucket = made()
    bucket.mine[:] = range(6)
    memory.fold(Slice(RESULT, 0, 6), [Slice(MINE, 0, 6), Slice(RESULT, 0, 6)], ADD, (2.0, 1.0), 2.0)
    assert bucket.result.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]


def test_kernels_of_plugins_see_float32() -> None:
    memory, bucket = made("bfloat16", 4)
    bucket.mine[:] = [0x3F80, 0x4000, 0x4040, 0x4080]
    bucket.result[:] = 0
    memory.view(Slice(WIDE, 2, 4))[:] = [10.0, 20.0]
    memory.scratch(1, 4)
    seen = []

    def kernel(dst: object, src: object) -> None:
        seen.append((dst.dtype.name, src.tolist()))  # type: ignore[attr-defined]
        np.multiply(src, 2, out=dst)  # type: ignore[call-overload]

    memory.run(kernel, [Slice(MINE, 0, 2), Slice(WIDE, 2, 4)], Slice(1, 0, 4))
    assert memory.view(Slice(1, 0, 4)).tolist() == [2.0, 4.0, 20.0, 40.0]
    memory.run(kernel, [Slice(1, 0, 4)], Slice(RESULT, 0, 4))
    assert bucket.result.tolist() == [0x4080, 0x4100, 0x4220, 0x42A0]
    memory.run(kernel, [Slice(RESULT, 1, 1)], Slice(1, 2, 2))
    assert seen == [
        ("float32", [1.0, 2.0, 10.0, 20.0]),
        ("float32", [2.0, 4.0, 20.0, 40.0]),
        ("float32", []),
    ]


def test_scratch_is_wide_and_can_be_dropped() -> None:
    memory, _ = made("float16")
    memory.scratch(3, 5)
    assert memory.view(Slice(3, 0, 5)).dtype == np.float32
    memory.drop(3)
    with pytest.raises(AssertionError, match="no area 3"):
        memory.view(Slice(3, 0, 1))


def test_staging_is_as_long_as_needed_and_comes_back() -> None:
    pool = StagingPool()
    memory, _ = made("float16", pool=pool)
    areas = memory.staging(100)
    narrow, wide = (memory.view(Slice(area, 0, 100)) for area in areas)
    assert (narrow.dtype, wide.dtype) == (np.float16, np.float32)
    other = memory.staging(100)
    assert len({*areas, *other}) == 4
    memory.release(areas)
    with pytest.raises(AssertionError):
        memory.view(Slice(areas[0], 0, 1))
    again = memory.staging(65)
    assert memory.view(Slice(again[0], 0, 1)).base is narrow.base, "of one size, to 128"
    assert not {*again} & {*areas, *other}
    memory.close()
    taken = [pool.take(DTYPES["float16"], 128) for _ in range(3)]
    assert len({id(pair[0]) for pair in taken}) == 3
    assert sum(narrow.base is pair[0] for pair in taken) == 1


def test_other_types_stage_in_one_array() -> None:
    memory, _ = made("float64")
    areas = memory.staging(3)
    assert areas[0] == areas[1]
    assert memory.view(Slice(areas[0], 0, 3)).dtype == np.float64
    memory.close()
    memory.close()


def test_a_pool_keeps_sizes_and_types_apart() -> None:
    pool = StagingPool()
    floats, halves = DTYPES["float32"], DTYPES["bfloat16"]
    pair = pool.take(floats, 5)
    assert pair[0] is pair[1]
    assert len(pair[0]) == 8
    assert len(pool.take(floats, 1)[0]) == 1
    assert len(pool.take(floats, 2)[0]) == 2
    assert len(pool.take(floats, WINDOW)[0]) == WINDOW
    assert [len(each) for each in pool.take(halves, 9)] == [16, 16]
    pool.give(floats, pair)
    assert pool.take(halves, 8)[0] is not pair[0]
    assert pool.take(floats, 16)[0] is not pair[0]
    assert pool.take(floats, 8)[0] is pair[0]
    assert pool.take(floats, 8)[0] is not pair[0]


def test_what_is_longer_than_a_window_is_not_kept() -> None:
    pool = StagingPool()
    pair = pool.take(DTYPES["int8"], WINDOW + 1)
    pool.give(DTYPES["int8"], pair)
    assert pool.take(DTYPES["int8"], WINDOW + 1)[0] is not pair[0]
