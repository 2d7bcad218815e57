"""
Who must be looked at when: a heap with at most a few entries for each.

A device that flaps puts its time off again and again. So an entry says only when to look: who looks
asks for the next time, if it is not due yet.

It must not know who is looked at, or clocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ("Timers",)

KeyT = TypeVar("KeyT", bound=Hashable)


class Timers(Generic[KeyT]):
    """Times by key."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, KeyT]] = []
        self._next: dict[KeyT, float] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def want(self, key: KeyT, when: float) -> None:
        """Have a key looked at by a time; if it is looked at before that, nothing is to be done."""
        if (known := self._next.get(key)) is not None and known <= when:
            return
        self._next[key] = when
        self._count += 1  # keys need not be comparable
        heapq.heappush(self._heap, (when, self._count, key))

    def first(self) -> float | None:
        """Give the time of the next look."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[KeyT]:
        """Take the keys whose time has come, each once."""
        keys: list[KeyT] = []
        while self._heap and self._heap[0][0] <= now:
            when, _, key = heapq.heappop(self._heap)
            if self._next.get(key) == when:
                del self._next[key]
                keys.append(key)
        return keys
