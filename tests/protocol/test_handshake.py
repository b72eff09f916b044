from __future__ import annotations

import pickle
import struct
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.errors import (
    AuthenticationError,
    FrameError,
    HandshakeError,
    VersionError,
    WrongRunError,
)
from p2pdpt.protocol import handshake
from p2pdpt.protocol.handshake import HELLO_BYTES, Handshake, Identity, Refusal

SECRET = b"0123456789abcdef"
ANN = Identity(
    cluster="c", run="r", kind="control", node_id="a" * 16, name="ann", package="1.2", torch="2.13"
)
BOB = Identity(
    cluster="c", run="r", node_id="b" * 16, name="bob", package="1.2", addresses=("h:1",)
)


def dialer(
    me: Identity = ANN, secret: bytes | None = SECRET, nonce: bytes = b"n" * 32
) -> Handshake:
    return Handshake("dialer", me, secret, nonce, where="h:1")


def acceptor(
    me: Identity = BOB,
    secret: bytes | None = SECRET,
    nonce: bytes = b"m" * 32,
    admit: Callable[[Identity], Refusal | None] = lambda peer: None,
) -> Handshake:
    return Handshake("acceptor", me, secret, nonce, where="h:2", admit=admit)


def feed(side: Handshake, data: bytes) -> bytes:
    """Feed as much as is wanted, and return the rest."""
    while data and not side.done:
        count = side.wanted
        side.receive(data[:count])
        data = data[count:]
    return data


def meet(one: Handshake, two: Handshake) -> None:
    for _ in range(8):
        feed(two, one.data_to_send())
        feed(one, two.data_to_send())


def test_both_learn_who_the_other_is() -> None:
    one, two = dialer(), acceptor()
    meet(one, two)
    assert one.error is None and two.error is None
    assert one.peer == BOB and two.peer == ANN
    assert one.done and two.done and one.wanted == two.wanted == 0


def test_hello_has_64_bytes() -> None:
    assert HELLO_BYTES == 64
    assert len(dialer().data_to_send()) == 64


def test_without_a_secret_on_both_sides() -> None:
    one, two = dialer(secret=None), acceptor(secret=None)
    meet(one, two)
    assert one.peer == BOB and two.peer == ANN


@pytest.mark.parametrize("mine", [None, SECRET])
def test_only_one_has_a_secret(mine: bytes | None) -> None:
    one, two = dialer(secret=mine), acceptor(secret=None if mine else SECRET)
    meet(one, two)
    assert isinstance(one.error, AuthenticationError) and "has none" in str(one.error)
    assert isinstance(two.error, AuthenticationError)


def test_other_secret_is_told_to_both_and_nothing_else_is() -> None:
    one, two = dialer(secret=b"x" * 16), acceptor()
    seen = bytearray()
    for _ in range(8):
        data = one.data_to_send()
        seen += data
        feed(two, data)
        data = two.data_to_send()
        seen += data
        feed(one, data)
    assert isinstance(one.error, AuthenticationError) and "the secrets differ" in str(one.error)
    assert isinstance(two.error, AuthenticationError) and "does not hold" in str(two.error)
    for private in (b"ann", b"bob", b"control", b"a" * 16, b"b" * 16):
        assert private not in seen


def test_other_version_is_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dialer()
    first = one.data_to_send()
    monkeypatch.setattr(handshake, "PROTOCOL", 2)
    two = acceptor(Identity(cluster="c", run="r", node_id="b" * 16, package="0.4.0"))
    feed(two, first)
    answer = two.data_to_send()
    assert str(two.error) == (
        "protocol 1 (p2pdpt 1.2) at h:2, 2 (p2pdpt 0.4.0) here; install the same version on both"
    )
    monkeypatch.setattr(handshake, "PROTOCOL", 1)
    feed(one, answer)
    assert isinstance(one.error, VersionError) and isinstance(two.error, VersionError)
    assert "protocol 2 (p2pdpt 0.4.0) at h:1, 1 (p2pdpt 1.2) here" in str(one.error)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"cluster": "d"}, "belongs to cluster"), ({"run": "s"}, "belongs to run")],
)
def test_other_cluster_or_run(change: dict[str, str], said: str) -> None:
    base = Identity(cluster="c", run="r", node_id="b" * 16)
    other = msgspec.structs.replace(base, **change)
    one, two = dialer(), acceptor(other)
    meet(one, two)
    assert isinstance(one.error, WrongRunError) and said in str(one.error)
    assert isinstance(two.error, WrongRunError) and said in str(two.error)
    assert one.peer is None and two.peer is None


def test_a_node_in_no_run_may_be_tried_again() -> None:
    one, two = dialer(), acceptor(Identity(cluster="c", node_id="b" * 16))
    meet(one, two)
    assert type(one.error) is HandshakeError and "is in no run yet" in str(one.error)


def test_expected_node() -> None:
    wanted = Identity(cluster="c", run="r", node_id="a" * 16, expected="c" * 16)
    one, two = dialer(wanted), acceptor()
    meet(one, two)
    assert one.peer is None and two.peer is None
    assert "not the one that was expected" in str(one.error)
    one, two = (
        dialer(Identity(cluster="c", run="r", node_id="a" * 16, expected="b" * 16)),
        acceptor(),
    )
    meet(one, two)
    assert one.peer == BOB


