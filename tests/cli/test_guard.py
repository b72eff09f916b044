from __future__ import annotations

import os
import signal
import subprocess
import sys

from p2pdpt.cli.guard import guard, kill_group


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )


def test_only_what_is_open_is_killed() -> None:
    open_one, closed_one = sleeper(), sleeper()
    try:
        account = [
            f"+{open_one.pid}\n",
            f"+{closed_one.pid}\n",
            f"-{closed_one.pid}\n",
            "nonsense\n",
        ]
        assert guard(account) == {open_one.pid}
        assert open_one.wait(timeout=10) == -signal.SIGKILL
        assert closed_one.poll() is None
    finally:
        kill_group(closed_one.pid)
        closed_one.wait()


def test_a_number_that_was_cut_off_is_nobodys() -> None:
    assert guard(["+1"]) == set()


def test_a_group_that_has_ended_is_no_error() -> None:
    ended = sleeper()
    kill_group(ended.pid)
    ended.wait()
    kill_group(ended.pid)


def test_it_outlives_signals_but_not_its_input() -> None:
    from p2pdpt.cli import guard as module

    watched = sleeper()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", module.__file__], stdin=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(f"+{watched.pid}\n")
    process.stdin.flush()
    try:
        # It ignores them once it is set up, which the kernel tells.
        ignored = 0
        while not ignored & 1 << (signal.SIGTERM - 1):
            with open(f"/proc/{process.pid}/status") as status:
                line = next(line for line in status if line.startswith("SigIgn"))
                ignored = int(line.split()[1], 16)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(process.pid, number)
        process.stdin.close()
        assert process.wait(timeout=10) == 0
        assert watched.wait(timeout=10) == -signal.SIGKILL
    finally:
        for each in (watched, process):
            each.kill()
            each.wait()
