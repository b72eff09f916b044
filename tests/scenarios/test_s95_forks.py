"""S95: processes that are forked after the node has started."""

from __future__ import annotations

import time
from typing import Any

import pytest

TRAINING = """
from stage import *
import p2pdpt
from torch.utils.data import DataLoader, TensorDataset

def main_():
    torch.manual_seed(5)
    model = m1()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(120, 8), torch.ones(120, 1))
    with p2pdpt.session(model, optimizer) as s:
        loader = DataLoader(
            data, batch_size=6, shuffle=True,
            num_workers={workers}, multiprocessing_context="{method}",
        )
        for epoch in s.epochs({epochs}):
            for x, y in s.split(loader):
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        say(steps=s.step, digest=s.digest())

if __name__ == "__main__":
    main_()
"""


@pytest.mark.parametrize(("method", "epochs"), [("fork", 3), ("spawn", 1)])
def test_s95_loader_workers(peers: Any, together: Any, method: str, epochs: int) -> None:
    script = TRAINING.replace("{method}", method).replace("{epochs}", str(epochs))
    script = script.replace("{workers}", "2" if method == "fork" else "1")
    said = together(peers(script, 2))
    assert {each[-1]["steps"] for each in said} == {20 * epochs}
    assert len({each[-1]["digest"] for each in said}) == 1


KILLED = """
import p2pdpt

model = m1()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with p2pdpt.session(model, optimizer) as s:
    x, y = batch(0)
    child = os.fork() if index() == 1 else -1
    if child == 0:
        time.sleep(30)
        os._exit(0)
    say(child=child)
    while True:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_s95_children_do_not_hide_a_death(peers: Any, within: Any, transport: str) -> None:
    two = peers(KILLED, 2, transport=transport)
    for peer in two:
        peer.read()
    time.sleep(0.2)
    killed = two[1].kill()
    assert two[0].end(20) == 1
    within(time.monotonic() - killed, 2)
    assert "PeerFailedError: peer n1 (" in two[0].wrote().strip().splitlines()[-1]


INSIDE = """
import p2pdpt

async def body(node, group):
    memory = fill(group, 1000)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            await group.exchange(memory, step=0, bucket=0)
        except p2pdpt.SessionError as error:
            code = 0 if f"belongs to pid {os.getppid()}" in str(error) else 2
        # A child that cleans up must not close what is its parent's.
        await group.leave()
        await node.close()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    await group.exchange(memory, step=0, bucket=0)
    await group.seal(0)
    say(mean=float(memory.result[0]))
    await group.leave()

main(body)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_s95_a_child_may_not_use_the_node(peers: Any, together: Any, transport: str) -> None:
    said = together(peers(INSIDE, 2, transport=transport, loop="asyncio"))
    assert {each[-1]["mean"] for each in said} == {4500.0}


ORDERLY = """
import p2pdpt

model = m1()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = batch(0)
with p2pdpt.session(model, optimizer) as s:
    child = os.fork()
    if child == 0:
        try:
            nn.functional.mse_loss(model(x), y).backward()
        except p2pdpt.SessionError as error:
            assert f"belongs to pid {os.getppid()}" in str(error)
        else:
            os._exit(3)
        # A child that ends like a script: its end passes through the session's block.
        sys.exit({code})
    _, status = os.waitpid(child, 0)
    say(child=os.waitstatus_to_exitcode(status))
    for _ in range(3):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    say(digest=s.digest())
"""


@pytest.mark.parametrize("code", [0, 5])
def test_s95_a_child_that_leaves_the_block(peers: Any, together: Any, code: int) -> None:
    said = together(peers(ORDERLY.replace("{code}", str(code)), 2))
    assert {each[0]["child"] for each in said} == {code}
    assert len({each[-1]["digest"] for each in said}) == 1