def test_the_acceptor_may_refuse() -> None:
    two = acceptor(admit=lambda peer: Refusal("other", f"no {peer.kind} here"))
    one = dialer()
    meet(one, two)
    assert str(one.error) == "h:1 refused this node: no control here"
    assert str(two.error) == "node ann at h:2 was refused: no control here"


def test_a_recorded_dialer_is_of_no_use() -> None:
    one, two = dialer(), acceptor()
    recorded = bytearray()
    for _ in range(4):
        data = one.data_to_send()
        recorded += data
        feed(two, data)
        feed(one, two.data_to_send())
    again = acceptor(nonce=b"o" * 32)
    feed(again, bytes(recorded))
    assert isinstance(again.error, AuthenticationError) and again.peer is None


def test_reflection_is_of_no_use() -> None:
    one = dialer()
    hello = one.data_to_send()
    feed(one, hello)
    proof = one.data_to_send()
    feed(one, proof)
    assert isinstance(one.error, AuthenticationError)


def test_a_changed_identity_is_noticed() -> None:
    one, two = dialer(), acceptor()
    feed(two, one.data_to_send())
    feed(one, two.data_to_send())
    feed(two, one.data_to_send())
    feed(one, two.data_to_send())
    feed(two, one.data_to_send().replace(b"ann", b"eve"))
    assert isinstance(two.error, AuthenticationError) and "changed" in str(two.error)


@pytest.mark.parametrize(
    "data", [pickle.dumps({"a": 1}), b"GET / HTTP/1.1\r\n", b"\0" * 64, b"\x16\x03\x01" + b"x" * 61]
)
def test_garbage(data: bytes) -> None:
    for side in (dialer(), acceptor()):
        feed(side, data + b"\0" * 64)
        assert isinstance(side.error, FrameError) and "does not speak p2pdpt" in str(side.error)


def test_a_stranger_gets_not_one_byte() -> None:
    side = acceptor()
    feed(side, b"GET / HTTP/1.1\r\n\r\n" * 4)
    assert side.data_to_send() == b""


@pytest.mark.parametrize("head", [(1, 33), (2, 10), (7, 1), (3, 20000), (1, 0)])
def test_bounds_and_order(head: tuple[int, int]) -> None:
    one, two = dialer(), acceptor()
    feed(two, one.data_to_send())
    feed(two, struct.pack("!BH", *head))
    assert isinstance(two.error, FrameError) and "in place of its proof" in str(two.error)


def test_refusals_cannot_steer_a_terminal() -> None:
    two = acceptor(admit=lambda peer: Refusal("other", "\x1b[2Jgone\n"))
    one = dialer()
    meet(one, two)
    assert str(one.error) == "h:1 refused this node: ?[2Jgone?"


def test_end_and_deadline() -> None:
    one, two = dialer(), acceptor()
    one.end()
    assert "h:1 closed the connection before it sent its hello" in str(one.error)
    two.expire(5)
    assert str(two.error) == "h:2 did not send its hello within 5 s"
    first = two.error
    two.end()
    two.receive(b"x")
    assert two.error is first


def test_names_that_could_steer_a_terminal_are_refused() -> None:
    one = dialer(Identity(cluster="c", run="r", node_id="a" * 16, name="\x1b[2J"))
    two = acceptor()
    meet(one, two)
    assert isinstance(two.error, FrameError) and two.peer is None


def test_nonce_length_is_checked() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        dialer(nonce=b"short")


@given(st.data())
def test_any_split_of_the_bytes(data: st.DataObject) -> None:
    sides = dialer(), acceptor()
    pending = [bytearray(), bytearray()]
    trailing = b"first bytes of the stream"
    sent = False
    for _ in range(1000):
        for index, side in enumerate(sides):
            pending[index] += side.data_to_send()
        if sides[1].done and not sent:
            pending[1] += trailing
            sent = True
        if all(side.done for side in sides):
            break
        index = data.draw(st.integers(0, 1))
        other = sides[1 - index]
        count = data.draw(st.integers(0, min(40, len(pending[index]))))
        count = min(count, other.wanted)
        other.receive(bytes(pending[index][:count]))
        del pending[index][:count]
    if all(side.done for side in sides):
        assert sides[0].peer == BOB and sides[1].peer == ANN
        assert bytes(pending[1]) == trailing


@given(st.data())
def test_bytes_flipped_anywhere_never_admit_the_wrong_node(data: st.DataObject) -> None:
    one, two = dialer(), acceptor()
    position = data.draw(st.integers(0, 2 * 400))
    mask = data.draw(st.integers(1, 255))
    passed = 0
    for _ in range(4):
        for source, target in ((one, two), (two, one)):
            out = bytearray(source.data_to_send())
            if passed <= position < passed + len(out):
                out[position - passed] ^= mask
            passed += len(out)
            feed(target, bytes(out))
    assert one.peer in (None, BOB) and two.peer in (None, ANN)
    if position < passed:
        assert one.peer is None or two.peer is None


@given(st.binary(max_size=600))
def test_any_bytes_end_in_an_error_or_wait(data: bytes) -> None:
    for side in (dialer(), acceptor()):
        feed(side, side._hello[:8] + data)
        assert side.peer is None
        side.end()
        assert side.error is not None


@given(st.integers(0, 300))
def test_truncation(count: int) -> None:
    one, two = dialer(), acceptor()
    left = count
    for _ in range(4):
        out = one.data_to_send()[:left]
        left -= len(out)
        feed(two, out)
        feed(one, two.data_to_send())
    two.end()
    assert two.peer is not None or two.error is not None
