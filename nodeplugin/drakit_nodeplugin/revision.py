"""
A counter of changes, which any number of tasks of one event loop can follow.

The writer advances it; readers wait for a change later than the last one they have seen, each at
its own pace. It must not depend on what changes.
"""

from __future__ import annotations

import asyncio

__all__ = ("Revision",)


class Revision:
    """
    A counter of changes, for any number of readers in one event loop.

    An `asyncio.Event` has one reader, which clears it. The devices of a driver have several: the
    publisher, and each health stream of the kubelet.
    """

    def __init__(self) -> None:
        self.number = 0
        self._changed = asyncio.Event()

    def advance(self) -> None:
        """Count a change, and wake all readers."""
        self.number += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, seen: int) -> int:
        """Wait for a change later than `seen`, and return its number."""
        while self.number <= seen:
            await self._changed.wait()
        return self.number
