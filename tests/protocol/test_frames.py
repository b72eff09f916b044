from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.channel import FRAME_BYTES, Meta, Tag
from p2pdpt.errors import FrameError, MismatchError
from p2pdpt.protocol import frames

TAG = Tag(view=1, stream=2, step=3, attempt=4, bucket=5, ordinal=6)
PACKED = frames.pack_tag(TAG)

tags = st.builds(
    Tag,
    view=st.integers(0, 2**32 - 1),
    stream=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**64 - 1),
    attempt=st.integers(0, 2**16 - 1),
    bucket=st.integers(0, 2**32 - 1),
    ordinal=st.integers(0, 2**32 - 1),
)


def header(
    *,
    magic: int = 0x9D2B,
    kind: int = 1,
    flags: int = 0,
    width: int = 4,
    length: int = 100,
    start: int = 0,
    count: int = 10,
) -> memoryview:
    return memoryview(
        struct.pack(
            "<HBBH26sQQIIdd",
            *(magic, kind, flags, width, PACKED, length, start, count, 1, 1.0, 1.0),
        )
    )


def test_sizes_on_the_wire() -> None:
    assert frames.TAG_BYTES == 26
    assert frames.HEADER_BYTES == 72
    assert frames.PREFIX_BYTES == 8
    assert frames.NOTE_BYTES == 36


def test_data_header_byte_for_byte() -> None:
    packed = frames.pack_data(PACKED, 0x1234567890, 7, 9, 2, Meta(0.5, 2.0, 3), True)
    assert packed.hex() == (
        "2b9d" "01" "01" "0200"  # magic, kind, flags, width
        "0400" "01000000" "02000000" "05000000" "06000000" "0300000000000000"  # tag
        "9078563412000000" "0700000000000000" "09000000"  # length, start, count
        "03000000" "000000000000e03f" "0000000000000040"  # contributions, scale, total
    )  # fmt: skip


@given(tags)
def test_tags_come_back(tag: Tag) -> None:
    packed = frames.pack_tag(tag)
    assert len(packed) == frames.TAG_BYTES
    assert frames.unpack_tag(packed) == tag


@pytest.mark.parametrize("field", Tag._fields)
@pytest.mark.parametrize("value", [-1, 2**64])
def test_tags_out_of_bounds(field: str, value: int) -> None:
    with pytest.raises(MismatchError, match=f"{field}={value}"):
        frames.pack_tag(TAG._replace(**{field: value}))


def test_tags_in_words() -> None:
    assert frames.describe(PACKED) == (
        "operation 6 of bucket 5 at step 3, attempt 4 of stream 00000002 in view 1"
    )
    assert frames.describe(frames.pack_tag(Tag(1, 0, 3, 0, 5, 6))) == (
        "operation 6 of bucket 5 at step 3 in view 1"
    )


@given(
    tags,
    st.integers(1, frames.MAX_WIDTH),
    st.integers(0, frames.MAX_LENGTH),
    st.integers(0, frames.MAX_LENGTH),
    st.data(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.floats(allow_nan=False),
    st.integers(0, 2**32 - 1),
)
def test_data_headers_come_back(
    tag: Tag,
    width: int,
    a: int,
    b: int,
    data: st.DataObject,
    eager: bool,
    scale: float,
    total: float,
    contributions: int,
) -> None:
    start, length = sorted((a, b))
    if start == length:
        start, length = max(start - 1, 0), max(length, 1)
    count = data.draw(st.integers(1, min(length - start, FRAME_BYTES // width)))
    meta = Meta(scale, total, contributions)
    packed = frames.pack_data(frames.pack_tag(tag), length, start, count, width, meta, eager)
    padded = memoryview(b"??" + packed)
    assert frames.parse_kind(padded, 2) == frames.DATA
    assert frames.parse_data(padded, 2) == (
        *(eager, width, frames.pack_tag(tag), length, start, count, meta),
    )


def test_offsets_beyond_4_gib() -> None:
    parsed = frames.parse_data(header(length=2**33, start=2**33 - 10), 0)
    assert parsed[3:6] == (2**33, 2**33 - 10, 10)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"magic": 1}, "magic 0x1"),
        ({"kind": 2}, "kind 2"),
        ({"flags": 2}, "flags 0x2"),
        ({"width": 0}, "width 0"),
        ({"width": 65}, "width 65"),
        ({"count": 0}, "count 0"),
        ({"count": 2**18 + 1, "length": 2**30}, "count 262145 of width 4"),
        ({"count": 2**32 - 1, "length": 2**30}, "exceeds 1048576 bytes"),
        ({"length": 2**60 + 1}, "length 1152921504606846977"),
        ({"length": 9}, "start 0 and count 10 of a data frame exceed the length 9"),
        ({"start": 91}, "start 91 and count 10 of a data frame exceed the length 100"),
        ({"start": 2**64 - 1}, "exceed the length 100"),
    ],
)
def test_data_headers_out_of_bounds(wrong: dict[str, int], text: str) -> None:
    with pytest.raises(FrameError, match=text):
        frames.parse_data(header(**wrong), 0)


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"GET / HT", "bad magic 4745"), (b"\x2b\x9d\x03\0\0\0\0\0", "unknown kind 3")],
)
def test_not_a_frame(data: bytes, text: str) -> None:
    with pytest.raises(FrameError, match=text):
        frames.parse_kind(memoryview(data), 0)


@given(st.binary(min_size=72, max_size=72))
def test_noise_is_refused_or_within_bounds(noise: bytes) -> None:
    for data in (noise, b"\x2b\x9d\x01" + noise[3:], b"\x2b\x9d\x01\x00\x04\x00" + noise[6:]):
        try:
            _, width, _, length, start, count, _ = frames.parse_data(memoryview(data), 0)
        except FrameError:
            continue
        assert 0 < count * width <= FRAME_BYTES
        assert start + count <= length <= frames.MAX_LENGTH


@given(st.lists(st.tuples(st.integers(1, 5), tags, st.integers(0, frames.MAX_LENGTH))))
def test_notes_come_back(notes: list[tuple[int, Tag, int]]) -> None:
    packed = [
        frames.pack_note(what, frames.pack_tag(tag), value) for what, tag, value in notes[:100]
    ]
    if not packed:
        return
    frame = memoryview(frames.pack_notes(packed))
    assert frames.parse_kind(frame, 0) == frames.NOTES
    assert frames.parse_notes(frame, 0) == len(packed)
    assert [
        frames.parse_note(frame, frames.PREFIX_BYTES + k * frames.NOTE_BYTES)
        for k in range(len(packed))
    ] == [(what, frames.pack_tag(tag), value) for what, tag, value in notes[:100]]


@pytest.mark.parametrize("number", [0, 1025, 2**32 - 1])
def test_number_of_notes_out_of_bounds(number: int) -> None:
    with pytest.raises(FrameError, match=f"number {number} of notes"):
        frames.parse_notes(memoryview(struct.pack("<HBBI", 0x9D2B, 2, 0, number)), 0)


@pytest.mark.parametrize(
    ("what", "zero", "value", "text"),
    [
        (0, 0, 1, "unknown note 0"),
        (6, 0, 1, "unknown note 6"),
        (1, 1, 1, "unknown note 1"),
        (2, 0, 2**63, "value 9223372036854775808 of note 2"),
    ],
)
def test_notes_out_of_bounds(what: int, zero: int, value: int, text: str) -> None:
    with pytest.raises(FrameError, match=text):
        frames.parse_note(memoryview(struct.pack("<BB26sQ", what, zero, PACKED, value)), 0)
