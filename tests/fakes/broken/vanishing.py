"""Drivers that do not cope with a device that vanishes."""

from __future__ import annotations

import asyncio

from drakit import DriverError
from tests.fakes.broken.tidy import Tidy


class ListsOnce(Tidy):
    """Does not look for changes."""

    async def devices(self):
        yield self.listed()
        await asyncio.Event().wait()


class NeedsDevice(Tidy):
    """Undoes nothing without the device."""

    def unprepare(self, claim, device):
        if device.name not in {listed.name for listed in self.listed()}:
            raise DriverError(f"{device.name} is not plugged in")
        super().unprepare(claim, device)


class Stumbles(Tidy):
    """Fails at the next list."""

    async def devices(self):
        yield self.listed()
        if not self.unplugged.exists():
            while not self.unplugged.exists():
                await asyncio.sleep(0.1)
            raise FileNotFoundError("lamp-1")
        await asyncio.Event().wait()
