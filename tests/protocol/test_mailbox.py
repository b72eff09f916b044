from __future__ import annotations

import struct
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.errors import FrameError, HazardError, MismatchError, TopologyError
from p2pdpt.protocol import mailbox
from p2pdpt.protocol.mailbox import HEADER_BYTES, MAX_REGIONS, is_mail, region_ordinal
from p2pdpt.protocol.round_io import WINDOW
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.testing.simulator import Network, simulate
from p2pdpt.testing.topology_kit import pattern
from p2pdpt.topology import ANY, Bucket, Handle, Links, Message, Recv, Region, Send, Topology


class Serving(Topology):
    """Rank 0 runs one coroutine, everybody else another."""

    agreement: ClassVar = "eventual"

    def __init__(self, server: Any, worker: Any) -> None:
        self.server, self.worker = server, worker

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        await (self.worker if links.rank else self.server)(links, bucket)


def serve(server: Any, worker: Any, size: int = 2, length: int = 12, **options: Any) -> Any:
    given_ = [pattern(rank, length) for rank in range(size)]
    options.setdefault("network", Network(frame_elements=(1, 7)))
    return simulate(Serving(server, worker), given_, reduction=Reduction.NONE, **options)


async def pause(links: Links, seconds: float) -> None:
    """Wait for a message that never comes."""
    await links.wait(links.post(Recv(ANY)), deadline=links.now + seconds)


# On the wire.


@given(
    kind=st.text(st.characters(min_codepoint=1, max_codepoint=127), min_size=1, max_size=32),
    clock=st.integers(-(2**63), 2**63 - 1),
    lengths=st.lists(st.integers(0, 2**40), max_size=MAX_REGIONS),
)
def test_headers_come_back(kind: str, clock: int, lengths: list[int]) -> None:
    message = Message(kind, clock, tuple(Region(5, 5 + length) for length in lengths))
    header = mailbox.encode(message)
    assert len(header) == HEADER_BYTES
    assert mailbox.decode(header) == (kind, clock, lengths)


def test_more_regions_than_fit_are_refused() -> None:
    with pytest.raises(TopologyError, match="a message carries 10 regions at most, not 11"):
        mailbox.encode(Message("push", 0, (Region(0, 1),) * 11))


@pytest.mark.parametrize(
    ("kind", "regions"), [(b"push", 11), (b"push", 255), (b"", 0), (b"p\xffsh", 0)]
)
def test_nonsense_in_a_header_is_refused(kind: bytes, regions: int) -> None:
    header = struct.pack("<32sqB10Q", kind, 0, regions, *[0] * 10).ljust(HEADER_BYTES, b"\0")
    with pytest.raises(FrameError, match="a message header names"):
        mailbox.decode(header)


def test_ordinals_of_messages_never_meet_those_of_operations() -> None:
    assert not is_mail(0)
    assert not is_mail((1 << 31) - 1)
    assert is_mail(1 << 31)
    ordinals = [
        region_ordinal(number, index) for number in range(3) for index in range(MAX_REGIONS)
    ]
    assert len(set(ordinals)) == 3 * MAX_REGIONS
    assert not any(is_mail(ordinal) for ordinal in ordinals)
    assert region_ordinal((1 << 27) - 1, MAX_REGIONS - 1) < 1 << 32


# In a round.


@pytest.mark.parametrize("size", [2, 4])
def test_messages_of_a_sender_come_in_order_and_whole(size: int) -> None:
    messages = 6

    async def worker(links: Links, bucket: Bucket) -> None:
        for number in range(messages):
            regions = tuple(bucket.region.chunk(part, 4) for part in range(number % 4))
            await links.move(Send(0, Message(f"kind{number}", number - 2, regions)))

    for seed in range(6):
        found: dict[int, list[tuple[str, int, list[int]]]] = {}

        async def server(
            links: Links,
            bucket: Bucket,
            found: dict[int, list[tuple[str, int, list[int]]]] = found,
        ) -> None:
            for _ in range(messages * (links.size - 1)):
                (message,) = await links.move(Recv(ANY))
                for part, region in enumerate(message.regions):
                    assert region.space > 0
                    target = bucket.region.chunk(part, 4)
                    await links.local(lambda dst, src: np.copyto(dst, src), region, target)
                found.setdefault(message.source, []).append(
                    (message.kind, message.clock, [len(region) for region in message.regions])
                )
                links.release(message)

        outcome = serve(server, worker, size, seed=seed)
        expected = [(f"kind{n}", n - 2, [3] * (n % 4)) for n in range(messages)]
        assert found == {rank: expected for rank in range(1, size)}
        # Parts 0 to 2 were overwritten by somebody, the last part by nobody.
        np.testing.assert_array_equal(outcome.results[0][9:], pattern(0, 12)[9:])
        assert all(value >= 6000 for value in outcome.results[0][:9])


