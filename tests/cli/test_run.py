from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdpt.cli.run import plan_nodes, run_environment
from p2pdpt.errors import ConfigError

Command = Callable[..., tuple[int, str, str]]
Start = Callable[..., "subprocess.Popen[str]"]
Script = Callable[[str], str]
Gone = Callable[[str], None]

FOLLOW = '''
class PeerFailedError(Exception):
    pass

def follow():
    """Do what a session does half a second after node1 has failed."""
    time.sleep(0.5)
    error = PeerFailedError("peer node1 at 127.0.0.1:1 failed: connection reset")
    fail(error, 3)
    raise error

join()
progress(3)
'''


def test_a_run_ends_with_the_table_and_the_file(
    command: Command, script: Script, tmp_path: Path
) -> None:
    path = script(
        """
join()
print("hello from", name, *sys.argv[1:])
print("to the errors", file=sys.stderr)
progress(1)
event("report", step=1, epoch=0, metrics={"loss": 0.5})
finish(test_accuracy=0.975)
"""
    )
    summary = tmp_path / "summary.json"
    code, out, err = command(
        "run", "--nodes", "2", "--run", "digits", "--summary", str(summary), path, "--epochs", "3"
    )
    assert code == 0
    seconds = json.loads(summary.read_text())["seconds"]
    assert out.split("\n") == [
        "hello from node0 --epochs 3",
        "",
        f"digits: 2 members, ring over tcp, {out.split('tcp, ')[1].splitlines()[0]}",
        "",
        "node   steps  steps/s  samples/s     sent  exposed            digest",
        "node0      8     10.0        100  1.50 kB   250 ms  dddddddddddddddd",
        "node1      8     10.0        100  1.50 kB   250 ms  dddddddddddddddd",
        "",
        "loss                   0.5000",
        "test_accuracy          0.9750",
        "steps/s                10.0",
        "samples/s              200",
        "bytes exchanged        3.00 kB",
        "exposed communication  250 ms (25% of training)",
        "parameters             equal on both nodes",
        "",
    ]
    assert sorted(err.split("\n")) == [
        "",
        "digits: 2 members (node0, node1), ring over tcp",
        "digits: epoch 0, step 1, loss 0.5000",
        "node0: to the errors",
        "node1: to the errors",
    ]
    node = {
        "digest": "d" * 32,
        "steps": 8,
        "samples_per_s": 100.0,
        "steps_per_s": 10.0,
        "bytes_sent": 1500,
        "exposed_s": 0.25,
    }
    assert json.loads(summary.read_text()) == {
        "run": "digits",
        "seconds": seconds,
        "exchange": "ring over tcp",
        "members": 2,
        "metrics": {"loss": 0.5, "test_accuracy": 0.975},
        "nodes": [
            {"id": "0000000000000000", "name": "node0", **node},
            {"id": "0000000000000001", "name": "node1", **node},
        ],
    }


def test_what_a_node_is_told(command: Command, script: Script, tmp_path: Path) -> None:
    path = script(
        """
wanted = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")
with open(f"{os.path.dirname(__file__)}/{name}.json", "w") as file:
    json.dump({k: v for k, v in os.environ.items() if k.startswith("P2PDPT_") or k in wanted}, file)
assert os.getpid() == os.getpgrp() == os.getsid(0)
assert sys.stdin.read() == ""
"""
    )
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    code, _, err = command(
        *("run", "--nodes", "2", "--topology", "mapreduce:reducer=0", "--join", "10.0.0.1:7"),
        *("--join", "10.0.0.2:7", "--min-nodes", "5", "--seed", "9", "--patience", "3"),
        *("--wait", "4.5", "--secret-file", str(secret), "--port", "7000", path),
        P2PDPT_LISTEN="127.0.0.2:1",
        P2PDPT_CLUSTER="lab",
        P2PDPT_SEED="1",
        OMP_NUM_THREADS="3",
    )
    assert (code, err) == (0, "")
    told = [json.loads((tmp_path / f"node{n}.json").read_text()) for n in range(2)]
    run = told[0].pop("P2PDPT_RUN")
    assert run == "train"
    assert told[1].pop("P2PDPT_RUN") == run
    assert told[0].pop("P2PDPT_REPORT_FD").isdigit()
    told[1].pop("P2PDPT_REPORT_FD")
    common = {
        "P2PDPT_CLUSTER": "lab",
        "P2PDPT_TOPOLOGY": "mapreduce:reducer=0",
        "P2PDPT_JOIN": "10.0.0.1:7,10.0.0.2:7",
        "P2PDPT_MIN_NODES": "5",
        "P2PDPT_SEED": "9",
        "P2PDPT_PATIENCE": "3.0",
        "P2PDPT_WAIT": "4.5",
        "P2PDPT_SECRET_FILE": str(secret),
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
    }
    assert told == [
        {"P2PDPT_NAME": "node0", "P2PDPT_LISTEN": "127.0.0.2:7000", **common},
        {"P2PDPT_NAME": "node1", "P2PDPT_LISTEN": "127.0.0.2:7001", **common},
    ]


