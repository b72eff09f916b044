"""Buckets that members map."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest

from p2pdpt.dtypes import DTYPES
from p2pdpt.errors import FrameError, TopologyError
from p2pdpt.memory import Area, BucketMemory, allocate
from p2pdpt.protocol.recorder import Unplannable
from p2pdpt.protocol.round_io import MINE, RESULT, WIDE
from p2pdpt.runtime.drivers.native_driver import unavailable
from p2pdpt.runtime.drivers.shared_buckets import LINES, Mapped, SharedBuckets, address_of

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

F32, HALF = DTYPES["float32"], DTYPES["bfloat16"]
PLACE = (0, 7)


def native() -> Any:
    from p2pdpt import _native

    return _native


class Peer:
    """Answers as the other member of two; `answer` gives what it shares for a payload."""

    def __init__(self) -> None:
        self.signals = Area(1 << 16, "p2pdpt-test")
        self.heard: list[tuple[str, bytes, int]] = []
        self.areas: list[Area] = []
        self.answer: Callable[[bytes], bytes] = lambda payload: payload

    async def share(
        self, name: str, payload: bytes, descriptors: Sequence[int]
    ) -> list[tuple[bytes, list[int]] | None]:
        self.heard.append((name, payload, len(descriptors)))
        if name == "signals":
            return [None, (b"", [os.dup(self.signals.fd)])]
        await asyncio.sleep(0)
        return [None, (self.answer(payload), [os.dup(area.fd) for area in self.areas])]


Shared = tuple[Peer, SharedBuckets]


@pytest.fixture
async def shared() -> AsyncIterator[Shared]:
    peer = Peer()
    buckets = SharedBuckets(0, 2, peer.share, native())
    bells = await buckets.open()
    assert bells[0] == address_of(buckets._signals.map) and bells[1] != bells[0]
    yield peer, buckets
    buckets.close()
    buckets.close()
    for area in (peer.signals, *peer.areas):
        area.close()


def areas_like(memory: BucketMemory) -> list[Area]:
    return [Area(area.nbytes) for area in memory.areas]


async def test_a_bucket_is_mapped_once(shared: Shared) -> None:
    peer, buckets = shared
    memory = allocate(F32, 100)
    peer.areas = areas_like(memory)
    peer.areas[1].buffer[:4] = b"abcd"
    bucket = await buckets.get(memory, PLACE, "one", "")
    assert await buckets.get(memory, PLACE, "two", "") is bucket
    assert [(name, count) for name, _, count in peer.heard] == [("signals", 1), ("one", 2)]
    assert msgspec.msgpack.decode(peer.heard[1][1]) == ["float32", 100, 1, ""]
    assert set(bucket.addresses[0]) == set(bucket.addresses[1]) == {MINE, RESULT}
    assert bucket.addresses[0][RESULT] == memory.result.__array_interface__["data"][0]
    assert ctypes.string_at(bucket.addresses[1][RESULT], 4) == b"abcd"
    line = int(native().ffi.cast("uintptr_t", bucket.lines[1]))
    assert line == buckets._peers[1].address + 64  # type: ignore[union-attr]


async def test_half_precision_has_room_for_partial_sums(shared: Shared) -> None:
    peer, buckets = shared
    memory = allocate(HALF, 10)
    peer.areas = [*areas_like(memory), Area(40)]
    bucket = await buckets.get(memory, PLACE, "one", "")
    assert set(bucket.addresses[1]) == {MINE, RESULT, WIDE}


async def test_new_memory_or_news_of_it_is_mapped_anew(shared: Shared) -> None:
    peer, buckets = shared
    memory = allocate(F32, 10)
    peer.areas = areas_like(memory)
    first = await buckets.get(memory, PLACE, "one", "")
    other = allocate(F32, 10)
    second = await buckets.get(other, PLACE, "two", "")
    assert first.mapped == [] and second.memory is other
    assert buckets.announced("three")
    third = await buckets.get(other, PLACE, "three", "")
    assert third is not second
    third.broken = True
    fourth = await buckets.get(other, PLACE, "four", "")
    # Lines are used again, from zero.
    places = [msgspec.msgpack.decode(payload)[2] for _, payload, _ in peer.heard[1:]]
    assert places == [1, 2, 1, 2]
    fourth.line.count = 9
    fifth_memory = allocate(F32, 10)
    await buckets.get(fifth_memory, PLACE, "five", "")
    sixth = await buckets.get(memory, PLACE, "six", "")
    assert sixth.place == 2 and sixth.line.count == 0


async def test_names_under_way_are_no_news(shared: Shared) -> None:
    peer, buckets = shared
    memory = allocate(F32, 10)
    peer.areas = areas_like(memory)
    getting = asyncio.create_task(buckets.get(memory, PLACE, "one", ""))
    await asyncio.sleep(0)
    assert not buckets.announced("one")
    bucket = await getting
    assert await buckets.get(memory, PLACE, "two", "") is bucket


async def test_reasons_against_are_final(shared: Shared) -> None:
    peer, buckets = shared
    memory = allocate(F32, 10)
    with pytest.raises(Unplannable, match="mine"):
        await buckets.get(memory, PLACE, "one", "mine")
    assert peer.heard[-1][2] == 0
    peer.answer = lambda payload: msgspec.msgpack.encode(["float32", 10, 0, "theirs"])
    with pytest.raises(Unplannable, match="theirs"):
        await buckets.get(memory, (0, 8), "two", "")
    count = len(peer.heard)
    for place, reason in ((PLACE, "mine"), ((0, 8), "theirs")):
        with pytest.raises(Unplannable, match=reason):
            await buckets.get(memory, place, "three", "")
    assert len(peer.heard) == count and len(buckets._free) == LINES - 1
    gone = allocate(F32, 10)
    gone.close()
    with pytest.raises(Unplannable, match="its memory has been closed"):
        await buckets.get(gone, (0, 9), "four", "")
    buckets._free.clear()
    with pytest.raises(Unplannable, match="1023 buckets are shared already"):
        await buckets.get(memory, (0, 10), "five", "")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (["float32", 11, 1, ""], "one has 10 float32 here and 11 float32 on rank 1"),
        (["float64", 10, 1, ""], "one has 10 float32 here and 10 float64 on rank 1"),
        (["float32", 10, 1024, ""], "rank 1 has no line 1024"),
        (["float32", 10, 0, ""], "rank 1 has no line 0"),
        (["float32"], "a bucket that cannot be told"),
        ("x", "a bucket that cannot be told"),
    ],
)
async def test_what_does_not_fit_is_refused(shared: Shared, answer: Any, said: str) -> None:
    peer, buckets = shared
    memory = allocate(F32, 10)
    peer.areas = areas_like(memory)
    peer.answer = lambda payload: msgspec.msgpack.encode(answer)
    with pytest.raises((TopologyError, FrameError), match=said):
        await buckets.get(memory, PLACE, "one", "")
    peer.answer = lambda payload: payload
    await buckets.get(memory, PLACE, "two", "")


async def test_memory_that_is_not_as_promised_is_refused(shared: Shared) -> None:
    peer, buckets = shared
    memory = allocate(F32, 1000)
    peer.areas = [Area(4000)]
    with pytest.raises(FrameError, match="rank 1 shares 1 areas, not 2"):
        await buckets.get(memory, PLACE, "one", "")
    peer.areas += [Area(3999)]
    with pytest.raises(FrameError, match="has 3999 bytes instead of 4000"):
        await buckets.get(memory, PLACE, "two", "")
    assert buckets._shared == {}


async def test_an_unsealed_file_is_never_mapped() -> None:
    descriptor = os.memfd_create("p2pdpt-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(FrameError, match="a shared area is not sealed"):
        Mapped(descriptor, 4096, native())
    os.close(descriptor)


async def test_a_peer_can_read_and_not_write() -> None:
    area = Area(4096)
    mapped = Mapped(area.fd, 4096, native())
    area.buffer[10] = 99
    assert ctypes.string_at(mapped.address + 10, 1) == b"c"
    # Neither the map nor the descriptor can be made to write.
    with pytest.raises(PermissionError):
        mmap.mmap(area.fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(area.fd, b"x", 0)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(mapped.address), ctypes.c_size_t(4096), 3) == -1
    mapped.close()
    mapped.close()
    area.close()


async def test_a_failed_open_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer()

    async def share(name: str, payload: bytes, descriptors: Sequence[int]) -> Any:
        return [None, (b"", [])]

    buckets = SharedBuckets(0, 2, share, native())
    with pytest.raises(FrameError, match="rank 1 shares 0 descriptors instead of 1"):
        await buckets.open()
    buckets.close()
    peer.signals.close()
