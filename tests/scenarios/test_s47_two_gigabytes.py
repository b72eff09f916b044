"""S47: tensors around and above 2 GiB."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
import resource
from p2pdpt import ADD

LENGTH = int(os.environ["LENGTH"])

async def body(node, group):
    memory = group.allocate(dtype_named("float32"), LENGTH)
    piece = 997 * 4096
    for start in range(0, LENGTH, piece):
        stop = min(start + piece, LENGTH)
        memory.mine[start:stop] = pattern(group.rank, piece)[: stop - start]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind in ("all_reduce", "broadcast"):
        if kind == "all_reduce":
            await group.all_reduce(memory, ADD, name="big")
            expected = pattern_sum(2, piece)
        else:
            await group.broadcast(memory, root=1, name="big")
            expected = pattern(1, piece)
        for start in range(0, LENGTH, piece):
            stop = min(start + piece, LENGTH)
            assert (memory.result[start:stop] == expected[: stop - start]).all(), (kind, start)
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # The result is touched for the first time, and nothing of that size besides.
    say(extra=extra * 1024 - 4 * LENGTH)
    await group.leave()

main(body)
"""


def available() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("size", [2**31 - 4, 2**31, 2**31 + 4, 2**32 + 4])
def test_s47_exact_beyond_every_limit(peers: Any, together: Any, transport: str, size: int) -> None:
    """The state that a joiner gets belongs to joining."""
    # Two areas on each of two nodes.
    if available() < 4 * size + (2 << 30):
        pytest.skip(f"needs {(4 * size >> 30) + 2} GiB of free memory")
    two = peers(SCRIPT, 2, transport=transport, variables={"LENGTH": str(size // 4)})
    for peer in two:
        peer.end(500)
    for said in together(two):
        assert said[-1]["extra"] < 256 << 20
