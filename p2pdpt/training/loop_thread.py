"""An event loop in a thread of its own, for programs that are not asyncio programs.

Training runs in the program's thread; the node's loop runs beside it here, and the two meet
only in ``call`` and ``post``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from p2pdpt.errors import SessionError
from p2pdpt.runtime.sockets import fill_standard

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["LoopThread"]

T = TypeVar("T")


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop loop where that is installed, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopThread:
    """A daemon thread that runs one event loop until ``stop``."""

    def __init__(self, name: str = "p2pdpt-loop") -> None:
        self._name = name
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._ready = threading.Event()

    @property
    def running(self) -> bool:
        """Whether the loop takes work; never in a process forked from its own."""
        return self._loop is not None and self._pid == os.getpid()

    def check(self) -> asyncio.AbstractEventLoop:
        """Return the loop, if it takes work.

        Raises:
            SessionError: it does not run, or runs in the process that this one was forked from.
        """
        if self._pid != os.getpid():
            raise SessionError(
                f"the session belongs to pid {self._pid}, not to pid {os.getpid()}, which was "
                "forked from it; use the session in its own process only"
            )
        if self._loop is None:
            raise SessionError(
                "the session's network is not running; use the session inside its `with` block"
            )
        return self._loop

    def start(self) -> None:
        """Start the thread and return when its loop runs; a second call does nothing."""
        if self._thread is not None:
            return
        fill_standard()
        # A daemon, so that an interpreter that ends without `stop` is not held up.
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._ending = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        await self._ending.wait()
        self._loop = None

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop; block until it returns, and return what it returns.

        Raises:
            SessionError: the loop does not run here, ended meanwhile, or this is its own thread.
        Whatever the coroutine raises is raised here. An interrupted call (Ctrl-C) cancels the
        coroutine and does not wait for it.
        """
        try:
            loop = self.check()
            if threading.current_thread() is self._thread:
                raise SessionError(
                    "the event loop cannot wait for itself; call this from the training thread"
                )
        except SessionError:
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise SessionError("the session's network ended while this call waited") from None
        except BaseException:
            future.cancel()
            raise

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Run ``function(*arguments)`` on the loop soon, without waiting.

        Raises:
            SessionError: the loop does not run here.
        """
        self.check().call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """Cancel what still runs, close the loop and end the thread; may be called twice."""
        thread, loop, ending = self._thread, self._loop, self._ending
        if thread is None or self._pid != os.getpid():
            return
        if loop is not None and ending is not None:
            loop.call_soon_threadsafe(ending.set)
        if thread is not threading.current_thread():
            thread.join()
