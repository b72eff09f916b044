"""The exchanges of a step: launched, waited for, sealed, given up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from p2pdpt.dtypes import DTYPES
from p2pdpt.errors import PeerFailedError
from p2pdpt.training.exchange import StepExchange
from p2pdpt.training.waiting import Waiting


class Member:
    """A member that exchanges buckets of two numbers."""

    def __init__(self, arena: Any, rank: int) -> None:
        self.connection = arena.connection(rank)
        self.waiting = Waiting(self.connection.loop, self.connection.open())
        self.waiting.start()
        self.memories = [self.waiting.group.allocate(DTYPES["float32"], 2) for _ in range(2)]
        for number, memory in enumerate(self.memories):
            memory.mine[:] = [rank + 1, 10 * number]

    def exchange(self, step: int = 0, weight: float = 1.0) -> StepExchange:
        return StepExchange(self.waiting, step, 0, weight)

    def close(self, error: str | None = None) -> None:
        self.waiting.stop()
        self.connection.close(error)


def test_buckets_may_leave_in_any_order_and_the_step_is_sealed(arena: Any) -> None:
    def run(rank: int) -> list[list[float]]:
        member = Member(arena, rank)
        exchange = member.exchange(step=4, weight=[1.0, 3.0][rank])
        for number in [0, 1] if rank else [1, 0]:
            exchange.launch(number, member.memories[number])
        sealed, seconds = exchange.finish(lambda: False)
        assert sealed and seconds > 0 and exchange.launched == 2
        results = [memory.result.tolist() for memory in member.memories]
        member.close()
        return results

    assert arena.run(2, run) == [[[1.75, 0], [1.75, 10]]] * 2
    assert [key for key, _ in arena.hub.log if key[0] == "seal"] == [("seal", 4, 0)] * 2


def test_a_step_that_grows_is_sealed_after_the_rest(arena: Any) -> None:
    def run(rank: int) -> None:
        member = Member(arena, rank)
        exchange = member.exchange()
        exchange.launch(0, member.memories[0])
        assert exchange.finish(lambda: bool(member.memories[0].result[0] == 1.5))[0] is False
        exchange.launch(1, member.memories[1])
        assert exchange.finish(lambda: False)[0] is True
        member.close()

    arena.run(2, run)
    kinds = [key[0] for key, rank in arena.hub.log if rank == 0 and key[0] != "gather"]
    assert kinds == ["exchange", "exchange", "seal"]


def test_a_failing_member_ends_the_wait_and_harms_nothing(arena: Any) -> None:
    def run(rank: int) -> None:
        member = Member(arena, rank)
        if rank == 1:
            member.close("ValueError: on purpose")
            return
        exchange = member.exchange()
        exchange.launch(0, member.memories[0])
        exchange.launch(1, member.memories[1])
        try:
            with pytest.raises(PeerFailedError, match="ValueError: on purpose"):
                exchange.finish(lambda: False)
            assert np.array_equal(member.memories[0].mine, [1, 0])
        finally:
            member.close()

    arena.run(2, run)


def test_what_is_abandoned_does_not_run_on(arena: Any) -> None:
    def run(rank: int) -> None:
        member = Member(arena, rank)
        if rank == 0:
            exchange = member.exchange()
            exchange.launch(0, member.memories[0])
            exchange.abandon()
            assert member.memories[0].result.tolist() == [0, 0]
        member.close()

    arena.run(2, run)
