"""
How long reading what a backend says may keep the daemon's loop.

It must not know what is said.
"""

from __future__ import annotations

import asyncio

__all__ = ("Turns",)

TURN_SECONDS = 0.001
"""How long one task works without letting others have their turn."""


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
