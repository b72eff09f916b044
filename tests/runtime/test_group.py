from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from p2pdpt.dtypes import DTYPES
from p2pdpt.errors import (
    ConfigError,
    GroupError,
    P2PError,
    PeerFailedError,
    PeerLeftError,
    SessionError,
    TopologyError,
)
from p2pdpt.group import Group
from p2pdpt.memory import BucketMemory
from p2pdpt.protocol.messages import Decide, Gather, Ok
from p2pdpt.topology import ADD, COPY, MAX

Start = Callable[..., Any]
F32 = DTYPES["float32"]


def fill(group: Group, length: int, value: float | None = None) -> BucketMemory:
    memory = group.allocate(F32, length)
    memory.mine[:] = group.rank + 1 if value is None else value
    return memory


async def step(group: Group, memory: BucketMemory, number: int, weight: float = 1.0) -> None:
    await group.exchange(memory, step=number, bucket=0, weight=weight)
    await group.seal(number)


async def failure_of(group: Group) -> P2PError:
    for _ in range(500):
        if group.failure is not None:
            return group.failure
        await asyncio.sleep(0.01)
    raise AssertionError("the group does not fail")


@pytest.mark.parametrize("topology", ["ring", "mapreduce"])
@pytest.mark.parametrize("size", [1, 3])
async def test_exchange_gives_the_weighted_mean(groups: Start, size: int, topology: str) -> None:
    joined = await groups(size, topology=topology)
    memories = [fill(group, 1001) for group in joined]
    for number in range(3):
        await asyncio.gather(
            *(
                step(group, memory, number, weight=group.rank + 1)
                for group, memory in zip(joined, memories, strict=True)
            )
        )
    ranks = np.arange(1, size + 1)
    expected = np.float32((ranks * ranks).sum() / ranks.sum())
    for group, memory in zip(joined, memories, strict=True):
        np.testing.assert_allclose(memory.result, expected, rtol=1e-6)
        assert memory.result.tobytes() == memories[0].result.tobytes()
        assert group.started == 2 and (size == 1 or group.counters.bytes_sent > 0)
        assert all(type(value) is int for value in (group.counters.messages_received,))


async def test_collectives(groups: Start) -> None:
    joined = await groups(3)

    async def work(group: Group) -> list[float]:
        total, most, copy = fill(group, 7), fill(group, 7), fill(group, 7)
        mean = fill(group, 7)
        await asyncio.gather(
            group.all_reduce(total, ADD, name="total"),
            group.all_reduce(most, MAX, name="most"),
            group.all_reduce(mean, ADD, name="mean", mean=True),
            group.broadcast(copy, root=2, name="copy"),
        )
        await group.all_reduce(total, ADD, name="total")
        return [float(each.result[3]) for each in (total, most, mean, copy)]

    assert await asyncio.gather(*map(work, joined)) == [[6.0, 3.0, 2.0, 3.0]] * 3


async def test_what_cannot_be_asked(groups: Start) -> None:
    (group,) = await groups(1)
    whole = group.allocate(DTYPES["int32"], 3)
    with pytest.raises(ConfigError, match="a mean of int32"):
        await group.exchange(whole, step=0, bucket=0)
    with pytest.raises(ConfigError, match="a mean of int32"):
        await group.all_reduce(whole, ADD, name="n", mean=True)
    with pytest.raises(ConfigError, match="a mean needs ADD"):
        await group.all_reduce(fill(group, 1), MAX, name="n", mean=True)
    with pytest.raises(ConfigError, match=r"joins with ADD, MIN, MAX or PROD, not <Combine\.COPY"):
        await group.all_reduce(whole, COPY, name="n")
    with pytest.raises(ConfigError, match="root 1"):
        await group.broadcast(whole, root=1, name="n")
    with pytest.raises(ConfigError, match="1 to 256 characters"):
        await group.all_gather(b"", name="")
    with pytest.raises(ConfigError, match="exceeds 8388608"):
        await group.all_gather(bytes(9 << 20), name="n")
    with pytest.raises(ConfigError, match="buckets have numbers from 0"):
        await group.exchange(fill(group, 1), step=0, bucket=-1)
    for weight in (-1.0, float("inf"), float("nan"), 1e308, 1e-320):
        with pytest.raises(ConfigError, match="a contribution weighs 0, or from 1e-12 to 1e"):
            await group.exchange(fill(group, 1), step=0, bucket=0, weight=weight)
    with pytest.raises(SessionError, match="step 1 cannot begin"):
        await group.exchange(fill(group, 1), step=1, bucket=0)
    assert group.failure is None


