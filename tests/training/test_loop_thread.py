"""The loop beside the training thread: calls, errors, interruptions and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from p2pdpt.errors import SessionError
from p2pdpt.training.loop_thread import LoopThread


async def answer(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_a_call_returns_what_the_coroutine_returns(loop_thread: LoopThread) -> None:
    assert loop_thread.running
    assert loop_thread.call(answer(42)) == 42


def test_it_runs_in_a_thread_of_its_own(loop_thread: LoopThread) -> None:
    async def name() -> str:
        return threading.current_thread().name

    assert loop_thread.call(name()) == "p2pdpt-loop"


def test_errors_come_back_as_they_are(loop_thread: LoopThread) -> None:
    async def fail() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        loop_thread.call(fail())


def test_post_keeps_order_with_calls(loop_thread: LoopThread) -> None:
    seen: list[int] = []
    for number in range(5):
        loop_thread.post(seen.append, number)
    loop_thread.call(answer(0))
    assert seen == [0, 1, 2, 3, 4]


def test_a_call_from_the_loop_itself_is_refused(loop_thread: LoopThread) -> None:
    async def nested() -> int:
        return loop_thread.call(answer(1))

    with pytest.raises(SessionError, match="cannot wait for itself"):
        loop_thread.call(nested())


def test_before_and_after_its_life_calls_are_refused() -> None:
    thread = LoopThread()
    with pytest.raises(SessionError, match="not running"):
        thread.call(answer(1))
    with pytest.raises(SessionError, match="not running"):
        thread.post(print)
    thread.stop()
    thread.start()
    thread.start()
    thread.stop()
    thread.stop()
    assert not thread.running
    with pytest.raises(SessionError, match="not running"):
        thread.call(answer(1))


def test_a_call_that_waits_when_the_loop_ends_gets_a_named_error() -> None:
    thread = LoopThread()
    thread.start()
    waiting = threading.Event()
    caught: list[BaseException] = []

    async def forever() -> None:
        waiting.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            thread.call(forever())
        except SessionError as error:
            caught.append(error)

    caller = threading.Thread(target=wait)
    caller.start()
    waiting.wait(5)
    thread.stop()
    caller.join(5)
    assert [str(error) for error in caught] == [
        "the session's network ended while this call waited"
    ]


def test_an_interrupt_ends_a_call_and_cancels_its_coroutine(loop_thread: LoopThread) -> None:
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def interrupt() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        loop_thread.call(forever())
    other.join()
    assert cancelled.wait(5)
    assert loop_thread.call(answer(7)) == 7


def test_a_forked_child_is_refused_and_does_not_hang(loop_thread: LoopThread) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            loop_thread.stop()
            if not loop_thread.running:
                loop_thread.call(answer(1))
        except SessionError as error:
            code = 0 if f"belongs to pid {os.getppid()}" in str(error) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert loop_thread.call(answer(2)) == 2
