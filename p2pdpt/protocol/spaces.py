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
    """The bucket (space 0), scratch and leased messages of one rank in one round.

    Attributes:
        replayed: whether the round may be replayed, so that complete tasks matter too.
    """

    __slots__ = ("_in_place", "_users", "_writers", "replayed")

    def __init__(self, length: int, *, in_place: bool, replayed: bool) -> None:
        """Begin with a bucket of `length` elements that nobody has written.

        Args:
            length: of the bucket.
            in_place: whether writing the bucket overwrites this node's contribution.
            replayed: whether the round may be replayed.
        """
        self.replayed = replayed
        self._in_place = in_place
        self._writers: dict[int, IntervalMap[Task | None]] = {RESULT: IntervalMap(length, None)}
        self._users: dict[int, IntervalMap[tuple[Task, ...]]] = {RESULT: IntervalMap(length, ())}

    def add(self, space: int, length: int) -> None:
        """Begin another space of `length` elements."""
        self._writers[space] = IntervalMap(length, None)
        self._users[space] = IntervalMap(length, ())

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
                for low, high, tasks in users.lookup(start, stop):
                    if not self.replayed:
                        tasks = tuple(user for user in tasks if not user.complete)
                    users.assign(low, high, (*tasks, task))

    def writes(self, task: Task, region: Region) -> None:
        """Note that `task` is the last writer of a region from now on.

        Earlier users are forgotten: whoever comes later waits for the writer, which waits for
        them.
        """
        self._writers[region.space].assign(region.start, region.stop, task)
        self._users[region.space].assign(region.start, region.stop, (task,))

    def hazards(self, region: Region) -> list[tuple[Task, int, int]]:
        """Return the earlier tasks that use the memory of a region, and which part of it."""
        return [
            (task, low, high)
            for low, high, tasks in self._users[region.space].lookup(region.start, region.stop)
            for task in tasks
            if self.replayed or not task.complete
        ]
