"""
What a driver's thread has to tell the daemon's loop: the last inventory, and the health since then.

The thread may tell as often as it likes: what has not been taken yet is replaced, and there is one
wake-up for each time that something is taken. So a driver that talks without end costs the daemon's
loop no more than how often it takes.

It must not know drivers, or what is done with inventories.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from drakit.device import Health, Inventory
from drakit_nodeplugin.endpoints.endpoint import DeviceKey, HealthReport, Update

__all__ = ("Mailbox",)


class Mailbox:
    """From one thread to the loop in which it was made; no lock, as each step is one of CPython's
    own (`deque` and `dict` of plain keys), which another thread sees wholly or not at all."""

    def __init__(self) -> None:
        self._home = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._woken = False
        self._inventory: deque[Inventory] = deque(maxlen=1)
        self._health: dict[DeviceKey, Health] = {}

    # ------------------------------------------------------------ in the thread

    def replace(self, inventory: Inventory) -> None:
        """There is this, all of it."""
        self._inventory.append(inventory)
        self._wake()

    def report(self, key: DeviceKey, health: Health) -> None:
        """A device of the last inventory is like this."""
        self._health[key] = health
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the daemon's loop is closed: nobody takes it any more
                self._home.call_soon_threadsafe(self._news.set)

    # ------------------------------------------------------------ at home

    def wake(self) -> None:
        """Let who waits go on, though there may be nothing to take."""
        self._news.set()

    async def wait(self) -> None:
        """Wait until there is something to take, or for :meth:`wake`."""
        await self._news.wait()

    def take(self) -> list[Update]:
        """Take all that there is: the inventory first."""
        self._news.clear()
        self._woken = False  # before the rest: what comes from now on wakes again
        # Health before the inventory: so the devices of each report are in an inventory that was
        # taken earlier, or is now. The other way round, one put between the two would be missed.
        reports = dict(self._health.popitem() for _ in range(len(self._health)))
        updates: list[Update] = []
        if self._inventory:
            updates.append(self._inventory.popleft())
        if reports:
            updates.append(HealthReport(devices=reports))
        return updates