def test_one_message_of_each_peer_is_leased_at_a_time() -> None:
    """The next one is asked for when the one before is released: senders are slowed."""
    log: list[str] = []

    async def worker(links: Links, bucket: Bucket) -> None:
        for number in range(3):
            await links.move(Send(0, Message("push", number, (bucket.region,))))
            log.append(f"sent {number}")

    async def server(links: Links, bucket: Bucket) -> None:
        (message,) = await links.move(Recv(ANY))
        for number in range(1, 3):
            (following,) = links.post(Recv(ANY))
            assert await links.wait([following], deadline=links.now + 5.0) == []
            log.append("nothing in 5 s")
            links.release(message)
            await links.wait([following])
            assert following.message is not None and following.message.clock == number
            message = following.message

    # Longer than what may go ahead of a receive.
    serve(server, worker, length=20_000, network=Network())
    assert log == ["sent 0", "nothing in 5 s", "sent 1", "nothing in 5 s", "sent 2"]


def test_a_message_that_came_before_anybody_received() -> None:
    async def worker(links: Links, bucket: Bucket) -> None:
        await links.move(Send(0, Message("early", 7, (Region(0, 5),))))
        await pause(links, 3.0)
        await links.move(Send(0, Region(0, 1)))

    async def server(links: Links, bucket: Bucket) -> None:
        await links.move(Recv(1, Region(0, 1)))
        assert links.now >= 3.0
        handles = [links.post(Recv(ANY))[0]]
        (taken,) = await links.wait(handles)
        assert taken.message is not None
        assert (taken.message.kind, taken.message.source) == ("early", 1)
        assert handles[0].done

    serve(server, worker)


def test_several_receives_take_one_message_each() -> None:
    async def worker(links: Links, bucket: Bucket) -> None:
        await links.move(Send(0, Message("one", links.rank)))

    async def server(links: Links, bucket: Bucket) -> None:
        messages = await links.move(Recv(ANY), Recv(ANY), Recv(ANY))
        assert sorted(message.source for message in messages) == [1, 2, 3]

    for seed in range(5):
        serve(server, worker, 4, seed=seed)


def test_a_message_to_several_and_to_nobody() -> None:
    async def server(links: Links, bucket: Bucket) -> None:
        await links.move(Send([], Message("void", 0, (bucket.region,))))
        await links.move(Send([1, 2], Message("all", 0, (bucket.region,))))

    async def worker(links: Links, bucket: Bucket) -> None:
        (message,) = await links.move(Recv(ANY))
        await links.local(lambda dst, src: np.copyto(dst, src), message.regions[0], bucket.region)
        # Never released: the round gives the memory back.

    outcome = serve(server, worker, 3)
    for result in outcome.results:
        np.testing.assert_array_equal(result, pattern(0, 12))


def test_a_message_reads_the_state_before_its_move() -> None:
    async def server(links: Links, bucket: Bucket) -> None:
        await links.move(Recv(1, bucket.region), Send(1, Message("old", 0, (bucket.region,))))

    async def worker(links: Links, bucket: Bucket) -> None:
        handles: tuple[Handle, ...] = links.post(Recv(ANY))
        await links.move(Send(0, bucket.region))
        await links.wait(handles)
        message = handles[0].message
        assert message is not None
        await links.local(lambda dst, src: np.copyto(dst, src), message.regions[0], bucket.region)

    for in_place in (False, True):
        outcome = serve(server, worker, in_place=in_place)
        np.testing.assert_array_equal(outcome.results[0], pattern(1, 12))
        np.testing.assert_array_equal(outcome.results[1], pattern(0, 12))


def test_half_precision_is_shown_in_float32() -> None:
    async def worker(links: Links, bucket: Bucket) -> None:
        await links.move(Send(0, Message("half", 0, (bucket.region,))))

    async def server(links: Links, bucket: Bucket) -> None:
        (message,) = await links.move(Recv(ANY))

        def add(dst: Any, src: Any) -> None:
            assert src.dtype == dst.dtype == np.float32
            np.add(src, 1.0 / 1024, out=dst)

        await links.local(add, message.regions[0], bucket.region)

    given_ = [np.full(4, 1.0 + rank, "float16") for rank in range(2)]
    outcome = simulate(Serving(server, worker), given_, reduction=Reduction.NONE)
    np.testing.assert_array_equal(outcome.results[0], np.full(4, 2.0, "float16"))
    np.testing.assert_array_equal(outcome.results[1], np.full(4, 2.0, "float16"))


