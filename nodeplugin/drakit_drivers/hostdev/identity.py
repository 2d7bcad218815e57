"""
The identity of a disk: it stays the same when the kernel numbers its disks in another order.

World wide names come first, then UUIDs of volumes, then serial numbers. The kernel's attributes
take precedence over udev's properties, so an identity does not depend on whether udev has already
processed the disk. A file system's UUID is not an identity: a pod that writes the disk chooses it.

It must not know a host's sysfs paths, policies, or names of published devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

__all__ = ("disk_identity",)

_WWN = re.compile(r"(?:naa\.|0x)([0-9a-f]+)", re.IGNORECASE)
_ZRAM_OR_LOOP = re.compile(r"(zram|loop)\d+")
"""Kernel names of zram and loop devices. Their number is chosen at setup, and is their only
identity."""

_HARDWARE_PARTITION = re.compile(r"mmcblk\d+(boot\d+|gp\d+)")
"""Kernel names of an eMMC's boot and general purpose areas, which are disks with the card's id."""


def disk_identity(
    kernel_name: str, attribute: Callable[[str], str | None], properties: Mapping[str, str]
) -> str | None:
    """
    Return the identity of a whole disk; None if it has none, like zram and loop devices.

    :param attribute: reads an attribute below the disk's directory in sysfs.
    :param properties: the disk's entry in udev's database.
    """
    if _ZRAM_OR_LOOP.fullmatch(kernel_name):
        return None
    area = _HARDWARE_PARTITION.fullmatch(kernel_name)
    for kind, value in (
        ("dm", attribute("dm/uuid")),
        ("md", _array_uuid(attribute, properties)),
        # An NVMe namespace has it as an attribute, a SCSI or SATA disk below its device.
        ("", attribute("wwid") or attribute("device/wwid")),
        ("", properties.get("ID_WWN_WITH_EXTENSION") or properties.get("ID_WWN")),
        ("cid", attribute("device/cid")),
        ("serial", _serial(attribute, properties)),
    ):
        identity = _identity(kind, value) if value else None
        if identity:
            return f"{identity}-{area[1]}" if area else identity
    return None


def _identity(kind: str, value: str) -> str | None:
    if not kind:
        wwn = _WWN.fullmatch(value)
        # The prefixes eui., uuid., nvme. and t10. already name the kind.
        kind, _, value = ("wwn", "", wwn[1].lower()) if wwn else value.partition(".")
    # Some firmware reports zeros or blanks instead of a number.
    return f"{kind}-{value}" if re.search(r"[1-9A-Za-z]", value) else None


def _array_uuid(
    attribute: Callable[[str], str | None], properties: Mapping[str, str]
) -> str | None:
    # udev's database also has MD_UUID for the members of the array.
    is_array = attribute("md/metadata_version") is not None
    return properties.get("MD_UUID") if is_array else None


def _serial(attribute: Callable[[str], str | None], properties: Mapping[str, str]) -> str | None:
    # Not ID_SERIAL, which is the model if there is no serial number.
    serial = attribute("serial") or properties.get("ID_SERIAL_SHORT")
    # Every slot of a USB card reader has the reader's number.
    slot = properties.get("ID_INSTANCE")
    return f"{serial}-{slot}" if serial and slot else serial
