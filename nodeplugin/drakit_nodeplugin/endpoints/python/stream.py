"""
What a driver yields, read in its own loop: made an :class:`.Inventory`, checked, and counted.

Only what would harm the daemon itself is refused here, and stops the driver: things that are no
devices, more of them than any node has, what cannot be read, and floods. What goes on is made plain
by :mod:`.freezing`. Whether a device can be published is the device manager's question, and costs
that device alone.

It must not know threads, or who takes the inventories.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import islice
from typing import Any, TypeVar, cast

from drakit.device import CounterSet, Device, Inventory
from drakit.driver import Driver, DriverError
from drakit_nodeplugin.endpoints.errors import text_of
from drakit_nodeplugin.endpoints.python.freezing import Freezer
from drakit_nodeplugin.endpoints.python.plain import name_of_type

__all__ = ("FloodError", "UnreadableError", "normalised", "open_stream", "read_inventories")

MAX_YIELDS = 2000
"""Inventories a second, and as many at once. A bus that reports each of its events stays far below;
a loop that forgets to wait is far above."""

COUNTED_DEVICES = 8_192
"""As many devices count like one more inventory, where a driver yields without waiting: a look at
them takes as long as many small ones."""

MAX_DEVICES = 16_384
"""Of a driver on one node: more than have been seen to be published with ease, and few enough to
be gone through at each change."""

PACE_SECONDS = 0.05
"""Between two inventories that are made plain: 1,000 devices take 2 ms of this thread, and a driver
may yield 2,000 times a second."""

TURN_SECONDS = 0.005
"""How long a stream that does not wait keeps the driver's loop from its calls."""

ThingT = TypeVar("ThingT")


class FloodError(DriverError):
    """A driver yields so fast that nobody can follow."""

    def __init__(self, *, large: bool = False) -> None:
        what = (
            "large inventories one after the other, and waited for nothing"
            if large
            else f"more than {MAX_YIELDS:,} inventories within a second"
        )
        super().__init__(
            f"it yielded {what}; this is a fault of the driver, which must wait for a change "
            f"before it yields again"
        )


class UnreadableError(DriverError):
    """What a driver yielded raises when it is looked at."""

    def __init__(self, error: Exception) -> None:
        kind = name_of_type(type(error))
        super().__init__(
            f"what it yielded cannot be read: {kind}: {text_of(error)}; this is a fault of the "
            f"driver"
        )


class _Allowance:
    """So many yields are left; what was taken comes back with time."""

    def __init__(self, *, a_second: int) -> None:
        self._limit = a_second
        self._left = float(a_second)

    def take(self, count: float = 1, *, after_seconds: float = 0) -> bool:
        """Take so many; False if there were not as many."""
        self._left = min(self._limit, self._left + after_seconds * self._limit) - count
        return self._left >= 0


def open_stream(driver: Driver[Any, Any]) -> AsyncIterator[object]:
    """Ask a driver for its stream; raises :class:`DriverError` if it has none."""
    stream = cast("object", driver.devices())
    if isinstance(stream, AsyncIterator):
        return cast("AsyncIterator[object]", stream)
    if inspect.iscoroutine(stream):
        stream.close()
        raise DriverError("its devices() never yields; it must be an async generator")
    raise DriverError(
        f"its devices() gave {_kind(stream)}; it must be an async generator, defined with "
        f"'async def' and yield"
    )


async def read_inventories(
    stream: AsyncIterator[object], take: Callable[[Inventory, Inventory], None]
) -> None:
    """
    Read a driver's stream until it ends. `take` gets each inventory twice: with the driver's own
    objects, which are for the driver alone, and made plain.

    Raises what the stream raises, and :class:`DriverError` for what is no inventory, cannot be
    read, or is a flood. The stream is not closed.
    """
    loop = asyncio.get_running_loop()
    allowance = _Allowance(a_second=MAX_YIELDS)
    yielded_at = turned_at = loop.time()
    turn = _Turn(loop)
    later = _Later(take)
    while True:
        asked_at = loop.time()
        turn.watch()
        try:
            listed = await anext(stream)
        except StopAsyncIteration:
            return
        now = loop.time()
        waited = turn.taken
        # Of one that does not wait only its own time counts: ours would hide the flood.
        if not allowance.take(after_seconds=now - (yielded_at if waited else asked_at)):
            raise FloodError
        yielded_at = now
        try:
            given = normalised(listed)
            large = 0 if waited else len(given.devices) // COUNTED_DEVICES
            if large and not allowance.take(large):
                raise FloodError(large=True)
            if later.put(given):
                await later.freeze()
        except DriverError:
            raise
        except Exception as error:
            raise UnreadableError(error) from error
        if waited:
            turned_at = now
        elif loop.time() - turned_at > TURN_SECONDS:
            await asyncio.sleep(0)
            turned_at = loop.time()


