"""S98: a slow receiver slows the sender, and nothing piles up."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import hashlib, resource
from p2pdpt.channel import Landing, Meta, Tag

SIZE, COUNT = 8 << 20, 20
BASE = np.random.default_rng(1).integers(0, 256, SIZE + COUNT, dtype=np.uint8)

def tag(number):
    return Tag(1, 5, number, 0, 0, 0)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

class Into(Landing):
    def __init__(self):
        self.memory = bytearray(SIZE)
        self.count = 0
        self.done = asyncio.get_running_loop().create_future()

    def buffer(self, start, count, width, meta):
        return memoryview(self.memory)[start : start + count]

    def arrived(self, start, count, meta):
        self.count += count
        if self.count == SIZE:
            self.done.set_result(None)

    def failed(self, error):
        self.done.set_exception(error)

async def send(channel):
    drained = asyncio.Semaphore(0)
    before = most = resident()

    def gone(upto):
        if upto == SIZE:
            drained.release()

    for number in range(COUNT):
        data = memoryview(BASE[number : number + SIZE])
        channel.send(tag(number), SIZE, gone).push(data, SIZE, Meta())
    # Everything has been pushed; nothing may have been copied.
    for number in range(COUNT):
        await drained.acquire()
        most = max(most, resident())
    say(grown=most - before)

async def receive(channel):
    for number in range(COUNT):
        landing = Into()
        incoming = channel.receive(tag(number), SIZE, landing)
        incoming.grant(SIZE)
        await landing.done
        expected = BASE[number : number + SIZE].tobytes()
        assert hashlib.sha256(landing.memory).digest() == hashlib.sha256(expected).digest()
        await asyncio.sleep(0.05)
    say(received=COUNT)

async def talk(group):
    longest = 0.0
    while True:
        begun = time.monotonic()
        await group.all_gather(b"small", name="small")
        longest = max(longest, time.monotonic() - begun)
        # All three end together.
        if all(each == b"end" for each in await group.all_gather(ENDED[0], name="end")):
            return longest
        await asyncio.sleep(0.02)

ENDED = [b""]

async def body(node, group):
    talking = asyncio.ensure_future(talk(group))
    if group.rank == 0:
        await send(group._channels[1])
    if group.rank == 1:
        await receive(group._channels[0])
    ENDED[0] = b"end"
    say(longest=await talking)
    await group.leave()

main(body)
"""


def test_s98_memory_is_bounded_and_others_get_through(
    peers: Any, together: Any, within: Any
) -> None:
    said = together(peers(SCRIPT, 3, transport="tcp"))
    assert said[0][1]["grown"] < 16 << 20
    assert said[1][1]["received"] == 20
    for each in said:
        within(each[-1]["longest"], 0.5)
