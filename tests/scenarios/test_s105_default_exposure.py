"""S105: what can be reached by default, and what a stranger sees."""

from __future__ import annotations

import re
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest


def listening(pid: int) -> list[str]:
    """Return the addresses, in hexadecimal, at which a process listens with TCP."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        own.add(str(entry.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            row = line.split()
            if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                found.append(row[1].partition(":")[0])
    return found


def test_s105_loopback_only_and_says_so(command: Any) -> None:
    node = command("node", "start")
    line = node.stdout.readline()
    assert "listens on 127.0.0.1:" in line
    assert "this machine only" in line
    assert "not authenticated (no secret)" in line
    assert "not encrypted" in line
    assert listening(node.pid) == ["0100007F"]


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_s105_elsewhere_only_with_a_secret(command: Any, listen: str) -> None:
    node = command("node", "start", "--listen", listen)
    _, errors = node.communicate(timeout=30)
    assert node.returncode == 2
    assert "this node has no secret" in errors


def test_s105_a_stranger_learns_nothing(command: Any, within: Any, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 40)
    secret.chmod(0o600)
    node = command(
        "node", "start", "--run", "hush-hush", "--name", "confidential", "--cluster", "classified",
        "--secret-file", str(secret),
    )  # fmt: skip
    found = re.search(r"127\.0\.0\.1:(\d+)", node.stdout.readline())
    assert found is not None
    hello = b"\x9fp2pdpt\n" + struct.pack("!HH", 1, 0) + bytes(20) + bytes(32)
    with_secret = b"\x9fp2pdpt\n" + struct.pack("!HH", 1, 1) + bytes(20) + bytes(32)
    proof = struct.pack("!BH", 1, 32) + bytes(32)
    for words in (hello, with_secret + proof, b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04"):
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", int(found.group(1))), timeout=10) as sock:
            sock.sendall(words)
            if len(words) < 8:
                # Whoever says too little has said nothing yet.
                sock.shutdown(socket.SHUT_WR)
            heard = b""
            try:
                while data := sock.recv(4096):
                    heard += data
            except ConnectionError:
                pass
        within(time.monotonic() - began, 1)
        assert len(heard) <= 200
        for word in (b"hush", b"confidential", b"classified"):
            assert word not in heard
    assert node.poll() is None
