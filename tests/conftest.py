"""What every test is held to: it leaves no task, thread, process or descriptor behind."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import inspect
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No test measures time, and a busy machine is no failure. The examples are the same every time;
# --hypothesis-profile=search looks for new ones.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("house", settings.get_profile("search"), derandomize=True)
settings.load_profile("house")

# Whoever starts the tests in the background or under nohup has signals ignored, which every
# process started here would inherit; the tests are about programs that were started plainly.
for _number, _plain in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _plain)

PATIENCE_S = 2.0
"""How long what was told to end may take to be gone."""
SHARED = ("/dev/urandom", "/dev/null", "/proc/", "/sys/")
"""Files that libraries open at first use and keep."""


def open_descriptors() -> dict[object, str]:
    """Return the descriptors of this process, and what they lead to."""
    found: dict[object, str] = {}
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:
            # The one that lists the folder.
            continue
        if not target.startswith(SHARED):
            found[entry.name, target] = f"descriptor {entry.name} of {target}"
    return found


def living_threads() -> dict[object, str]:
    """Return Python's own threads; those of native libraries live as long as the process."""
    return {
        thread: f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread.is_alive() and not isinstance(thread, threading._DummyThread)
    }


def child_processes() -> dict[object, str]:
    """Return this process's children, and their command lines."""
    found: dict[object, str] = {}
    for task in os.scandir("/proc/self/task"):
        try:
            for child in Path(task.path, "children").read_text(encoding="ascii").split():
                command = Path("/proc", child, "cmdline").read_bytes().replace(b"\0", b" ")
                # Python's own, which serves the process until its end.
                if b"multiprocessing.resource_tracker" not in command:
                    found["process", child] = f"process {child} {command.decode()}"
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def census() -> dict[object, str]:
    """Return all that a test might leave behind, and what to call it."""
    return living_threads() | child_processes() | open_descriptors()


def leaks(before: dict[object, str]) -> list[str]:
    """Return what is there now and was not `before`."""
    return [name for key, name in census().items() if key not in before]


@pytest.fixture
async def _no_task_left() -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    # Finds calls from the wrong thread, and coroutines that nobody awaited.
    loop.set_debug(True)
    yield
    deadline = loop.time() + PATIENCE_S
    while left := asyncio.all_tasks() - {asyncio.current_task()}:
        if loop.time() > deadline:
            pytest.fail(f"tasks left behind: {left}")
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    if not Path("/proc/self/fd").exists():
        yield
        return
    before = census()
    yield
    if not leaks(before):
        return
    # Cycles may hold descriptors until the collector runs; threads may be on their way out.
    deadline = time.monotonic() + PATIENCE_S
    gc.collect()
    while left := leaks(before):
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + ", ".join(left))
        time.sleep(0.02)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Look for tasks after coroutine tests; leave out what cannot run here."""
    without_torch = importlib.util.find_spec("torch") is None
    for item in items:
        if without_torch and item.get_closest_marker("needs_torch"):
            item.add_marker(pytest.mark.skip(reason="torch is not installed"))
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            # Second, so that the loop opens and closes between the two looks at the process.
            item.fixturenames.insert(item.fixturenames.index("_nothing_left") + 1, "_no_task_left")
