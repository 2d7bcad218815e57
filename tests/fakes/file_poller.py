"""File pollers for tests: with fast rounds, or without checks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from drakit_nodeplugin.file_poller import FilePoller

__all__ = ("AlwaysDue", "with_poller")


class AlwaysDue(FilePoller):
    """Wakes every waiter in every round, without a check: for tests with a virtual clock."""

    async def until(self, check: Callable[[], bool], *, rounds: int = 1) -> None:
        """Wait for a round."""
        await asyncio.sleep(rounds)


async def with_poller(run: Callable[[FilePoller], Awaitable[None]]) -> None:
    """Run a part that waits for a poller, and the poller."""
    poller = FilePoller(period_seconds=0.01)
    async with asyncio.TaskGroup() as group:
        group.create_task(poller.run())
        await run(poller)