def test_a_runs_name_is_random_unless_others_must_find_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("P2PDPT_RUN", raising=False)
    monkeypatch.delenv("P2PDPT_JOIN", raising=False)
    first, second = (run_environment("my/Train_1.py", {})["P2PDPT_RUN"] for _ in range(2))
    assert first != second
    assert first.startswith("train-1-") and len(first) == len("train-1-123456")
    joined = run_environment("my/Train_1.py", {"join": ("a:1",)})
    assert joined["P2PDPT_RUN"] == "train-1"
    assert run_environment("train.py", {"run": "mine"})["P2PDPT_RUN"] == "mine"


def test_names_are_in_the_order_of_ranks() -> None:
    names = [plan.name for plan in plan_nodes(["python"], 11, {})]
    assert names == sorted(names)
    assert names[::5] == ["node00", "node05", "node10"]


def test_threads_are_shared_out_and_a_variable_names_the_run() -> None:
    plans = plan_nodes(["python"], 10_000, {"P2PDPT_RUN": "x"})
    assert {plan.environment["OMP_NUM_THREADS"] for plan in plans} == {"1"}
    assert {plan.environment["P2PDPT_RUN"] for plan in plans} == {"x"}
    (plan,) = plan_nodes(["python"], 1, {"P2PDPT_NAME": "mine"})
    assert plan.name == "mine"
    with pytest.raises(ConfigError, match="there are no 3 ports from 65534 on"):
        plan_nodes(["python"], 3, {"P2PDPT_LISTEN": "127.0.0.1:65534"})


def test_the_users_traceback_comes_last_and_once(command: Command, script: Script) -> None:
    path = script(
        FOLLOW
        + """
def pick(batch):
    return batch["x"]

if rank != 1:
    follow()
try:
    pick({})
except KeyError as error:
    fail(error, 3)
    raise
"""
    )
    code, out, err = command("run", "--nodes", "3", "--run", "r", path)
    assert (code, out) == (1, "")
    first, _, block = err.partition("\n")
    assert first == "r: 3 members (node0, node1, node2), ring over tcp"
    lines = block.split("\n")
    assert lines[0] == "node1 (rank 1) failed at step 3: KeyError: 'x'"
    assert lines[1] == "Traceback (most recent call last):"
    text = Path(path).read_text().split("\n")
    called, raised = (1 + text.index(f"    {code}") for code in ("pick({})", 'return batch["x"]'))
    assert [line for line in lines if line.startswith("  File")] == [
        f'  File "{path}", line {called}, in <module>',
        f'  File "{path}", line {raised}, in pick',
    ]
    gone = "PeerFailedError: peer node1 at 127.0.0.1:1 failed: connection reset"
    assert lines[-4:] == [
        "KeyError: 'x'",
        f"node0 (rank 0) ended with it: {gone}",
        f"node2 (rank 2) ended with it: {gone}",
        "",
    ]
    assert err.count("Traceback") == 1


