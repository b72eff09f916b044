"""Every wait of the training thread, and the watch that no two members wait for different things.

Members that call different things (one ended its loop early, one skipped ``optimizer.step()``)
would wait for each other for ever, each seemingly healthy. So twice a second the members gather,
beside whatever else goes on, what each one's training thread waits for; when all wait, for
different things, and nothing moves, all come to the same verdict and raise it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from p2pdpt.errors import P2PError, SessionError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from p2pdpt.group import Group
    from p2pdpt.training.loop_thread import LoopThread

__all__ = ["Verdict", "WaitState", "Waiting"]

T = TypeVar("T")
INTERVAL_S: Final = 0.5
# A difference in kind cannot mend itself; one within a kind may be a message on its way.
ROUNDS_OF_KIND: Final = 3
ROUNDS_OF_DETAIL: Final = 8


class WaitState(msgspec.Struct, frozen=True, array_like=True):
    """What a member's training thread waits for.

    Attributes:
        serial: counts waits, so that two looks at one wait are recognised.
        kind: what it is, for instance ``the backward of step 3``; empty while it computes.
        detail: more of it.
    """

    serial: int
    kind: str = ""
    detail: str = ""

    def describe(self) -> str:
        """Return kind and detail as a person would write them."""
        return f"{self.kind} ({self.detail})" if self.detail else self.kind


class Verdict:
    """Judge successive looks at what all members wait for; has no clock and no task."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._before: list[WaitState] = []
        self._unchanged = 0

    def look(self, states: Sequence[WaitState]) -> str | None:
        """Take one look, in rank order; return why the members cannot go on, if so."""
        listed = list(states)
        self._unchanged = self._unchanged + 1 if listed == self._before else 0
        self._before = listed
        described = [state.describe() for state in listed]
        if not all(state.kind for state in listed) or len(set(described)) == 1:
            return None
        kinds = {state.kind.rpartition(" of step ")[0] or state.kind for state in listed}
        needed = ROUNDS_OF_KIND if len(kinds) > 1 else ROUNDS_OF_DETAIL
        if self._unchanged < needed:
            return None
        places = "; ".join(
            f"{name} in {text}" for name, text in zip(self._names, described, strict=True)
        )
        return (
            f"the nodes wait for each other in different places: {places}. All nodes must make "
            "the same calls in the same order: the same number of batches (s.split sees to that), "
            "of backward() and of optimizer.step(), and s.mean, s.sum and s.split on every node"
        )


class Waiting:
    """Run coroutines of the group for the training thread, under watch.

    Attributes:
        loop: where they run.
        group: whose coroutines they are.
    """

    def __init__(self, loop: LoopThread, group: Group) -> None:
        self.loop, self.group = loop, group
        self._state = WaitState(0)
        self._broken: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch, if there is anybody to wait for."""
        self.loop.call(self._start())

    async def _start(self) -> None:
        self._broken = asyncio.get_running_loop().create_future()
        if self.group.size > 1:
            self._watch = asyncio.ensure_future(self._look_around())

    async def _look_around(self) -> None:
        verdict = Verdict([member.name for member in self.group.view.members])
        # The group's own failures reach whoever waits; the watch just ends with it.
        with contextlib.suppress(P2PError):
            while True:
                await asyncio.sleep(INTERVAL_S)
                payload = msgspec.msgpack.encode(self._state)
                looks = await self.group.all_gather(payload, name="watch")
                text = verdict.look(
                    [msgspec.msgpack.decode(look, type=WaitState) for look in looks]
                )
                if text is not None and self._broken is not None and not self._broken.done():
                    self._broken.set_exception(SessionError(text))
                    # Whoever waits next sees it; nobody need be waiting now.
                    self._broken.exception()
                    return

    def stop(self) -> None:
        """End the watch; may be called twice."""
        if self.loop.running:
            self.loop.call(self._stop())

    async def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None

    def wait(self, kind: str, detail: str, work: Coroutine[Any, Any, T]) -> T:
        """Block until `work` returns, and return what it returns.

        Args:
            kind: what the members must agree that they wait for.
            detail: more of it.

        Raises:
            PeerFailedError: a member failed.
            SessionError: the members wait for different things.
        """
        return self.loop.call(self._wait(kind, detail, work))

    async def _wait(self, kind: str, detail: str, work: Coroutine[Any, Any, T]) -> T:
        self._state = WaitState(self._state.serial + 1, kind, detail)
        task = asyncio.ensure_future(work)
        try:
            if self._broken is None:
                return await task
            either: set[asyncio.Future[Any]] = {task, self._broken}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._broken.result()
            return task.result()
        finally:
            self._state = WaitState(self._state.serial)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
