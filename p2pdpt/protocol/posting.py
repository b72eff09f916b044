"""What a topology has posted, and what it awaits; and the hazards a plugin must not create."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from p2pdpt.errors import HazardError, TopologyError
from p2pdpt.topology import Handle, Message, Region

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from p2pdpt.protocol.tasks import Task

__all__ = ["Flight", "Posted", "Request", "check_region"]


class Posted(Handle):
    """A posted operation, done when all its tasks are, or when ``finished`` is set."""

    __slots__ = ("awaited", "finished", "mail", "reads", "tasks", "what", "writes")

    def __init__(self, what: object) -> None:
        self.tasks: list[Task] = []
        self.mail: Message | None = None
        self.finished = False
        self.awaited = False
        self.reads: tuple[Region, ...] = ()
        self.writes: Region | None = None
        self.what = what

    @property
    def done(self) -> bool:
        if self.tasks:
            return all(task.complete for task in self.tasks)
        return self.finished

    @property
    def text(self) -> str:
        """The operation as a person would write it."""
        return str(self.what)

    @property
    def message(self) -> Message | None:
        return self.mail


class Request:
    """What a coroutine awaits; yields itself to the round, which resumes it."""

    __slots__ = ("count", "deadline", "handles", "kind")

    def __init__(
        self, kind: str, handles: Sequence[Posted], count: int, deadline: float | None
    ) -> None:
        self.kind = kind
        self.handles = handles
        self.count = count
        self.deadline = deadline

    def __await__(self) -> Generator[Request, Any, Any]:
        return (yield self)


class Flight:
    """The operations that a plugin has posted and not yet awaited.

    What the plugin could not know to be ordered is refused here; what it could is ordered by
    the tasks themselves, however far the round runs ahead.
    """

    def __init__(self) -> None:
        self._posted: list[Posted] = []

    def add(self, handles: Sequence[Posted]) -> None:
        """Note operations that are in flight from now on."""
        self._posted.extend(handles)

    def check(self, handles: Sequence[Posted], length_of: Callable[[int], int | None]) -> None:
        """Refuse operations that conflict with each other or with what is in flight.

        Raises:
            HazardError: two writes to one element in one move, or a region in flight is used.
            TopologyError: a region lies outside its space.
        """
        self._posted = [handle for handle in self._posted if not handle.awaited]
        writes = []
        for handle in handles:
            for region in handle.reads:
                check_region(region, length_of)
            if handle.writes is not None:
                check_region(handle.writes, length_of)
                if len(handle.writes):
                    writes.append(handle.writes)
        writes.sort(key=lambda region: (region.space, region.start))
        for one, two in itertools.pairwise(writes):
            if _overlap(one, two):
                raise HazardError(f"two operations of one move write elements of {two}")
        for handle in handles:
            for other in self._posted:
                pairs = [(handle.writes, each) for each in (other.writes, *other.reads)]
                pairs += [(each, other.writes) for each in handle.reads]
                for mine, theirs in pairs:
                    if mine is not None and theirs is not None and _overlap(mine, theirs):
                        raise HazardError(
                            f"{mine} is used while {other.text} is in flight; wait for it first"
                        )

    def check_free(self, space: int) -> None:
        """Refuse to give back a space that an operation in flight uses.

        Raises:
            HazardError: there is one; the text names it.
        """
        for handle in self._posted:
            regions = handle.reads if handle.writes is None else (*handle.reads, handle.writes)
            if not handle.awaited and any(region.space == space for region in regions):
                raise HazardError(
                    f"a message is released while {handle.text} uses it; wait for that first"
                )


def check_region(region: Region, length_of: Callable[[int], int | None]) -> None:
    """Refuse a region outside its space.

    Raises:
        TopologyError: the space does not exist or is shorter.
    """
    length = length_of(region.space)
    if length is None:
        raise TopologyError(f"{region} lies in a space that does not exist")
    if region.stop > length:
        raise TopologyError(
            f"elements {region.start}..{region.stop} lie outside the {length} elements "
            f"of {'the bucket' if region.space == 0 else f'space {region.space}'}"
        )


def _overlap(one: Region, other: Region) -> bool:
    return one.space == other.space and max(one.start, other.start) < min(one.stop, other.stop)
