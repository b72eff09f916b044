"""The rounds of one group that are under way on this member, and what others say of theirs.

A round needs all members: where one of them gives it up, by cancelling it or by an error of its
own, the others would wait for ever. So it tells them, and they give it up, too; the group goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from p2pdpt.errors import FrameError, GroupError, SessionError

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from p2pdpt.protocol.messages import Abandoned
    from p2pdpt.protocol.view import Member
    from p2pdpt.runtime.drivers.asyncio_driver import RoundKey

__all__ = ["Rounds"]

FAREWELL_S: Final = 0.5
"""How long a farewell, which knows better why, may come after a round was given up, in seconds."""
_KEPT: Final = 4096


@dataclass(eq=False, slots=True)
class _Round:
    operation: str
    task: asyncio.Task[object]
    cancelling: int
    error: GroupError | None = None


class Rounds:
    """What is under way here, each round in the task that awaits it."""

    def __init__(self) -> None:
        self._running: dict[RoundKey, _Round] = {}
        # What others have given up and this member has not begun, or not ended.
        self._abandoned: dict[RoundKey, str] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def keys(self) -> list[RoundKey]:
        """The rounds under way."""
        return list(self._running)

    @property
    def given_up(self) -> Container[RoundKey]:
        """Those that others have given up and that have not ended here."""
        return self._abandoned

    @contextlib.contextmanager
    def running(self, key: RoundKey, operation: str) -> Iterator[None]:
        """Let the block, in which the current task awaits a round, end when others give it up.

        Args:
            key: which round.
            operation: what it is to people, for the error.

        Raises:
            GroupError: a member gave the round up.
            SessionError: it is under way already.
        """
        if key in self._running:
            raise SessionError(f"{operation} is under way already; wait for its end")
        task = asyncio.current_task()
        assert task is not None
        here = self._running[key] = _Round(operation, task, task.cancelling())
        if key in self._abandoned:
            self._judge_later(key)
        try:
            yield
        except asyncio.CancelledError:
            if here.error is None or task.cancelling() > here.cancelling + 1:
                raise
            raise here.error from None
        finally:
            if here.error is not None:
                task.uncancel()
            del self._running[key]
            self._abandoned.pop(key, None)

    def abandoned(self, key: RoundKey, by: Member, message: Abandoned) -> None:
        """Note that a member has given up a round that has not ended here.

        Raises:
            FrameError: it has given up more rounds than there can be.
        """
        if len(self._abandoned) >= _KEPT:
            raise FrameError(f"bad message: {_KEPT} rounds given up that nobody began here")
        where = f"{by} at {by.address}"
        said = f"failed on {where}: {message.reason}" if message.reason else f"cancelled by {where}"
        self._abandoned.setdefault(key, said)
        if key in self._running:
            self._judge_later(key)

    def sealed(self, steps: int) -> None:
        """Forget what was said of the first `steps` steps."""
        for key in [key for key in self._abandoned if key.stream == 0 and key.step < steps]:
            del self._abandoned[key]

    def _judge_later(self, key: RoundKey) -> None:
        self._loop.call_later(FAREWELL_S, self._judge, key, self._running[key])

    def _judge(self, key: RoundKey, here: _Round) -> None:
        ending = here.task.cancelling() > here.cancelling
        if self._running.get(key) is not here or here.error is not None or ending:
            return
        at = f" at step {key.step}" if key.stream == 0 else ""
        here.error = GroupError(f"{here.operation}{at}: {self._abandoned[key]}")
        here.task.cancel()
