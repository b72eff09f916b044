"""The contract of a group: what it shows of its view."""

from __future__ import annotations

import pytest

from p2pdpt.group import Group, GroupCounters
from p2pdpt.protocol.view import Member, View


class Shown(Group):
    """Only what the contract itself provides."""

    def __init__(self, view: View, rank: int) -> None:
        self.view, self.rank = view, rank


def test_a_group_shows_its_size_and_who_this_member_is(monkeypatch: pytest.MonkeyPatch) -> None:
    members = tuple(Member(f"{k:016x}", f"node{k}", f"127.0.0.1:{7000 + k}") for k in range(3))
    monkeypatch.setattr(Shown, "__abstractmethods__", frozenset())
    group = Shown(View(1, members), 2)  # type: ignore[abstract]
    assert group.size == 3
    assert group.me == members[2]


def test_a_group_must_do_all_that_training_asks() -> None:
    assert Group.__abstractmethods__ == {
        "all_gather",
        "all_reduce",
        "allocate",
        "broadcast",
        "counters",
        "exchange",
        "failure",
        "leave",
        "seal",
        "transport",
    }


def test_counters_are_bytes_and_messages() -> None:
    counters = GroupCounters(1, 2, 3, 4)
    assert (counters.bytes_sent, counters.bytes_received) == (1, 2)
    assert (counters.messages_sent, counters.messages_received) == (3, 4)
