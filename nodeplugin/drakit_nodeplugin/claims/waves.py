"""
Concurrent works whose results are taken in groups: what ends together costs one step further on.

Works that end at the same time, as those of a batch mostly do, come as one group, so that one
transaction stores them. A work that takes long delays the others by a moment, not by its length.

It must not know what the works are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

__all__ = ("waves", "workers")

ResultT = TypeVar("ResultT")

FIRST_SECONDS = 0.02
"""How long the first group waits for those that have not ended; doubling from group to group."""

LONGEST_SECONDS = 1.0


async def waves(
    works: Mapping[str, Coroutine[Any, Any, ResultT]],
    *,
    tasks: dict[str, asyncio.Task[Any]] | None = None,
) -> AsyncGenerator[Mapping[str, ResultT | BaseException]]:
    """
    Run works by key and give their results, or what they raised, in groups.

    While they run their tasks stand in `tasks`, if it is given, so that one can be cancelled: a
    cancelled work gives its CancelledError as its result. Who leaves early cancels the rest.

    All works begin in the same turn of the event loop.
    """
    running = {key: asyncio.create_task(work) for key, work in works.items()}
    if tasks is not None:
        tasks.update(running)
    linger_seconds = FIRST_SECONDS
    try:
        while running:
            done, _ = await asyncio.wait(running.values(), timeout=linger_seconds)
            linger_seconds = min(linger_seconds * 2, LONGEST_SECONDS)
            if not done:
                continue
            ended = {key: task for key, task in running.items() if task in done}
            for key in ended:
                del running[key]
                if tasks is not None:
                    del tasks[key]
            yield {key: _result(task) for key, task in ended.items()}
    finally:
        for key, task in running.items():
            task.cancel()
            if tasks is not None:
                del tasks[key]
        if running:
            await asyncio.wait(running.values())


async def workers(
    work: Callable[[], Coroutine[Any, Any, None]], *, parallel: int, items: int
) -> None:
    """Run a work that takes items off a line, as often at the same time as there is use for it."""
    async with asyncio.TaskGroup() as group:
        for _ in range(min(parallel, items)):
            group.create_task(work())


def _result(task: asyncio.Task[ResultT]) -> ResultT | BaseException:
    if task.cancelled():
        return asyncio.CancelledError()
    return task.exception() or task.result()
