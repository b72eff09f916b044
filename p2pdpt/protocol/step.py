"""The step transaction of one member: when is a step known to be held by all?

A step goes through these states, each attempt of it anew::

    open      contributions are exchanged
    held      this member has its complete result, and has told all (ok)
    sealed    all members are known to hold it: the optimizer may see it
    applied   the optimizer has seen it; the next step may open

A member says ok to steps in order, so the latest ok of each is enough: an ok for an attempt
implies those before it. Once the view is frozen nothing of it counts any more: no contribution,
no ok, no seal; ``held`` and ``applied`` keep what may have to be reported. (Views do not change
yet; a failure freezes the view for good.) No clock and no network: what to do is returned,
with the reason.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from p2pdpt.errors import SessionError

__all__ = ["Act", "Decision", "Place", "State", "StepTransaction"]


class Place(NamedTuple):
    """A step and which attempt of it, in the order in which members pass them."""

    step: int
    attempt: int = 0

    def __str__(self) -> str:
        again = f", attempt {self.attempt}" if self.attempt else ""
        return f"step {self.step}{again}"


class State(enum.Enum):
    """Where the latest step is."""

    OPEN = "open"
    HELD = "held"
    SEALED = "sealed"
    APPLIED = "applied"


class Act(enum.Enum):
    """What the shell is to do."""

    NOTHING = "nothing"
    TELL = "tell all members ok"
    WAKE = "let the waiting seal return"
    TELL_AND_WAKE = "both"
    IGNORE = "drop the message"
    REFUSE = "close the connection: the peer broke a rule"


class Decision(NamedTuple):
    """What to do, and why."""

    act: Act
    reason: str


class StepTransaction:
    """One member's steps in one view.

    Attributes:
        place: the latest step and attempt.
        state: where it is.
        held: the highest step whose complete result this member holds; -1 for none.
        applied: the highest step that the optimizer may have seen: ``held`` or ``held`` - 1.
        frozen: why nothing of the view counts any more, or None.
    """

    def __init__(self, view: int, size: int, rank: int, base: int = -1) -> None:
        """Begin in a view whose steps up to `base` are applied by all `size` members."""
        self.view, self.size, self.rank = view, size, rank
        self.place = Place(base)
        self.state = State.APPLIED
        self.held = self.applied = base
        self.frozen: str | None = None
        # The latest ok of each member.
        self._oks = [Place(base, 2**16)] * size

    @property
    def done(self) -> int:
        """How many steps all members are known to hold."""
        sealed = self.state in (State.SEALED, State.APPLIED)
        return self.place.step + 1 if sealed or self.place.attempt else self.place.step

    def open(self, step: int, attempt: int = 0) -> Decision:
        """Begin to contribute to a step; may be called again for each bucket.

        Raises:
            SessionError: it is not the next step or the next attempt.
        """
        place = Place(step, attempt)
        if self.frozen is not None:
            return Decision(Act.IGNORE, f"the view is frozen: {self.frozen}")
        if place == self.place and self.state is State.OPEN:
            return Decision(Act.NOTHING, f"{place} is open already")
        ready = self.state in (State.SEALED, State.APPLIED)
        if place == (self.place.step + 1, 0) and ready:
            # Whoever goes on to the next step has let the optimizer see this one.
            self.applied = self.held
        elif not (place == (self.place.step, self.place.attempt + 1) and ready and attempt):
            raise SessionError(
                f"{place} cannot begin: {self.place} is {self.state.value}; steps follow each "
                "other, each sealed before the next"
            )
        self.place, self.state = place, State.OPEN
        return Decision(Act.NOTHING, f"{place} is open")

    def hold(self, step: int, attempt: int = 0) -> Decision:
        """Note that this member has the step's complete result.

        Raises:
            SessionError: the step is not open.
        """
        place = Place(step, attempt)
        if self.frozen is not None:
            return Decision(Act.IGNORE, f"the view is frozen: {self.frozen}")
        if place != self.place or self.state is not State.OPEN:
            raise SessionError(f"{place} cannot be held: {self.place} is {self.state.value}")
        self.state, self.held = State.HELD, step
        self._oks[self.rank] = place
        if self._seal():
            return Decision(Act.TELL_AND_WAKE, f"all members hold {place}")
        return Decision(Act.TELL, self.waiting())

    def ok(self, rank: int, view: int, step: int, attempt: int = 0) -> Decision:
        """Take a member's ok."""
        place = Place(step, attempt)
        if view != self.view:
            return Decision(Act.IGNORE, f"ok for view {view} in view {self.view}")
        if self.frozen is not None:
            return Decision(Act.IGNORE, f"the view is frozen: {self.frozen}")
        if not 0 <= rank < self.size or rank == self.rank:
            return Decision(Act.REFUSE, f"ok from rank {rank}")
        latest = self._oks[rank]
        follows = (latest.step, latest.attempt + 1), (latest.step + 1, 0)
        if place not in follows:
            return Decision(Act.REFUSE, f"rank {rank} says ok to {place} after {latest}")
        self._oks[rank] = place
        if self._seal():
            return Decision(Act.WAKE, f"all members hold {self.place}")
        return Decision(Act.NOTHING, self.waiting())

    def apply(self, step: int) -> Decision:
        """Note that the optimizer sees the step's result.

        Raises:
            SessionError: the step is not sealed.
        """
        if step != self.place.step or self.state not in (State.SEALED, State.APPLIED):
            raise SessionError(f"step {step} cannot be applied: {self.place} is {self.state.value}")
        self.state, self.applied = State.APPLIED, step
        return Decision(Act.NOTHING, f"step {step} is applied")

    def freeze(self, reason: str) -> Decision:
        """Let nothing of this view count any more; irrevocable."""
        if self.frozen is None:
            self.frozen = reason
        return Decision(Act.NOTHING, f"frozen at {self.place}, {self.state.value}: {self.frozen}")

    def has_ok(self, rank: int, step: int, attempt: int = 0) -> bool:
        """Tell whether a member is known to hold a step."""
        return self._oks[rank] >= Place(step, attempt)

    def waiting(self) -> str:
        """Return in words what the latest step waits for."""
        missing = [str(rank) for rank in range(self.size) if self._oks[rank] < self.place]
        if not missing:
            return f"{self.place} is {self.state.value}"
        return f"{self.place} is {self.state.value}; no ok yet from rank {', '.join(missing)}"

    def _seal(self) -> bool:
        if self.state is State.HELD and all(each >= self.place for each in self._oks):
            self.state = State.SEALED
            return True
        return False
