"""
The identities that earlier releases gave devices, with numbers that the kernel can assign in
another order: the bus of a USB port, for example.

A device that a claim held during the upgrade keeps its name until the claim is released. No device
gets such a name newly.

Pure: it must not know claims, or how names are assigned.
"""

from __future__ import annotations

import re

from drakit_drivers.hostdev.naming import Identity, is_wireless
from drakit_drivers.hostdev.sysfs import HostDevice

__all__ = ("former_identity",)

_BUSES = ("pci", "platform", "pnp", "acpi", "amba", "ccw", "vmbus")


def former_identity(host: HostDevice, *, unit: bool) -> Identity | None:
    """Return the former identity of a device node, or of the unit that it is part of; None if it
    has not changed since."""
    if host.block or is_wireless(host):
        return None
    usb = host.usb
    if usb:
        who = usb.serial or f"port-{usb.port}"
        interface = "" if unit or usb.interface is None else f"-i{usb.interface}"
        return Identity(
            text=f"{usb.vendor_id}-{usb.product_id}-{who}{interface}",
            place=f"{usb.port}{interface}",
        )
    name = host.path.removeprefix("/dev/")
    where = _address(host)
    if not unit and re.fullmatch(r"ttyS\d+", host.kernel_name):
        text = name
    elif where:
        stem = re.sub(r"[\d.]+$", "", re.sub(r"C\d+D", "CD", name))
        text = where if unit else f"{stem}-{where}"
    else:
        return None
    return Identity(text=text, place=text)


def _address(host: HostDevice) -> str | None:
    for each in host.ancestors:
        numbered = each.subsystem == "platform" and re.search(r"\.(\d+|auto)$", each.name)
        if each.subsystem in _BUSES and not numbered:
            return f"{each.subsystem}-{each.name}"
    return None
