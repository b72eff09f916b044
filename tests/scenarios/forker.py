"""Starts processes at once: it has imported torch, and forks.

Reads one JSON object a line: ``{"start": script, "name", "environ", "out", "err"}`` is answered
with ``{"pid"}``, ``{"poll": pid}`` with ``{"status"}``: an exit code, minus a signal's number, or
null while it runs. Each process leads a session of its own.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import sys
import threading
import warnings

import stage  # noqa: F401 - what takes long to import, and what the scripts need
import torch.utils.data
import uvloop  # noqa: F401

import p2pdpt.runtime.joining
import p2pdpt.training  # noqa: F401


def answer(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def become(request: dict[str, str]) -> None:
    """Turn this new process into what was asked for."""
    os.setsid()
    for number, path in enumerate((os.devnull, request["out"], request["err"])):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(json.loads(request["environ"]))
    sys.argv = [request["start"]]


def serve() -> str:
    """Answer until the input ends; in a new process, return its script."""
    answer(ready=True)
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer(status=os.waitstatus_to_exitcode(status) if pid else None)
            continue
        child = os.fork()
        if child == 0:
            become(request)
            return str(request["start"])
        answer(pid=child)
    return ""


def end(script: str) -> int:
    """Run a script as in a process that was started with it, and return its exit code."""
    warnings.simplefilter("error")
    code: object = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        code = error.code or 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    # torch imports a third of itself with the first optimizer.
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    # Pages that are the same in all processes stay the same.
    gc.collect()
    gc.freeze()
    if script := serve():
        # The interpreter does not take itself apart, which takes longer than most scripts.
        os._exit(end(script))
