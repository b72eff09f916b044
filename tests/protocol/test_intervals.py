from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.protocol.intervals import IntervalMap


def test_assignments_cut_and_replace() -> None:
    found: IntervalMap[str] = IntervalMap(10, "a")
    assert found.pieces() == [(0, 10, "a")]
    found.assign(3, 6, "b")
    assert found.pieces() == [(0, 3, "a"), (3, 6, "b"), (6, 10, "a")]
    found.assign(5, 8, "c")
    assert found.pieces() == [(0, 3, "a"), (3, 5, "b"), (5, 8, "c"), (8, 10, "a")]
    assert found.lookup(4, 9) == [(4, 5, "b"), (5, 8, "c"), (8, 9, "a")]
    found.assign(0, 10, "d")
    assert found.pieces() == [(0, 10, "d")]


def test_ends_meet() -> None:
    found: IntervalMap[int] = IntervalMap(4, 0)
    found.assign(0, 2, 1)
    found.assign(2, 4, 2)
    assert found.pieces() == [(0, 2, 1), (2, 4, 2)]
    found.assign(2, 4, 3)
    assert found.pieces() == [(0, 2, 1), (2, 4, 3)]
    assert found.lookup(2, 3) == [(2, 3, 3)]


def test_empty_ranges_hold_nothing() -> None:
    found: IntervalMap[int] = IntervalMap(4, 0)
    found.assign(2, 2, 1)
    assert found.pieces() == [(0, 4, 0)]
    assert found.lookup(2, 2) == []
    assert IntervalMap(0, 0).pieces() == []


@given(
    length=st.integers(0, 20),
    ranges=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12),
)
def test_it_is_a_list_of_values(length: int, ranges: list[tuple[int, int]]) -> None:
    found: IntervalMap[int] = IntervalMap(length, -1)
    plain = [-1] * length
    for value, pair in enumerate(ranges):
        start, stop = sorted(min(end, length) for end in pair)
        found.assign(start, stop, value)
        plain[start:stop] = [value] * (stop - start)
        pieces = found.lookup(start, length)
        assert [v for a, b, v in pieces for _ in range(b - a)] == plain[start:]
        assert [a for a, _, _ in pieces[1:]] == [b for _, b, _ in pieces[:-1]]
        assert all(a < b for a, b, _ in found.pieces())
