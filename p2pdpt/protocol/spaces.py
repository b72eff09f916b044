"""Who wrote each element of a rank's spaces last, and which operations still use their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdpt.errors import HazardError
from p2pdpt.protocol.intervals import IntervalMap
from p2pdpt.protocol.posting import check_region
from p2pdpt.protocol.round_io import RESULT
from p2pdpt.protocol.tasks import Read

if TYPE_CHECKING:
    from p2pdpt.channel import Meta
    from p2pdpt.protocol.tasks import Task
    from p2pdpt.topology import Region

__all__ = ["Spaces"]


class Spaces:
    """The bucket (space 0), scratch and leased messages of one rank in one round."""

    __slots__ = ("_in_place", "_users", "_writers")

    def __init__(self, length: int, *, in_place: bool) -> None:
        """Begin with a bucket of `length` elements that nobody has written.

        Args:
            length: of the bucket.
            in_place: whether writing the bucket overwrites this node's contribution.
        """
        self._in_place = in_place
        self._writers: dict[int, IntervalMap[Task | None]] = {RESULT: IntervalMap(length, None)}
        self._users: dict[int, list[tuple[Task, int, int]]] = {RESULT: []}

    def add(self, space: int, length: int) -> None:
        """Begin another space of `length` elements."""
        self._writers[space] = IntervalMap(length, None)
        self._users[space] = []

    def drop(self, space: int) -> None:
        """Forget a space."""
        del self._writers[space], self._users[space]

    def length_of(self, space: int) -> int | None:
        """Return how long a space is, or None if there is none."""
        found = self._writers.get(space)
        return None if found is None else found.length

    def pieces(self) -> list[tuple[int, int, Task | None]]:
        """Return ``(start, stop, last writer)`` over the whole bucket, in order."""
        return self._writers[RESULT].pieces()

    def read(self, region: Region, leaf: Meta) -> Read:
        """Return what a region holds now, for an operation that will read it.

        Raises:
            TopologyError: the region lies outside its space.
            HazardError: it is scratch that nothing was written to.
        """
        check_region(region, self.length_of)
        parts = self._writers[region.space].lookup(region.start, region.stop)
        if region.space != RESULT and any(writer is None for _, _, writer in parts):
            raise HazardError(f"{region} is read, but nothing has been written there")
        return Read(parts, leaf)

    def reads(self, task: Task, space: int, read: Read) -> None:
        """Note that `task` reads; contributions that no write can touch need no note."""
        users = self._users[space]
        for start, stop, writer in read.parts:
            if writer is not None or self._in_place:
                users.append((task, start, stop))

    def writes(self, task: Task, region: Region) -> None:
        """Note that `task` is the last writer of a region from now on."""
        self._writers[region.space].assign(region.start, region.stop, task)
        self._users[region.space].append((task, region.start, region.stop))

    def hazards(self, region: Region, *, every: bool) -> list[tuple[Task, int, int]]:
        """Return the earlier tasks that use the memory of a region that is to be written.

        They are forgotten for these elements: whoever comes later waits for the writer, which
        waits for them.

        Args:
            region: what is to be written.
            every: whether to list those that are complete too, for a later replay.
        """
        kept = []
        hazards = []
        first, last = region.start, region.stop
        for user in self._users[region.space]:
            task, start, stop = user
            if not every and task.complete:
                continue
            if stop <= first or last <= start:
                kept.append(user)
                continue
            hazards.append((task, max(start, first), min(stop, last)))
            if start < first:
                kept.append((task, start, first))
            if last < stop:
                kept.append((task, last, stop))
        self._users[region.space] = kept
        return hazards
