from __future__ import annotations

from collections.abc import Callable

import pytest

from p2pdpt.channel import Transport
from p2pdpt.errors import P2PError
from p2pdpt.testing.callback_tests import CallbackTests


@pytest.mark.parametrize(
    ("flaw", "test"),
    [
        ("drains at once", CallbackTests.test_memory_is_free_once_drained),
        ("drains at once", CallbackTests.test_push_calls_nobody),
        ("places after cancel", CallbackTests.test_cancelled_receive_places_nothing_more),
        ("places after cancel", CallbackTests.test_landing_may_cancel_its_receive),
        ("sends after cancel", CallbackTests.test_cancelled_send_sends_nothing_more),
        ("swallows failures", CallbackTests.test_lengths_that_differ),
        ("fails twice", CallbackTests.test_lengths_that_differ),
    ],
)
async def test_flaws_are_found(
    flaw: str,
    test: Callable[[CallbackTests], object],
    flawed: Callable[[str], type[Transport]],
) -> None:
    class Tests(CallbackTests):
        transport = flawed(flaw)
        patience = 0.3

    with pytest.raises((AssertionError, TimeoutError, P2PError)):
        await getattr(Tests(), test.__name__)()
