from __future__ import annotations

import asyncio

from p2pdpt.runtime.background import Background


async def test_what_fails_is_told_once() -> None:
    told: list[tuple[str, Exception]] = []
    background = Background(lambda what, error: told.append((what, error)))

    async def boom() -> None:
        raise RuntimeError("boom")

    async def fine() -> None:
        await asyncio.sleep(0)

    await asyncio.wait([background.start(boom(), "a"), background.start(fine(), "b")])
    await asyncio.sleep(0)
    assert [(what, str(error)) for what, error in told] == [("a", "boom")]
    await background.close()


async def test_close_ends_all_and_nothing_begins_after_it() -> None:
    ended: list[str] = []
    background = Background(lambda what, error: ended.append(f"{what} failed"))

    async def forever(name: str) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0.01)
            ended.append(name)

    background.start(forever("a"), "a")
    background.start(forever("b"), "b")
    await asyncio.sleep(0)
    await background.close()
    assert sorted(ended) == ["a", "b"]
    late = background.start(forever("c"), "c")
    await asyncio.wait([late])
    assert late.cancelled() and "c" not in ended
    await background.close()


async def test_a_task_may_close_its_own_set() -> None:
    background = Background(lambda what, error: None)
    done = asyncio.Event()

    async def closes() -> None:
        await background.close()
        done.set()

    background.start(closes(), "closing")
    await asyncio.wait_for(done.wait(), 5)
