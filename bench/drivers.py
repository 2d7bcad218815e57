"""
Drivers whose own work takes no time, or a known time. The rest of the measured time is spent in the
plugin.

`Effects` and `Changing` have the same name, and a plugin hosts one of them at a time. `Separate`
has its own name, because it runs at the same time as `Effects`. `Effects` publishes the devices of
the measured claims, and a few that all other claims share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from datetime import timedelta
from typing import ClassVar

from drakit import AllocatedDevice, ClaimReference, Device, DeviceNode, Driver, DriverConfig, Edits
from drakit.settings import Duration

DRIVER = "bench.drakit.dev"

SEPARATE = "container.bench.drakit.dev"
SEPARATE_DEVICES = 8

EFFECTS = {"driver": "bench.drivers:Effects"}
"""The drivers entry of the measured driver."""

DEVICES = 64
"""The number of devices that only one claim can have at a time."""

SHARED = 100
"""The number of devices that any number of claims can share."""


class BenchConfig(DriverConfig):
    device_time: Duration = timedelta(0)
    """How long preparing a device takes, and unpreparing it."""


class Effects(Driver[BenchConfig]):
    """A typical driver, which has side effects to undo."""

    name = DRIVER
    config_type = BenchConfig
    side_effects: ClassVar[bool] = True

    async def devices(self) -> AsyncIterator[Collection[Device]]:
        own = [Device(name=f"device-{number}") for number in range(DEVICES)]
        shared = [
            Device(name=f"shared-{number}", allow_multiple_allocations=True)
            for number in range(SHARED)
        ]
        yield [*own, *shared]
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


class Separate(Effects):
    """The same driver, for a separate process."""

    name = SEPARATE

    async def devices(self) -> AsyncIterator[Collection[Device]]:
        yield [Device(name=f"device-{number}") for number in range(SEPARATE_DEVICES)]
        await asyncio.Event().wait()


class Changing(Effects):
    """A driver whose last device changes when the measurement requests it."""

    running: Changing | None = None

    async def devices(self) -> AsyncIterator[Collection[Device]]:
        self.loop, self.asked = asyncio.get_running_loop(), asyncio.Queue[int]()
        Changing.running = self
        level = 0
        while True:
            yield [Device(name="device-0"), Device(name="changing", attributes={"level": level})]
            level = await self.asked.get()

    @classmethod
    def change(cls, level: int) -> None:
        """Change the device, from any thread."""
        assert cls.running is not None
        cls.running.loop.call_soon_threadsafe(cls.running.asked.put_nowait, level)
