"""Drivers that publish what they must not, or not what they should."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace

from drakit import Device, Health, Inventory
from tests.fakes.broken.tidy import Tidy


class CapitalName(Tidy):
    """One device's name is no DNS label."""

    def listed(self):
        return [*super().listed(), Device(name="Lamp-X", health=Health.healthy())]


class TooLongAttribute(Tidy):
    """One device has an attribute that the API does not take."""

    def listed(self):
        return [
            *super().listed(),
            Device(name="long", attributes={"story": "x" * 65}, health=Health.healthy()),
        ]


class OtherNames(Tidy):
    """Devices are called after the process."""

    def listed(self):
        return [replace(d, name=f"{d.name}-{os.getpid()}") for d in super().listed()]


class Clock(Tidy):
    """An attribute says when the driver was started."""

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.started = int(time.time() * 1000)

    def listed(self):
        return [replace(d, attributes={"started": self.started}) for d in super().listed()]


class Shuffled(Tidy):
    """The order of its devices changes with each start."""

    async def devices(self):
        starts = self.config.root / "starts"
        starts.open("a").write("x")
        turned = len(starts.read_text()) % 2
        async for listed in super().devices():
            yield Inventory(devices=[*listed[turned:], *listed[:turned]], ordered=True)


class NoFallback(Tidy):
    """Publishes devices with a field that few API servers support, and no fallback."""

    def listed(self):
        return [replace(d, extra={"inNoRelease": {"a": 1}}) for d in super().listed()]


class WithFallback(NoFallback):
    """Has devices for API servers that do not know the field of its others."""

    async def devices(self):
        async for listed in super().devices():
            plain = [replace(device, extra={}) for device in listed]
            yield Inventory(devices=listed, fallback=plain)


class OneList(Tidy):
    """Lists its devices, and that was it."""

    async def devices(self):
        yield self.listed()
        await asyncio.sleep(0.3)


class SilentHealth(Tidy):
    """Says that it has health, and tells none."""

    def listed(self):
        return [replace(d, health=None) for d in super().listed()]


class HalfHealth(Tidy):
    """Tells the health of some devices."""

    def listed(self):
        first, *others = super().listed()
        return [first, *(replace(d, health=None) for d in others)]


class WrongCapacity(Tidy):
    """None of its devices can be published."""

    def listed(self):
        return [Device(name="lamp-0", capacity={"light": "2 GB"})]


class BlockingHealth(Tidy):
    """Each query of a device's health blocks, as an SDK does."""

    def health(self, device):
        time.sleep(3)
        return Health.healthy()
