"""
The claims engine of one driver: prepares and unprepares a claim once its turn has come.

Until a damaged checkpoint has been rebuilt, no claim is answered: devices whose entry is missing
must be neither prepared for other claims nor reported as unprepared. :mod:`.prepare` and
:mod:`.unprepare` do everything else; :mod:`.queue` ensures that they never run at the same time for
one claim.

It must not know gRPC, HTTP, SQLite, or the format of a CDI file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from drakit_nodeplugin.claims.errors import ClaimBusyError
from drakit_nodeplugin.claims.prepare import Preparing
from drakit_nodeplugin.claims.unprepare import Unpreparing
from drakit_nodeplugin.claims.work import ClaimWork, EngineParts

__all__ = ("ClaimEngine",)

REBUILD_SECONDS = 20.0
"""How long work waits for the rebuild of a checkpoint that was damaged: half of a call's time."""


class ClaimEngine:
    """Implements :class:`.queue.Engine`."""

    def __init__(self, parts: EngineParts) -> None:
        self._checkpoint = parts.checkpoint
        self._unpreparing = Unpreparing(parts)
        self._preparing = Preparing(parts, self._unpreparing)
        self.undo_left = self._unpreparing.undo_left
        self.collect = self._unpreparing.collect
        self.rebuilt = asyncio.Event()
        """Set once a damaged checkpoint has been rebuilt."""

    async def prepare(self, works: Sequence[ClaimWork]) -> None:
        """Prepare the claims of a pod; errors are answers."""
        if await self._is_complete(works):
            await self._preparing.prepare(works)

    async def unprepare(self, works: Sequence[ClaimWork]) -> None:
        """Unprepare claims from the checkpoint alone; an unknown one is success."""
        if await self._is_complete(works):
            await self._unpreparing.unprepare(works)

    async def _is_complete(self, works: Sequence[ClaimWork]) -> bool:
        if self._checkpoint.damage is None:
            return True
        try:
            async with asyncio.timeout(REBUILD_SECONDS):
                await self.rebuilt.wait()
        except TimeoutError:
            cause = "the checkpoint was damaged and is still being rebuilt"
            for work in works:
                work.refuse(ClaimBusyError(claim=str(work.claim), cause=cause))
            return False
        return True
