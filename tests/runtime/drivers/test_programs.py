"""Plans with addresses."""

from __future__ import annotations

import numpy as np
import pytest

from p2pdpt.dtypes import DTYPES
from p2pdpt.protocol.plan import Plan
from p2pdpt.protocol.recorder import record
from p2pdpt.protocol.round_io import MINE, RESULT, WIDE
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.runtime.drivers.native_driver import unavailable
from p2pdpt.runtime.drivers.programs import compile_plan
from p2pdpt.topology import Bucket, Facts
from p2pdpt_plugins.mapreduce import MapReduce

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

ADDRESSES = [{MINE: 1 << 20, RESULT: 2 << 20, WIDE: 3 << 20}, {MINE: 4 << 20, RESULT: 5 << 20}]


def plan(dtype: str, *, fuse: bool = True) -> Plan:
    return record(
        MapReduce(reducer=0),
        Bucket(10, dtype),
        DTYPES[dtype],
        size=2,
        facts=Facts(),
        reduction=Reduction.MEAN,
        fuse=fuse,
    )


def test_steps_have_the_addresses_of_the_folds() -> None:
    from p2pdpt._native import ffi

    dtype = DTYPES["float32"]
    first = compile_plan(plan("float32"), 0, ADDRESSES, dtype, ffi)
    second = compile_plan(plan("float32"), 1, ADDRESSES, dtype, ffi)
    assert (first.count, second.count) == (1, 1)
    step = first.steps[0]
    assert int(ffi.cast("uintptr_t", step.out)) == 2 << 20
    sources = [int(ffi.cast("uintptr_t", step.sources[index])) for index in range(2)]
    assert sources == [1 << 20, 4 << 20]
    assert (step.length, step.source_count, step.out_wide) == (10, 2, 0)
    assert (step.divide, step.divisor, step.scales) == (1, 2.0, ffi.NULL)
    copy = second.steps[0]
    assert int(ffi.cast("uintptr_t", copy.sources[0])) == 2 << 20
    assert copy.divide == 0 and copy.wait_count == 1
    assert (copy.waits[0].rank, copy.waits[0].need, copy.waits[0].slope) == (0, 0, 1)
    assert list(first.totals) == [10, 10]


def test_weights_are_set_again_and_again() -> None:
    from p2pdpt._native import ffi

    program = compile_plan(plan("float32", fuse=False), 0, ADDRESSES, DTYPES["float32"], ffi)
    for weights in ([1.0, 3.0], [2.0, 0.0]):
        program.weigh(weights)
        step = program.steps[0]
        assert [step.scales[index] for index in range(2)] == weights
        assert step.divisor == sum(weights) and program.weights == weights
    program.weigh([4.0, 4.0])
    assert program.steps[0].scales == ffi.NULL and program.steps[0].divisor == 2.0


def test_what_is_read_of_others_is_counted() -> None:
    from p2pdpt._native import ffi

    dtype = DTYPES["bfloat16"]
    addresses = [{MINE: 0, RESULT: 0, WIDE: 0}] * 2
    programs = [compile_plan(plan("bfloat16"), rank, addresses, dtype, ffi) for rank in range(2)]
    assert [(each.bytes_read, each.bytes_lent) for each in programs] == [(20, 20), (20, 20)]


def test_the_executor_replays_what_was_compiled() -> None:
    """One rank alone, whose plan needs nobody else's progress."""
    from p2pdpt._native import ffi, lib

    given = [np.arange(10, dtype=np.float32), np.full(10, 2, np.float32)]
    result = np.zeros(10, np.float32)
    addresses = [
        {MINE: given[0].__array_interface__["data"][0],
         RESULT: result.__array_interface__["data"][0]},
        {MINE: given[1].__array_interface__["data"][0], RESULT: 0},
    ]  # fmt: skip
    program = compile_plan(plan("float32"), 0, addresses, DTYPES["float32"], ffi)
    lines = ffi.new("p2pdpt_line[2]", [{"entered": 1, "weight": 1.0}] * 2)
    bells = ffi.new("p2pdpt_bell[2]")
    abort, poke, which = ffi.new("uint32_t *"), ffi.new("uint32_t *"), ffi.new("uint32_t *")
    bell_list = ffi.new("p2pdpt_bell *[]", [bells + 0, bells + 1])
    line_list = ffi.new("p2pdpt_line *[]", [lines + 0, lines + 1])
    bases = ffi.new("uint64_t[2]")
    executor = ffi.new(
        "p2pdpt_executor *",
        {"bells": bell_list, "abort": abort, "poke": poke, "size": 2, "rank": 0, "segment": 3,
         "path": lib.p2pdpt_best_path()},
    )  # fmt: skip
    weights = ffi.new("double[]", [1.0, 1.0])
    round_ = ffi.new(
        "p2pdpt_round *",
        {"steps": program.steps, "step_count": program.count, "totals": program.totals,
         "lines": line_list, "bases": bases, "weights": weights, "number": 1, "size": 2,
         "rank": 0, "dtype": DTYPES["float32"].code},
    )  # fmt: skip
    # The other has finished already.
    lines[1].count = 10
    rounds = ffi.new("p2pdpt_round *[]", [round_])
    assert lib.p2pdpt_advance(executor, rounds, 1, which) == lib.P2PDPT_DONE
    np.testing.assert_array_equal(result, (np.arange(10) + 2) / 2)
    assert lines[0].count == 10
    # Other weights than expected are given back, and nothing is folded.
    lines[1].weight = 3.0
    round_.state = round_.step = 0
    assert lib.p2pdpt_advance(executor, rounds, 1, which) == lib.P2PDPT_WEIGHTS
    assert list(weights) == [1.0, 3.0]
    for word, reason in ((poke, lib.P2PDPT_POKED), (abort, lib.P2PDPT_ABORTED)):
        word[0] = 1
        round_.number = 5
        assert lib.p2pdpt_advance(executor, rounds, 1, which) == reason
