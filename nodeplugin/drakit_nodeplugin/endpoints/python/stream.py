"""
Reads what a driver yields, in its own loop, and stops a driver that floods.

Only what would harm the daemon itself is refused here: what is no inventory, and yields without
end. Snapshots are taken by :mod:`.snapshot`, only of the newest inventory. Whether a device can be
published is the device manager's question, and costs that device alone.

It must not know threads, or who takes the inventories.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from drakit.device import Inventory
from drakit.driver import Driver, DriverError
from drakit_nodeplugin.endpoints.errors import kind_of, text_of
from drakit_nodeplugin.endpoints.latest_value import LatestValue
from drakit_nodeplugin.endpoints.python.snapshot import InventorySnapshots, inventory_of
from drakit_nodeplugin.endpoints.unchanged import MAX_DEVICES

__all__ = (
    "MAX_DEVICES",
    "FloodError",
    "UnreadableError",
    "open_stream",
    "read_inventories",
    "take_snapshots",
)

MAX_YIELDS = 2000
"""Inventories a second, and as many at once. A bus that reports each of its events stays far below;
a loop that forgets to wait is far above."""

COUNTED_DEVICES = 8_192
"""As many devices count like one more inventory, where a driver yields without waiting: going
through them takes as long as many small ones."""

SNAPSHOT_SECONDS = 0.05
"""Between two snapshots: 1,000 devices take 2 ms of this thread, and a driver may yield 2,000 times
a second."""

TURN_SECONDS = 0.005
"""How long a stream that does not wait keeps the driver's loop from its calls."""


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
    """What a driver yielded raises when it is read."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"what it yielded cannot be read: {kind_of(error)}: {text_of(error)}; this is a fault "
            f"of the driver"
        )


def open_stream(driver: Driver[Any]) -> AsyncIterator[object]:
    """Ask a driver for its stream; raises :class:`DriverError` if it has none."""
    stream = cast("object", driver.devices())
    if isinstance(stream, AsyncIterator):
        return cast("AsyncIterator[object]", stream)
    if inspect.iscoroutine(stream):
        stream.close()
        raise DriverError("its devices() never yields; it must be an async generator")
    raise DriverError(
        f"its devices() gave {kind_of(stream)}; it must be an async generator, defined with "
        f"'async def' and yield"
    )


async def read_inventories(stream: AsyncIterator[object], latest: LatestValue[Inventory]) -> None:
    """
    Read a driver's stream until it ends, into a cell of the same loop.

    Raises what the stream raises, and :class:`DriverError` for what is no inventory, cannot be
    read, or is a flood. The stream is not closed.
    """
    loop = asyncio.get_running_loop()
    allowance = _Allowance(MAX_YIELDS)
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
        has_waited = turn.is_over
        # Without a wait only the driver's own time counts: ours would hide the flood.
        if not allowance.take(after_seconds=now - (yielded_at if has_waited else asked_at)):
            raise FloodError
        yielded_at = now
        try:
            given = inventory_of(listed)
        except DriverError:
            raise
        except Exception as error:
            raise UnreadableError(error) from error
        large = 0 if has_waited else len(given.devices) // COUNTED_DEVICES
        if large and not allowance.take(large):
            raise FloodError(large=True)
        latest.replace(given)
        if has_waited:
            turned_at = now
        elif loop.time() - turned_at > TURN_SECONDS:
            await asyncio.sleep(0)
            turned_at = loop.time()


async def take_snapshots(
    latest: LatestValue[Inventory], take: Callable[[Inventory, Inventory], None]
) -> None:
    """
    Take snapshots of the newest inventory until cancelled. `take` gets it twice: with the driver's
    own objects, which are for the driver alone, and as a snapshot.
    """
    snapshots = InventorySnapshots()
    while True:
        given, _ = await latest.next()
        if given is None:
            continue
        try:
            ours = await snapshots.of(given)
        except Exception as error:
            raise UnreadableError(error) from error
        take(given, ours)


class _Allowance:
    """So many yields are left; what was taken comes back with time."""

    def __init__(self, per_second: int) -> None:
        self._limit = per_second
        self._left = float(per_second)

    def take(self, count: float = 1, *, after_seconds: float = 0) -> bool:
        """Take so many; False if there were not as many."""
        self._left = min(self._limit, self._left + after_seconds * self._limit) - count
        return self._left >= 0


class _Turn:
    """Whether the loop has gone round since `watch` was called."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due = False
        self.is_over = True

    def watch(self) -> None:
        self.is_over = False
        if not self._due:  # one is enough, however often a stream yields before the next turn
            self._due = True
            self._loop.call_soon(self._end)

    def _end(self) -> None:
        self._due = False
        self.is_over = True