def test_a_killed_node_is_named(command: Command, script: Script) -> None:
    path = script(
        FOLLOW + "if rank != 1: follow()\ntime.sleep(0.3)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    code, _, err = command("run", "--nodes", "2", path)
    assert code == 137
    assert err.split("\n")[1:] == [
        "node1 (rank 1) failed after step 3: killed by signal 9 (out of memory? see dmesg)",
        "node0 (rank 0) ended with it: PeerFailedError: peer node1 at 127.0.0.1:1 failed: "
        "connection reset",
        "",
    ]


def test_a_scripts_own_exit_code_is_the_commands(command: Command, script: Script) -> None:
    code, _, err = command("run", "--nodes", "2", script(FOLLOW + "sys.exit(7 * rank)"))
    assert code == 7
    assert err.split("\n")[1:] == ["node1 (rank 1) failed after step 3: exit code 7", ""]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import nothing_there", "ModuleNotFoundError: No module named 'nothing_there'"),
        ("def f(:\n    pass", "SyntaxError: invalid syntax"),
    ],
)
def test_a_script_that_does_not_start(
    command: Command, script: Script, text: str, cause: str
) -> None:
    code, _, err = command("run", "--nodes", "3", script(text))
    lines = err.split("\n")
    first = lines[0].partition(" ")[0]
    others = [f"node{n}" for n in range(3) if f"node{n}" != first]
    assert code == 1
    assert lines[0] == f"{first} failed before it joined: {cause}"
    assert lines[-4:] == [cause, *(f"{other} failed in the same way" for other in others), ""]
    assert err.count("train.py") == 1


def test_errors_of_use_and_waiting_have_their_codes(command: Command, script: Script) -> None:
    path = script(
        """
class AddressInUseError(Exception): pass
class NotEnoughNodesError(Exception): pass
error = locals()[sys.argv[1]]("1 of 2 came; start the other one")
fail(error)
raise error
"""
    )
    said = "node0 failed before it joined: {}: 1 of 2 came; start the other one\n"
    for kind, expected in (("AddressInUseError", 2), ("NotEnoughNodesError", 3)):
        code, out, err = command("run", path, kind)
        assert (code, out, err) == (expected, "", said.format(kind))


def test_a_traceback_that_the_script_survives_is_shown(command: Command, script: Script) -> None:
    path = script("import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()")
    code, _, err = command("run", path)
    assert code == 0
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("ZeroDivisionError: division by zero\n")


def test_those_who_do_not_end_by_themselves_are_ended(
    command: Command, script: Script, gone: Gone
) -> None:
    path = script(
        """
if rank == 1:
    sys.exit(4)
signal.signal(signal.SIGTERM, lambda *_: os.write(2, b"asked\\n"))
while True:
    time.sleep(60)
"""
    )
    start = time.monotonic()
    code, _, err = command("run", "--nodes", "2", path)
    assert 5 < time.monotonic() - start < 12
    assert code == 4
    # Both come after five seconds, in either order; the notice may not come at all.
    *first, failed, stopped, end = err.split("\n")
    assert "node0: asked" in first
    assert all("not joined yet" in line for line in first if line != "node0: asked")
    assert [failed, stopped, end] == [
        "node1 failed before it joined: exit code 4",
        "node0 was stopped after it",
        "",
    ]
    gone(path)


SLEEP = """
import subprocess
here = os.path.abspath(__file__)
if rank == 0:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", here])
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", here],
                     start_new_session=True)
join()
print("ready", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    os.write(2, b"interrupted\\n")
    if "stay" in sys.argv:
        time.sleep(600)
    raise
"""


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_it_in_order(
    start: Start, script: Script, gone: Gone, number: signal.Signals, expected: int
) -> None:
    path = script(SLEEP)
    process = start("run", "--nodes", "2", "--run", "r", path)
    ready(process)
    begin = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - begin < 2
    assert (process.returncode, out) == (expected, "")
    lines = err.split("\n")
    assert sorted(lines[1:3]) == ["node0: interrupted", "node1: interrupted"]
    assert lines[3].startswith(f"r: stopped by {number.name} after ")
    assert lines[4:] == [""]
    gone(path)


