"""S28: two people use one name for their runs, at the same time."""

from __future__ import annotations

from typing import Any

import pytest

SCRIPT = """
from p2pdpt import ADD

async def body(node, group):
    memory = group.allocate(dtype_named("float32"), 1000)
    memory.mine[:] = pattern(index(), 1000)
    for _ in range(20):
        await group.all_reduce(memory, ADD, name="sum")
    # Of nodes n0 and n1, or of nodes n2 and n3.
    own = [index() // 2 * 2, index() // 2 * 2 + 1]
    assert (memory.result == sum(pattern(i, 1000) for i in own)).all()
    say(done=True)

main(body)
"""


def test_s28_other_secrets(peers: Any, together: Any, tmp_path: Any) -> None:
    """Broadcast on a network of its own belongs to discovery over LAN."""
    files = []
    for owner in "ab":
        files.append(tmp_path / owner)
        files[-1].write_text(owner * 64)
        files[-1].chmod(0o600)
    mine = peers(SCRIPT, 2, secret_file=files[0])
    others = peers(SCRIPT, 2, first=2, secret_file=files[1])
    check(together([*mine, *others], wrote="secret"))


@pytest.mark.parametrize("what", ["cluster", "run"])
def test_s28_other_clusters_and_runs(peers: Any, together: Any, run_name: str, what: str) -> None:
    mine = peers(SCRIPT, 2, **{what: f"{run_name}-a"})
    others = peers(SCRIPT, 2, first=2, **{what: f"{run_name}-b"})
    check(together([*mine, *others]))


def check(said: list[list[dict[str, Any]]]) -> None:
    groups = [{member.split()[0] for member in each[0]["members"]} for each in said]
    assert groups == [{"n0", "n1"}, {"n0", "n1"}, {"n2", "n3"}, {"n2", "n3"}]
    assert all(each[-1]["done"] for each in said)


def test_s28_another_secret_at_the_address_given(
    peers: Any, free_ports: Any, within: Any, tmp_path: Any
) -> None:
    for owner in "ab":
        (tmp_path / owner).write_text(owner * 64)
        (tmp_path / owner).chmod(0o600)
    seed = f"127.0.0.1:{free_ports(1)[0]}"
    mine = peers(WAITING, 1, secret_file=tmp_path / "a", listen=seed, min_nodes=2)
    (other,) = peers(WAITING, 1, first=1, secret_file=tmp_path / "b", join=seed, min_nodes=2)
    assert other.end() == 1
    (said,) = other.said()
    assert said["error"] == "AuthenticationError"
    assert seed in said["text"]
    assert "secret" in said["text"]
    assert mine[0].poll() is None


WAITING = """
async def body(node, group):
    pass

main(body)
"""
