from __future__ import annotations

import random

import numpy as np

from p2pdpt.protocol.weighting import Reduction
from p2pdpt.testing.programs import Local, check
from p2pdpt.testing.random_programs import random_all_reduce, random_program
from p2pdpt.testing.reference import run_reference
from p2pdpt.topology import Recv, Send


def test_programs_keep_the_rules_and_repeat() -> None:
    for seed in range(60):
        program = random_program(random.Random(seed), 1 + seed % 5, 1 + seed % 23, 1 + seed % 9)
        check(program)
        assert program == random_program(
            random.Random(seed), 1 + seed % 5, 1 + seed % 23, 1 + seed % 9
        )
        assert program.size == 1 + seed % 5
        assert program.length == 1 + seed % 23


def test_programs_have_all_that_there_is() -> None:
    moves = [
        (rank, move)
        for seed in range(80)
        for rank, listed in enumerate(random_program(random.Random(seed), 4, 20).moves)
        for move in listed
    ]
    kernels = [move for _, move in moves if isinstance(move, Local)]
    operations = [(r, each) for r, move in moves if not isinstance(move, Local) for each in move]
    sends = [each for _, each in operations if isinstance(each, Send)]
    receives = [
        (rank, each.sources, each)
        for rank, each in operations
        if isinstance(each, Recv) and isinstance(each.sources, tuple)
    ]
    assert len(kernels) > 10
    assert len({each.combine for _, _, each in receives}) == 5
    assert any(len(each.to) > 1 for each in sends)
    assert any(each.region.space for _, _, each in receives)
    assert any(not len(each.region) for _, _, each in receives)
    assert any(rank in sources[1:] for rank, sources, _ in receives)
    assert any(len(sources) == 4 for _, sources, _ in receives)
    assert any(list(sources) != sorted(sources) for _, sources, _ in receives)
    assert any(not isinstance(move, Local) and len(move) > 3 for _, move in moves)


def test_an_all_reduce_holds_every_contribution_once() -> None:
    joined = 0
    for seed in range(60):
        size, length = 1 + seed % 6, seed % 30
        program = random_all_reduce(random.Random(seed), size, length)
        given_ = [np.full(length, 1 << 4 * rank, "int64") for rank in range(size)]
        for result in run_reference(program, given_, reduction=Reduction.SUM):
            np.testing.assert_array_equal(result, sum(given_))
        joined += sum(len(move) > 1 for moves in program.moves for move in moves)  # type: ignore[arg-type]
    assert joined > 20
