"""
The intake: from Kopf's thread to the main loop, without an unbounded queue.

Kopf's thread adds the objects that it saw; the main loop takes all of them at once. Only an
object's last state is kept, so the size is bounded by the number of objects, however far the main
loop lags. Each run of Kopf gets its own intake: after it is closed, a lingering thread can no
longer add to it.

It must not know Kopf, the store, or what the facts mean.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from drakit_operator.kinds import Fact, Kind, Name

__all__ = ("Intake", "Seen")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """An object as a watch reported it: its facts, or None if it is gone."""

    kind: Kind
    name: Name
    uid: str
    fact: Fact | None


class Intake:
    """Hands objects over. Any thread may call ``put``; only the loop may call the other methods."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[list[Seen]], None]) -> None:
        self._loop = loop
        self._take = take
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], Seen] = {}
        self._open = True

    def close(self) -> None:
        """Accept no more objects, and drop the waiting ones."""
        with self._lock:
            self._open = False
            self._waiting.clear()

    def put(self, seen: Seen) -> None:
        """Keep an object's last state until the loop takes it."""
        key = (seen.kind.plural, seen.uid)
        with self._lock:
            if not self._open:
                return
            idle = not self._waiting
            # Taken out first, so that the new word stands last: a name deleted and made again
            # has two UIDs, and their order is the order of events.
            self._waiting.pop(key, None)
            self._waiting[key] = seen
            if idle:
                self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            batch = list(self._waiting.values())
            self._waiting.clear()
        if batch:
            self._take(batch)
