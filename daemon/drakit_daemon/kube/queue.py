"""
A fair queue of keys: many changes to one object result in one work item, and failures are retried
later.

A key is in one lane at a time. Each lane has its own workers, so no lane waits for the work of
another lane. These rules decide which owner is charged, and which key is next:

1. Each key has an owner, who is charged for the time that the workers measure.
2. The next key of a lane belongs to the owner who has used the least time in the lane. Owners who
   have used the same time take turns. The keys of an owner keep their order. A key that was moved
   to a lane and continues there stays first, because its results so far may expire soon.
3. An owner without work does not accumulate credit: when its next key arrives, its used time is
   raised to at least :data:`CREDIT_SECONDS` less than that of the owner whose turn came last.

Therefore, an owner with little work waits only for the key in progress, no matter how much work
other owners have. The other owners share the rest of the time, so no time is unused. :class:`Turns`
applies the same rules.

While a worker has a key, no other worker gets it. If the key is added during that time, it is
queued again afterwards. All times are from the loop's clock. Only the workers interpret keys.

A key is in the queue at most once, so the number of objects limits the queue.

Does not depend on Kubernetes. Use the queue in one event loop. In other threads, use
``call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from drakit_daemon.backoff import Backoff

Key = TypeVar("Key", bound=Hashable)


CREDIT_SECONDS = 1.0
"""Maximum credit of an owner without work. With it, a burst of a hundred keys comes before the keys
of owners that are always busy."""

KEY_SECONDS = 0.0001
"""Minimum charge for a key, so that an owner whose keys take no time does not keep other owners
waiting."""

MANY_OWNERS = 1000
"""The number of accounts above which those with full credit are dropped. It is raised if many
accounts remain."""

OUTDATED = 1000
"""Maximum number of outdated entries to keep in the heap, in addition to one per waiting key. Each
time a key is queued before it is due, it leaves an outdated entry."""

DUE_AT_ONCE = 1000
"""Maximum number of keys to make ready in one iteration of the loop, because 100,000 can be due at
the same time."""


class FairShare:
    """Tracks how many seconds each owner has used a resource, and determines whose turn it is."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._reached = 0.0
        """The time that the owner whose turn came last had used by then. It never decreases."""

        self._many = MANY_OWNERS

    def enter(self, owner: str) -> None:
        """Record that an owner has work again, and limit its credit."""
        self._used[owner] = max(self._used.get(owner, 0.0), self._reached - CREDIT_SECONDS)
        if len(self._used) > self._many:
            least = self._reached - CREDIT_SECONDS
            self._used = {each: used for each, used in self._used.items() if used >= least}
            self._many = 2 * len(self._used) + MANY_OWNERS

    def choose(self, owners: Iterable[str]) -> str:
        """Return the first owner among those that have used the least time. The caller must call
        `enter` for each owner first."""
        owner = min(owners, key=self._used.__getitem__)
        self._reached = max(self._reached, self._used[owner])
        return owner

    def charge(self, owner: str, seconds: float) -> None:
        """Charge an owner for the time of its work."""
        used = self._used.get(owner, self._reached - CREDIT_SECONDS)
        self._used[owner] = used + max(seconds, 0.0)


@dataclass(slots=True, eq=False)
class _Lane(Generic[Key]):
    ready: dict[str, deque[Key]] = field(default_factory=dict[str, "deque[Key]"])
    """The keys of each owner, in the order of the owners' turns."""

    share: FairShare = field(default_factory=FairShare)
    getters: deque[asyncio.Future[None]] = field(default_factory=deque["asyncio.Future[None]"])


