"""What members of one host say to each other."""

from __future__ import annotations

import hashlib
import hmac

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.errors import FrameError
from p2pdpt.protocol.sharing import (
    MESSAGE_BYTES,
    PAYLOAD_BYTES,
    Announce,
    Hand,
    Hello,
    HostMessage,
    Refusal,
    Standing,
    Welcome,
    decode,
    encode,
    obstacle,
    prove,
    told,
    verdict,
)

A, B = "a" * 16, "b" * 16
NAMES = ["n0", "n1", "n2"]


@pytest.mark.parametrize(
    "message",
    [
        Hello(A, bytes(32)),
        Welcome(bytes(32)),
        Refusal("no"),
        Announce("bucket 0", bytes(PAYLOAD_BYTES)),
        Hand("x" * 256),
    ],
)
def test_messages_come_back(message: HostMessage) -> None:
    data = encode(message)
    assert len(data) <= MESSAGE_BYTES and decode(data) == message


@pytest.mark.parametrize(
    "wrong",
    [
        [1, "short", bytes(32)],
        [1, A, bytes(31)],
        [3, "x" * 1001],
        [4, "", b""],
        [4, "n", bytes(PAYLOAD_BYTES + 1)],
        [5, "n", "more"],
        [6, "n"],
        ["n"],
        7,
    ],
)
def test_anything_else_is_refused(wrong: object) -> None:
    with pytest.raises(FrameError, match="bad message between members of one host"):
        decode(msgspec.msgpack.encode(wrong))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    try:
        message = decode(data)
    except FrameError:
        return
    assert isinstance(message, HostMessage)


def test_too_long_a_message_is_not_sent() -> None:
    with pytest.raises(FrameError, match=r"Announce of 9\d+ bytes exceeds 8192"):
        encode(Announce("n", bytes(9000)))


def test_a_proof_names_both_sides_the_view_and_the_probe() -> None:
    token = b"t" * 32
    said = b"p2pdpt shared memory|3|" + A.encode() + b"|" + B.encode() + b"|probe"
    proof = prove(token, 3, A, B, b"probe")
    assert proof == hmac.new(token, said, hashlib.sha256).digest()
    others = [
        prove(token, 3, B, A, b"probe"),
        prove(token, 4, A, B, b"probe"),
        prove(token, 3, A, B),
        prove(b"u" * 32, 3, A, B, b"probe"),
    ]
    assert proof not in others and len(set(others)) == 4


def standing(reason: str = "", **what: int) -> Standing:
    return Standing(reason, False, what.get("version", 2), what.get("user", 7), b"\0x", b"t" * 32)


def test_nothing_stands_in_the_way() -> None:
    assert obstacle(NAMES, [0, 0, 0], [standing()] * 3, "") == ""


@pytest.mark.parametrize(
    ("hosts", "last", "topology", "said"),
    [
        ([0, 0, 0], standing("it was told to use tcp"), "", "n2: it was told to use tcp"),
        ([0, 0, 1], standing(), "", "n0 and n2 are on different hosts"),
        ([0, 0, 0], standing(user=8), "", "n0 and n2 belong to different users (7 and 8)"),
        ([0, 0, 0], standing(version=3), "", "n0 and n2 have different compiled modules"),
        ([0, 0, 0], standing(), "topology x: it is not static", "topology x: it is not static"),
    ],
)
def test_the_first_obstacle_is_named(
    hosts: list[int], last: Standing, topology: str, said: str
) -> None:
    assert obstacle(NAMES, hosts, [standing(), standing(), last], topology) == said


def test_the_first_pair_that_failed_is_named() -> None:
    assert verdict(NAMES, [{}, {}, {}]) == ""
    assert verdict(NAMES, [{}, {2: "no answer"}, {0: "x"}]) == "n1 and n2: no answer"
    assert verdict(NAMES, [{9: "x"}, {}, {}]) == ""


def test_what_was_told_is_checked() -> None:
    one = standing("because")
    assert told(msgspec.msgpack.encode(one), Standing) == one
    assert told(msgspec.msgpack.encode({1: "x"}), dict[int, str]) == {1: "x"}
    for payload in (b"", b"\xc1", msgspec.msgpack.encode({1: 2})):
        with pytest.raises(FrameError, match="a member says what cannot be read"):
            told(payload, dict[int, str])
