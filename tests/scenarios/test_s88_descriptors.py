"""S88: descriptors, tasks and threads over a long life."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
import gc, threading
from p2pdpt import ADD

def census():
    gc.collect()
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    own = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    half_closed = sum(row[3] == "08" and f"socket:[{row[9]}]" in own for row in rows)
    return {
        "descriptors": len(own),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "half_closed": half_closed,
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
    }

async def cycle(number, config, run):
    run = dataclasses.replace(run, run=f"{run.run}-{number}", min_nodes=2)
    a, b = Node(config), Node(config)
    await a.start()
    await b.start()
    groups = await asyncio.gather(a.join(run), b.join(run))
    memories = [fill(group, 5000) for group in groups]
    await asyncio.gather(*(g.all_reduce(m, ADD, name="sum") for g, m in zip(groups, memories)))
    assert (memories[0].result == pattern_sum(2, 5000)).all()
    if number % 2:
        await asyncio.gather(a.close(), b.close())
        return
    # One fails in the middle of a round of the other.
    waiting = asyncio.ensure_future(groups[0].all_reduce(memories[0], ADD, name="sum"))
    await asyncio.sleep(0)
    await b.close("as asked")
    try:
        await waiting
    except P2PError as error:
        assert "as asked" in str(error)
    await a.close()

async def live():
    config, run = configuration()
    for number in range(60):
        await cycle(number, config, run)
        if number in (9, 59):
            say(**census())

asyncio.run(live())
"""
FEW = """
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

async def crowd():
    config, run = configuration()
    async with Node(config) as node:
        host, port = node.address.split(":")
        crowd = []
        say(address=node.address)
        await asyncio.sleep(2.0)
        used = time.process_time()
        await asyncio.sleep(1.0)
        say(busy=time.process_time() - used)
        await asyncio.sleep(1.0)
        say(alive=True)

import logging
logging.basicConfig(level=logging.INFO)
asyncio.run(crowd())
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_s88_sixty_groups_leave_nothing(peers: Any, together: Any, transport: str) -> None:
    (said,) = together(peers(SCRIPT, 1, transport=transport))
    early, late = said
    assert late["descriptors"] <= early["descriptors"] + 4
    assert abs(late["tasks"] - early["tasks"]) <= 2
    assert abs(late["threads"] - early["threads"]) <= 2
    assert late["half_closed"] == 0
    assert late["maps"] <= early["maps"] + 20


def test_s88_out_of_descriptors(peers: Any) -> None:
    import socket
    import time

    (one,) = peers(FEW, 1)
    host, _, port = one.read()["address"].rpartition(":")
    crowd = []
    for _ in range(60):
        each = socket.socket()
        each.setblocking(False)
        each.connect_ex((host, int(port)))
        crowd.append(each)
    time.sleep(0.1)
    busy = one.read()["busy"]
    for each in crowd:
        each.close()
    assert one.read()["alive"]
    assert one.end() == 0
    # It does not turn in circles.
    assert busy < 0.5
    lines = [line for line in one.wrote().splitlines() if "cannot accept" in line]
    assert len(lines) == 1
    assert "Too many open files" in lines[0]
