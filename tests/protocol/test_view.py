from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from p2pdpt.protocol.view import Member, View
from p2pdpt.topology import Facts

ADA = Member("00aa11bb22cc33dd", "ada", "10.0.0.1:7000")
BOB = Member("ffee11bb22cc33dd", "bob", "10.0.0.2:7000")


def test_members_have_ranks() -> None:
    view = View(1, (ADA, BOB))
    assert view.size == 2
    assert view.rank_of(ADA.node_id) == 0
    assert view.rank_of(BOB.node_id) == 1
    assert view.rank_of("0000000000000000") == -1
    assert view.facts == Facts()


def test_a_member_is_shown_with_the_start_of_its_id() -> None:
    assert str(ADA) == "ada (00aa11)"


def test_views_are_values() -> None:
    assert View(1, (ADA,)) == View(1, (ADA,))
    assert View(1, (ADA,)) != View(2, (ADA,))
    assert hash(View(1, (ADA,), Facts(hosts=(0,)))) == hash(View(1, (ADA,), Facts(hosts=(0,))))
    with pytest.raises(FrozenInstanceError):
        View(1, (ADA,)).number = 2  # type: ignore[misc]