@pytest.mark.parametrize("regions", [0, 1])
def test_a_message_is_released_once(regions: int) -> None:
    """Also one without memory, while the next of its sender is already here."""

    async def worker(links: Links, bucket: Bucket) -> None:
        for number in range(2):
            await links.move(Send(0, Message("push", number, (bucket.region,) * regions)))

    async def server(links: Links, bucket: Bucket) -> None:
        (first,) = await links.move(Recv(ANY))
        links.release(first)
        (second,) = await links.move(Recv(ANY))
        with pytest.raises(TopologyError, match="'push' from rank 1 is not held: it was released"):
            links.release(first)
        with pytest.raises(TopologyError, match="is not held"):
            links.apply(0, first)
        with pytest.raises(TopologyError, match="is not held"):
            links.release(Message("push", 1, second.regions, source=0))
        links.release(second)

    serve(server, worker)


def test_a_message_in_use_is_not_released() -> None:
    async def worker(links: Links, bucket: Bucket) -> None:
        if links.rank == 1:
            await links.move(Send(0, Message("push", 0, (bucket.region,))))
        else:
            await links.move(Recv(0, bucket.region))

    async def server(links: Links, bucket: Bucket) -> None:
        (message,) = await links.move(Recv(ANY))
        handles = links.post(Send(2, message.regions[0]))
        with pytest.raises(HazardError, match=r"a message is released while Send.* uses it; wait"):
            links.release(message)
        await links.wait(handles)
        links.release(message)

    outcome = serve(server, worker, 3)
    np.testing.assert_array_equal(outcome.results[2], pattern(1, 12))


def test_a_longer_message_than_the_bucket_is_refused() -> None:
    async def worker(links: Links, bucket: Bucket) -> None:
        await links.move(Send(0, Message("huge", 0, (bucket.region, bucket.region))))

    async def server(links: Links, bucket: Bucket) -> None:
        await links.move(Recv(ANY))

    length = WINDOW + 8
    text = f"'huge' from rank 1 has {2 * length} elements; a round of this bucket takes {length}"
    with pytest.raises(MismatchError, match=text):
        serve(server, worker, length=length, network=Network())


def test_a_message_that_nobody_took_is_refused() -> None:
    async def worker(links: Links, bucket: Bucket) -> None:
        await links.move(Send(0, Message("push", links.rank)))
        await pause(links, 3.0)
        await links.move(Send(0, bucket.region.chunk(links.rank, 3)))

    async def server(links: Links, bucket: Bucket) -> None:
        await links.move(Recv(ANY))
        await links.move(*(Recv(rank, bucket.region.chunk(rank, 3)) for rank in (1, 2)))

    with pytest.raises(MismatchError, match=r"message 'push' from rank [12] was never received"):
        serve(server, worker, 3)


def test_a_round_may_end_with_a_receive_open() -> None:
    async def worker(links: Links, bucket: Bucket) -> None:
        await links.move(Send(0, Message("last", 0, (bucket.region,))))

    async def server(links: Links, bucket: Bucket) -> None:
        handles = links.post(Recv(ANY), Recv(ANY))
        done = await links.wait(handles, count=1)
        assert [handle.done for handle in handles] == [True, False]
        assert done == [handles[0]]

    for seed in range(10):
        serve(server, worker, seed=seed)


class Slow:
    """A store that notes what it was given."""

    def __init__(self) -> None:
        self.given: list[bytes] = []

    def apply(self, shard: int, message: Message, data: list[memoryview]) -> None:
        self.given += [bytes(each) for each in data]


def test_a_round_ends_after_what_it_applied() -> None:
    """Even where the plugin does not wait for it."""

    async def worker(links: Links, bucket: Bucket) -> None:
        await links.move(Send(0, Message("push", 0, (bucket.region,))))

    async def server(links: Links, bucket: Bucket) -> None:
        (message,) = await links.move(Recv(ANY))
        links.apply(0, message)
        with pytest.raises(HazardError, match="while apply uses it"):
            links.release(message)

    store = Slow()
    serve(server, worker, store=store)
    assert store.given == [pattern(1, 12).tobytes()]
