"""S43: a peer falls silent while nothing is being sent."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

SCRIPT = """
def sockets():
    # Where this process is connected to.
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:
            pass
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return [row[2] for row in rows if f"socket:[{row[9]}]" in own]

async def body(node, group):
    memory = fill(group, 1000)
    await group.exchange(memory, step=0, bucket=0)
    await group.seal(0)
    say(idle=True)
    if index() == 1:
        await asyncio.sleep(600)
    try:
        {call}
    finally:
        await group.leave()
        say(open=sockets(), tasks=len(asyncio.all_tasks()))

main(body)
"""
CALLS = {
    "all_gather": 'await group.all_gather(b"x", name="idle")',
    "exchange": "await group.exchange(memory, step=1, bucket=0)",
    "seal": "await group.exchange(memory, step=0, bucket=1); await group.seal(0, 1)",
}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("call", ["all_gather", "exchange"])
def test_s43_who_waits_for_a_silent_peer_is_told(
    peers: Any, within: Any, call: str, transport: str
) -> None:
    """A cable that is pulled belongs to tests in network namespaces; here a process is stopped."""
    patience = 1.0
    two = peers(SCRIPT.replace("{call}", CALLS[call]), 2, patience=patience, transport=transport)
    silent = two[1].read()
    for peer in two:
        while "idle" not in peer.said()[-1:] and not any("idle" in each for each in peer.said()):
            peer.read()
    stopped = time.monotonic()
    two[1].signal(signal.SIGSTOP)
    assert two[0].end(30) == 1
    last = two[0].said()[-1]
    assert last["error"] == "PeerFailedError"
    within(last["at"] - stopped, patience + 2)
    assert f"n1 ({silent['id'][:6]}) at {silent['address']}" in last["text"]
    assert "1 s" in last["text"] or "heartbeat" in last["text"] or "silent" in last["text"]
    port = int(silent["address"].rpartition(":")[2])
    closed = next(each for each in two[0].said() if "open" in each)
    assert f"0100007F:{port:04X}" not in closed["open"]
    assert closed["tasks"] <= 3
