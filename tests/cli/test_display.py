from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from p2pdpt.cli.display import (
    ForegroundDisplay,
    Output,
    PlainDisplay,
    TerminalDisplay,
    progress_line,
)
from p2pdpt.cli.events import Finished, Joined, Progress, Report
from p2pdpt.cli.outcome import NodeState
from p2pdpt.cli.summary import Summary

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def nodes(count: int) -> list[NodeState]:
    names = [f"node{rank}" for rank in range(count)]
    run = [NodeState(name) for name in names]
    for rank, node in enumerate(run):
        node.hear(Joined(f"{rank:016x}", node.name, rank, names, "ring", "tcp"), 0.0)
        node.hear(Progress(7 + rank, 0, 100.0, 10.0, 1500, 0.25, 0.5), 0.0)
    return run


class Files:
    def __init__(self, folder: Path) -> None:
        self._files = [open(folder / name, "w+b") for name in ("out", "err")]
        self.out, self.err = (Output(file.fileno()) for file in self._files)

    def read(self) -> tuple[str, str]:
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        return texts[0], texts[1]


def test_one_line_of_figures() -> None:
    assert progress_line("run", nodes(2), 12.0) == (
        "run: step 8, loss 0.5000, 200 samples/s, 3.00 kB sent, 2 members, 12.0 s"
    )
    assert progress_line("run", [NodeState("node0"), *nodes(1)[:0]], 3.0) == (
        "run: 1 of 1 local nodes not joined yet, 3.0 s"
    )


def test_plain_lines_come_seldom_and_only_with_news(tmp_path: Path) -> None:
    files, run = Files(tmp_path), nodes(2)
    display = PlainDisplay("run", run, files.out, files.err, every=5.0)
    for tenths in range(0, 200):
        display.tick(tenths / 10)
        if tenths == 101:
            run[0].hear(Progress(9), 0.0)
    display.out("from the script")
    display.err(run[1], "a warning")
    display.end(None, ["node1 failed"])
    assert files.read() == (
        "from the script\n",
        "run: step 8, loss 0.5000, 200 samples/s, 3.00 kB sent, 2 members, 5.0 s\n"
        "run: step 9, loss 0.5000, 100 samples/s, 1.50 kB sent, 2 members, 10.2 s\n"
        "node1: a warning\n"
        "node1 failed\n",
    )


def test_reports_are_shown_once_a_second(tmp_path: Path) -> None:
    files = Files(tmp_path)
    display = ForegroundDisplay("run", files.err)
    display.report(Report({"loss": 0.5, "best": True}, 1, 0))
    display.tick(0.25)
    for step in (2, 3):
        display.report(Report({"loss": 0.25}, step, 0))
    display.tick(0.5)
    display.tick(1.25)
    for step in range(4, 100):
        display.report(Report({"loss": 0.125}, step, 1))
    display.tick(2.25)
    display.report(Report({}, 100, 1))
    display.end(None, ["the end"])
    assert files.read() == (
        "",
        "run: epoch 0, step 1, loss 0.5000, best True\n"
        "run: epoch 0, step 2, loss 0.2500\n"
        "run: epoch 0, step 3, loss 0.2500\n"
        "run: epoch 1, step 99, loss 0.1250\n"
        "run: epoch 1, step 100\n"
        "the end\n",
    )


def test_a_single_nodes_lines_need_no_name(tmp_path: Path) -> None:
    files, run = Files(tmp_path), nodes(1)
    display = PlainDisplay("run", run, files.out, files.err)
    assert run[0].joined is not None
    display.joined("run", run[0].joined)
    display.err(run[0], "a warning")
    assert files.read() == ("", "run: 1 member (node0), ring over tcp\na warning\n")


def test_an_output_that_is_gone_is_silent() -> None:
    read, write = os.pipe()
    os.close(read)
    output = Output(write)
    output.lines("lost")
    os.close(write)
    output.lines("lost too")
    assert not output.is_terminal


