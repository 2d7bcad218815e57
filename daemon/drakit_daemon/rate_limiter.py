"""
A rate limit with a burst: a token bucket on the loop's clock.

The caller decides whether to wait, drop or refuse. It must not know what is limited.
"""

from __future__ import annotations

import asyncio


class RateLimiter:
    """A token bucket: `burst` tokens, refilled at `per_second`. Use it in one event loop."""

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

    def reserve(self) -> float:
        """Take the next token; return in how many seconds the bucket has it."""
        self._refill()
        self._left -= 1
        return max(0.0, -self._left / self._per_second)

    def give_back(self) -> None:
        """Return a token that was taken and not used."""
        self._left = min(self._burst, self._left + 1)

    async def wait(self) -> None:
        """Take a token, and wait until there is one; concurrent callers get theirs in order."""
        if seconds := self.reserve():
            await asyncio.sleep(seconds)

    def _refill(self) -> None:
        now = self._loop.time()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
