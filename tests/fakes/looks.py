"""Looks as tests need them: with rounds that follow fast, or none at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from drakit_nodeplugin.file_poller import FilePoller

__all__ = ("AlwaysDue", "with_looks")


class AlwaysDue(FilePoller):
    """Has something to do for everybody in every round: for tests with a virtual clock."""

    async def until(self, look: Callable[[], bool], *, rounds: int = 1) -> None:
        """Wait for a round, and look at nothing."""
        await asyncio.sleep(rounds)


async def with_looks(run: Callable[[FilePoller], Awaitable[None]]) -> None:
    """Run a part that waits for looks, and these."""
    looks = FilePoller(period_seconds=0.01)
    async with asyncio.TaskGroup() as group:
        group.create_task(looks.run())
        await run(looks)
