"""S86: a node inside somebody else's application does not take it over."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
import logging, multiprocessing, random, signal, threading
from p2pdpt import ADD

def application(number, frame):
    pass

signal.signal(signal.SIGTERM, application)
signal.signal(signal.SIGINT, application)
logging.basicConfig(level=logging.ERROR)
random.seed(1); np.random.seed(1); torch.manual_seed(1)

def handler(loop, context):
    say(unhandled=str(context))

def state():
    loop = asyncio.get_running_loop()
    numpy_state = np.random.get_state()
    return {
        "signals": [signal.getsignal(number) for number in range(1, 32)],
        "policy": asyncio.get_event_loop_policy(),
        "handler": loop.get_exception_handler(),
        "executor": getattr(loop, "_default_executor", None),
        "debug": loop.get_debug(),
        "level": logging.getLogger().level,
        "handlers": list(logging.getLogger().handlers),
        "method": multiprocessing.get_start_method(allow_none=True),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "random": (random.getstate(), torch.get_rng_state().tolist(), numpy_state[1].tolist()),
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "recursion": sys.getrecursionlimit(),
    }

def compare(before, after, when):
    for what in before:
        assert before[what] == after[what], (when, what, before[what], after[what])

async def application_loop(number):
    asyncio.get_running_loop().set_exception_handler(handler)
    before = state()
    config, run = configuration()
    run = dataclasses.replace(run, run=f"{run.run}-{number}", min_nodes=2)
    threads = threading.active_count()
    async with Node(config) as a, Node(config) as b:
        compare(before, state(), "started")
        groups = await asyncio.gather(a.join(run), b.join(run))
        memories = [fill(group, 5000) for group in groups]
        for _ in range(3):
            await asyncio.gather(
                *(g.all_reduce(m, ADD, name="sum") for g, m in zip(groups, memories))
            )
        assert (memories[0].result == pattern_sum(2, 5000)).all()
        compare(before, state(), "joined")
        await asyncio.gather(*(group.leave() for group in groups))
    compare(before, state(), "closed")
    assert threading.active_count() == threads
    assert asyncio.all_tasks() == {asyncio.current_task()}

def in_thread():
    try:
        asyncio.run(application_loop(1))
    except BaseException as error:
        say(thread=repr(error))
        raise

asyncio.run(application_loop(0))
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
say(done=True)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_s86_all_is_as_it_was(peers: Any, together: Any, transport: str) -> None:
    (said,) = together(peers(SCRIPT, 1, transport=transport))
    assert [set(each) - {"at"} for each in said] == [{"done"}]


SESSION = """
import logging, signal, threading, random
import p2pdpt

def state():
    return {
        "signals": [signal.getsignal(number) for number in range(1, 32)],
        "policy": asyncio.get_event_loop_policy(),
        "level": logging.getLogger().level,
        "handlers": list(logging.getLogger().handlers),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "alive": threading.enumerate(),
        "gradients": torch.is_grad_enabled(),
    }

model = m1()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = batch(0)
before = state()
with p2pdpt.session(model, optimizer) as s:
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
after = state()
for what in before:
    assert before[what] == after[what], (what, before[what], after[what])
say(done=True)
"""


def test_s86_nor_does_a_session(peers: Any, together: Any) -> None:
    together(peers(SESSION, 2))
