"""
A driver with many devices. The measurement decides how many of them change.

A file contains the total number of changes, so that a restart restores the devices. Consecutive
changes are in different slices.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from itertools import count
from math import gcd
from pathlib import Path

from drakit import Device, Driver, DriverConfig, Topology

DRIVER = "many.drakit.dev"

RATE = 1_000
"""The number of changes per second. Each is a separate inventory."""

LEVEL = "level"
"""The attribute that changes: the number of changes to the device."""

_LOOK_SECONDS = 0.01


def names(devices: int) -> list[str]:
    """Return the devices' names, in order."""
    return [f"device-{number:05}" for number in range(devices)]


def levels(devices: int, *, changes: int) -> list[int]:
    """Return the devices' levels after this many changes."""
    turns, more = divmod(changes, devices)
    step = _step(devices)
    result = [turns] * devices
    for turn in range(more):
        result[turn * step % devices] += 1
    return result


def _step(devices: int) -> int:
    """Return the distance between two devices that change consecutively: longer than a slice, and
    coprime to the number of devices, so that each device changes before any changes again."""
    return next(step for step in count(67) if gcd(step, devices) == 1)


def order(changes: Path, number: int) -> None:
    """Write the total number of changes. The driver may be reading the file."""
    new = changes.with_suffix(".new")
    new.write_text(str(number))
    new.replace(changes)


class ManyConfig(DriverConfig):
    devices: int
    changes: Path
    """The file with the number of changes."""


class Many(Driver[ManyConfig]):
    name = DRIVER
    config_type = ManyConfig

    async def devices(self) -> AsyncIterator[Collection[Device]]:
        total, step = self.config.devices, _step(self.config.devices)
        done = self._wanted()
        current = levels(total, changes=done)
        devices = list(map(_device, names(total), range(total), current))
        yield list(devices)
        began, first = time.monotonic(), done
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            wanted = self._wanted()
            if done == wanted:
                began, first = time.monotonic(), done
                continue
            due = min(wanted, first + int((time.monotonic() - began) * RATE))
            while done < due:
                number = done * step % total
                current[number] += 1
                devices[number] = _device(devices[number].name, number, current[number])
                done += 1
                yield list(devices)

    def _wanted(self) -> int:
        return int(self.config.changes.read_text())


def _device(name: str, number: int, level: int) -> Device:
    return Device(
        name=name,
        attributes={"model": "LATEST-GPU-MODEL", "serial": f"SN-{number:012}", LEVEL: level},
        capacity={"memory": "80Gi"},
        topology=Topology(numa_node=number % 2, pci_bus_id=f"0000:{number % 256:02x}:00.0"),
    )
