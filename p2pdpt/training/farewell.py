"""The end of a session that went well: all members are done, and hold the same."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import msgspec

from p2pdpt.errors import P2PError, SessionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from p2pdpt.training.agreement import Agreement

__all__ = ["Ending", "describe_difference", "end_together"]

SHOWN: Final = 5
# What fits into one gather.
LISTED: Final = 40_000


class Ending(msgspec.Struct, array_like=True):
    """How a member ends: finished steps, and the digest of its models."""

    steps: int
    digest: str


def end_together(
    agreement: Agreement,
    mine: Ending,
    *,
    exact: bool,
    details: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Wait until all members are done, and compare what they hold.

    Args:
        exact: whether all must hold the same bits.
        details: digests by name of parameter or buffer, called where members differ.

    Raises:
        SessionError: they do not hold the same, or members ended in different places.
        PeerFailedError: a member failed before it was done.
    """
    endings = agreement.gather("the end of the session", mine, Ending)
    if exact and len({(each.steps, each.digest) for each in endings}) > 1:
        listed = dict(list(details().items())[:LISTED])
        parts = agreement.gather("the end of the session, details", listed, dict[str, str])
        raise SessionError.of_all(describe_difference(agreement.names, endings, parts))
    # Whoever hears all of this second call knows that all have finished the first, so that nobody
    # disturbs it by leaving; whoever leaves during this one has heard enough.
    with contextlib.suppress(P2PError):
        agreement.gather("the end of the session, all heard", "", str)


def describe_difference(
    names: Sequence[str], endings: Sequence[Ending], parts: Sequence[Mapping[str, str]]
) -> str:
    """Return what differs between members, given in rank order, and where to look for the cause.

    Args:
        parts: digests by name of parameter or buffer.
    """
    groups: dict[str, list[str]] = {}
    for name, end in zip(names, endings, strict=True):
        groups.setdefault(f"{end.digest[:12]} after {end.steps} steps", []).append(name)
    whole = ", ".join(f"{text} on {', '.join(who)}" for text, who in groups.items())
    differ = [key for key in parts[0] if len({part.get(key) for part in parts}) > 1]
    where = ", ".join(differ[:SHOWN])
    if len(differ) > SHOWN:
        where += f" and {len(differ) - SHOWN} more"
    return (
        f"the nodes' parameters and buffers are not equal at the end: {whole}"
        + (f"; they differ in {where}" if where else "")
        + ". Something changed them on one node only: a step taken or skipped there, a different "
        "learning rate, or a write to a parameter outside the optimizer"
    )
