"""
A cell with the newest value of a stream and the device health reported since then, which is read at
a limited rate.

A source may write at any rate, from the loop in which the cell was created or from another thread.
A value that has not been read yet is replaced, and the reader is woken once per read. Therefore, a
source that never pauses costs the daemon no more than the reader's rate allows. This is the only
rate limit between a source of devices and the device manager.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Generic, TypeVar

from drakit.device import Health, Inventory
from drakit_driver.runtime.contract import (
    ConnectionEndedError,
    DeviceKey,
    HealthReport,
    Update,
)

PACE_SECONDS = 0.1
"""Minimum time between two reads, in seconds. The first value is read immediately."""

PACE_SECONDS_A_DEVICE = 20e-6
"""Additional time between two reads per device of an inventory, in seconds: several times as long
as the device manager takes to compare a device."""

SHARE = 9
MAX_PAUSE_SECONDS = 2.0
"""Maximum pause after a read. The pause is SHARE times as long as the processing took, so a source
that keeps changing many devices gets a tenth of the loop's time."""

ValueT = TypeVar("ValueT")


def pause_after(worked_seconds: float) -> float:
    """Return how many seconds to pause after this much processing time in the loop."""
    return min(MAX_PAUSE_SECONDS, SHARE * worked_seconds)


class LatestValue(Generic[ValueT]):
    """
    A cell between a source and the loop in which the cell was created.

    It needs no lock: each step is a single atomic CPython operation on a `deque`, or on a `dict`
    with plain keys.
    """

    def __init__(self, *, pace_seconds: float = PACE_SECONDS) -> None:
        """Create an empty cell. `pace_seconds` is the minimum time between two reads."""
        self._home = asyncio.get_running_loop()
        self._pace_seconds = pace_seconds
        self._news = asyncio.Event()
        self._woken = False
        self._value: deque[ValueT] = deque(maxlen=1)
        self._health: dict[DeviceKey, Health] = {}
        self._next_at = -math.inf
        self.over: ConnectionEndedError | None = None
        """The error with which the source ended. None while it is running."""
        self._ended = asyncio.Event()

    # ------------------------------------------------------------ for the source, in any thread

    def replace(self, value: ValueT) -> None:
        """Write the newest value."""
        self._value.append(value)
        self.wake()

    def report(self, key: DeviceKey, health: Health) -> None:
        """Write the health of a device in the newest value."""
        self._health[key] = health
        self.wake()

    def wake(self) -> None:
        """Wake the reader, even if there is nothing new."""
        if not self._woken:
            self._woken = True
            # the daemon's loop is closed, so there is no reader
            with suppress(RuntimeError):
                self._home.call_soon_threadsafe(self._news.set)

    # ------------------------------------------------------------ for the reader's loop

    def end(self, error: ConnectionEndedError) -> None:
        """End the source. The reader gets this error instead of values that it has not read yet. If
        this is called more than once, only the first error is kept."""
        if self.over is None:
            self.over = error
            self._ended.set()
            self._news.set()

    async def ended_within(self, seconds: float) -> ConnectionEndedError | None:
        """Wait for the end of the source until a timeout, and return its error, if any."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        return self.over

    async def wait(self) -> None:
        """Wait until there is something to read, or the source has ended."""
        await self._news.wait()

    def hold(self, seconds: float) -> None:
        """Don't read again for at least this long, because processing the last value took time."""
        self._next_at = max(self._next_at, self._home.time() + seconds)

    async def next(self) -> tuple[ValueT | None, dict[DeviceKey, Health]]:
        """
        Wait for changes and read all of them: the newest value, or None if it is unchanged, and the
        health reported since, which may be empty.

        Raises the error with which the source has ended.
        """
        while True:
            await self._news.wait()
            if self.over is None and (pause := self._next_at - self._home.time()) > 0:
                # Pause before reading, because a newer value may arrive in the meantime.
                await self.ended_within(pause)
            if self.over is not None:
                raise self.over
            self._news.clear()
            self._woken = False  # do this first, so that later writes wake the reader again
            # Read health before the value, so that every report refers to a device in a value that
            # has already been read or is read next. In the opposite order, a report that arrives
            # between the two reads could refer to a device in a value that is still unread, and
            # would be lost.
            health = dict(self._health.popitem() for _ in range(len(self._health)))
            value = self._value.popleft() if self._value else None
            self._next_at = self._home.time() + self._pace_seconds
            return value, health


async def updates_of(latest: LatestValue[Inventory]) -> AsyncIterator[Update]:
    """Yield a cell's inventories and health as updates. Raises the error with which its source
    ends."""
    loop = asyncio.get_running_loop()
    while True:
        inventory, health = await latest.next()
        began_at = loop.time()
        if inventory is not None:
            yield inventory
            if latest.over is not None:
                raise latest.over
        if health:
            yield HealthReport(devices=health)
        # The receiver has processed the last values by the time it requests more, so this measures
        # its processing time.
        worked = loop.time() - began_at
        size = 0 if inventory is None else len(inventory.devices)
        pace = PACE_SECONDS + PACE_SECONDS_A_DEVICE * size
        latest.hold(max(pace - worked, pause_after(worked)))
