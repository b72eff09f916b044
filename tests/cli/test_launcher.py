from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# The launcher adopts orphans and handles signals, which is no business of this process; what it
# does to nodes is tested through the command in test_run.py.
PROGRAM = """
import asyncio, os, sys
from p2pdpt.cli.launcher import Launcher, NodePlan

def plan(name, code, python=sys.executable):
    return NodePlan(name, [python, "-c", code, os.path.abspath("."), "marker"], dict(os.environ))

async def children():
    with open("/proc/self/task/%d/children" % os.getpid()) as file:
        return len(file.read().split())

SLEEP = "import time; time.sleep(600)"
"""


def launch(code: str, environment: dict[str, str], folder: Path) -> tuple[int, str, str]:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM + code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=30,
        cwd=folder,
    )
    return result.returncode, result.stdout, result.stderr


def test_cancellation_kills_the_nodes(
    environment: dict[str, str], tmp_path: Path, gone: Callable[[str], None]
) -> None:
    code = """
async def main():
    launcher = Launcher("r", [plan("node0", SLEEP), plan("node1", SLEEP)])
    try:
        await asyncio.wait_for(launcher.run(None), 0.5)
    except TimeoutError:
        print("cancelled", await children(), [node.stopped for node in launcher.nodes])
    print(sorted(os.listdir("/proc/self/fd")) == before)

async def outer():
    global before
    before = sorted(os.listdir("/proc/self/fd"))
    await main()

asyncio.run(outer())
"""
    assert launch(code, environment, tmp_path) == (0, "cancelled 0 [True, True]\nTrue\n", "")
    gone(str(tmp_path))


def test_a_node_that_cannot_be_started_ends_the_others(
    environment: dict[str, str], tmp_path: Path, gone: Callable[[str], None]
) -> None:
    code = """
async def main():
    plans = [plan("node0", SLEEP), plan("node1", SLEEP, "/nothing/there")]
    try:
        await Launcher("r", plans).run(None)
    except FileNotFoundError as error:
        print(error, await children())

asyncio.run(main())
"""
    said = "[Errno 2] No such file or directory: '/nothing/there' 0\n"
    assert launch(code, environment, tmp_path) == (0, said, "")
    gone(str(tmp_path))


def test_a_foreground_node_has_our_input_and_outputs(
    environment: dict[str, str], tmp_path: Path
) -> None:
    code = """
told = "import os; print('out', flush=True); os.write(2, b'err'); os.write(" \\
       "int(os.environ['P2PDPT_REPORT_FD']), b'{\\"event\\":\\"failed\\",\\"error\\":\\"x\\"}')"
launcher = Launcher("r", [plan("node0", told)], foreground=True)
end = asyncio.run(launcher.run(None))
print(end.signal, launcher.nodes[0].status, launcher.nodes[0].failed.error)
"""
    assert launch(code, environment, tmp_path) == (0, "out\nNone 0 x\n", "err")


def test_signal_handlers_are_given_back(environment: dict[str, str], tmp_path: Path) -> None:
    code = """
import signal
numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
before = [signal.getsignal(number) for number in numbers]

async def main():
    at = [signal.getsignal(number) for number in numbers]
    await Launcher("r", [plan("node0", "")]).run(None)
    after = [signal.getsignal(number) for number in numbers]
    print(after[1:] == before[1:])

asyncio.run(main())
"""
    assert launch(code, environment, tmp_path) == (0, "True\n", "")


def test_a_report_that_is_too_long_or_nonsense_is_dropped(
    environment: dict[str, str], tmp_path: Path
) -> None:
    code = """
told = '''
import os
fd = int(os.environ["P2PDPT_REPORT_FD"])
for piece in (b"x" * (3 << 20) + b"\\\\n", b"\\\\xff\\\\n", b'{"event":"progress","step":5}'):
    while piece:
        piece = piece[os.write(fd, piece):]
'''
launcher = Launcher("r", [plan("node0", told)])
asyncio.run(launcher.run(None))
print(launcher.nodes[0].status, launcher.nodes[0].progress.step)
"""
    assert launch(code, environment, tmp_path) == (0, "0 5\n", "")


def test_it_is_not_a_network_process(environment: dict[str, str]) -> None:
    code = (
        "import sys, p2pdpt.cli.run\n"
        "print(sorted({'torch', 'p2pdpt.runtime.node', 'p2pdpt.training'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert result.stdout == "[]\n"
    assert os.path.exists("/proc")
