"""
Two drivers for processes that are killed: one marks its devices in a directory, the other has no
side effects.

The directory simulates the hardware: it outlives every process, and shows what is really prepared.
Both drivers follow the contract of `drakit/driver.py`: every call may be repeated, and leads to the
same state, wherever the previous one was interrupted.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from drakit import CounterSet, Device, Driver, DriverConfig, DriverError, Edits, Inventory

DEVICES = ("dev-1", "dev-2", "dev-3", "dev-4")
WHOLE = "whole"
"""The whole device; each of the others is a quarter of it."""

SLOW_SECONDS = 0.1
"""Duration of a slow call. The claims of a batch then end one after the other."""


class HardwareConfig(DriverConfig):
    directory: Path


class Hardware:
    """
    The directory, for drivers and for tests.

    ``marks/<device>`` contains the UID of the claim that has the device. ``broken/<device>`` makes
    its prepare fail after the mark is made. ``slow/<device>`` delays its calls. ``away`` prevents
    the start of the driver. ``wrong`` lists calls that must never be made.
    """

    def __init__(self, directory: Path) -> None:
        self.marks, self.broken = directory / "marks", directory / "broken"
        self.slow = directory / "slow"
        self.away, self.wrong = directory / "away", directory / "wrong"

    def make(self) -> None:
        for directory in (self.marks, self.broken, self.slow):
            directory.mkdir(parents=True, exist_ok=True)

    async def take_time(self, device: str) -> None:
        if (self.slow / device).exists():
            await asyncio.sleep(SLOW_SECONDS)

    def holder(self, device: str) -> str | None:
        try:
            return (self.marks / device).read_text()
        except FileNotFoundError:
            return None

    def overlaps(self, device: str, uid: str) -> list[str]:
        """Return other claims' devices that overlap this one."""
        others = DEVICES if device == WHOLE else (WHOLE,)
        return [other for other in others if self.holder(other) not in (None, uid)]

    def mark(self, device: str, uid: str) -> None:
        temporary = self.marks / f".{device}"
        temporary.write_text(uid)
        temporary.rename(self.marks / device)

    def clear(self, device: str) -> None:
        (self.marks / device).unlink(missing_ok=True)
        (self.marks / f".{device}").unlink(missing_ok=True)

    def note_wrong(self, text: str) -> None:
        with self.wrong.open("a") as file:
            file.write(f"{text}\n")


class Marking(Driver[HardwareConfig]):
    """A driver with side effects: a device must be cleared before another claim can have it."""

    name = "marking.example.com"
    config_type = HardwareConfig

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.hardware = Hardware(config.directory)
        if self.hardware.away.exists():
            raise RuntimeError("the hardware's daemon does not answer")

    async def devices(self):
        yield listed()
        await asyncio.Event().wait()

    async def prepare(self, claim, device):
        await self.hardware.take_time(device.name)
        holder = self.hardware.holder(device.name)
        if holder not in (None, claim.uid):
            self.hardware.note_wrong(f"prepare of {device.name} for {claim.uid}: {holder} has it")
            raise DriverError(f"{device.name} is marked for {holder}")
        if others := self.hardware.overlaps(device.name, claim.uid):
            self.hardware.note_wrong(f"prepare of {device.name} for {claim.uid} beside {others}")
        self.hardware.mark(device.name, claim.uid)
        if (self.hardware.broken / device.name).exists():
            raise DriverError(f"{device.name} is broken; repair it")
        return edits(device.name)

    async def unprepare(self, claim, device):
        await self.hardware.take_time(device.name)
        holder = self.hardware.holder(device.name)
        if holder not in (None, claim.uid):
            self.hardware.note_wrong(f"unprepare of {device.name} for {claim.uid}: {holder} has it")
            return
        self.hardware.clear(device.name)

    async def check(self, claim, device):
        return self.hardware.holder(device.name) == claim.uid


class Plain(Driver[HardwareConfig]):
    """A driver without side effects: a claim gets only a CDI file."""

    name = "plain.example.com"
    config_type = HardwareConfig
    side_effects = False

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.hardware = Hardware(config.directory)

    async def devices(self):
        yield listed()
        await asyncio.Event().wait()

    async def prepare(self, claim, device):
        await self.hardware.take_time(device.name)
        if (self.hardware.broken / device.name).exists():
            raise DriverError(f"{device.name} is broken; repair it")
        return edits(device.name)


def listed() -> Inventory:
    parts = [Device(name=name, consumes={WHOLE: {"quarters": "1"}}) for name in DEVICES]
    return Inventory(
        devices=[*parts, Device(name=WHOLE, consumes={WHOLE: {"quarters": "4"}})],
        counter_sets=[CounterSet(name=WHOLE, counters={"quarters": "4"})],
    )


def edits(device: str) -> Edits:
    return Edits(env={device.upper().replace("-", "_"): device})
