"""What a plugin sees: regions, operations, and a topology's name."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.errors import TopologyError
from p2pdpt.topology import (
    ADD,
    ANY,
    COPY,
    Bucket,
    Combine,
    Links,
    Message,
    Recv,
    Region,
    Send,
    Topology,
)


def test_a_region_is_a_range_of_elements() -> None:
    region = Region(3, 10)
    assert len(region) == 7
    assert region == Region(3, 10, 0) != Region(3, 10, 1)
    assert len(Region(5, 5)) == 0


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3)])
def test_a_region_that_is_no_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(TopologyError, match=f"region {start}..{stop} is not a range"):
        Region(start, stop)


def test_chunks_differ_by_at_most_one_element() -> None:
    assert Region(10, 20, 4).chunks(3) == [Region(10, 13, 4), Region(13, 16, 4), Region(16, 20, 4)]
    assert Bucket(2).chunks(3) == [Region(0, 0), Region(0, 1), Region(1, 2)]
    assert Bucket(0).chunks(2) == [Region(0, 0), Region(0, 0)]


@given(start=st.integers(0, 2**40), length=st.integers(0, 2**40), count=st.integers(1, 50))
def test_chunks_cover_a_region_exactly(start: int, length: int, count: int) -> None:
    region = Region(start, start + length)
    chunks = region.chunks(count)
    assert [chunk.start for chunk in chunks] + [region.stop] == [region.start] + [
        chunk.stop for chunk in chunks
    ]
    assert {len(chunk) for chunk in chunks} <= {length // count, length // count + 1}
    assert chunks == [region.chunk(index, count) for index in range(count)]


def test_the_numbers_of_combines_are_fixed() -> None:
    assert {combine.name: int(combine) for combine in Combine} == {
        "COPY": 0,
        "ADD": 1,
        "MIN": 2,
        "MAX": 3,
        "PROD": 4,
    }


def test_a_send_goes_to_one_rank_or_to_several() -> None:
    region = Region(0, 4)
    assert Send(2, region).to == (2,)
    assert Send([1, 3], region).to == (1, 3)
    assert Send(iter((1, 3)), region) == Send((1, 3), region)


def test_a_receive_lists_its_sources_in_order() -> None:
    region = Region(0, 4)
    assert Recv(2, region) == Recv((2,), region, COPY)
    assert Recv([2, 0], region, ADD).sources == (2, 0)
    assert Recv(ANY).sources is ANY
    assert len(Recv(ANY).region) == 0
    assert repr(ANY) == "ANY"


def test_a_receive_that_makes_no_sense_is_refused() -> None:
    region = Region(0, 4)
    with pytest.raises(TopologyError, match="COPY takes one source, not 2"):
        Recv([0, 1], region)
    with pytest.raises(TopologyError, match="distinct sources"):
        Recv([1, 1], region, ADD)
    with pytest.raises(TopologyError, match="distinct sources"):
        Recv([], region, ADD)
    with pytest.raises(TopologyError, match="needs a region"):
        Recv(1)


def test_a_message_is_bounded() -> None:
    message = Message("push", 7, (Region(0, 4),))
    assert (message.kind, message.clock, message.source) == ("push", 7, -1)
    for kind in ("", "x" * 33, "größe"):
        with pytest.raises(TopologyError, match="32 ASCII characters"):
            Message(kind)
    assert Message("pull", 2**63 - 1).clock == 2**63 - 1
    with pytest.raises(TopologyError, match="does not fit 64 bits"):
        Message("pull", 2**63)


class Plain(Topology):
    """Without options."""

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        """Exchange nothing."""


@dataclasses.dataclass(frozen=True)
class Optioned(Plain):
    """With options."""

    fan_out: int = 2
    hosts: tuple[int, ...] = dataclasses.field(default_factory=tuple)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted(Optioned):
    """With options, and no dictionary."""

    depth: int = 1


def test_a_topology_describes_itself_as_it_is_written() -> None:
    assert Plain().describe() == "plain"
    assert Optioned().describe() == "optioned"
    assert Optioned(fan_out=3).describe() == "optioned:fan_out=3"
    assert Slotted(depth=5, hosts=(1,)).describe() == "slotted:hosts=(1,),depth=5"


def test_a_topology_must_say_how_it_exchanges() -> None:
    with pytest.raises(TypeError, match="exchange"):
        Topology()  # type: ignore[abstract]
    assert (Plain.static, Plain.agreement) == (False, "exact")
