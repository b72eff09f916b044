"""A group's shared memory: whether all its members can, and the rounds that go through it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

import msgspec

from p2pdpt.config import SHARED
from p2pdpt.dtypes import DTYPES
from p2pdpt.errors import P2PError, UnavailableError
from p2pdpt.memory import allocate
from p2pdpt.protocol.recorder import Unplannable
from p2pdpt.protocol.sharing import Standing, obstacle, told, verdict
from p2pdpt.protocol.weighting import Reduction
from p2pdpt.runtime.drivers.native_driver import ABI, NativeDriver
from p2pdpt.runtime.host_door import HostDoor
from p2pdpt.topology import ADD

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from p2pdpt.memory import BucketMemory
    from p2pdpt.protocol.view import View
    from p2pdpt.runtime.drivers.asyncio_driver import RoundKey
    from p2pdpt.topology import Combine, Topology

__all__ = ["SharedMemory"]

logger = logging.getLogger(__name__)

_NAME: Final = "p2pdpt shared memory"


class SharedMemory:
    """One member's part of the memory that its group shares, if it does.

    Attributes:
        reason: why the group does not share memory; empty if it does.
    """

    def __init__(self, view: View, rank: int, on_lost: Callable[[int, Exception], None]) -> None:
        """Share nothing yet.

        Args:
            view, rank: of the group.
            on_lost: called with rank and reason when the connection to a member ends.
        """
        self.reason = "nothing has been shared yet"
        self._view, self._rank, self._on_lost = view, rank, on_lost
        self._door: HostDoor | None = None
        self._driver: NativeDriver | None = None
        self._error: BaseException | None = None
        self._told: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether buckets are exchanged in shared memory."""
        return not self.reason

    @property
    def bytes_sent(self) -> int:
        """What the other members have read of this one's memory, by the plans, in bytes."""
        return self._driver.bytes_lent if self._driver is not None else 0

    @property
    def bytes_received(self) -> int:
        """What this member has read of the others' memory, in bytes."""
        return self._driver.bytes_read if self._driver is not None else 0

    async def open(
        self,
        gather: Callable[[bytes, str], Awaitable[list[bytes]]],
        needing_all: Callable[[Coroutine[Any, Any, None]], Awaitable[None]],
        topology: Topology,
        transports: Sequence[str],
    ) -> None:
        """Find out whether all members can, all alike, and share if so. All members call it.

        Args:
            gather: gives a payload to all members and returns theirs by rank; a member may
                leave when its own call has returned.
            needing_all: awaits what cannot end without all members, and fails if one leaves.
            topology: of the group.
            transports: which this member was told to use.

        Raises:
            UnavailableError: a member was told to use nothing else, and it cannot be.
            PeerFailedError: a member failed meanwhile.
        """
        names = [member.name for member in self._view.members]
        try:
            standing = self._stand(transports)
            standings = [
                told(each, Standing)
                for each in await gather(msgspec.msgpack.encode(standing), _NAME)
            ]
            hosts = self._view.facts.hosts or [0] * self._view.size
            reason = obstacle(names, hosts, standings, self._try(topology))
            if not reason:
                assert self._door is not None
                assert self._driver is not None
                failed: dict[int, str] = {}
                await needing_all(self._connect(standings, failed))
                all_failed = await gather(msgspec.msgpack.encode(failed), _NAME)
                reason = verdict(names, [told(each, dict[int, str]) for each in all_failed])
                if not reason:
                    self._door.begin()
                    await needing_all(self._driver.open())
        except BaseException:
            self.close()
            raise
        self.reason = reason
        if not reason:
            logger.info("sharing.begun: all %d members share memory", len(names))
            return
        self.close()
        demanding = [name for name, each in zip(names, standings, strict=True) if each.required]
        if demanding:
            raise UnavailableError(
                f"transport shm cannot be used, and {demanding[0]} was told to use no other: "
                f"{reason}"
            )
        logger.info("sharing.none: %s", reason)

    async def _connect(self, standings: Sequence[Standing], failed: dict[int, str]) -> None:
        assert self._door is not None
        failed.update(await self._door.connect(standings))

    def _stand(self, transports: Sequence[str]) -> Standing:
        required = tuple(transports) == (SHARED,)
        if SHARED not in transports:
            return Standing(f"it was told to use {', '.join(transports)}", False)
        view = self._view
        ids = [member.node_id for member in view.members]
        try:
            self._door = HostDoor(self._rank, ids, view.number, self._on_lost)
            self._driver = NativeDriver(
                rank=self._rank, size=view.size, share=self._door.share, facts=view.facts
            )
            self._door.on_announced = self._driver.announced
            address, token = self._door.listen()
        except (P2PError, OSError, MemoryError) as error:
            return Standing(str(error)[:1000], required)
        if self._error is not None:
            self.abort(self._error)
        return Standing("", required, ABI, os.geteuid(), address, token)

    def _try(self, topology: Topology) -> str:
        """Return why the topology is not replayed; the same on all members that could."""
        if self._driver is None:
            return ""
        memory = allocate(DTYPES["float32"], 4 * self._view.size)
        try:
            reason = self._driver.reason_against(topology, memory, ADD, Reduction.MEAN)
        except P2PError as error:
            # Whoever exchanges will be told by the other driver.
            reason = str(error)
        finally:
            memory.close()
        return f"topology {topology.describe()}: {reason}" if reason else ""

    async def run(
        self,
        topology: Topology,
        memory: BucketMemory,
        key: RoundKey,
        *,
        combine: Combine,
        reduction: Reduction,
        weight: float = 1.0,
        against: str = "",
    ) -> bool:
        """Run a round; False if the members agree to run it in another way.

        Args:
            against: why this member does not want it here; the others are as in
                :meth:`p2pdpt.runtime.drivers.NativeDriver.run`.

        Raises:
            PeerFailedError: whatever ``abort`` was given.
            TopologyError: another member's bucket has another type or length.
        """
        if self._driver is None or not self.active:
            return False
        try:
            await self._driver.run(
                topology,
                memory,
                key,
                combine=combine,
                reduction=reduction,
                weight=weight,
                against=against,
            )
        except Unplannable as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                logger.info("sharing.not: %s", error)
            return False
        return True

    def abort(self, error: BaseException) -> None:
        """Make every running and every later round raise `error`."""
        self._error = error
        if self._door is not None:
            self._door.fail(error)
        if self._driver is not None:
            self._driver.abort(error)

    def close(self) -> None:
        """Abort what runs, and give everything back. May be called twice."""
        if self._driver is not None:
            self._driver.close()
        if self._door is not None:
            self._door.close()