class WorkQueue(Generic[Key]):
    """
    A queue of keys to process. A key is in the queue at most once.

        while True:
            key = await queue.get()
            try:
                queue.charge(key, await reconcile(key))
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
        owner_of: Callable[[Key], str] = lambda key: "",
        lanes: Sequence[str] = ("",),
        lane_of: Callable[[Key], str] = lambda key: "",
    ) -> None:
        """
        Create an empty queue.

        :param owner_of: returns the owner of a key.
        :param lane_of: returns the lane in which a key starts.
        """
        self._retry_seconds = retry_seconds
        self._retry_limit_seconds = retry_limit_seconds
        self._owner_of = owner_of
        self._lane_of = lane_of
        self._lanes: dict[str, _Lane[Key]] = {name: _Lane() for name in lanes}
        self._ready_keys: set[Key] = set()
        self._waiting: dict[Key, float] = {}  # the time at which each key is due
        # A heap; an entry is outdated unless `_waiting` has the same time for its key.
        self._due: list[tuple[float, int, Key]] = []
        self._numbers = count()  # tiebreakers, so that keys with the same time are not compared
        self._timer: asyncio.TimerHandle | None = None  # one timer for all keys
        self._timer_at = 0.0  # uvloop's timer handles have no time if they are due immediately
        self._working: dict[Key, str] = {}  # the lane of each key in progress
        self._again: dict[Key, str] = {}  # keys to add again when they are done, and their lanes
        self._backoffs: dict[Key, Backoff] = {}
        self._progress_at = float("-inf")
        """The time at which a worker last took or finished a key, or at which the first key became
        ready."""

    def __len__(self) -> int:
        """The number of keys that are ready or waiting."""
        return len(self._ready_keys) + len(self._waiting) + len(self._again)

    def add(self, key: Key) -> None:
        """Queue a key."""
        self._waiting.pop(key, None)
        if key in self._working:
            self._again.setdefault(key, self._lane_of(key))
        elif key not in self._ready_keys:
            self._put(key, self._lane_of(key))

    def move(self, key: Key, lane: str) -> None:
        """Queue a key that is in progress: either in another lane, or again in the lane to which
        it was moved."""
        self._waiting.pop(key, None)
        self._again[key] = lane

    def _put(self, key: Key, lane: str, *, is_first: bool = False) -> None:
        if not self._ready_keys:
            self._progress_at = asyncio.get_running_loop().time()
        self._ready_keys.add(key)
        place, owner = self._lanes[lane], self._owner_of(key)
        if owner not in place.ready:
            place.ready[owner] = deque()
            place.share.enter(owner)
        if is_first:
            place.ready[owner].appendleft(key)
        else:
            place.ready[owner].append(key)
        _wake_first(place.getters)

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue a key after a delay. If the key is already delayed, the earlier time applies."""
        if seconds <= 0:
            self.add(key)
            return
        if key in self._ready_keys or key in self._again:
            return
        due = asyncio.get_running_loop().time() + seconds
        if self._waiting.get(key, due + 1) <= due:
            return
        self._waiting[key] = due
        heappush(self._due, (due, next(self._numbers), key))
        if len(self._due) > 2 * len(self._waiting) + OUTDATED:
            self._due = [each for each in self._due if self._waiting.get(each[2]) == each[0]]
            heapify(self._due)
        self._set_timer()

    def is_busy(self, lane: str) -> bool:
        """Return whether keys of a lane are ready or in progress."""
        return bool(self._lanes[lane].ready) or lane in self._working.values()

    def retry(self, key: Key) -> float:
        """Queue a key again after a failure. Return the delay in seconds."""
        backoff = self._backoffs.get(key)
        if backoff is None:
            backoff = self._backoffs[key] = Backoff(
                first_seconds=self._retry_seconds, limit_seconds=self._retry_limit_seconds
            )
        seconds = backoff.next_seconds()
        self.add_after(key, seconds)
        return seconds

    def forget(self, key: Key) -> None:
        """Reset a key's failures. Call this after a success, and when the key's object is gone."""
        self._backoffs.pop(key, None)

    def failures(self, key: Key) -> int:
        backoff = self._backoffs.get(key)
        return backoff.failures if backoff else 0

    async def get(self, lane: str = "") -> Key:
        """Wait for a key of a lane. No other worker gets the key until :meth:`done` is called."""
        place = self._lanes[lane]
        while not place.ready:
            getter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            place.getters.append(getter)
            try:
                await getter
            except asyncio.CancelledError:
                # This worker was woken and canceled at the same time, so the key goes to another
                # worker.
                if getter.done() and not getter.cancelled() and place.ready:
                    _wake_first(place.getters)
                raise
        self._progress_at = asyncio.get_running_loop().time()
        owner = place.share.choose(place.ready)
        keys = place.ready.pop(owner)
        key = keys.popleft()
        if keys:
            place.ready[owner] = keys  # move the owner behind the others
        place.share.charge(owner, KEY_SECONDS)
        self._ready_keys.discard(key)
        self._working[key] = lane
        return key

    def charge(self, key: Key, seconds: float) -> None:
        """Charge the owner of a key in progress for the time of its work."""
        self._lanes[self._working[key]].share.charge(self._owner_of(key), seconds)

    def done(self, key: Key) -> str | None:
        """Record that the work on a key has ended, with or without success. Return the lane in
        which the key continues, if any."""
        was = self._working.pop(key)
        self._progress_at = asyncio.get_running_loop().time()
        if (lane := self._again.pop(key, None)) is not None:
            self._put(key, lane, is_first=lane == was != self._lane_of(key))
        return lane

    def stalled_seconds(self) -> float:
        """
        How many seconds keys have been ready without a worker taking or finishing one. Used by
        probes.

        The age of a key would not indicate a hang, because a tenant can create more work than the
        workers can do.
        """
        if not self._ready_keys:
            return 0.0
        return asyncio.get_running_loop().time() - self._progress_at

    def close(self) -> None:
        """Drop all keys and the timer. The caller cancels the workers."""
        if self._timer is not None:
            self._timer.cancel()
        for lane in self._lanes.values():
            lane.ready.clear()
        for keys in (self._ready_keys, self._waiting, self._due, self._again, self._backoffs):
            keys.clear()

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


def _wake_first(getters: deque[asyncio.Future[None]]) -> None:
    while getters:
        getter = getters.popleft()
        if not getter.done():
            getter.set_result(None)
            return


class Turns:
    """Makes callers take turns, according to the rules of a lane. Not thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """
        :param clock: returns the time in seconds, to measure turns.
        """
        self._clock = clock
        self._share = FairShare()
        self._busy = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncGenerator[None]:
        """Wait for a turn, and hold it until the end of the block. The owner is charged for its
        duration."""
        if owner not in self._waiting:
            self._share.enter(owner)
        if self._busy:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(owner, deque()).append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._hand_over()  # the caller got its turn and was canceled at the same time
                raise
        self._busy = True
        began = self._clock()
        try:
            yield
        finally:
            self._share.charge(owner, self._clock() - began)
            self._hand_over()

    def _hand_over(self) -> None:
        """Hand the turn to the next caller. The turn stays taken, so that no other caller takes it
        first."""
        self._busy = False
        while self._waiting and not self._busy:
            owner = self._share.choose(self._waiting)
            waiters = self._waiting.pop(owner)
            waiter = waiters.popleft()
            if waiters:
                self._waiting[owner] = waiters  # move the owner behind the others
            if not waiter.done():
                waiter.set_result(None)
                self._busy = True
