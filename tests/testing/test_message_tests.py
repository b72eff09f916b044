from __future__ import annotations

from collections.abc import Callable

import pytest

from p2pdpt.channel import Transport
from p2pdpt.errors import P2PError
from p2pdpt.testing.message_tests import MessageTests


@pytest.mark.parametrize(
    ("flaw", "test"),
    [
        ("loses metas", MessageTests.test_metas_arrive_with_their_elements),
        ("ignores grants", MessageTests.test_bulk_waits_for_its_grant),
        ("drains at once", MessageTests.test_bulk_waits_for_its_grant),
        ("mixes up tags", MessageTests.test_grants_may_come_long_before_the_message),
        ("mixes up tags", MessageTests.test_many_messages_at_once),
        ("mixes up tags", MessageTests.test_short_message_ahead_of_its_receive),
    ],
)
async def test_flaws_are_found(
    flaw: str,
    test: Callable[[MessageTests], object],
    flawed: Callable[[str], type[Transport]],
) -> None:
    class Tests(MessageTests):
        transport = flawed(flaw)
        patience = 0.3

    with pytest.raises((AssertionError, TimeoutError, P2PError)):
        await getattr(Tests(), test.__name__)()
