from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import uvloop

from p2pdpt.cli.loops import ended_by_signal, run_on_loop


def test_the_loop_is_uvloops() -> None:
    async def main() -> type:
        return type(asyncio.get_running_loop())

    assert run_on_loop(main()) is uvloop.Loop


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
