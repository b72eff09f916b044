"""S84: nothing is left behind, however a run ends."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

SCRIPT = """
import subprocess, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import p2pdpt

WAY, MARK = sys.argv[1:]
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = TensorDataset(torch.ones(100_000, 8), torch.ones(100_000, 1))
with p2pdpt.session(model, optimizer) as s:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", MARK])
    loader = DataLoader(data, batch_size=100, num_workers=2)
    for number, (x, y) in enumerate(s.split(loader)):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 3:
            print("running", flush=True)
            if WAY == "end":
                break
            if WAY == "error":
                raise ValueError("as asked")
        if number > 3:
            time.sleep(0.05)
"""
WAYS = {
    "end": (0, 0),
    "error": (0, 1),
    "SIGTERM": (signal.SIGTERM, 143),
    "SIGHUP": (signal.SIGHUP, 129),
    "SIGKILL": (signal.SIGKILL, -9),
}


def running(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if mark in line:
                found.append(f"{entry.name} {line}")
    return found


def listening(port: int) -> bool:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def test_s84_no_process_port_or_file(command: Any, tmp_path: Path, free_ports: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    before = {entry for entry in os.listdir("/dev/shm") if "p2pdpt" in entry}
    began = {}
    for way in WAYS:
        mark, (port,) = f"mark-{os.getpid()}-{way}", free_ports(1)
        process = command(
            "run", "--nodes", "1", "--port", str(port), str(script), way, mark,
            TMPDIR=str(tmp_path / way),
        )  # fmt: skip
        (tmp_path / way).mkdir()
        began[way] = process, mark, port
    for way, (process, mark, port) in began.items():
        number, code = WAYS[way]
        if number:
            while "running" not in (line := process.stdout.readline()):
                assert line, process.stderr.read()
            assert len(running(mark)) >= 2
            assert listening(port)
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code, (way, errors)
        assert not re.search("ResourceWarning|never|Exception ignored", errors)
        deadline = time.monotonic() + 12
        while running(mark) or listening(port):
            assert time.monotonic() < deadline, (way, running(mark))
            time.sleep(0.05)
        left = list((tmp_path / way).iterdir())
        # Not ours: torch's compiler keeps its folder, and Python's own for the loader's workers
        # stays behind when a process is killed.
        left = [path for path in left if not path.name.startswith(("pymp-", "torchinductor"))]
        assert left == [], way
    assert {entry for entry in os.listdir("/dev/shm") if "p2pdpt" in entry} == before
