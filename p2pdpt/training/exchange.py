"""One attempt of one step, as training sees it: buckets leave, then the step is sealed."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.group import Group
    from p2pdpt.memory import BucketMemory
    from p2pdpt.training.waiting import Waiting

__all__ = ["StepExchange"]


class StepExchange:
    """The exchanges of one attempt; made and used in the training thread.

    Attributes:
        step: the step that is open.
        attempt: which repetition of it.
        weight: of this node's contributions.
        launched: how many buckets have left.
    """

    def __init__(self, waiting: Waiting, step: int, attempt: int, weight: float) -> None:
        self.step, self.attempt, self.weight = step, attempt, weight
        self.launched = 0
        self._waiting = waiting
        self._group: Group = waiting.group
        self._tasks: list[asyncio.Task[None]] = []

    def launch(self, number: int, memory: BucketMemory) -> None:
        """Let a bucket leave; its ``mine`` must not change until ``finish`` has returned."""
        self.launched += 1
        self._waiting.loop.post(self._start, number, memory)

    def _start(self, number: int, memory: BucketMemory) -> None:
        self._tasks.append(
            asyncio.ensure_future(
                self._group.exchange(
                    memory,
                    step=self.step,
                    bucket=number,
                    attempt=self.attempt,
                    weight=self.weight,
                )
            )
        )

    def finish(self, grows: Callable[[], bool]) -> tuple[bool, float]:
        """Wait for what was launched, then seal the step unless it grows.

        Args:
            grows: called on the loop when all results are there; whether more must be launched
                before the step can be sealed.
        Returns whether the step is sealed, and the seconds waited.

        Raises:
            PeerFailedError: a member failed; no gradient was touched.
            SessionError: the members wait for different things.
        """
        begun = time.perf_counter()
        sealed = self._waiting.wait(
            f"the backward of step {self.step}",
            f"attempt {self.attempt}",
            self._finish(grows),
        )
        return sealed, time.perf_counter() - begun

    async def _finish(self, grows: Callable[[], bool]) -> bool:
        try:
            await asyncio.gather(*self._tasks)
            self._tasks.clear()
            if grows():
                return False
            await self._group.seal(self.step, self.attempt)
        except BaseException:
            await self._cancel()
            raise
        return True

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def abandon(self) -> None:
        """Give up what was launched and wait until nothing of it runs any more."""
        self._waiting.loop.call(self._cancel())
