"""
The order of calls: calls that share a key run one at a time, in order of arrival. Calls without a
common key run concurrently.

A key is a claim (by UID), a device or a counter set (both by pool and name). A call enters the
queues of all its keys at the same time, and runs when it is the first in each of them. A call that
already holds the key of its claim can later enter queues only for hardware. Therefore, the earliest
call is never behind another one, and no call waits forever.

If a caller stops waiting (deadline, closed connection, cancellation), a running call continues and
keeps its place until its work has ended. A waiting call gives up its place, and the calls behind it
still wait for the running one.

All calls for claims use this module. The Go module for backends follows the same rule; the tests of
both use ``proto/go/testdata/call_order.json``.

Does not depend on drivers, or on what the calls do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from drakit.device import AllocatedClaim, AllocatedDevice

logger = logging.getLogger(__name__)

Key = tuple[str, ...]
"""A key: its kind, followed by the names that identify the object."""

ResultT = TypeVar("ResultT")


def claim_key(uid: str) -> Key:
    """Return the key of a claim."""
    return "claim", uid


def hardware_keys(devices: Iterable[AllocatedDevice]) -> frozenset[Key]:
    """Return the keys of devices and of the counter sets that they consume from."""
    keys: set[Key] = set()
    for device in devices:
        keys.add(("device", device.pool, device.name))
        for name in device.consumes:
            keys.add(("counter set", device.pool, name))
    return frozenset(keys)


@dataclass(eq=False, kw_only=True, slots=True)
class Place:
    """The place of a waiting or running call in its queues."""

    keys: Collection[Key]
    """The keys of the call, without duplicates."""

    on_turn: Callable[[], None] | None = None
    """Called at the start of the call's turn, if it had to wait. Must return immediately."""

    behind: int = 0
    """The number of queues in which other calls are ahead of this one. 0 if it is this call's
    turn."""

    async def turn(self) -> None:
        """Wait for the turn of this call."""
        if self.behind:
            turn = asyncio.get_running_loop().create_future()
            self.on_turn = lambda: None if turn.done() else turn.set_result(None)
            await turn


class Order:
    """The queues of calls for one driver. Not thread-safe."""

    def __init__(self) -> None:
        self._lines: dict[Key, deque[Place]] = {}
        """The queue of places for each key. The first place belongs to a running call, or to a call
        that is waiting only in other queues. No queue is ever empty."""
        self.idle = asyncio.Event()
        """Set while there are no calls."""
        self.idle.set()

    def line(self, key: Key) -> Sequence[Place]:
        """Return the queue of places for a key."""
        return tuple(self._lines.get(key, ()))

    def places(self) -> Collection[Place]:
        """Return all places."""
        return {place for line in self._lines.values() for place in line}

    def is_free(self, keys: Collection[Key]) -> bool:
        """Return whether a call with these keys could run immediately."""
        return self._lines.keys().isdisjoint(keys)

    def enter(self, place: Place) -> bool:
        """Add a place to the end of the queues for its keys. Return whether it is already its
        turn."""
        for key in place.keys:
            line = self._lines.get(key)
            if line is None:
                self._lines[key] = deque((place,))
            else:
                line.append(place)
                place.behind += 1
        self.idle.clear()
        return not place.behind

    def leave(self, place: Place) -> None:
        """Remove a place from its queues, because the call has ended or will not begin."""
        due: list[Place] = []
        for key in place.keys:
            line = self._lines[key]
            was_first = line[0] is place
            line.remove(place)
            if not line:
                del self._lines[key]
            elif was_first:
                line[0].behind -= 1
                if not line[0].behind:
                    due.append(line[0])
        if not self._lines:
            self.idle.set()
        for each in due:
            if each.on_turn is not None:
                each.on_turn()

    async def run(self, keys: Collection[Key], call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Make a call when it is its turn. A cancellation must end the call's work (see
        :class:`CallQueue`)."""
        place = Place(keys=keys)
        self.enter(place)
        try:
            await place.turn()
            return await call()
        finally:
            self.leave(place)


class CallQueue:
    """Makes calls in order. Each call is a task, so its caller can stop waiting for it."""

    def __init__(self, *, limit_seconds: float) -> None:
        """Create a queue. `limit_seconds` is the time limit for a call, from its start."""
        self._order = Order()
        self._limit_seconds = limit_seconds
        self._tasks: set[asyncio.Task[Any]] = set()

    async def call(
        self, batch: Sequence[AllocatedClaim], function: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        """
        Make a call for a batch when it is its turn with respect to all of its claims and hardware.

        If the caller is canceled, a waiting call ends, but a running call continues. After its time
        limit, a call is canceled, and it ends when the driver has cleaned up.
        """
        keys = {claim_key(item.claim.uid) for item in batch}
        place = Place(keys=keys.union(*(hardware_keys(item.devices) for item in batch)))
        self._order.enter(place)
        task = asyncio.create_task(self._run(place, function))
        self._tasks.add(task)
        # Use a callback, because a task that is canceled before its first step does not run
        # `finally` blocks.
        task.add_done_callback(partial(self._ended, place))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if place.behind:
                task.cancel()
            elif not task.done():
                logger.warning("caller no longer waits for a call that continues")
                task.add_done_callback(_log_failure)
            raise

    async def _run(self, place: Place, function: Callable[[], Awaitable[ResultT]]) -> ResultT:
        await place.turn()
        async with asyncio.timeout(self._limit_seconds):
            return await function()

    def _ended(self, place: Place, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._order.leave(place)

    async def drain(self, *, timeout_seconds: float) -> None:
        """Wait until no call is in flight, or until the timeout; then cancel the rest."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while self._tasks and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait({*self._tasks}, timeout=left)
        for task in self._tasks:
            task.cancel()


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Log the failure of a call that no longer has a caller."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("call without a caller failed", extra={"error": repr(error)})
