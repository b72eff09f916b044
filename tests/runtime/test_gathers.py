from __future__ import annotations

import asyncio

import pytest

from p2pdpt.errors import FrameError, GroupError, PeerLeftError
from p2pdpt.protocol.messages import Gather
from p2pdpt.runtime import gathers as module
from p2pdpt.runtime.gathers import Gathers


def three() -> tuple[Gathers, list[Gather]]:
    told: list[Gather] = []
    return Gathers(1, 3, told.append), told


async def test_payloads_come_back_in_rank_order() -> None:
    gathers, told = three()
    gathers.receive(2, Gather("n", 0, b"c"))
    waiting = asyncio.create_task(gathers.gather(b"b", "n"))
    await asyncio.sleep(0)
    assert told == [Gather("n", 0, b"b")]
    gathers.receive(0, Gather("n", 0, b"a"))
    assert await waiting == [b"a", b"b", b"c"]


async def test_names_and_calls_are_kept_apart() -> None:
    gathers, told = three()
    calls = [
        asyncio.create_task(gathers.gather(payload, name))
        for payload, name in ((b"1", "n"), (b"2", "n"), (b"3", "m"))
    ]
    await asyncio.sleep(0)
    assert told == [Gather("n", 0, b"1"), Gather("n", 1, b"2"), Gather("m", 0, b"3")]
    for name, sequence in (("n", 1), ("m", 0), ("n", 0)):
        for rank in (0, 2):
            gathers.receive(rank, Gather(name, sequence, f"{name}{sequence}{rank}".encode()))
    assert await asyncio.gather(*calls) == [
        [b"n00", b"1", b"n02"],
        [b"n10", b"2", b"n12"],
        [b"m00", b"3", b"m02"],
    ]


async def test_a_cancelled_call_is_over() -> None:
    gathers, _ = three()
    waiting = asyncio.create_task(gathers.gather(b"", "n"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    for rank in (0, 2):
        gathers.receive(rank, Gather("n", 0, b"late"))
    second = asyncio.create_task(gathers.gather(b"x", "n"))
    await asyncio.sleep(0)
    for rank in (0, 2):
        gathers.receive(rank, Gather("n", 1, b"y"))
    assert await second == [b"y", b"x", b"y"]


async def test_a_failure_reaches_all_calls_and_later_ones() -> None:
    gathers, _ = three()
    waiting = asyncio.create_task(gathers.gather(b"", "n"))
    await asyncio.sleep(0)
    gathers.fail(lambda operation: GroupError(f"{operation} failed"))
    with pytest.raises(GroupError, match="all_gather 'n' failed"):
        await waiting
    with pytest.raises(GroupError, match="all_gather 'm' failed"):
        await gathers.gather(b"", "m")


async def test_a_leaver_fails_only_what_needs_it() -> None:
    gathers, _ = three()
    both = [asyncio.create_task(gathers.gather(b"", name)) for name in "nm"]
    await asyncio.sleep(0)
    gathers.receive(2, Gather("n", 0, b"c"))
    gathers.leave(2, lambda operation: PeerLeftError("two", "h:1", "left", operation=operation))
    gathers.receive(0, Gather("n", 0, b"a"))
    assert await both[0] == [b"a", b"", b"c"]
    with pytest.raises(PeerLeftError, match="during all_gather 'm': left"):
        await both[1]
    with pytest.raises(PeerLeftError, match="during all_gather 'k'"):
        await gathers.gather(b"", "k")


async def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    gathers, _ = three()
    gathers.receive(0, Gather("n", 0, b"a"))
    with pytest.raises(FrameError, match="payload 0 of 'n' again"):
        gathers.receive(0, Gather("n", 0, b"a"))
    monkeypatch.setattr(module, "AHEAD_BYTES", 1000)
    for sequence in range(7):
        gathers.receive(2, Gather("m", sequence, b""))
    with pytest.raises(FrameError, match="has not called, the last of them 'm'"):
        gathers.receive(2, Gather("m", 7, b""))
