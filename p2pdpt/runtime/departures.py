"""Members that end their part of a run: what they had finished, and when they may go.

A leaver says in its farewell which steps and collectives it has finished. Whoever still needs
more of it is told at once. What the leaver sent for a collective may wait in its connections for
a member that is behind, so it closes them only when each member has released it: finished the
same collectives.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from p2pdpt.errors import PeerFailedError, PeerLeftError
from p2pdpt.protocol.messages import Farewell, Released

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from p2pdpt.errors import P2PError
    from p2pdpt.protocol.view import View

__all__ = ["Departures"]

_TEXT: Final = 4000
_STREAMS: Final = 4096


class Departures:
    """The farewells of one view, seen by one member.

    Attributes:
        left: the farewell of each rank that has said one.
    """

    def __init__(self, view: View, send: Callable[[int, Released], None]) -> None:
        """`send` sends to a rank."""
        self.left: dict[int, Farewell] = {}
        self._view, self._send = view, send
        # By stream of collectives: how many are over here.
        self._over: dict[int, int] = {}
        self._owed: set[int] = set()
        self._waiting: set[int] = set()
        self._free = asyncio.Event()

    def take(self, rank: int, farewell: Farewell) -> None:
        """Note a member's farewell."""
        self.left[rank] = farewell
        self._owed.add(rank)
        self._release()

    def over(self, stream: int, count: int) -> None:
        """Note that the first `count` collectives of a stream are over here, well or not."""
        self._over[stream] = max(self._over.get(stream, 0), count)
        self._release()

    def misses(self, rank: int, stream: int, step: int) -> bool:
        """Tell whether a round needs more of a member than it gave before it left."""
        farewell = self.left[rank]
        return step >= (farewell.finished.get(stream, 0) if stream else farewell.steps)

    def error(self, rank: int, operation: str, step: int | None) -> PeerLeftError:
        """Return what an operation that needs a leaver raises."""
        member, steps = self._view.members[rank], self.left[rank].steps
        after = f"after step {steps - 1}" if steps else "before the first step was complete"
        return PeerLeftError(
            str(member), member.address, f"its script ended {after}", operation=operation, step=step
        )

    def farewell(
        self,
        steps: int,
        others: Iterable[int],
        error: str | None,
        culprit: str,
        failure: P2PError | None,
    ) -> Farewell:
        """Begin to leave, and return what to say to `others`, who are still connected."""
        self._waiting = set(others)
        if not self._waiting:
            self._free.set()
        finished = dict(list(self._over.items())[:_STREAMS])
        if error is None:
            return Farewell(steps, finished)
        reason = failure.reason if isinstance(failure, PeerFailedError) else ""
        return Farewell(steps, finished, error[:_TEXT], culprit, reason[:_TEXT])

    def released(self, rank: int) -> None:
        """Note that a member needs nothing more of this one, or is gone."""
        self._waiting.discard(rank)
        if not self._waiting:
            self._free.set()

    async def wait(self, seconds: float) -> None:
        """Return when all have released this member, or `seconds` have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._free.wait()

    def _release(self) -> None:
        for rank in list(self._owed):
            finished = self.left[rank].finished
            if all(self._over.get(stream, 0) >= count for stream, count in finished.items()):
                self._owed.discard(rank)
                self._send(rank, Released())
