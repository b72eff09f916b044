from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

from p2pdpt.cli.loops import ended_by_signal


def test_the_loop_is_uvloops() -> None:
    # libuv keeps a pipe for as long as the process lives, so not in this one.
    code = (
        "import asyncio, uvloop\nfrom p2pdpt.cli.loops import run_on_loop\n"
        "async def main(): return type(asyncio.get_running_loop())\n"
        "print(run_on_loop(main()) is uvloop.Loop)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("True\n", "")


async def test_a_signal_fulfils_the_future_and_handlers_go() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with ended_by_signal() as ended:
        os.kill(os.getpid(), signal.SIGHUP)
        assert await asyncio.wait_for(ended, 10) == signal.SIGHUP
    assert signal.getsignal(signal.SIGHUP) == before


def test_a_second_signal_ends_it_at_once() -> None:
    code = (
        "import asyncio\nfrom p2pdpt.cli.loops import *\n"
        "async def main():\n"
        "    with ended_by_signal() as ended:\n"
        "        print('ready', flush=True)\n"
        "        await ended\n"
        "        print('one', flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "run_on_loop(main())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in ("ready", "one"):
        assert process.stdout.readline() == f"{line}\n"
        process.send_signal(signal.SIGINT)
    start = time.monotonic()
    assert process.wait(timeout=20) == 130
    assert time.monotonic() - start < 5
    process.stdout.close()
