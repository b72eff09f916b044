from __future__ import annotations

import asyncio

import pytest

from p2pdpt.channel import Meta
from p2pdpt.errors import MismatchError
from p2pdpt.testing.memory_transport import MemoryTransport
from p2pdpt.testing.transport_bench import (
    Ends,
    RecordingLanding,
    Sending,
    TransportBench,
    pattern,
    tag,
)


class Bench(TransportBench):
    transport = MemoryTransport


def test_patterns_differ_by_seed_and_repeat() -> None:
    assert pattern(1000) == pattern(1000) != pattern(1000, 1)
    assert len(pattern(0)) == 0


def test_tags_differ() -> None:
    assert len({tag(1), tag(2), tag(1, view=2)}) == 3


async def test_a_landing_records_and_checks() -> None:
    seen: list[int] = []
    landing = RecordingLanding(10, 2, piece=6, then=lambda landing: seen.append(landing.got))
    place = landing.buffer(0, 10, 2, Meta())
    assert len(place) == 12
    place[:] = b"abcdefghijkl"
    with pytest.raises(AssertionError):
        landing.arrived(0, 10, Meta())
    landing.arrived(0, 6, Meta(2.0))
    await landing.reach(6)
    with pytest.raises(AssertionError):
        landing.buffer(0, 10, 2, Meta())
    with pytest.raises(AssertionError):
        landing.buffer(6, 5, 2, Meta())
    assert len(landing.buffer(6, 4, 2, Meta())) == 8
    landing.arrived(6, 4, Meta())
    assert landing.done.is_set()
    assert landing.memory == b"abcdefghijkl" + bytes(8)
    assert landing.arrivals == [(0, 6, Meta(2.0)), (6, 4, Meta())]
    assert seen == [6, 10]


async def test_a_failed_landing_wakes_who_waits() -> None:
    landing = RecordingLanding(10)
    waiting = asyncio.ensure_future(landing.reach(5))
    await asyncio.sleep(0)
    landing.failed(MismatchError("x"))
    await waiting
    await landing.done.wait()
    for call in (
        lambda: landing.failed(MismatchError("x")),
        lambda: landing.arrived(0, 1, Meta()),
        lambda: landing.buffer(0, 1, 4, Meta()),
    ):
        with pytest.raises(AssertionError):
            call()


async def test_pairs_carry_and_close() -> None:
    async with Bench().pair() as (here, there):
        ends = Ends(here, there)
        await Bench().carry(here, there, tag(1))
        await Bench().settle(here, there)
    await ends.wait()
    assert ends.reasons[0] is None
    assert ends.calls == 2


async def test_a_body_that_waits_in_vain_fails() -> None:
    bench = Bench()
    bench.patience = 0.02  # type: ignore[misc]

    async def wait_in_vain() -> None:
        async with bench.pair() as (_, there):
            landing, _ = bench.expect(there, tag(1), RecordingLanding(10))
            await landing.done.wait()

    with pytest.raises(TimeoutError):
        await wait_in_vain()


async def test_sending_wants_rising_counts() -> None:
    async with Bench().pair() as (here, _):
        sending = Sending(here, tag(1), 10)
        sending._drained(5)
        with pytest.raises(AssertionError):
            sending._drained(5)
        with pytest.raises(AssertionError):
            sending._drained(11)
        assert not sending.done.is_set()
        sending._drained(10)
        assert sending.done.is_set()
