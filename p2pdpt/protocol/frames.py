"""What bulk looks like on the wire: the one place that packs and parses its frames.

Little-endian. Every frame begins with a magic number and its kind::

    DATA    magic u16, kind u8, flags u8, width u16, tag (26 bytes), length u64, start u64,
            count u32, contributions u32, scale f64, total f64; then count * width bytes
    NOTES   magic u16, kind u8, 0 u8, number u32; then that many notes of 36 bytes each:
            what u8, 0 u8, tag (26 bytes), value u64
    tag     attempt u16, view u32, stream u32, bucket u32, ordinal u32, step u64

`length`, `start` and `count` are elements, so a message may be longer than 4 GiB; `width` is
bytes of one element and may change from frame to frame. A packed tag is the key by which both
sides know a message. Every number is checked before anything is done with it.
"""

from __future__ import annotations

from struct import Struct, error
from typing import Final, TypeAlias

from p2pdpt.channel import FRAME_BYTES, Meta, Tag
from p2pdpt.errors import FrameError, MismatchError

__all__ = [
    "ANNOUNCE",
    "CREDIT",
    "DATA",
    "EAGER",
    "GRANT",
    "HEADER_BYTES",
    "MAX_LENGTH",
    "MAX_NOTES",
    "MAX_WIDTH",
    "NOTES",
    "NOTE_BYTES",
    "PREFIX_BYTES",
    "TAG_BYTES",
    "UNWANTED",
    "WITHDRAWN",
    "DataHeader",
    "describe",
    "pack_data",
    "pack_note",
    "pack_notes",
    "pack_tag",
    "parse_data",
    "parse_kind",
    "parse_note",
    "parse_notes",
    "unpack_tag",
]

MAGIC: Final = 0x9D2B

DATA: Final = 1
"""Frame kind: elements of a message."""
NOTES: Final = 2
"""Frame kind: a batch of notes about messages."""

EAGER: Final = 1
"""Flag of a DATA frame: sent before it was granted, against the pool's credit."""

ANNOUNCE: Final = 1
"""Note: a message of `value` elements waits for a grant, or is empty."""
GRANT: Final = 2
"""Note: elements below `value` may be sent."""
CREDIT: Final = 3
"""Note: `value` bytes of the pool are free again; its tag means nothing."""
UNWANTED: Final = 4
"""Note: the receive was cancelled; send nothing more."""
WITHDRAWN: Final = 5
"""Note: the message was cancelled; nothing more will come."""

MAX_WIDTH: Final = 64
"""The widest element, in bytes."""
MAX_LENGTH: Final = 1 << 60
"""The longest message, in elements."""
MAX_NOTES: Final = 1024
"""The most notes of one frame."""

_TAG: Final = Struct("<HIIIIQ")
_DATA: Final = Struct("<HBBH26sQQIIdd")
_NOTES: Final = Struct("<HBBI")
_NOTE: Final = Struct("<BB26sQ")

TAG_BYTES: Final = _TAG.size
HEADER_BYTES: Final = _DATA.size
PREFIX_BYTES: Final = _NOTES.size
NOTE_BYTES: Final = _NOTE.size

_pack_data = _DATA.pack
_unpack_data = _DATA.unpack_from
_new_meta = Meta._make


DataHeader: TypeAlias = tuple[bool, int, bytes, int, int, int, Meta]
"""A checked header: eager, width, packed tag, length, start, count (at least 1), meta."""


def pack_tag(tag: Tag) -> bytes:
    """Return the packed form of `tag`.

    Raises:
        MismatchError: a field is negative or too large.
    """
    view, stream, step, attempt, bucket, ordinal = tag
    try:
        return _TAG.pack(attempt, view, stream, bucket, ordinal, step)
    except error as wrong:
        raise MismatchError(f"{tag} does not fit its fields: {wrong}") from None


def unpack_tag(packed: bytes) -> Tag:
    """Return the tag that was packed."""
    attempt, view, stream, bucket, ordinal, step = _TAG.unpack(packed)
    return Tag(view, stream, step, attempt, bucket, ordinal)


def describe(packed: bytes) -> str:
    """Return a packed tag in words, for the texts of errors."""
    tag = unpack_tag(packed)
    stream = f" of stream {tag.stream:08x}" if tag.stream else ""
    attempt = f", attempt {tag.attempt}" if tag.attempt else ""
    return (
        f"operation {tag.ordinal} of bucket {tag.bucket} at step {tag.step}{attempt}{stream}"
        f" in view {tag.view}"
    )


