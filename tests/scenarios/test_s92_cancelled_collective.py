"""S92: a collective is cancelled while it runs."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
from p2pdpt import ADD

async def body(node, group):
    big = group.allocate(dtype_named("float32"), 16 << 20)
    big.mine[:] = 1
    small = fill(group, 1000)
    await group.all_reduce(small, ADD, name="before")
    task = asyncio.ensure_future(group.all_reduce(big, ADD, name="big"))
    if group.rank == 0:
        await asyncio.sleep({after})
        task.cancel()
        at = time.monotonic()
        try:
            await task
        except asyncio.CancelledError:
            say(cancelled=time.monotonic() - at)
    else:
        try:
            await task
        except P2PError as error:
            say(error=type(error).__name__, text=str(error))
    big.mine[:] = 3
    for _ in range(3):
        await group.all_reduce(small, ADD, name="after")
        assert (small.result == pattern_sum(2, 1000)).all()
    await asyncio.sleep(0.5)
    assert (big.mine == 3).all()
    say(done=True)
    await group.leave()

main(body)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("after", [0, 0.01, 0.03])
def test_s92_the_other_is_told_and_the_group_goes_on(
    peers: Any, together: Any, within: Any, transport: str, after: float
) -> None:
    two = peers(SCRIPT.replace("{after}", str(after)), 2, transport=transport)
    one, other = together(two)
    if "cancelled" in one[1]:
        within(one[1]["cancelled"], 1)
    if "error" not in other[1]:
        # It had all that it needs of the other before that was cancelled.
        return
    assert other[1]["error"] == "GroupError"
    within(other[1]["at"] - one[1]["at"], 2)
    assert f"all_reduce 'big' (ring): cancelled by n0 ({one[0]['id'][:6]})" in other[1]["text"]
    assert one[0]["address"] in other[1]["text"]
