"""When silence counts as death, and when one's own sleep explains it.

Any bytes of a peer are a sign of life; a heartbeat is sent every sixth of the patience so that
there are some. A node whose own loop did not run could not hear anybody: the time that it slept
is forgiven to all peers. Time is an argument, in seconds of any monotonic clock.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["BEATS", "Liveness", "Silence"]

BEATS: Final = 6
"""How many heartbeats fit into the patience."""


class Silence(NamedTuple):
    """A peer that was not heard for too long.

    Attributes:
        peer: who.
        reason: the evidence, in words.
    """

    peer: str
    reason: str


class Liveness:
    """Watches the peers of one node.

    Attributes:
        interval: seconds between heartbeats.
        stalled: seconds for which this node's own loop has not run, in all.
    """

    def __init__(self, patience: float, now: float) -> None:
        """Begin at `now`; a peer is suspected after `patience` seconds of silence."""
        self.patience = patience
        self.interval = patience / BEATS
        self.stalled = 0.0
        self._heard: dict[str, float] = {}
        self._due = now + self.interval

    def add(self, peer: str, now: float) -> None:
        """Watch `peer` from now on."""
        self._heard[peer] = now

    def remove(self, peer: str) -> None:
        """Watch `peer` no more."""
        self._heard.pop(peer, None)

    def heard(self, peer: str, now: float) -> None:
        """Note a sign of life."""
        if peer in self._heard:
            self._heard[peer] = now

    def next_tick(self) -> float:
        """Return when ``tick`` wants to be called."""
        return self._due

    def tick(self, now: float) -> list[Silence]:
        """Return who has been silent for too long; each is told once. Send heartbeats, too."""
        late = now - self._due
        if late > self.interval / 2:
            # Nothing could be heard while this loop did not run; what came then is still unread.
            self.stalled += late
            for peer in self._heard:
                self._heard[peer] = min(self._heard[peer] + late, now)
        self._due = now + self.interval
        silent = [peer for peer, heard in self._heard.items() if now - heard >= self.patience]
        for peer in silent:
            del self._heard[peer]
        return [Silence(peer, f"no heartbeat for {self.patience:g} s") for peer in silent]
