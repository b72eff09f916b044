from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from p2pdpt.channel import Transport
from p2pdpt.errors import P2PError
from p2pdpt.testing.transport_kit import TransportKit


@pytest.mark.parametrize(
    ("flaw", "test"),
    [
        ("gives no reason", TransportKit.test_name_and_availability),
        ("has another name", TransportKit.test_ends_know_each_other),
        ("closes at once", TransportKit.test_close_sends_what_was_granted),
        ("swallows failures", TransportKit.test_peer_closes_amid_a_message),
        ("tells nobody", TransportKit.test_abort_amid_a_message),
        (
            "places after cancel",
            TransportKit.test_receives_that_were_cancelled_hear_nothing_of_the_end,
        ),
    ],
)
async def test_flaws_are_found(
    flaw: str,
    test: Callable[[TransportKit], object],
    flawed: Callable[[str], type[Transport]],
) -> None:
    class Tests(TransportKit):
        transport = flawed(flaw)
        patience = 0.3

    with pytest.raises((AssertionError, TimeoutError, P2PError)):
        await getattr(Tests(), test.__name__)()


def test_the_kit_needs_no_pytest() -> None:
    check = "import sys, p2pdpt.testing.transport_kit; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


async def test_without_a_flaw_all_is_well(flawed: Callable[[str], type[Transport]]) -> None:
    class Tests(TransportKit):
        transport = flawed("")

    names = [name for name in dir(Tests) if name.startswith("test_")]
    assert len(names) > 35
    for name in names:
        await getattr(Tests(), name)()
