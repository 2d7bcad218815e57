"""File pollers for tests, with fast rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from drakit_nodeplugin.changes import FilePoller

__all__ = ("with_poller",)


async def with_poller(run: Callable[[FilePoller], Awaitable[None]]) -> None:
    """Run a part that waits for a poller, and the poller."""
    poller = FilePoller(period_seconds=0.01)
    async with asyncio.TaskGroup() as group:
        group.create_task(poller.run())
        await run(poller)
