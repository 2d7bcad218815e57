"""
How fast a backend may talk, and how long reading it may keep the daemon's loop.

It must not know what is said.
"""

from __future__ import annotations

import asyncio

__all__ = ("Allowance", "Turns")

TURN_SECONDS = 0.001
"""How long one task works without letting others have their turn."""


class Allowance:
    """So many are left; what was taken comes back with time, by the loop's clock."""

    def __init__(self, *, burst: float, a_second: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._burst = self._left = burst
        self._a_second = a_second
        self._at = self._loop.time()

    def take(self) -> bool:
        """Take one; False if there is none."""
        now = self._loop.time()
        self._left = min(self._burst, self._left + (now - self._at) * self._a_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    async def wait(self) -> None:
        """Take one, and wait for it as long as there is none."""
        if not self.take():
            await asyncio.sleep((1 - self._left) / self._a_second)
            self.take()


class Turns:
    """Gives way to others from time to time, in a loop over many small things."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._worked_seconds = 0.0

    @property
    def worked_seconds(self) -> float:
        """In all turns, the one that is not over included; those of others do not count."""
        return self._worked_seconds + self._loop.time() - self._began_at

    async def give_way(self) -> None:
        """Let others have their turn if this one has taken long enough."""
        took = self._loop.time() - self._began_at
        if took > TURN_SECONDS:
            self._worked_seconds += took
            await asyncio.sleep(0)
            self._began_at = self._loop.time()
