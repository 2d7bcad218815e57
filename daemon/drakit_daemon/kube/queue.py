"""
A work queue of keys: many changes of one object are one piece of work; failures are retried later.

While a worker has a key, no other worker gets it; if the key is added meanwhile, it is queued again
afterwards. Time is the loop's. The workers decide what a key means.

It must not know Kubernetes. It belongs to one loop; from elsewhere use ``call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from drakit_daemon.backoff import Backoff

Key = TypeVar("Key", bound=Hashable)


URGENT_IN_A_ROW = 4
"""Urgent keys after which the oldest key is next: anyone can change claims, which are urgent."""


class QueueFullError(Exception):
    """The queue is full; the key was not added."""

    def __init__(self, capacity: int) -> None:
        super().__init__(f"the work queue is full ({capacity} keys)")
        self.capacity = capacity


@dataclass(slots=True)
class _Waiting:
    due: float
    timer: asyncio.TimerHandle


class WorkQueue(Generic[Key]):
    """
    Keys to be worked on, each once.

        while True:
            key = await queue.get()
            try:
                await reconcile(key)
            except Exception:
                queue.retry(key)
            else:
                queue.forget(key)
            finally:
                queue.done(key)
    """

    def __init__(
        self,
        *,
        capacity: int = 100_000,
        retry_seconds: float = 0.5,
        retry_limit_seconds: float = 300.0,
        is_urgent: Callable[[Key], bool] = lambda key: False,
    ) -> None:
        """
        Make an empty queue.

        :param capacity: of all keys: waiting, ready and in progress.
        :param is_urgent: keys that workers get before the others that are ready. Every fifth key
            is the oldest one nevertheless, so that urgent keys cannot keep the others waiting.
        """
        self._capacity = capacity
        self._retry_seconds = retry_seconds
        self._retry_limit_seconds = retry_limit_seconds
        self._is_urgent = is_urgent
        self._ready: dict[Key, float] = {}  # in order; the value is the time since when
        self._urgent: dict[Key, None] = {}  # those of them that are urgent
        self._waiting: dict[Key, _Waiting] = {}
        self._working: set[Key] = set()
        self._again: set[Key] = set()  # added while they were in progress
        self._backoffs: dict[Key, Backoff] = {}
        self._getters: deque[asyncio.Future[None]] = deque()
        self._progress_at = float("-inf")  # when a worker last took a key, or was done with one
        self._urgent_row = 0  # urgent keys since the last other one

    def __len__(self) -> int:
        """The number of keys that are ready or waiting."""
        return len(self._ready) + len(self._waiting) + len(self._again)

    def add(self, key: Key) -> None:
        """Queue a key. Raises QueueFullError if there is no room for another."""
        self._check_room(key)
        self._make_ready(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue a key after some time, or before if it is added otherwise."""
        if seconds <= 0:
            self.add(key)
            return
        if key in self._ready or key in self._again:
            return
        self._check_room(key)
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        old = self._waiting.get(key)
        if old is not None and old.due <= due:
            return
        self._cancel_timer(key)
        self._waiting[key] = _Waiting(due, loop.call_at(due, self.add, key))

    def retry(self, key: Key) -> float:
        """Queue a key again after a failure; return the delay in seconds."""
        backoff = self._backoffs.get(key)
        if backoff is None:
            backoff = self._backoffs[key] = Backoff(
                first_seconds=self._retry_seconds, limit_seconds=self._retry_limit_seconds
            )
        seconds = backoff.next_seconds()
        self.add_after(key, seconds)
        return seconds

    def forget(self, key: Key) -> None:
        """Reset a key's failures. Needed after success, and when its object is gone."""
        self._backoffs.pop(key, None)

    def failures(self, key: Key) -> int:
        backoff = self._backoffs.get(key)
        return backoff.failures if backoff else 0

    async def get(self) -> Key:
        """Wait for a key; no other worker gets it until :meth:`done`."""
        while not self._ready:
            getter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._getters.append(getter)
            try:
                await getter
            except asyncio.CancelledError:
                # Woken and canceled at the same time: the key is for another worker.
                if getter.done() and not getter.cancelled() and self._ready:
                    self._wake_getter()
                raise
        urgent = self._urgent if self._urgent_row < URGENT_IN_A_ROW else {}
        key = next(iter(urgent or self._ready))
        self._urgent_row = self._urgent_row + 1 if urgent else 0
        self._urgent.pop(key, None)
        del self._ready[key]
        self._working.add(key)
        self._progress_at = asyncio.get_running_loop().time()
        return key

    def done(self, key: Key) -> None:
        """End the work on a key, with or without success."""
        self._working.discard(key)
        self._progress_at = asyncio.get_running_loop().time()
        if key in self._again:
            self._again.discard(key)
            self._make_ready(key)  # it already had its room

    def stalled_seconds(self) -> float:
        """
        Seconds in which keys were ready and no worker took one or was done with one; for probes.

        The age of a key is no sign of a hang: a tenant can make more work than the workers can do.
        """
        if not self._ready:
            return 0.0
        since = max(self._progress_at, next(iter(self._ready.values())))
        return asyncio.get_running_loop().time() - since

    def close(self) -> None:
        """Drop all keys and timers. The owner of the workers cancels them."""
        for waiting in self._waiting.values():
            waiting.timer.cancel()
        for keys in (self._ready, self._urgent, self._waiting, self._again, self._backoffs):
            keys.clear()

    def _check_room(self, key: Key) -> None:
        if any(key in keys for keys in (self._ready, self._waiting, self._working)):
            return
        if len(self._ready) + len(self._waiting) + len(self._working) >= self._capacity:
            raise QueueFullError(self._capacity)

    def _make_ready(self, key: Key) -> None:
        self._cancel_timer(key)
        if key in self._working:
            self._again.add(key)
        elif key not in self._ready:
            self._ready[key] = asyncio.get_running_loop().time()
            if self._is_urgent(key):
                self._urgent[key] = None
            self._wake_getter()

    def _cancel_timer(self, key: Key) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting.timer.cancel()

    def _wake_getter(self) -> None:
        while self._getters:
            getter = self._getters.popleft()
            if not getter.done():
                getter.set_result(None)
                return
