"""The lines that a script's session reports to its launcher: one JSON object each, typed.

Written on the descriptor named by ``P2PDPT_REPORT_FD``. A line that cannot be read is dropped:
reports are for people to look at, and none of them may stop a run.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "Event",
    "Failed",
    "Finished",
    "Joined",
    "MAX_LINE",
    "Progress",
    "Report",
    "Value",
    "parse_event",
]

MAX_LINE = 1 << 20
"""Bytes of the longest line that is read: a thousand members' names fit twenty times."""

Value = float | int | bool | str | None
"""What a reported metric may be."""


class Joined(msgspec.Struct, frozen=True, tag_field="event", tag="joined"):
    """The node is a member of the run.

    Attributes:
        id: 16 hexadecimal digits of the incarnation.
        name: what people call it.
        rank: its place in the view.
        members: all members' names in rank order.
        topology: as a person would write it.
        transport: the transport's name.
        address: where the node listens.
    """

    id: str
    name: str
    rank: int
    members: list[str]
    topology: str = ""
    transport: str = ""
    address: str = ""

    @property
    def exchange(self) -> str:
        """How the members exchange, in words: ``ring over tcp``."""
        return f"{self.topology} over {self.transport}" if self.transport else self.topology


class Progress(msgspec.Struct, frozen=True, tag_field="event", tag="progress"):
    """How far the node is; `samples_per_s` and `steps_per_s` are of the last moments."""

    step: int
    epoch: int = 0
    samples_per_s: float = 0.0
    steps_per_s: float = 0.0
    bytes_sent: int = 0
    exposed_s: float = 0.0
    loss: float | None = None


class Report(msgspec.Struct, frozen=True, tag_field="event", tag="report"):
    """What the script reported by ``s.report``."""

    metrics: dict[str, Value]
    step: int = 0
    epoch: int = 0


class Finished(msgspec.Struct, frozen=True, tag_field="event", tag="finished"):
    """The session ended well; rates are over all of it, `exposed_s` and `seconds` in seconds."""

    id: str
    name: str
    digest: str
    steps: int
    samples_per_s: float = 0.0
    steps_per_s: float = 0.0
    bytes_sent: int = 0
    exposed_s: float = 0.0
    seconds: float = 0.0
    metrics: dict[str, Value] = {}


class Failed(msgspec.Struct, frozen=True, tag_field="event", tag="failed"):
    """The session ended by an error.

    Attributes:
        error: its text.
        kind: the name of its class.
        step: the step that was open, if any.
    """

    error: str
    kind: str = ""
    step: int | None = None


Event = Joined | Progress | Report | Finished | Failed

_DECODER = msgspec.json.Decoder(Event)


def parse_event(line: bytes) -> Event | None:
    """Return what a line says, or None if it is not one of the events."""
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
