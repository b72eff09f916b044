from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdpt.cli.node import describe
from p2pdpt.config import NodeConfig

Command = Callable[..., tuple[int, str, str]]
Start = Callable[..., "subprocess.Popen[str]"]
Script = Callable[[str], str]


def test_how_a_node_describes_itself(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    assert describe("127.0.0.1:7", NodeConfig()) == (
        "listens on 127.0.0.1:7, this machine only; peers are not authenticated (no secret), "
        "connections are not encrypted"
    )
    assert describe("10.0.0.1:7", NodeConfig(secret_file=secret)) == (
        "listens on 10.0.0.1:7; peers are authenticated by the shared secret, connections are "
        "not encrypted"
    )
    assert describe("", NodeConfig()) == "does not listen"


def test_a_script_runs_in_this_terminal(command: Command, script: Script) -> None:
    path = script("print(name, *sys.argv[1:])\nprint('oops', file=sys.stderr)\nsys.exit(7)")
    arguments = ("node", "start", "--name", "node5", "--min-nodes", "6", path, "--epochs", "3")
    assert command(*arguments) == (7, "node5 --epochs 3\n", "oops\n")


def test_a_scripts_reports_and_figures(command: Command, script: Script) -> None:
    path = script(
        "join()\nevent('report', step=3, epoch=1, metrics={'loss': 0.5, 'best': True})\n"
        "time.sleep(0.5)\nevent('report', step=4, epoch=1, metrics={'loss': 0.25})\nfinish()"
    )
    code, out, err = command(
        "node", "start", "--name", "node0", "--run", "r", "--min-nodes", "1", path
    )
    assert (code, out) == (0, "")
    lines = err.split("\n")
    assert lines[:4] == [
        "r: 1 member (node0), ring over tcp",
        "r: epoch 1, step 3, loss 0.5000, best True",
        "r: epoch 1, step 4, loss 0.2500",
        "",
    ]
    assert lines[4].startswith("r: 1 member, ring over tcp, ")
    assert lines[-2] == f"parameters             {'d' * 16}, one node here"


def test_a_script_that_is_killed(command: Command, script: Script) -> None:
    path = script("os.kill(os.getpid(), signal.SIGKILL)")
    code, out, err = command("node", "start", "--min-nodes", "2", path)
    assert (code, out) == (137, "")
    assert err == (
        "p2pdpt: node0 failed before it joined: killed by signal 9 (out of memory? see dmesg)\n"
    )


def test_a_script_is_interrupted(start: Start, script: Script) -> None:
    path = script(
        "try: print('ready', flush=True); time.sleep(600)\n"
        "except KeyboardInterrupt: print('farewell', flush=True)"
    )
    process = start("node", "start", "--min-nodes", "2", path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20) == ("farewell\n", "")
    assert process.returncode == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_node_without_a_script_stays(start: Start, number: signal.Signals) -> None:
    process = start("node", "start", "--name", "witness")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("node witness listens on 127.0.0.1:")
    assert line.endswith(
        ", this machine only; peers are not authenticated (no secret), connections are not "
        "encrypted\n"
    )
    port = int(line.split(",")[0].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 5):
        pass
    begin = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (128 + number, "")
    # It may have noticed that we closed the connection without a word.
    assert err.count("\n") <= 1
    assert time.monotonic() - begin < 2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def test_a_port_that_is_taken(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = command("node", "start", "--port", str(port))
    assert (code, out) == (2, "")
    assert err.startswith(f"p2pdpt: port {port} on 127.0.0.1 is in use")
    assert "use port 0 for any free one" in err
    assert err.count("\n") == 1


def test_beyond_this_machine_a_secret_is_needed(command: Command) -> None:
    code, out, err = command("node", "start", "--listen", "0.0.0.0:0")
    assert (code, out) == (2, "")
    assert "secret" in err
    assert err.count("\n") <= 3


def test_a_wrong_address(command: Command) -> None:
    said = "p2pdpt: join '10.0.0.1' has no port; write 10.0.0.1:PORT\n"
    assert command("node", "start", "--join", "10.0.0.1") == (2, "", said)