async def test_a_sealed_step_is_held_by_all(groups: Start) -> None:
    joined = await groups(2)
    memories = [fill(group, 5) for group in joined]
    await asyncio.gather(
        *(g.exchange(m, step=0, bucket=0) for g, m in zip(joined, memories, strict=True))
    )
    first = asyncio.create_task(joined[0].seal(0))
    await asyncio.sleep(0.05)
    assert not first.done()
    await joined[1].seal(0)
    await first


async def test_an_attempt_repeats_a_step(groups: Start) -> None:
    joined = await groups(2)

    async def work(group: Group) -> float:
        memory = fill(group, 5)
        await step(group, memory, 0)
        memory.mine[:] *= 3
        await group.exchange(memory, step=0, bucket=0, attempt=1)
        await group.seal(0, 1)
        await step(group, memory, 1)
        return float(memory.result[0])

    assert await asyncio.gather(*map(work, joined)) == [4.5, 4.5]


async def test_a_failed_member_tells_its_own_error(groups: Start) -> None:
    joined = await groups(3)
    member = joined[1].me

    async def survive(group: Group) -> PeerFailedError:
        memory = fill(group, 1000)
        await step(group, memory, 0)
        with pytest.raises(PeerFailedError) as caught:
            await step(group, memory, 1)
        assert (memory.mine == group.rank + 1).all()
        return caught.value

    async def fail(group: Group) -> None:
        await step(group, fill(group, 1000), 0)
        await group.leave("ValueError: bad sample 1234")

    one, two, _ = await asyncio.gather(survive(joined[0]), survive(joined[2]), fail(joined[1]))
    for error in (one, two):
        assert type(error) is PeerFailedError
        assert str(error) == (
            f"peer {member} at {member.address} failed during exchange of bucket 0 (ring) at "
            "step 1: ValueError: bad sample 1234"
        )


async def test_a_failure_is_seen_without_waiting(groups: Start) -> None:
    joined = await groups(2)
    await joined[1].leave("RuntimeError: no")
    await failure_of(joined[0])
    assert str(joined[0].failure).endswith(" failed at step 0: RuntimeError: no")
    for call in (
        joined[0].all_gather(b"", name="n"),
        joined[0].exchange(fill(joined[0], 1), step=0, bucket=0),
        joined[0].all_reduce(fill(joined[0], 1), ADD, name="n"),
        joined[0].broadcast(fill(joined[0], 1), name="n"),
    ):
        with pytest.raises(PeerFailedError, match="RuntimeError: no"):
            await call
    assert type(joined[0].failure) is PeerFailedError


async def test_the_first_cause_is_told_by_those_who_follow(groups: Start) -> None:
    joined = await groups(3)
    await joined[2].leave("ValueError: first")
    await failure_of(joined[1])
    # This member would learn of the cause by a witness only.
    joined[0]._failure = None
    joined[0]._departures.left.clear()
    await joined[1].leave(f"PeerFailedError: {joined[1].failure}")
    await failure_of(joined[0])
    assert joined[0].failure.peer == str(joined[2].me)
    assert f"ValueError: first, as {joined[1].me} reports" in str(joined[0].failure)


