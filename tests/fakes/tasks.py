"""Tasks that run during a test, and waits for conditions without notifications."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

POLL_SECONDS = 0.005


async def until(condition: Callable[[], object], *, seconds: float = 5) -> None:
    """Wait for a condition. The limit is a number of polls, and not a time of the clock: on a busy
    machine each of them takes longer, as the work of the other tasks does."""
    for _ in range(round(seconds / POLL_SECONDS)):
        if condition():
            return
        await asyncio.sleep(POLL_SECONDS)
    if not condition():
        raise TimeoutError(f"a condition did not become true in {seconds:g} s")


@asynccontextmanager
async def running(*parts: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Run parts during the block; none of them may end before it does."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        yield
        for task in tasks:
            assert not task.done(), task.exception()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextmanager
def counted_turns() -> Iterator[list[int]]:
    """Count the turns that other tasks of the loop get."""
    turns = [0]

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    yield turns
    counting.cancel()
