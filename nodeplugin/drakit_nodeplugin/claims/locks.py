"""
Locks by key that exist only while somebody holds or awaits them.

It must not know what the keys are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

__all__ = ("KeyedLocks",)


class KeyedLocks:
    """One lock a key, handed on in the order of asking; a key that nobody uses costs nothing."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The line behind each key that is held."""

    def held(self, key: str) -> bool:
        """Tell whether somebody holds the lock of a key now."""
        return key in self._waiting

    def take(self, key: str) -> bool:
        """Take the lock of a key if it is free."""
        if key in self._waiting:
            return False
        self._waiting[key] = deque()
        return True

    async def acquire(self, key: str) -> None:
        """Take the lock of a key, after those who asked before."""
        if self.take(key):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._waiting[key]
        line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(key)  # it was handed to us in the same moment
            elif turn in line:
                line.remove(turn)
            raise

    def release(self, key: str) -> None:
        """Hand the lock on to the next in line."""
        line = self._waiting[key]
        while line:
            turn = line.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[key]

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncGenerator[None]:
        """Hold the lock of a key. Who holds several takes them in the keys' order."""
        await self.acquire(key)
        try:
            yield
        finally:
            self.release(key)
