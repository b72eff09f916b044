from __future__ import annotations

from typing import cast

import pytest

from p2pdpt.cli.bench_allreduce import LEAST, MOST, MOST_IN_A_ROW, Row, _Method, measure
from p2pdpt.errors import P2PError
from p2pdpt.group import Group


class Alone:
    """A group of one, which is enough to see in which order things are called."""

    size, rank = 1, 0

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def all_gather(self, payload: bytes, *, name: str) -> list[bytes]:
        if name == "bench barrier":
            self.calls.append("|")
        return [payload]

    def method(self, name: str, *, right: bool = True) -> _Method:
        async def call() -> None:
            self.calls.append(name)

        return _Method(name, call, lambda: right)


async def test_methods_take_turns_between_barriers() -> None:
    group = Alone()
    methods = [group.method("gloo"), group.method("tcp")]
    rows = await measure(cast("Group", group), methods, 4096, 2)
    # These take no time, so a turn is as many as it may be.
    turn = "|" + "gloo" * MOST_IN_A_ROW + "|" + "tcp" * MOST_IN_A_ROW
    assert "".join(group.calls) == "gloo" * 6 + "tcp" * 6 + turn * 2
    gloo, tcp = rows
    assert gloo == Row(1, 4096, "gloo", gloo.median_s, 1.0, gloo.cpu_s, 2)
    assert tcp == Row(1, 4096, "tcp", tcp.median_s, gloo.median_s / tcp.median_s, tcp.cpu_s, 2)
    assert 0 < tcp.median_s < 1 and tcp.cpu_s >= 0


async def test_nothing_to_compare_with() -> None:
    group = Alone()
    (row,) = await measure(cast("Group", group), [group.method("tcp")], 4, None)
    assert row.ratio_to_gloo is None
    assert LEAST <= row.repeats <= MOST
    assert group.calls.count("|") == row.repeats


async def test_a_wrong_sum_is_an_error() -> None:
    group = Alone()
    with pytest.raises(P2PError, match="tcp did not sum right"):
        await measure(cast("Group", group), [group.method("tcp", right=False)], 4, 1)
