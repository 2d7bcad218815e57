"""
Wakes the manager when time alone has changed something: at a time that is known before, and every
second for as long as it waits for what nobody tells of.

It must not know what is due, or for whom.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from drakit_nodeplugin.devices.timers import Timers

__all__ = ("Waking",)

POLL_SECONDS = 1.0
"""Between two looks whether the sources are ready: nobody tells of that."""

SETTLED_SECONDS = 60.0
"""Between two looks while nothing is waited for: there may be fifty drivers on a node."""

KeyT = TypeVar("KeyT", bound=Hashable)


class Waking(Generic[KeyT]):
    """One sleeper. Times are the loop's."""

    def __init__(
        self, *, pass_time: Callable[[], bool], ends: Callable[[], Iterable[float]]
    ) -> None:
        """`pass_time` does all that is due, and tells whether something is waited for that nobody
        tells of; `ends` gives the times of what is not wanted by key."""
        self._pass_time = pass_time
        self._ends = ends
        self._timers: Timers[KeyT] = Timers()
        self._awake = asyncio.Event()
        self._asleep_until = self._passed = -math.inf

    def now(self) -> float:
        """Give the time, which is never before one that has come."""
        return max(asyncio.get_running_loop().time(), self._passed)

    def wake(self) -> None:
        """Something has changed: when to look next as well."""
        self._awake.set()

    def wake_by(self, when: float) -> None:
        """Something is due then."""
        if when < self._asleep_until:
            self._awake.set()

    def want(self, key: KeyT, when: float) -> None:
        """Have a key looked at by then."""
        self._timers.want(key, when)
        self.wake_by(when)

    def due(self, now: float) -> list[KeyT]:
        """Take the keys whose time has come, each once."""
        return self._timers.due(now)

    async def run(self) -> None:
        """Wake until cancelled."""
        while True:
            self._awake.clear()
            poll_seconds = POLL_SECONDS if self._pass_time() else SETTLED_SECONDS
            now = self.now()
            ends = [*self._ends()]
            if (first := self._timers.first()) is not None:
                ends.append(first)
            coming = min((when for when in ends if when > now), default=math.inf)
            self._asleep_until = min(coming, now + poll_seconds)
            try:
                async with asyncio.timeout_at(self._asleep_until):
                    await self._awake.wait()
            except TimeoutError:
                # A loop's timer may fire a hair before its time; it has come all the same.
                self._passed = self._asleep_until
