"""Small collectives over control connections: every member's payload to every member."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from p2pdpt.errors import FrameError
from p2pdpt.protocol.messages import Gather

if TYPE_CHECKING:
    from collections.abc import Callable

    from p2pdpt.errors import PeerFailedError

__all__ = ["Gathers"]

AHEAD_BYTES: Final = 64 << 20
"""How much of one member is kept for calls that this member has not made yet."""
# What a message costs beside its payload.
_OVERHEAD: Final = 128


class _Call:
    def __init__(self, size: int) -> None:
        self.payloads: list[bytes | None] = [None] * size
        self.future: asyncio.Future[list[bytes]] | None = None
        self.operation = ""

    def missing(self) -> list[int]:
        return [rank for rank, payload in enumerate(self.payloads) if payload is None]

    def settle(self) -> None:
        if self.future is not None and not self.future.done():
            found = [payload for payload in self.payloads if payload is not None]
            if len(found) == len(self.payloads):
                self.future.set_result(found)


class Gathers:
    """The ``all_gather`` calls of one member of one view."""

    def __init__(self, rank: int, size: int, tell: Callable[[Gather], None]) -> None:
        """`tell` sends a message to all other members."""
        self._rank, self._size, self._tell = rank, size, tell
        self._made: dict[str, int] = {}
        self._calls: dict[tuple[str, int], _Call] = {}
        self._ahead = [0] * size
        self._error: Callable[[str], Exception] | None = None
        self._left: dict[int, Callable[[str], PeerFailedError]] = {}

    async def gather(self, payload: bytes, name: str) -> list[bytes]:
        """Give `payload` and return everybody's, in rank order."""
        operation = f"all_gather {name!r}"
        if self._error is not None:
            raise self._error(operation)
        sequence = self._made.get(name, 0)
        self._made[name] = sequence + 1
        call = self._calls.setdefault((name, sequence), _Call(self._size))
        for rank, early in enumerate(call.payloads):
            if early is not None:
                self._ahead[rank] -= len(early) + _OVERHEAD
        call.operation = operation
        call.payloads[self._rank] = payload
        call.future = asyncio.get_running_loop().create_future()
        self._tell(Gather(name, sequence, payload))
        call.settle()
        for rank in self._left:
            self._miss(call, rank)
        try:
            return await call.future
        finally:
            self._calls.pop((name, sequence), None)

    def receive(self, rank: int, message: Gather) -> None:
        """Take a member's payload.

        Raises:
            FrameError: it came twice, or the member is too far ahead.
        """
        made = self._made.get(message.name, 0)
        key = (message.name, message.sequence)
        call = self._calls.get(key)
        if call is None:
            if message.sequence < made:
                # This member's call was cancelled.
                return
            call = self._calls[key] = _Call(self._size)
        if call.payloads[rank] is not None:
            raise FrameError(f"bad message: payload {message.sequence} of {message.name!r} again")
        if call.future is None:
            self._ahead[rank] += len(message.payload) + _OVERHEAD
            if self._ahead[rank] > AHEAD_BYTES:
                raise FrameError(
                    f"bad message: more than {AHEAD_BYTES >> 20} MiB for collectives that this "
                    f"member has not called, the last of them {message.name!r}"
                )
        call.payloads[rank] = message.payload
        call.settle()

    def leave(self, rank: int, error: Callable[[str], PeerFailedError]) -> None:
        """Fail what needs more of a member that has said farewell; `error` makes the error."""
        self._left[rank] = error
        for call in list(self._calls.values()):
            self._miss(call, rank)

    def fail(self, error: Callable[[str], Exception]) -> None:
        """Fail all that wait and all that are made later; `error` makes the error."""
        self._error = error
        for call in self._calls.values():
            if call.future is not None and not call.future.done():
                call.future.set_exception(error(call.operation))

    def _miss(self, call: _Call, rank: int) -> None:
        if call.payloads[rank] is None and call.future is not None and not call.future.done():
            call.future.set_exception(self._left[rank](call.operation))
