"""
A rate limit with a burst: a token bucket on the loop's clock.

The caller decides whether to wait, drop or reject.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TURN_SECONDS = 0.05
"""How often to check for the next turn while objects wait."""


class RateLimiter:
    """A token bucket: `burst` tokens, refilled at `per_second`. Use it in one event loop."""

    def __init__(self, *, burst: float, per_second: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._burst = self._left = burst
        self._per_second = per_second
        self._at = self._loop.time()

    def take(self) -> bool:
        """Take a token. Return False if there is none."""
        self._refill()
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def reserve(self) -> float:
        """Take the next token in advance. Return the seconds until the bucket has it."""
        self._refill()
        self._left -= 1
        return max(0.0, -self._left / self._per_second)

    def give_back(self) -> None:
        """Return an unused token to the bucket."""
        self._left = min(self._burst, self._left + 1)

    async def wait(self) -> None:
        """Take a token, waiting if necessary. Concurrent callers get their tokens in order."""
        if seconds := self.reserve():
            await asyncio.sleep(seconds)

    def _refill(self) -> None:
        now = self._loop.time()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now


class FairRateLimiter:
    """
    A shared rate for the objects of many owners. The owners take turns, no matter how many of their
    objects are waiting.

    An object has either a token or a place in the queue. The object keeps its token until it calls
    `use`, or gives it back with `leave`. Use the rate limiter in one event loop.
    """

    def __init__(self, *, burst: float, per_second: float) -> None:
        self._limiter = RateLimiter(burst=burst, per_second=per_second)
        self._waiting: dict[str, dict[str, Callable[[], None]]] = {}
        """The callbacks that wake the objects, keyed by owner and object, both in the order of
        their turns."""

        self._owner_of: dict[str, str] = {}
        """The owner of each waiting object."""

        self._granted: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def take(self, name: str, owner: str, wake: Callable[[], None]) -> bool:
        """Return whether an object has a token. If not, `wake` is called when it gets one."""
        if name in self._granted:
            return True
        if name not in self._owner_of:
            if not self._waiting and self._limiter.take():
                self._granted.add(name)
                return True
            self._owner_of[name] = owner
            self._waiting.setdefault(owner, {})[name] = wake
            self._start()
        return False

    def is_waiting(self, name: str) -> bool:
        return name in self._owner_of

    def use(self, name: str) -> None:
        """Mark the object's token as used. The object needs another token next time."""
        self._granted.discard(name)

    def leave(self, name: str) -> None:
        """Give back the object's token, or its place in the queue."""
        if name in self._granted:
            self._granted.discard(name)
            self._limiter.give_back()
        elif (owner := self._owner_of.pop(name, None)) is not None:
            objects = self._waiting[owner]
            del objects[name]
            if not objects:
                del self._waiting[owner]

    def _start(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(TURN_SECONDS, self._grant)

    def _grant(self) -> None:
        self._timer = None
        while self._waiting and self._limiter.take():
            owner = next(iter(self._waiting))
            objects = self._waiting.pop(owner)
            name = next(iter(objects))
            wake = objects.pop(name)
            if objects:
                self._waiting[owner] = objects  # move the owner behind the others
            del self._owner_of[name]
            self._granted.add(name)
            wake()
        self._start()
