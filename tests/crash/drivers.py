"""
Two drivers for processes that are killed: one marks its devices in a directory, the other has no
side effects.

The directory simulates the hardware: it outlives every process, and shows what is really prepared.
Both drivers follow the contract of `drakit/driver.py`: every call may be repeated, and leads to the
same state, wherever the previous one was interrupted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path

from drakit import (
    CounterSet,
    Device,
    DeviceNode,
    Driver,
    DriverConfig,
    DriverError,
    Edits,
    Inventory,
)

DEVICES = ("dev-1", "dev-2", "dev-3", "dev-4")
WHOLE = "whole"
"""The whole device; each of the others is a quarter of it."""

POLL_SECONDS = 0.05
"""Time between two looks at the numbers of devices."""

SLOW_SECONDS = 0.1
"""Duration of a slow call. The claims of a batch then end one after the other."""


class HardwareConfig(DriverConfig):
    directory: Path


class Hardware:
    """
    The directory, for drivers and for tests.

    ``marks/<device>`` contains the UID of the claim that has the device. ``broken/<device>`` makes
    its prepare fail after the mark is made. ``slow/<device>`` delays its calls. ``away`` prevents
    the start of the driver. ``wrong`` lists calls that must never be made. ``numbers/<device>``
    contains the minor number of a device that was renumbered.
    """

    def __init__(self, directory: Path) -> None:
        self.marks, self.broken = directory / "marks", directory / "broken"
        self.slow, self.numbers = directory / "slow", directory / "numbers"
        self.away, self.wrong = directory / "away", directory / "wrong"

    def make(self) -> None:
        for directory in (self.marks, self.broken, self.slow, self.numbers):
            directory.mkdir(parents=True, exist_ok=True)

    async def take_time(self, device: str) -> None:
        if (self.slow / device).exists():
            await asyncio.sleep(SLOW_SECONDS)

    def new_number(self, device: str) -> int | None:
        """Return the number of a device that was renumbered."""
        try:
            return int((self.numbers / device).read_text())
        except FileNotFoundError:
            return None

    def number(self, device: str) -> int:
        new = self.new_number(device)
        return (*DEVICES, WHOLE).index(device) if new is None else new

    def renumber(self, numbers: Mapping[str, int]) -> None:
        """Give devices other numbers, all at the same time for the driver."""
        new = self.numbers.with_name("new numbers")
        new.mkdir()
        for device, number in numbers.items():
            (new / device).write_text(str(number))
        self.numbers.rmdir()
        new.rename(self.numbers)

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
    metadata_files = True

    def __init__(self, config, node) -> None:
        super().__init__(config, node)
        self.hardware = Hardware(config.directory)
        if self.hardware.away.exists():
            raise RuntimeError("the hardware's daemon does not answer")
        self.prepared: dict[str, int] = {}
        """The number with which this process has prepared a device."""

    async def devices(self):
        marked: frozenset[str] | None = None
        while True:
            before, marked = marked, self.outdated()
            if marked != before:
                yield listed(marked)
            await asyncio.sleep(POLL_SECONDS)

    def outdated(self) -> frozenset[str]:
        """Return the devices of claims that must be prepared again."""
        return frozenset(
            device
            for device in DEVICES
            if (number := self.hardware.new_number(device)) is not None
            and number != self.prepared.get(device)
            and self.hardware.holder(device) is not None
        )

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
        number = self.prepared[device.name] = self.hardware.number(device.name)
        return edits(device.name, number)

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
    metadata_files = True

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
        return edits(device.name, self.hardware.number(device.name))


def listed(outdated: Collection[str] = ()) -> Inventory:
    parts = [
        Device(name=name, consumes={WHOLE: {"quarters": "1"}}, prepare_again=name in outdated)
        for name in DEVICES
    ]
    return Inventory(
        devices=[*parts, Device(name=WHOLE, consumes={WHOLE: {"quarters": "4"}})],
        counter_sets=[CounterSet(name=WHOLE, counters={"quarters": "4"})],
    )


def edits(device: str, number: int) -> Edits:
    node = DeviceNode(path=f"/dev/{device}", type="c", major=188, minor=number, identity=device)
    return Edits(env={device.upper().replace("-", "_"): device}, device_nodes=(node,))
