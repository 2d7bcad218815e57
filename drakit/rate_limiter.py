"""
How often something may happen: so many times at once, and so many a second for ever.

What becomes of what comes too often is decided by who asks.

It must not know what is counted.
"""

from __future__ import annotations

import asyncio

__all__ = ("RateLimiter",)


class RateLimiter:
    """So many are left; what was taken comes back with time, by the loop's clock."""

    def __init__(self, *, burst: float, per_second: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._burst = self._left = burst
        self._per_second = per_second
        self._at = self._loop.time()

    def take(self) -> bool:
        """Take a token; return False if there is none."""
        self._refill()
        if self._left < 1:
            return False
        self._left -= 1
        return True

    async def wait(self) -> None:
        """Take a token, and wait until there is one; concurrent callers get theirs in order."""
        self._refill()
        self._left -= 1
        if self._left < 0:
            await asyncio.sleep(-self._left / self._per_second)

    def _refill(self) -> None:
        now = self._loop.time()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