def pack_data(
    tag: bytes, length: int, start: int, count: int, width: int, meta: Meta, eager: bool
) -> bytes:
    """Return the header of a DATA frame; the caller vouches for the bounds."""
    scale, total, contributions = meta
    return _pack_data(
        MAGIC, DATA, eager, width, tag, length, start, count, contributions, scale, total
    )


def parse_kind(data: memoryview, offset: int) -> int:
    """Return the kind of the frame at `offset`, where at least ``PREFIX_BYTES`` have arrived.

    Raises:
        FrameError: these bytes are not the beginning of a frame.
    """
    if data[offset] | data[offset + 1] << 8 != MAGIC:
        raise FrameError(f"bad magic {bytes(data[offset : offset + 2]).hex()} of a bulk frame")
    kind = data[offset + 2]
    if kind != DATA and kind != NOTES:
        raise FrameError(f"unknown kind {kind} of a bulk frame")
    return kind


def parse_data(data: memoryview, offset: int) -> DataHeader:
    """Return the checked header at `offset`, where ``HEADER_BYTES`` have arrived.

    Raises:
        FrameError: a field is out of bounds; the text names it.
    """
    magic, kind, flags, width, tag, length, start, count, contributions, scale, total = (
        _unpack_data(data, offset)
    )
    if (
        magic != MAGIC
        or kind != DATA
        or flags > EAGER
        or not 0 < width <= MAX_WIDTH
        or not 0 < count * width <= FRAME_BYTES
        or start + count > length
        or length > MAX_LENGTH
    ):
        raise _wrong(magic, kind, flags, width, length, start, count)
    meta = _new_meta((scale, total, contributions))
    return flags == EAGER, width, tag, length, start, count, meta


def _wrong(
    magic: int, kind: int, flags: int, width: int, length: int, start: int, count: int
) -> FrameError:
    if magic != MAGIC or kind != DATA:
        return FrameError(f"magic {magic:#x} and kind {kind} are not those of a data frame")
    if flags > EAGER:
        return FrameError(f"unknown flags {flags:#x} of a data frame")
    if not 0 < width <= MAX_WIDTH:
        return FrameError(f"width {width} of a data frame is not within 1 to {MAX_WIDTH}")
    if not count:
        return FrameError("count 0 of a data frame")
    if count * width > FRAME_BYTES:
        return FrameError(
            f"count {count} of width {width} of a data frame exceeds {FRAME_BYTES} bytes"
        )
    if length > MAX_LENGTH:
        return FrameError(f"length {length} of a data frame exceeds {MAX_LENGTH}")
    return FrameError(f"start {start} and count {count} of a data frame exceed the length {length}")


def pack_note(what: int, tag: bytes, value: int) -> bytes:
    """Return one note; the caller vouches for the bounds."""
    return _NOTE.pack(what, 0, tag, value)


def pack_notes(notes: list[bytes]) -> bytes:
    """Return a NOTES frame of 1 to ``MAX_NOTES`` packed notes."""
    return _NOTES.pack(MAGIC, NOTES, 0, len(notes)) + b"".join(notes)


def parse_notes(data: memoryview, offset: int) -> int:
    """Return how many notes the frame at `offset` has.

    Raises:
        FrameError: none, or more than ``MAX_NOTES``.
    """
    number: int
    _, _, zero, number = _NOTES.unpack_from(data, offset)
    if zero or not 0 < number <= MAX_NOTES:
        raise FrameError(f"number {number} of notes is not within 1 to {MAX_NOTES}")
    return number


def parse_note(data: memoryview, offset: int) -> tuple[int, bytes, int]:
    """Return what the note at `offset` says, its packed tag and its value.

    Raises:
        FrameError: it says something unknown, or its value is out of bounds.
    """
    what, zero, tag, value = _NOTE.unpack_from(data, offset)
    if zero or not ANNOUNCE <= what <= WITHDRAWN:
        raise FrameError(f"unknown note {what}")
    if value > MAX_LENGTH:
        raise FrameError(f"value {value} of note {what} exceeds {MAX_LENGTH}")
    return what, tag, value
