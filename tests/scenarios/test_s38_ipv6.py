"""S38: addresses of IPv6, and how they are written."""

from __future__ import annotations

import socket
from typing import Any

import pytest

SCRIPT = """
from p2pdpt import ADD

async def body(node, group):
    memory = fill(group, 1000)
    await group.all_reduce(memory, ADD, name="sum")
    assert (memory.result == pattern_sum(2, 1000)).all()
    say(addresses=[member.address for member in group.view.members])
    await group.leave()

main(body)
"""


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_s38_a_group_over_ipv6(
    peers: Any, together: Any, free_ports: Any, within: Any, transport: str
) -> None:
    """Machines with nothing but IPv6 belong to tests in network namespaces."""
    seed = f"[::1]:{free_ports(1)[0]}"
    two = peers(
        SCRIPT,
        2,
        listen=[seed, "[::1]:0"],
        join=["", seed],
        node={"discovery": ["static"]},
        transport=transport,
    )
    for said in together(two):
        assert seed in said[-1]["addresses"]
        assert all(address.startswith("[::1]:") for address in said[-1]["addresses"])


@pytest.mark.parametrize("option", ["--join", "--listen"])
def test_s38_the_bracketed_form_is_shown(command: Any, option: str) -> None:
    process = command("node", "start", option, "fd00::1:7777")
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert output == ""
    assert "[fd00::1]:7777" in errors
    assert len(errors.strip().splitlines()) <= 3