def test_nothing_is_lost_to_an_output_that_is_busy(tmp_path: Path) -> None:
    program = (
        "import os\nfrom p2pdpt.cli.display import Output\nos.set_blocking(1, False)\n"
        "for n in range(20000): Output(1).lines(f'line {n}')\n"
    )
    out = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True).stdout
    assert out.split("\n") == [*(f"line {n}" for n in range(20000)), ""]


def test_the_live_table(tmp_path: Path) -> None:
    files, run, screen = Files(tmp_path), nodes(2), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    display = TerminalDisplay("run", run, files.out, console)
    display.out("from the script")
    display.err(run[0], "a [bold]warning[/bold]")
    display.tick(12.0)
    live = ESCAPES.sub("", screen.getvalue())
    assert "node0: a [bold]warning[/bold]\n" in live.replace("\r", "")
    table = live.replace("\r", "")[live.replace("\r", "").index("run: step") :].split("\n")
    assert [line.rstrip() for line in table] == [
        "run: step 8, loss 0.5000, 200 samples/s, 3.00 kB sent, 2 members, 12.0 s",
        "┏━━━━━━━┳━━━━━━━━━━┳━━━━━━┳━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━┓",
        "┃ node  ┃ state    ┃ step ┃ samples/s ┃   loss ┃    sent ┃ exposed ┃ members ┃",
        "┡━━━━━━━╇━━━━━━━━━━╇━━━━━━╇━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━┩",
        "│ node0 │ training │    7 │       100 │ 0.5000 │ 1.50 kB │  250 ms │       2 │",
        "│ node1 │ training │    8 │       100 │ 0.5000 │ 1.50 kB │  250 ms │       2 │",
        "└───────┴──────────┴──────┴───────────┴────────┴─────────┴─────────┴─────────┘",
    ]
    run[0].hear(Finished("0" * 16, "node0", "ab", 8), 0.0)
    display.end(Summary.of("run", 1.0, run), ["node1 failed"])
    shown = screen.getvalue()
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1
    assert ESCAPES.sub("", shown).endswith("node1 failed\n")
    out, err = files.read()
    assert out.startswith("from the script\nrun: 2 members, ring over tcp, 1.0 s\n\nnode ")
    assert err == ""


@pytest.mark.parametrize("end", ["finish", "interrupt"])
def test_a_run_on_a_terminal(
    environment: dict[str, str], script: Callable[[str], str], end: str
) -> None:
    path = script(
        "join()\nprint('hello')\nfor n in range(8): progress(n); time.sleep(0.1)\n"
        + ("finish()" if end == "finish" else "time.sleep(600)")
    )
    terminal, its_end = pty.openpty()
    # It becomes the process's own terminal, so that Ctrl-C is a signal.
    code = f"import os; os.login_tty({its_end}); from p2pdpt.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", "--nodes", "2", "--run", "r", path],
        env={**environment, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        pass_fds=(its_end,),
        start_new_session=True,
    )
    os.close(its_end)
    seen = b""
    interrupted = False
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:
            break
        seen += piece
        if end == "interrupt" and b"training" in seen and not interrupted:
            interrupted = True
            os.write(terminal, b"\x03")
    os.close(terminal)
    status = process.wait(timeout=30)
    text = ESCAPES.sub("", seen.decode()).replace("\r", "")
    assert seen.count(b"\x1b[?25l") == seen.count(b"\x1b[?25h") == 1
    assert "\nhello\n" in text
    assert re.search(r"│ node1 │ training │ +\d │ +100 │ 0.5000 │", text)
    if end == "finish":
        assert status == 0
        assert re.search(r"│ node1 │ +8 │ +10.0 │ +100 │ 1.50 kB │ +250 ms │ d{16} │", text)
        assert text.rstrip().endswith("\nparameters             equal on both nodes")
    else:
        assert status == 130
        assert re.search(r"r: stopped by SIGINT after \d\.\d s\n$", text)
