from __future__ import annotations

import dataclasses

import pytest

from p2pdpt.channel import (
    EAGER_BYTES,
    FRAME_BYTES,
    Channel,
    ChannelCounters,
    Door,
    Landing,
    Listener,
    Meta,
    PeerInfo,
    Stream,
    Tag,
    Transport,
)


def test_limits_of_a_frame_and_of_eagerness() -> None:
    assert FRAME_BYTES == 1 << 20
    assert EAGER_BYTES == 64 << 10


def test_a_leaf_of_weight_one_is_the_default_meta() -> None:
    assert Meta() == (1.0, 1.0, 1)


def test_tags_are_told_apart_by_every_field() -> None:
    tag = Tag(1, 2, 3, 4, 5, 6)
    others = {tag._replace(**{field: 9}) for field in Tag._fields}
    assert len(others | {tag}) == 7
    assert Tag(view=1, stream=2, step=3, attempt=4, bucket=5, ordinal=6) == tag


def test_peers_are_called_by_name_or_else_by_id() -> None:
    assert str(PeerInfo("00ff", "bob")) == "bob"
    assert str(PeerInfo("00ff")) == "00ff"


def test_peers_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PeerInfo("00ff").name = "bob"  # type: ignore[misc]


def test_counters_begin_at_zero() -> None:
    assert dataclasses.astuple(ChannelCounters()) == (0, 0, 0, 0)


@pytest.mark.parametrize("contract", [Channel, Door, Landing, Listener, Stream, Transport])
def test_contracts_cannot_be_used_bare(contract: type) -> None:
    with pytest.raises(TypeError, match="abstract"):
        contract()
