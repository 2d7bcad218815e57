"""
The identity of a disk: what stays the same when the kernel numbers its disks in another order.

World wide names come first, then UUIDs of volumes, then serial numbers. The kernel's own attributes
go before udev's properties, so an identity does not depend on whether udev has processed the disk
already. File systems' UUIDs are no identity: a pod that writes to the disk chooses them.

It must not know sysfs paths of a host, policies, or names of published devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

__all__ = ("disk_identity",)

_WWN = re.compile(r"(?:naa\.|0x)([0-9a-f]+)", re.IGNORECASE)
_ZRAM_OR_LOOP = re.compile(r"(zram|loop)\d+")
"""Their number is chosen when they are set up, and is all the identity that they have."""

_HARDWARE_PARTITION = re.compile(r"mmcblk\d+(boot\d+|gp\d+)")
"""Kernel names of the boot and general purpose areas of an eMMC, each a disk with the card's id."""


def disk_identity(
    kernel_name: str, attribute: Callable[[str], str | None], properties: Mapping[str, str]
) -> str | None:
    """
    Return the identity of a whole disk; None if it has none, as zram and loop devices.

    :param attribute: reads an attribute below the disk's directory in sysfs.
    :param properties: what udev's database has about the disk.
    """
    if _ZRAM_OR_LOOP.fullmatch(kernel_name):
        return None
    area = _HARDWARE_PARTITION.fullmatch(kernel_name)
    for kind, value in (
        ("dm", attribute("dm/uuid")),
        ("md", _array_uuid(attribute, properties)),
        # An NVMe namespace has it itself, a SCSI or SATA disk at its device.
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
        # eui.…, uuid.…, nvme.… and t10.… name their kind themselves.
        kind, _, value = ("wwn", "", wwn[1].lower()) if wwn else value.partition(".")
    # Some firmware reports zeros, or blanks, for lack of a number.
    return f"{kind}-{value}" if re.search(r"[1-9A-Za-z]", value) else None


def _array_uuid(
    attribute: Callable[[str], str | None], properties: Mapping[str, str]
) -> str | None:
    # udev's database has MD_UUID for the members of the array as well.
    is_array = attribute("md/metadata_version") is not None
    return properties.get("MD_UUID") if is_array else None


def _serial(attribute: Callable[[str], str | None], properties: Mapping[str, str]) -> str | None:
    # Not ID_SERIAL, which is the model where there is no serial number.
    serial = attribute("serial") or properties.get("ID_SERIAL_SHORT")
    # Of a USB card reader every slot has the reader's number.
    slot = properties.get("ID_INSTANCE")
    return f"{serial}-{slot}" if serial and slot else serial
