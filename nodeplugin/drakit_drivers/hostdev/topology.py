"""
Where hardware is in the machine: paths that do not depend on the order in which the kernel finds
it. They follow the ``ID_PATH`` of udev, and need no udev daemon.

A path begins at the nearest bus whose devices are named after their addresses, such as PCI. Below
it, a path has the parts that hardware, firmware or a cable decides: the chip select of an SPI
device, the ports on the way to a USB device. The numbers of buses and hosts are left out, because
the kernel counts these as they come.

Pure: it must not know files, policies, or names of published devices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ("Ancestor", "address", "is_root_hub", "usb_path")

_ADDRESSED_BUSES = ("pci", "platform", "pnp", "acpi", "amba", "ccw", "vmbus")
"""Buses whose devices have names with the address of the hardware. Others number their devices."""

_NUMBERED = re.compile(r".*\.(\d+|auto)")
"""Platform devices without an address, which the kernel numbers: coretemp.0, dwc3.2.auto."""

_FIXED_PARTS = {
    # The address of a chip, or its id in the tables of the firmware. An adapter (i2c-1) has none.
    "i2c": re.compile(r"\d+-([0-9a-f]{4,})|i2c-(\w+:\d+)"),
    "spi": re.compile(r"spi\d+\.(\d+)|spi-(\w+:\d+)"),
    # Channel, target and unit, without the host's number.
    "scsi": re.compile(r"\d+:(\d+:\d+:\d+)"),
    # Keyboard and mouse of one PS/2 controller, which the driver registers in this order.
    "serio": re.compile(r"serio(\d+)"),
    # A port of a serial card.
    "serial-base": re.compile(r".+:\d+\.(\d+)"),
}
"""By subsystem: what in the name of a device does not depend on the kernel's numbering."""

_ROOT_HUB = re.compile(r"usb\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ancestor:
    """A device above another one in sysfs."""

    name: str
    subsystem: str | None
    driver: str | None


def address(ancestors: Sequence[Ancestor]) -> str | None:
    """Return the path to a device with these ancestors, nearest first; None if no bus above it has
    addresses."""
    below: list[str] = []
    for each in ancestors:
        subsystem = each.subsystem or ""
        numbered = subsystem == "platform" and _NUMBERED.fullmatch(each.name)
        if subsystem in _ADDRESSED_BUSES and not numbered:
            return "-".join((f"{subsystem}-{each.name}", *reversed(below)))
        pattern = _FIXED_PARTS.get(subsystem)
        match = pattern and pattern.fullmatch(each.name)
        if match:
            below.append(f"{subsystem}-{match[match.lastindex or 0]}")
    return None


def is_root_hub(name: str) -> bool:
    """Return whether the kernel's name of a device is that of a bus's root hub: ``usb1``."""
    return _ROOT_HUB.fullmatch(name) is not None


def usb_path(name: str, ancestors: Sequence[Ancestor], *, root_hub_speed: int | None) -> str | None:
    """
    Return the path to a USB device: ``pci-0000:00:14.0-usbv2-0:1.2`` is port 2 of the hub at port 1
    of the controller's USB 2 root hub. None if the controller has no address, as in usbip.

    A controller has up to two root hubs, whose ports have the same numbers: only the revision tells
    them apart. The form is that of udev's ``ID_PATH_WITH_USB_REVISION``, with 0 in place of the
    number of the bus.

    :param name: the kernel's name of the USB device: ``1-1.2``.
    :param ancestors: the devices above a node of it, nearest first.
    :param root_hub_speed: Megabits per second.
    """
    ports = name.partition("-")[2]
    names = [each.name for each in ancestors]
    root = next((index for index, name in enumerate(names) if is_root_hub(name)), None)
    if root is None or not ports or root_hub_speed is None:
        return None
    controller = address(ancestors[root + 1 :])
    revision = 1 if root_hub_speed < 480 else 2 if root_hub_speed < 5000 else 3
    return f"{controller}-usbv{revision}-0:{ports}" if controller else None
