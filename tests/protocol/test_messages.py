from __future__ import annotations

import contextlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.errors import FrameError
from p2pdpt.protocol.messages import (
    GATHER_BYTES,
    HEAD,
    Abandoned,
    Adopt,
    Control,
    Decide,
    Farewell,
    Gather,
    Heartbeat,
    MemberEntry,
    MessageReader,
    Ok,
    Peers,
    Place,
    Propose,
    Released,
    Started,
    Status,
    Vote,
    Withdraw,
    encode,
)

A, B = "a" * 16, "b" * 16
VIEW = Decide(1, (MemberEntry(A, "ann", "h:1", 0), MemberEntry(B, "bob", "h:2", 1)), 7, "ring")
ALL: list[Control] = [
    Heartbeat(),
    Adopt(),
    Peers((Place(A, ("h:1", "[::1]:2")),)),
    Status(1, "ann", "h:1", "host", 2, "ring", 7, (A, B), True, B),
    Propose(3, (A, B), (1, 1)),
    Vote(3),
    Withdraw(3),
    VIEW,
    Started(VIEW),
    Gather("schema", 0, b"\0payload"),
    Ok(1, 12, 0),
    Farewell(12, {5: 6}, "ValueError: bad sample 1234", A, "connection reset"),
    Released(),
    Abandoned(1, 77, 12, 0, 3, "MemoryError: no room"),
]


@pytest.mark.parametrize("message", ALL, ids=lambda m: type(m).__name__)
def test_there_and_back(message: Control) -> None:
    assert MessageReader().receive(encode(message)) == [message]


@given(st.lists(st.integers(1, 30)))
def test_any_split_gives_the_same(cuts: list[int]) -> None:
    data = b"".join(encode(message) for message in ALL)
    reader = MessageReader()
    found: list[Control] = []
    for cut in cuts:
        found += reader.receive(data[:cut])
        data = data[cut:]
    found += reader.receive(data)
    assert found == ALL


def test_the_largest_payload_passes_and_no_larger() -> None:
    message = Gather("n", 0, bytes(GATHER_BYTES))
    assert MessageReader().receive(encode(message)) == [message]
    with pytest.raises(FrameError, match="exceeds the limit"):
        encode(Gather("n", 0, bytes(GATHER_BYTES + 5000)))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x63\0\0\0\1x", "there is no kind 99"),
        (HEAD.pack(1, 2**31), "Heartbeat of 2147483648 bytes exceeds the limit of 8"),
        (HEAD.pack(6, 1) + b"\xc1", "Vote"),
        (HEAD.pack(11, 4) + b"\x93\x01\xff\x00", "Ok"),
        (HEAD.pack(6, 4) + b"\x92\x01\x02\x03", "Vote"),
        (HEAD.pack(3, 20) + b"\x91" * 20, "Peers"),
    ],
)
def test_what_is_malformed_is_named(data: bytes, said: str) -> None:
    with pytest.raises(FrameError, match=said):
        MessageReader().receive(data)


def test_a_pickle_is_a_bad_message() -> None:
    with pytest.raises(FrameError, match="bad message"):
        MessageReader().receive(pickle.dumps({"a": 1}) + bytes(8))


@given(st.binary(max_size=300))
def test_any_bytes_are_messages_or_an_error(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        MessageReader().receive(data)


@given(st.integers(1, 13), st.binary(max_size=200))
def test_any_body_of_any_kind(kind: int, body: bytes) -> None:
    try:
        found = MessageReader().receive(HEAD.pack(kind, len(body)) + body)
    except FrameError:
        return
    assert len(found) == 1 and MessageReader().receive(encode(found[0])) == found