class _Later:
    """
    Makes inventories plain, but not each of those that come faster than anybody takes them.

    Of several that a driver yields in a short time the last one is made plain a little later, also
    if the driver then waits for long.
    """

    def __init__(self, take: Callable[[Inventory, Inventory], None]) -> None:
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._freezer = Freezer()
        self._lock = asyncio.Lock()
        self._pending: Inventory | None = None
        self._frozen_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._failed: Exception | None = None

    def put(self, given: Inventory) -> bool:
        """Hand in an inventory; tells whether it is to be made plain now. Raises what has failed
        later for an earlier one."""
        if self._failed is not None:
            raise self._failed
        self._pending = given
        now = self._loop.time()
        if now - self._frozen_at >= PACE_SECONDS:
            return True
        if self._timer is None:
            self._timer = self._loop.call_later(PACE_SECONDS, self._begin)
        return False

    async def freeze(self) -> None:
        """Make the last inventory plain, and pass it on."""
        async with self._lock:
            given, self._pending = self._pending, None
            if given is None:
                return
            ours = await self._freezer.frozen(given)
            self._frozen_at = self._loop.time()
            self._take(given, ours)

    def _begin(self) -> None:
        self._timer = None
        if self._pending is not None:
            self._task = self._loop.create_task(self._freeze_later())

    async def _freeze_later(self) -> None:
        try:
            await self.freeze()
        except Exception as error:
            # Raised at the next yield; until then what was there before stays.
            self._failed = error


class _Turn:
    """Whether the loop has gone round since somebody began to watch."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due = False
        self.taken = True

    def watch(self) -> None:
        self.taken = False
        if not self._due:  # one is enough, however often a stream yields before the next turn
            self._due = True
            self._loop.call_soon(self._take)

    def _take(self) -> None:
        self._due = False
        self.taken = True


# ------------------------------------------------------------ what is an inventory


def normalised(listed: object) -> Inventory:
    """Make an inventory of what was yielded, with tuples of its objects; raises DriverError."""
    if not isinstance(listed, Inventory):
        return Inventory(devices=_all_of(listed, Device, "devices"))
    fallback = listed.fallback
    return Inventory(
        devices=_all_of(listed.devices, Device, "devices"),
        counter_sets=_all_of(listed.counter_sets, CounterSet, "counter sets"),
        fallback=None if fallback is None else _all_of(fallback, Device, "devices"),
    )


def _all_of(listed: object, kind: type[ThingT], plural: str) -> tuple[ThingT, ...]:
    if not isinstance(listed, Iterable):
        raise DriverError(
            f"it listed {_kind(listed)}, which is no collection of {plural}; this is a "
            f"fault of the driver"
        )
    endless = cast("Iterable[Any]", listed)  # as it may be
    things = tuple(islice(endless, MAX_DEVICES + 1))
    if len(things) > MAX_DEVICES:
        raise DriverError(
            f"it listed more than {MAX_DEVICES:,} {plural}, which no node can publish; this is a "
            f"fault of the driver"
        )
    if set(map(type, things)) - {kind}:  # fast, as it is done at each yield
        for thing in things:
            if not isinstance(thing, kind):
                raise DriverError(
                    f"it listed {_kind(thing)}, which is no {kind.__name__}; this is a "
                    f"fault of the driver"
                )
    return things


def _kind(thing: object) -> str:
    return name_of_type(type(thing))
