from __future__ import annotations

from p2pdpt.cli.events import Failed, Finished, Joined, Progress, Report
from p2pdpt.cli.outcome import NodeState, exit_code, failure_lines, first_failure


def nodes(count: int = 3) -> list[NodeState]:
    found = [NodeState(f"node{rank}") for rank in range(count)]
    for rank, node in enumerate(found):
        node.hear(Joined(f"{rank:016x}", node.name, rank, [each.name for each in found]), 0.0)
        node.hear(Progress(step=2), 0.1)
    return found


def follow(node: NodeState, at: float) -> None:
    node.hear(Failed("peer node1 (00) at 127.0.0.1:1 failed: gone", "PeerFailedError", 3), at)
    node.end(1, at)


def test_an_error_that_names_its_kind_itself() -> None:
    run = nodes(1)
    run[0].hear(Failed("KeyError: 'x'", "KeyError", 3), 1.0)
    run[0].end(1, 1.1)
    assert run[0].cause == "KeyError: 'x'"


def test_no_failure() -> None:
    run = nodes()
    run[0].end(0, 1.0)
    assert first_failure(run) is None
    assert exit_code(None) == 0
    assert failure_lines(run) == []


def test_the_first_failure_is_not_the_first_that_is_noticed() -> None:
    run = nodes()
    follow(run[0], 1.0)
    run[1].hear(Failed("'x'", "KeyError", 3), 1.1)
    run[1].traceback = ["Traceback (most recent call last):", '  File "t.py", line 1', "KeyError"]
    run[1].end(1, 1.5)
    follow(run[2], 1.2)
    assert first_failure(run) is run[1]
    assert exit_code(run[1]) == 1
    follower = "PeerFailedError: peer node1 (00) at 127.0.0.1:1 failed: gone"
    assert failure_lines(run) == [
        "node1 (rank 1) failed at step 3: KeyError: 'x'",
        "Traceback (most recent call last):",
        '  File "t.py", line 1',
        "KeyError",
        f"node0 (rank 0) ended with it: {follower}",
        f"node2 (rank 2) ended with it: {follower}",
    ]


def test_a_kill_is_named_and_gives_its_code() -> None:
    run = nodes()
    run[1].end(-9, 1.0)
    follow(run[0], 1.1)
    run[2].stopped = True
    run[2].end(-15, 6.0)
    assert exit_code(first_failure(run)) == 137
    assert failure_lines(run) == [
        "node1 (rank 1) failed after step 2: killed by signal 9 (out of memory? see dmesg)",
        "node0 (rank 0) ended with it: PeerFailedError: peer node1 (00) at 127.0.0.1:1 failed: "
        "gone",
        "node2 (rank 2) was stopped after it",
    ]


def test_only_followers_are_here() -> None:
    run = nodes(2)
    follow(run[1], 1.0)
    follow(run[0], 1.1)
    assert first_failure(run) is run[1]


def test_an_exit_code_is_the_scripts_own() -> None:
    run = nodes(1)
    run[0].hear(Failed("7", "SystemExit", 3), 1.0)
    run[0].end(7, 1.1)
    assert exit_code(run[0]) == 7
    assert failure_lines(run) == ["node0 (rank 0) failed at step 3: exit code 7"]


def test_errors_of_use_are_told_without_a_traceback() -> None:
    run = [NodeState("node0"), NodeState("node1")]
    for node in run:
        node.hear(Failed("port 7 is taken\nuse another", "AddressInUseError"), 1.0)
        node.traceback = ["Traceback (most recent call last):"]
        node.end(1, 1.1)
    assert exit_code(run[0]) == 2
    assert failure_lines(run) == [
        "node0 failed before it joined: AddressInUseError: port 7 is taken",
        "use another",
        "node1 failed in the same way",
    ]
    assert "Traceback (most recent call last):" in failure_lines(run, debug=True)


def test_nodes_that_never_came() -> None:
    run = [NodeState("node0")]
    run[0].hear(Failed("1 of 2 nodes came within 3 s", "NotEnoughNodesError"), 1.0)
    run[0].end(1, 1.1)
    assert exit_code(run[0]) == 3


def test_a_node_that_hangs_after_its_failure_is_still_the_first() -> None:
    run = nodes(2)
    run[1].hear(Failed("'x'", "KeyError", 3), 1.0)
    follow(run[0], 1.2)
    assert first_failure(run) is run[0]
    run[1].stopped = True
    run[1].end(-15, 6.0)
    assert first_failure(run) is run[1]
    assert exit_code(run[1]) == 1
    assert failure_lines(run)[0] == "node1 (rank 1) failed at step 3: KeyError: 'x'"


def test_what_our_signal_caused_is_no_failure_of_the_nodes() -> None:
    run = nodes(1)
    run[0].stopped = True
    run[0].hear(Failed("", "KeyboardInterrupt", 3), 1.0)
    run[0].end(-2, 1.1)
    assert run[0].failed is None
    assert run[0].follows


def test_a_crash_before_the_session_is_told_by_its_traceback() -> None:
    run = [NodeState("node0")]
    run[0].traceback = [
        "Traceback (most recent call last):",
        '  File "train.py", line 1, in <module>',
        "    import nothing",
        "ModuleNotFoundError: No module named 'nothing'",
    ]
    run[0].end(1, 1.0)
    assert run[0].sentence == (
        "node0 failed before it joined: ModuleNotFoundError: No module named 'nothing'"
    )


def test_states_for_the_table() -> None:
    node = NodeState("node0")
    seen = [node.state]
    node.hear(Joined("00", "node0", 0, ["node0"]), 0.0)
    seen.append(node.state)
    node.hear(Progress(1), 0.0)
    seen.append(node.state)
    node.hear(Report({"loss": 1.0}), 0.0)
    node.hear(Finished("00", "node0", "ab", 1, metrics={"accuracy": 0.5}), 0.0)
    seen.append(node.state)
    node.end(0, 1.0)
    seen.append(node.state)
    assert seen == ["starting", "joined", "training", "finished", "done"]
    assert node.metrics == {"loss": 1.0, "accuracy": 0.5}
