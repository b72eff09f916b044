from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.errors import TopologyError
from p2pdpt.topology import (
    ADD,
    ANY,
    COPY,
    MAX,
    MIN,
    PROD,
    Bucket,
    Combine,
    Facts,
    Links,
    Message,
    Recv,
    Region,
    Send,
    Topology,
)


def test_ways_to_combine_have_the_numbers_of_the_kernels() -> None:
    assert [COPY, ADD, MIN, MAX, PROD] == [0, 1, 2, 3, 4]
    assert list(Combine) == [COPY, ADD, MIN, MAX, PROD]


def test_regions_are_ranges() -> None:
    assert len(Region(3, 7)) == 4
    assert Region(3, 7) == Region(3, 7, 0)
    assert Region(3, 7) != Region(3, 7, 1)
    assert sorted([Region(2, 3), Region(1, 9)]) == [Region(1, 9), Region(2, 3)]
    for start, stop in ((-1, 2), (3, 2)):
        with pytest.raises(TopologyError, match=f"region {start}..{stop} is not a range"):
            Region(start, stop)


@given(start=st.integers(0, 50), length=st.integers(0, 200), count=st.integers(1, 40))
def test_chunks_cover_a_region_nearly_equally(start: int, length: int, count: int) -> None:
    region = Region(start, start + length, 3)
    chunks = region.chunks(count)
    assert [region.chunk(index, count) for index in range(count)] == chunks
    assert chunks[0].start == start
    assert chunks[-1].stop == start + length
    assert all(one.stop == other.start for one, other in itertools.pairwise(chunks))
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert {chunk.space for chunk in chunks} == {3}


def test_buckets_are_cut_alike() -> None:
    bucket = Bucket(10)
    assert bucket.region == Region(0, 10)
    assert bucket.chunks(3) == [Region(0, 3), Region(3, 6), Region(6, 10)]
    assert (bucket.dtype, bucket.combine, bucket.index) == ("float32", ADD, 0)


def test_a_send_names_one_rank_or_several() -> None:
    region = Region(0, 1)
    assert Send(2, region).to == (2,)
    assert Send(range(3), region).to == (0, 1, 2)
    assert Send(iter([4, 1]), region) == Send((4, 1), region)
    assert Send([], region).to == ()


def test_a_receive_names_its_sources_in_order() -> None:
    region = Region(0, 1)
    assert Recv(2, region) == Recv((2,), region, COPY)
    assert Recv([3, 1], region, ADD).sources == (3, 1)
    assert Recv(ANY).sources is ANY
    assert repr(Recv(ANY).sources) == "ANY"
    assert len(Recv(ANY).region) == 0


@pytest.mark.parametrize(
    ("sources", "region", "combine", "text"),
    [
        (1, None, COPY, "needs a region"),
        ((1, 2), Region(0, 1), COPY, "COPY takes one source, not 2"),
        ((), Region(0, 1), COPY, "COPY takes one source, not 0"),
        ((), Region(0, 1), ADD, "distinct sources"),
        ((1, 2, 1), Region(0, 1), ADD, r"distinct sources, not \(1, 2, 1\)"),
    ],
)
def test_receives_that_mean_nothing_are_refused(
    sources: Any, region: Region | None, combine: Combine, text: str
) -> None:
    with pytest.raises(TopologyError, match=text):
        Recv(sources, region, combine)


def test_messages_are_bounded() -> None:
    message = Message("push", -5, (Region(0, 1),))
    assert message.source == -1
    for kind in ("", "x" * 33, "püsh"):
        with pytest.raises(TopologyError, match="is not 1 to 32 ASCII characters"):
            Message(kind)
    Message("x" * 32, 2**63 - 1)
    Message("x", -(2**63))
    for clock in (2**63, -(2**63) - 1):
        with pytest.raises(TopologyError, match="does not fit 64 bits"):
            Message("x", clock)


def test_facts_are_empty_where_nothing_was_measured() -> None:
    assert Facts() == Facts((), (), ())


@dataclass(frozen=True)
class Grid(Topology):
    """For the descriptions."""

    static: ClassVar[bool] = True
    width: int = 4
    order: tuple[int, ...] = field(default_factory=lambda: (1, 2))

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        """Do nothing."""


class Plain(Topology):
    """Has no options."""

    async def exchange(self, links: Links, bucket: Bucket) -> None:
        """Do nothing."""


def test_a_topology_describes_itself_as_a_person_writes_it() -> None:
    assert Grid().describe() == "grid"
    assert Grid(width=2).describe() == "grid:width=2"
    assert Grid(2, (3,)).describe() == "grid:width=2,order=(3,)"
    assert Plain().describe() == "plain"


async def test_defaults() -> None:
    assert not Plain.static
    assert Plain.agreement == "exact"
    assert await Plain().serve(None, None) is None  # type: ignore[arg-type, func-returns-value]
