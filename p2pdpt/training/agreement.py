"""Small things that all members say to each other: one call on each, in the same order.

Everything goes under one name, so that members which call different things notice it at once,
and each hears who called what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from p2pdpt.errors import SessionError

if TYPE_CHECKING:
    from p2pdpt.training.waiting import Waiting

__all__ = ["Agreement"]

T = TypeVar("T")


class _Said(msgspec.Struct, array_like=True):
    """What one member says.

    Attributes:
        call: what its program called, for instance ``s.mean(loss)``.
        body: msgpack of what it says.
    """

    call: str
    body: bytes


class Agreement:
    """Gather typed values from all members."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting

    @property
    def names(self) -> list[str]:
        """The members' names in rank order."""
        return [member.name for member in self._waiting.group.view.members]

    def gather(self, call: str, value: T, kind: type[T]) -> list[T]:
        """Return what all members said, in rank order.

        Args:
            call: what the program called, as it would write it; must be equal on all members.
            value: what this one says; anything that msgspec can encode.
            kind: type of `value`, against which the others' are checked.

        Raises:
            SessionError: members called different things; names who called what.
            PeerFailedError: a member failed.
        """
        said = msgspec.msgpack.encode(_Said(call, msgspec.msgpack.encode(value)))
        group = self._waiting.group
        replies = self._waiting.wait(call, "", group.all_gather(said, name="session"))
        heard = [msgspec.msgpack.decode(reply, type=_Said) for reply in replies]
        if len({item.call for item in heard}) > 1:
            calls: dict[str, list[str]] = {}
            for name, item in zip(self.names, heard, strict=True):
                calls.setdefault(item.call, []).append(name)
            listed = "; ".join(f"{', '.join(who)} called {what}" for what, who in calls.items())
            raise SessionError.of_all(
                f"the nodes called different things at the same time: {listed}. "
                "All nodes must make the same calls in the same order"
            )
        return [msgspec.msgpack.decode(item.body, type=kind) for item in heard]
