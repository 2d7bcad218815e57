"""Tasks beside a test, and waits for conditions that nothing notifies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any


async def until(condition: Callable[[], object], *, seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


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