async def test_a_closed_connection_is_a_failure(groups: Start) -> None:
    joined = await groups(2)
    waiting = asyncio.create_task(joined[0].all_gather(b"", name="n"))
    await asyncio.sleep(0)
    joined[1]._mesh.drop(joined[0].me.node_id, "for the test")
    with pytest.raises(PeerFailedError, match=r"during all_gather 'n' at step 0: .*(lost|closed)"):
        await waiting


async def test_a_lost_bulk_connection_is_a_failure(groups: Start) -> None:
    joined = await groups(2)
    memory = fill(joined[0], 100_000)
    waiting = asyncio.create_task(joined[0].exchange(memory, step=0, bucket=0))
    await asyncio.sleep(0.01)
    joined[1]._channels[0].abort()
    with pytest.raises(PeerFailedError, match="its bulk connection ended") as caught:
        await waiting
    assert caught.value.step == 0


async def test_leaving_when_done_is_no_failure(
    groups: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    joined = await groups(3)
    for group in joined:
        await group.leave()
        assert group.failure is None
    await asyncio.sleep(0.05)
    assert [group.failure for group in joined] == [None] * 3
    assert caplog.text == ""
    with pytest.raises(SessionError, match="has left the run"):
        await joined[0].all_gather(b"", name="n")
    await joined[0].leave()


async def test_who_still_needs_a_member_that_ended_is_told(groups: Start) -> None:
    joined = await groups(3)
    watch = asyncio.create_task(joined[0].all_gather(b"", name="watch"))

    async def work(group: Group, steps: int) -> None:
        memory = fill(group, 1000)
        for number in range(steps):
            await step(group, memory, number)

    longer = [asyncio.create_task(work(group, 4)) for group in joined[:2]]
    await work(joined[2], 2)
    await joined[2].leave()
    for task in longer:
        with pytest.raises(PeerLeftError, match="its script ended after step 1") as caught:
            await task
        assert caught.value.step == 2
    with pytest.raises(PeerLeftError, match="all_gather 'watch'"):
        await watch


async def test_a_collective_that_a_leaver_finished_completes(groups: Start) -> None:
    joined = await groups(2)

    async def early(group: Group) -> None:
        await group.broadcast(fill(group, 10), root=0, name="n")
        await group.leave()

    async def late(group: Group) -> float:
        await asyncio.sleep(0.2)
        memory = fill(group, 10)
        await group.broadcast(memory, root=0, name="n")
        return float(memory.result[0])

    _, value = await asyncio.gather(early(joined[0]), late(joined[1]))
    assert value == 1.0


async def test_a_plugins_mistake_reaches_the_caller(groups: Start) -> None:
    joined = await groups(2)

    async def boom(links: object, bucket: object) -> None:
        raise RuntimeError("boom")

    object.__setattr__(joined[0]._topology, "exchange", boom)
    with pytest.raises(TopologyError, match="boom") as caught:
        await joined[0].exchange(fill(joined[0], 10), step=0, bucket=0)
    assert isinstance(caught.value.__cause__, RuntimeError)


async def test_members_that_break_the_rules_are_cut_off(groups: Start) -> None:
    joined = await groups(3)
    joined[1]._mesh.send(joined[0].me.node_id, Ok(1, 7, 0))
    await failure_of(joined[0])
    assert "bad message: rank 1 says ok to step 7" in str(joined[0].failure)
    joined[1]._mesh.send(joined[2].me.node_id, Gather("n", 0, b""))
    joined[1]._mesh.send(joined[2].me.node_id, Gather("n", 0, b""))
    await failure_of(joined[2])
    assert joined[2].failure.peer in (str(joined[1].me), str(joined[0].me))


async def test_a_cancelled_leave_still_closes(groups: Start) -> None:
    joined = await groups(2)
    leaving = asyncio.create_task(joined[0].leave())
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await joined[0].leave()
    assert joined[0]._mesh.links == {}


async def test_messages_of_forming_are_out_of_place(groups: Start) -> None:
    joined = await groups(2)
    with pytest.raises(Exception, match="Decide in a group"):
        joined[0].receive(joined[1].me.node_id, Decide(1, (), 0, "ring"))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_round_that_one_cancels_ends_on_all_and_the_group_goes_on(
    groups: Start, transport: str
) -> None:
    members = await groups(3, transports=(transport,))
    memories = [fill(group, 300_000) for group in members]

    async def reduce(group: Group, name: str) -> None:
        await group.all_reduce(memories[group.rank], ADD, name=name)

    # One is cancelled before the others have begun, one is in the middle, for all they know.
    for late in (False, True):
        tasks = [asyncio.create_task(reduce(members[0], "x"))]
        await asyncio.sleep(0)
        if late:
            tasks[0].cancel()
            await asyncio.wait(tasks)
        tasks += [asyncio.create_task(reduce(group, "x")) for group in members[1:]]
        await asyncio.sleep(0)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        for result in results[1:]:
            assert type(result) is GroupError
            assert "all_reduce 'x' (ring): cancelled by n0 (" in str(result)
        await asyncio.gather(*(reduce(group, "x") for group in members))
        assert all((memory.result == 6).all() for memory in memories)


async def test_a_round_that_one_cannot_do_fails_on_all(groups: Start) -> None:
    members = await groups(3, transports=("tcp",))
    memories = [fill(group, 1000 + (group.rank == 1)) for group in members]
    work = (group.all_reduce(memories[group.rank], ADD, name="x") for group in members)
    results = await asyncio.gather(*work, return_exceptions=True)
    assert all(isinstance(result, GroupError | TopologyError) for result in results), results


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_an_exchange_that_one_cancels_is_an_error_on_all(
    groups: Start, transport: str
) -> None:
    members = await groups(2, transports=(transport,))
    memories = [fill(group, 300_000) for group in members]
    tasks = [
        asyncio.create_task(group.exchange(memory, step=0, bucket=0))
        for group, memory in zip(members, memories, strict=True)
    ]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert "exchange of bucket 0 (ring) at step 0: cancelled by n1 (" in str(results[0])
    # The step is lost, the group is not.
    work = (
        group.all_reduce(memory, ADD, name="x")
        for group, memory in zip(members, memories, strict=True)
    )
    await asyncio.gather(*work)
    assert all((memory.result == 3).all() for memory in memories)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_collectives_of_one_name_take_turns(groups: Start, transport: str) -> None:
    members = await groups(2, transports=(transport,))
    memories = [[fill(group, 1000 + each) for each in range(4)] for group in members]
    work = [
        asyncio.create_task(group.all_reduce(memory, ADD, name="x"))
        for group, own in zip(members, memories, strict=True)
        for memory in own
    ]
    await asyncio.sleep(0)
    # One that waits for its turn is cancelled: it is not had by anybody.
    work[2].cancel()
    results = await asyncio.gather(*work, return_exceptions=True)
    assert isinstance(results[2], asyncio.CancelledError)
    assert "cancelled by n0 (" in str(results[6])
    assert [each for number, each in enumerate(results) if number not in (2, 6)] == [None] * 6
    for own in memories:
        assert all((own[number].result == 3).all() for number in (0, 1, 3))


async def test_a_round_that_a_leaver_never_was_in_ends(
    groups: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pdpt.runtime.group.GONE_S", 0.05)
    monkeypatch.setattr("p2pdpt.runtime.group.RELEASE_S", 0.05)
    one, two = await groups(2, transports=("shm",))
    # A program's mistake: one broadcasts, and goes; the other waits for something else.
    await one.broadcast(fill(one, 10), name="x")
    waiting = asyncio.create_task(two.all_reduce(fill(two, 10), ADD, name="x"))
    await asyncio.sleep(0.05)
    await one.leave()
    with pytest.raises(PeerLeftError, match=r"all_reduce 'x' \(ring\): its script ended"):
        await waiting
