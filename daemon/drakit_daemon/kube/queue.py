"""
A work queue of keys: many changes of one object are one piece of work; failures are retried later.

While a worker has a key, no other worker gets it; if the key is added meanwhile, it is queued again
afterwards. Groups of keys take turns, and so do the owners of a group's keys: none waits for all
keys of another. Time is the loop's. The workers decide what a key means.

Keys can be deferred: they wait for a time, but a worker without other work takes them before.

A key is in the queue once, so the owner's objects are its bound.

It must not know Kubernetes. It belongs to one loop; from elsewhere use ``call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from drakit_daemon.backoff import Backoff

Key = TypeVar("Key", bound=Hashable)


URGENT_IN_A_ROW = 4
"""Urgent keys after which another group is next: anyone can change claims, which are urgent."""

OUTDATED = 1000
"""Outdated entries of the heap that are kept, beside as many as keys wait: a key that is checked
many times before its time leaves one each time."""

DUE_AT_ONCE = 1000
"""Keys that become ready in one turn of the loop: 100,000 can be due at the same time."""


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
        retry_seconds: float = 0.5,
        retry_limit_seconds: float = 300.0,
        group_of: Callable[[Key], str] = lambda key: "",
        owner_of: Callable[[Key], str] = lambda key: "",
        urgent: str | None = None,
    ) -> None:
        """
        Make an empty queue.

        :param group_of: returns the group of a key. Groups with ready keys take turns.
        :param owner_of: returns the owner of a key. Owners take turns within a group.
        :param urgent: the group that comes before the others. Every fifth turn is another one's
            nevertheless, so that urgent keys cannot keep the others waiting.
        """
        self._retry_seconds = retry_seconds
        self._retry_limit_seconds = retry_limit_seconds
        self._group_of = group_of
        self._owner_of = owner_of
        self._urgent = urgent
        # By group and owner, both in the order of their turns.
        self._ready: dict[str, dict[str, deque[Key]]] = {}
        self._ready_keys: set[Key] = set()
        self._deferred: dict[Key, None] = {}  # those of `_waiting` that idle workers take
        self._spare: set[Key] = set()  # deferred keys in progress that were taken before their time
        self._waiting: dict[Key, float] = {}  # until when
        self._due: list[tuple[float, int, Key]] = []  # a heap; outdated if not in `_waiting`
        self._numbers = count()  # keys of one time are not compared
        self._timer: asyncio.TimerHandle | None = None  # one for all keys
        self._timer_at = 0.0  # uvloop's handles do not have a time if they are due at once
        self._working: set[Key] = set()
        self._again: set[Key] = set()  # added while they were in progress
        self._backoffs: dict[Key, Backoff] = {}
        self._getters: deque[asyncio.Future[None]] = deque()
        self._urgent_getters: deque[asyncio.Future[None]] = deque()
        self._progress_at = float("-inf")
        """When a worker last took a key or was done with one, or the first key became ready."""

        self._urgent_row = 0  # urgent keys since the last other one

    def __len__(self) -> int:
        """The number of keys that are ready or waiting."""
        return len(self._ready_keys) + len(self._waiting) + len(self._again)

    def add(self, key: Key) -> None:
        """Queue a key."""
        self._waiting.pop(key, None)
        self._deferred.pop(key, None)
        if key in self._working:
            self._again.add(key)
        elif key not in self._ready_keys:
            if not self._ready:
                self._progress_at = asyncio.get_running_loop().time()
            self._ready_keys.add(key)
            owners = self._ready.setdefault(self._group_of(key), {})
            owners.setdefault(self._owner_of(key), deque()).append(key)
            self._wake_getter()

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue a key after some time, or before if it is added otherwise."""
        if seconds <= 0:
            self.add(key)
            return
        if key in self._ready_keys or key in self._again:
            return
        due = asyncio.get_running_loop().time() + seconds
        if self._waiting.get(key, due + 1) <= due:
            return
        self._waiting[key] = due
        self._deferred.pop(key, None)
        heappush(self._due, (due, next(self._numbers), key))
        if len(self._due) > 2 * len(self._waiting) + OUTDATED:
            self._due = [each for each in self._due if self._waiting.get(each[2]) == each[0]]
            heapify(self._due)
        self._set_timer()

    def defer(self, key: Key, seconds: float) -> None:
        """Queue a key after some time, or when a worker has nothing else to do."""
        self.add_after(key, seconds)
        if key in self._waiting:
            self._deferred[key] = None
            self._wake_getter()

    def is_spare(self, key: Key) -> bool:
        """Return whether a worker has a deferred key before its time, for want of other work."""
        return key in self._spare

    def is_urgent(self) -> bool:
        """Return whether urgent keys are ready or in progress."""
        return self._urgent in self._ready or any(
            self._group_of(each) == self._urgent for each in self._working
        )

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

    async def get(self, *, urgent: bool = False) -> Key:
        """
        Wait for a key; no other worker gets it until :meth:`done`.

        :param urgent: wait for urgent keys only.
        """
        while not self._can_take(urgent=urgent):
            getters = self._urgent_getters if urgent else self._getters
            getter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            getters.append(getter)
            try:
                await getter
            except asyncio.CancelledError:
                # Woken and canceled at the same time: the key is for another worker.
                if getter.done() and not getter.cancelled() and self._can_take():
                    self._wake_getter()
                raise
        self._progress_at = asyncio.get_running_loop().time()
        if not self._ready:
            key = next(self._idle_keys())
            del self._deferred[key], self._waiting[key]
            self._spare.add(key)
            self._working.add(key)
            return key
        group = next(iter(self._ready))
        if urgent or (self._urgent in self._ready and self._urgent_row < URGENT_IN_A_ROW):
            group = self._urgent or ""
        if not urgent:
            self._urgent_row = self._urgent_row + 1 if group == self._urgent else 0
        owners = self._ready.pop(group)
        owner = next(iter(owners))
        keys = owners.pop(owner)
        key = keys.popleft()
        if keys:
            owners[owner] = keys  # behind the others
        if owners:
            self._ready[group] = owners
        self._ready_keys.discard(key)
        self._working.add(key)
        return key

    def _can_take(self, *, urgent: bool = False) -> bool:
        if urgent:
            return self._urgent in self._ready
        return bool(self._ready) or any(True for _ in self._idle_keys())

    def _idle_keys(self) -> Iterator[Key]:
        return (each for each in self._deferred if each not in self._working)

    def done(self, key: Key) -> None:
        """End the work on a key, with or without success."""
        self._working.discard(key)
        self._spare.discard(key)
        self._progress_at = asyncio.get_running_loop().time()
        if key in self._again:
            self._again.discard(key)
            self.add(key)
        elif key in self._deferred:
            self._wake_getter()

    def stalled_seconds(self) -> float:
        """
        Seconds in which keys were ready and no worker took one or was done with one; for probes.

        The age of a key is no sign of a hang: a tenant can make more work than the workers can do.
        """
        if not self._ready:
            return 0.0
        return asyncio.get_running_loop().time() - self._progress_at

    def close(self) -> None:
        """Drop all keys and the timer. The owner of the workers cancels them."""
        if self._timer is not None:
            self._timer.cancel()
        for keys in (self._ready, self._ready_keys, self._waiting, self._due, self._again):
            keys.clear()
        self._deferred.clear()
        self._backoffs.clear()

    def _set_timer(self) -> None:
        if not self._due:
            return
        due, _, _ = self._due[0]
        if self._timer is not None:
            if self._timer_at <= due:
                return
            self._timer.cancel()
        self._timer_at = due
        self._timer = asyncio.get_running_loop().call_at(due, self._add_due, due)

    def _add_due(self, now: float) -> None:
        self._timer = None
        now = max(now, asyncio.get_running_loop().time())
        for _ in range(DUE_AT_ONCE):
            if not self._due or self._due[0][0] > now:
                break
            due, _, key = heappop(self._due)
            if self._waiting.get(key) == due:
                self.add(key)
        self._set_timer()

    def _wake_getter(self) -> None:
        if self._urgent in self._ready:
            _wake_first(self._urgent_getters)
        _wake_first(self._getters)


def _wake_first(getters: deque[asyncio.Future[None]]) -> None:
    while getters:
        getter = getters.popleft()
        if not getter.done():
            getter.set_result(None)
            return
