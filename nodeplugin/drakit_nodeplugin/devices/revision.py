"""
A number that grows at each change, for any number of those who wait for the next one.

An `asyncio.Event` has one reader who clears it; the devices of a driver have several: the publisher
and each health stream of the kubelet.

It must not know what changes.
"""

from __future__ import annotations

import asyncio

__all__ = ("Revision",)


class Revision:
    """Counts changes; used in one event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._changed = asyncio.Event()

    def advance(self) -> None:
        """Something changed: all who wait go on."""
        self.number += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, seen: int) -> int:
        """Wait until there is a later change than the one that was seen, and give its number."""
        while self.number <= seen:
            await self._changed.wait()
        return self.number
