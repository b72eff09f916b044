"""The end of a session that went well: all members are done, and hold the same."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from p2pdpt.errors import P2PError, SessionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from p2pdpt.training.agreement import Agreement

__all__ = ["Ending", "compare_endings", "end_together"]


class Ending(msgspec.Struct, array_like=True):
    """How a member ends: finished steps, and the digest of its models."""

    steps: int
    digest: str


def end_together(agreement: Agreement, mine: Ending, *, exact: bool) -> None:
    """Wait until all members are done, and compare what they hold.

    Args:
        exact: whether all must hold the same bits.

    Raises:
        SessionError: they do not, or members ended in different places.
        PeerFailedError: a member failed before it was done.
    """
    endings = agreement.gather("the end of the session", mine, Ending)
    if exact:
        compare_endings(agreement.names, endings)
    # Whoever hears all of this second call knows that all have finished the first, so that nobody
    # disturbs it by leaving; whoever leaves during this one has heard enough.
    with contextlib.suppress(P2PError):
        agreement.gather("the end of the session, all heard", "", str)


def compare_endings(names: Sequence[str], endings: Sequence[Ending]) -> None:
    """Check that all members trained the same.

    Raises:
        SessionError: steps or digests differ; says whose.
    """
    groups: dict[str, list[str]] = {}
    for name, end in zip(names, endings, strict=True):
        groups.setdefault(f"{end.digest[:12]} after {end.steps} steps", []).append(name)
    if len(groups) > 1:
        listed = ", ".join(f"{text} on {', '.join(who)}" for text, who in groups.items())
        raise SessionError(
            f"the nodes' parameters and buffers are not equal at the end: {listed}. Something "
            "changed them on one node only: a step taken or skipped there, a different learning "
            "rate, or a write to a parameter outside the optimizer"
        )
