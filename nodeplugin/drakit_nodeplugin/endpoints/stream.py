"""
What a driver yields, read in its own loop: made an :class:`.Inventory`, checked, and counted.

Only what would harm the daemon itself is refused here, and stops the driver: things that are no
devices, more of them than any node has, and floods. Whether a device can be published is the device
manager's question, and costs that device alone.

It must not know threads, or who takes the inventories.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import islice
from typing import Any, TypeVar, cast

from drakit.device import CounterSet, Device, Inventory
from drakit.driver import Driver, DriverError

__all__ = ("FloodError", "normalised", "open_stream", "read_inventories")

MAX_YIELDS = 2000
"""Inventories a second, and as many at once. A bus that reports each of its events stays far below;
a loop that forgets to wait is far above."""

MAX_DEVICES = 65_536
"""Of a driver on one node: five times what is published with ease."""

TURN_SECONDS = 0.005
"""How long a stream that does not wait keeps the driver's loop from its calls."""

ThingT = TypeVar("ThingT")


class FloodError(DriverError):
    """A driver yields so fast that nobody can follow."""

    def __init__(self) -> None:
        super().__init__(
            f"it yielded more than {MAX_YIELDS:,} inventories within a second; this is a fault of "
            f"the driver, which must wait for a change before it yields again"
        )


class _Allowance:
    """So many yields are left; what was taken comes back with time."""

    def __init__(self, *, a_second: int) -> None:
        self._limit = a_second
        self._left = float(a_second)

    def take(self, *, after_seconds: float) -> bool:
        """Take one; False if there was none."""
        self._left = min(self._limit, self._left + after_seconds * self._limit) - 1
        return self._left >= 0


def open_stream(driver: Driver[Any]) -> AsyncIterator[object]:
    """Ask a driver for its stream; raises :class:`DriverError` if it has none."""
    stream = cast("object", driver.devices())
    if isinstance(stream, AsyncIterator):
        return cast("AsyncIterator[object]", stream)
    if inspect.iscoroutine(stream):
        stream.close()
        raise DriverError("its devices() never yields; it must be an async generator")
    raise DriverError(
        f"its devices() gave {type(stream).__name__}; it must be an async generator, defined with "
        f"'async def' and yield"
    )


async def read_inventories(
    stream: AsyncIterator[object], take: Callable[[Inventory], None]
) -> None:
    """
    Read a driver's stream until it ends.

    Raises what the stream raises, and :class:`DriverError` for what is no inventory, or a flood.
    The stream is not closed.
    """
    loop = asyncio.get_running_loop()
    allowance = _Allowance(a_second=MAX_YIELDS)
    yielded_at = turned_at = loop.time()
    turn = _Turn(loop)
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
        take(normalised(listed))
        if waited:
            turned_at = now
        elif loop.time() - turned_at > TURN_SECONDS:
            await asyncio.sleep(0)
            turned_at = loop.time()


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
    """Make an inventory of what was yielded, which cannot change any more; raises DriverError."""
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
            f"it listed {type(listed).__name__}, which is no collection of {plural}; this is a "
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
                    f"it listed {type(thing).__name__}, which is no {kind.__name__}; this is a "
                    f"fault of the driver"
                )
    return things
