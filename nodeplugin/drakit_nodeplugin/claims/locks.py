"""
Locks by key that exist only while somebody holds or awaits them.

It must not know what the keys are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

__all__ = ("KeyedLocks",)


class KeyedLocks:
    """One lock a key; a key that nobody uses costs nothing."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}

    def held(self, key: str) -> bool:
        """Tell whether somebody holds the lock of a key now."""
        return key in self._locks and self._locks[key].locked()

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncGenerator[None]:
        """Hold the lock of a key. Who holds several takes them in the keys' order."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] = self._users.get(key, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]
