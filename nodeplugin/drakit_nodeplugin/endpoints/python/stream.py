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

__all__ = (
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
"""As many devices count like one more inventory: going through them takes as long."""

SNAPSHOT_SECONDS = 0.05
"""Between two snapshots: 1,000 devices take 2 ms of this thread, and a driver may yield 2,000 times
a second."""

TURN_SECONDS = 0.005
"""How long a stream that does not wait keeps the driver's loop from its calls."""


class FloodError(DriverError):
    """A driver yields so fast that nobody can follow."""

    def __init__(self) -> None:
        super().__init__(
            f"it yielded more than {MAX_YIELDS:,} inventories within a second; this is a fault of "
            f"the driver, which must wait for a change before it yields again"
        )


class UnreadableError(DriverError):
    """What a driver yielded raises when it is read."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"what it yielded cannot be read: {kind_of(error)}: {text_of(error)}; this is a fault "
            f"of the driver"
        )


def open_stream(driver: Driver[Any, Any]) -> AsyncIterator[object]:
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
    allowed = float(MAX_YIELDS)
    turned_at = loop.time()
    while True:
        asked_at = loop.time()
        try:
            listed = await anext(stream)
        except StopAsyncIteration:
            return
        # Only the driver's own time counts: ours would hide the flood of a stream that never waits.
        allowed = min(MAX_YIELDS, allowed + (loop.time() - asked_at) * MAX_YIELDS)
        try:
            given = inventory_of(listed)
        except DriverError:
            raise
        except Exception as error:
            raise UnreadableError(error) from error
        allowed -= 1 + len(given.devices) // COUNTED_DEVICES
        if allowed < 0:
            raise FloodError
        latest.replace(given)
        if loop.time() - turned_at > TURN_SECONDS:
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
