"""S34: the port that was asked for is taken."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import Any

import pytest


def test_s34_by_another_node(command: Any, within: Any) -> None:
    first = command("node", "start", "--port", "0")
    line = first.stdout.readline()
    found = re.search(r"listens on 127\.0\.0\.1:(\d+)", line)
    assert found is not None, line
    port = found.group(1)
    for _ in range(2):
        check(command("node", "start", "--port", port), port, first.pid)
    assert first.poll() is None
    with socket.create_connection(("127.0.0.1", int(port)), timeout=5):
        pass
    first.terminate()
    _, errors = first.communicate(timeout=20)
    assert first.returncode == 143
    assert "WARN" not in errors and "Traceback" not in errors


@pytest.mark.parametrize("script", [False, True])
def test_s34_by_anybody_else(command: Any, tmp_path: Any, script: bool) -> None:
    train = tmp_path / "train.py"
    train.write_text("import p2pdpt, torch\np2pdpt.session(torch.nn.Linear(1, 1)).__enter__()\n")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        arguments = (
            ("run", "--port", port, str(train)) if script else ("node", "start", "--port", port)
        )
        check(command(*arguments), port, os.getpid())


def check(second: Any, port: str, holder: int) -> None:
    output, errors = second.communicate(timeout=60)
    assert second.returncode == 2, errors
    assert output == ""
    assert "Traceback" not in errors
    (line,) = errors.strip().splitlines()
    assert f"port {port} on 127.0.0.1 is in use by pid {holder} " in line
    assert "use port 0 for any free one, or another" in line


def test_s34_a_free_one_is_found_and_shown(command: Any) -> None:
    nodes = [command("node", "start") for _ in range(2)]
    lines = [node.stdout.readline() for node in nodes]
    ports = {found.group(1) for line in lines if (found := re.search(r"127\.0\.0\.1:(\d+)", line))}
    assert len(ports) == 2, lines
    time.sleep(0.1)
    assert all(node.poll() is None for node in nodes)
