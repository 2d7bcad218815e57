"""
Drivers whose own work costs nothing, or a known time: what is left is the plugin's.

All have one name, so that the same claims of the API server serve for all of them; a plugin hosts
one of them at a time. They give edits for any device that a claim names, and publish few.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from datetime import timedelta
from typing import ClassVar

from drakit import AllocatedDevice, ClaimReference, Device, DeviceNode, Driver, DriverConfig, Edits
from drakit.settings import Duration

__all__ = ("DRIVER", "BenchConfig", "Effects", "Plain")

DRIVER = "bench.drakit.dev"

PUBLISHED = 4


class BenchConfig(DriverConfig):
    device_time: Duration = timedelta(0)
    """How long a device takes, to prepare and to unprepare."""


class Effects(Driver[BenchConfig]):
    """A driver as most are: what it does for a device must be undone."""

    name = DRIVER
    config_type = BenchConfig
    side_effects: ClassVar[bool] = True

    async def devices(self) -> AsyncIterator[Collection[Device]]:
        yield [Device(name=f"published-{number}") for number in range(PUBLISHED)]
        await asyncio.Event().wait()

    async def prepare(self, claim: ClaimReference, device: AllocatedDevice) -> Edits:
        await self._work()
        node = DeviceNode(path=f"/dev/{device.name}", host_path="/dev/null", type="c")
        return Edits(env={"BENCH_DEVICE": device.name}, device_nodes=(node,))

    async def unprepare(self, claim: ClaimReference, device: AllocatedDevice) -> None:
        await self._work()

    async def _work(self) -> None:
        if seconds := self.config.device_time.total_seconds():
            await asyncio.sleep(seconds)


class Plain(Effects):
    """A driver that does nothing but say what the container gets."""

    side_effects: ClassVar[bool] = False