def test_a_second_interrupt_ends_it_at_once(start: Start, script: Script, gone: Gone) -> None:
    path = script(SLEEP)
    process = start("run", "--nodes", "2", path, "stay")
    ready(process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert time.monotonic() - begin < 1
    assert process.returncode == 130
    gone(path)


def test_a_stubborn_node_does_not_hold_it_up(start: Start, script: Script, gone: Gone) -> None:
    path = script(SLEEP)
    process = start("run", "--nodes", "2", path, "stay")
    ready(process)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert 1.9 < time.monotonic() - begin < 4
    assert process.returncode == 130
    gone(path)


def test_an_early_failure_is_told_though_a_person_stopped_the_rest(
    start: Start, script: Script
) -> None:
    path = script("join()\nif rank: sys.exit(4)\nprint('ready')\ntime.sleep(600)")
    process = start("run", "--nodes", "2", path)
    ready(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err.split("\n")[1:3] == [
        "node1 (rank 1) failed: exit code 4",
        "node0 (rank 0) was stopped after it",
    ]


def test_a_killed_launcher_leaves_nothing(start: Start, script: Script, gone: Gone) -> None:
    # All but what took itself out of its node's session.
    path = script(SLEEP.replace("start_new_session=True", "start_new_session=False"))
    process = start("run", "--nodes", "3", "--run", "left-behind", path)
    ready(process)
    process.kill()
    process.wait()
    gone(path)
    gone(f"guard.py {process.pid}")


def test_what_a_killed_node_started_goes_with_it(start: Start, script: Script, gone: Gone) -> None:
    path = script(SLEEP)
    process = start("run", path)
    ready(process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    process.communicate(timeout=20)
    assert process.returncode == 137
    gone(path)


def test_what_a_finished_node_left_behind_is_ended(
    command: Command, script: Script, gone: Gone
) -> None:
    path = script(
        """
import subprocess
sleep = [sys.executable, "-c", "import time; time.sleep(600)", os.path.abspath(__file__)]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
print("end")
"""
    )
    code, out, _ = command("run", path)
    assert (code, out.split("\n")[0]) == (0, "end")
    gone(path)


def test_parameters_that_differ_are_a_failure(command: Command, script: Script) -> None:
    path = script("join()\nfinish(digest=name)")
    code, out, err = command("run", "--nodes", "2", "--run", "r", path)
    assert code == 1
    assert "DIFFERENT on 2 nodes" in out
    assert err.split("\n")[1:] == [
        "r: the nodes ended with different parameters; see the table",
        "",
    ]


def test_output_that_nobody_reads_does_not_stop_it(
    environment: dict[str, str], script: Script
) -> None:
    path = script("for n in range(50): print('line', n)\ntime.sleep(0.5)\nfinish()")
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-c", "from p2pdpt.cli.main import main; main()", "run", path],
        stdin=subprocess.DEVNULL,
        stdout=write,
        stderr=subprocess.PIPE,
        env=environment,
        timeout=30,
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.py"], "script 'nothing.py' does not exist"),
        (["/"], "script '/' is a folder"),
        (
            ["--topology", "rng", "SCRIPT"],
            "there is no topology called 'rng'; did you mean ring?; known: mapreduce, ring",
        ),
        (["--min-nodes", "0", "SCRIPT"], "--min-nodes is 0; a run needs at least one node"),
        (["--listen", "here", "SCRIPT"], "listen 'here' has no port; write here:PORT"),
        (
            ["--listen", "127.0.0.1:7", "--port", "7", "SCRIPT"],
            "--listen and --port are both given; put the port into --listen",
        ),
        (
            ["--summary", "/nowhere/s.json", "SCRIPT"],
            "--summary /nowhere/s.json: the folder '/nowhere' does not exist",
        ),
        (["--seed", "-1", "SCRIPT"], f"seed must be a whole number from 0 to {2**63 - 1}, not -1"),
    ],
)
def test_wrong_use_is_told_in_one_line(
    command: Command, script: Script, arguments: list[str], said: str
) -> None:
    path = script("print('never')")
    code, out, err = command("run", *(path if each == "SCRIPT" else each for each in arguments))
    assert (code, out, err) == (2, "", f"p2pdpt: {said}\n")


def test_an_unknown_option_is_told_with_the_nearest(command: Command, script: Script) -> None:
    code, out, err = command("run", "--node", "4", script(""))
    assert (code, out) == (2, "")
    assert err.split("\n")[0].startswith("p2pdpt: No such option '--node'")
    assert "--nodes" in err.split("\n")[0]
    assert err.split("\n")[1:] == ["Try: p2pdpt run --help", ""]


def test_a_wrong_variable_is_named(command: Command, script: Script) -> None:
    code, _, err = command("run", script(""), P2PDPT_SEED="x")
    assert (code, err) == (2, "p2pdpt: P2PDPT_SEED: 'x' is not a whole number\n")
