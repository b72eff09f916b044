"""S20: nodes that start at the same time form one group."""

from __future__ import annotations

import time
from typing import Any

import pytest

SCRIPT = """
async def body(node, group):
    memory = fill(group, 2000)
    await group.all_reduce(memory, ADD, name="first")
    assert (memory.result == pattern_sum(4, 2000)).all()
    await group.leave()

from p2pdpt import ADD
main(body)
"""
NODE = {"discovery": ["static"]}


@pytest.mark.parametrize("seeds", ["one", "all"])
def test_s20_one_group_every_time(
    peers: Any, together: Any, within: Any, free_ports: Any, run_name: str, seeds: str
) -> None:
    for repeat in range(5):
        ports = free_ports(4)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        join = ["", *[addresses[0]] * 3] if seeds == "one" else [",".join(addresses)] * 4
        began = time.monotonic()
        four = peers(SCRIPT, 4, node=NODE, listen=addresses, join=join, run=f"{run_name}-{repeat}")
        said = together(four)
        # One group, seen by all alike.
        assert len({tuple(each[0]["members"]) for each in said}) == 1
        assert sorted(each[0]["joined"] for each in said) == [0, 1, 2, 3]
        for each in said:
            within(each[0]["at"] - began, 5)


def test_s20_the_seed_comes_late(peers: Any, together: Any, within: Any, free_ports: Any) -> None:
    seed = f"127.0.0.1:{free_ports(1)[0]}"
    early = peers(SCRIPT, 3, first=1, node=NODE, join=seed, min_nodes=4)
    time.sleep(2)
    assert not any(peer.said() for peer in early)
    began = time.monotonic()
    late = peers(SCRIPT, 1, node=NODE, listen=seed, min_nodes=4)
    said = together([*late, *early])
    assert len({tuple(each[0]["members"]) for each in said}) == 1
    for each in said:
        within(each[0]["at"] - began, 5)
