"""Run every coroutine test of a transport on asyncio's own loop and on uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

# libuv opens a pipe with the first loop of a process and keeps it; not a leak of any test.
uvloop.new_event_loop().close()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
