"""Tasks that run beside the user's: none is lost, none fails unseen, none is left behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["Background"]


class Background:
    """A set of tasks of one owner, which is told about every exception."""

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        """`on_error` is called on the loop with what the task was for, and what it raised."""
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run `work` until it ends or ``close``; after that it does not begin."""
        task = asyncio.get_running_loop().create_task(work, name=f"p2pdpt {what}")
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._ended(ended, what))
        if self._closed:
            task.cancel()
        return task

    def _ended(self, task: asyncio.Task[None], what: str) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, Exception):
                raise error
            self._on_error(what, error)

    async def close(self) -> None:
        """Cancel all and return when they have ended. May be called twice."""
        self._closed = True
        current = asyncio.current_task()
        while tasks := [task for task in self._tasks if task is not current]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
