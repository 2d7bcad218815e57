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
        """Take one; False if there is none."""
        now = self._loop.time()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    async def wait(self) -> None:
        """Take one, and wait for it as long as there is none."""
        if not self.take():
            await asyncio.sleep((1 - self._left) / self._per_second)
            self.take()
