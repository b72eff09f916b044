"""The event loop of a command that is a node itself, and how a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Any

__all__ = ["ended_by_signal", "run_on_loop"]

_T = TypeVar("_T")


def run_on_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on a new event loop, uvloop's where there is one."""
    from p2pdpt.runtime.sockets import fill_standard

    fill_standard()
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


@contextlib.contextmanager
def ended_by_signal() -> Iterator[asyncio.Future[int]]:
    """Give a future that the first SIGINT, SIGTERM or SIGHUP fulfils with its number.

    A second one ends the process at once, with 128 and its number.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def handle(number: int) -> None:
        if ended.done():
            os._exit(128 + number)
        ended.set_result(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup, go on
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield ended
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
