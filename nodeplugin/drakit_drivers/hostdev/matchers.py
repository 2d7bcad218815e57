"""
Matchers: how a HostDevicePolicy describes the devices that it publishes.

They are checked here, and compared with devices in :mod:`.matching`.

It must not know the host, or what else a policy decides.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from drakit import DevicePolicy
from drakit_drivers.hostdev.globs import check_glob

__all__ = ("RAW_DISK_SUBSYSTEMS", "Matcher", "ParentMatcher", "PciMatcher", "UsbMatcher")

RAW_DISK_SUBSYSTEMS = ("bsg", "nvme", "nvme-generic", "scsi_generic")
"""Character devices that reach the blocks of a disk, mounted or not."""


def _parse_hex(value: Any) -> Any:
    # YAML reads 0403 as 259, and 1e10 as a float.
    if not isinstance(value, str):
        raise ValueError('must be hexadecimal digits in quotes, like "0403"')
    return value.lower()


def _check_name_glob(glob: str) -> str:
    # The rules for brackets are those of a device's path.
    if "/" in glob:
        raise ValueError(f"{glob!r} has a '/'; write a name, not a path")
    check_glob(f"/dev/{glob}")
    return glob


def _check_text_glob(glob: str) -> str:
    if re.search(r"[\x00-\x1f\x7f]", glob):
        raise ValueError(f"{glob!r} has a control character")
    return glob


Hex4 = Annotated[str, Field(pattern="^[0-9a-f]{4}$"), BeforeValidator(_parse_hex)]
ClassPrefix = Annotated[str, Field(pattern="^[0-9a-f]{2,6}$"), BeforeValidator(_parse_hex)]
Glob = Annotated[str, Field(max_length=256), AfterValidator(check_glob)]
NameGlob = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_check_name_glob)]
TextGlob = Annotated[str, Field(max_length=256), AfterValidator(_check_text_glob)]
Subsystem = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)]
KernelDriver = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)]
Property = Annotated[str, Field(pattern="^[A-Za-z0-9_.:-]+$", max_length=128)]


class UsbMatcher(DevicePolicy):
    """Properties of the USB device. All specified fields must match."""

    vendor_id: Hex4 | None = Field(default=None, alias="vendorID")
    """The vendor ID: four hexadecimal digits in quotes, such as ``"1a86"``."""

    product_id: Hex4 | None = Field(default=None, alias="productID")
    """The product ID: four hexadecimal digits in quotes."""

    serial: str | None = Field(default=None, min_length=1, max_length=126)
    """The serial number. If several units have the same serial number, also set ``path``."""

    path: str | None = Field(default=None, pattern=r"^[!-~]+-usbv[1-3]-0:[0-9.]+$", max_length=128)
    """The USB controller and port path, as in the attribute ``usbPath``, such as
    ``pci-0000:00:14.0-usbv2-0:1.2``. It stays the same after a reboot."""

    port: str | None = Field(default=None, pattern=r"^[0-9]+-[0-9]+(\.[0-9]+)*$", max_length=32)
    """The USB bus number and port path, such as ``1-2.3``. The kernel can change the bus number at
    a reboot, so use ``path`` instead."""


class PciMatcher(DevicePolicy):
    """Properties of the PCI function of the device. All specified fields must match."""

    vendor_id: Hex4 | None = Field(default=None, alias="vendorID")
    """The vendor ID: four hexadecimal digits in quotes, such as ``"8086"``."""

    device_id: Hex4 | None = Field(default=None, alias="deviceID")
    """The device ID: four hexadecimal digits in quotes."""

    class_id: ClassPrefix | None = Field(default=None, alias="classID")
    """The first two to six hexadecimal digits of the class, in quotes: ``"03"`` for every display
    controller, ``"0302"`` for 3D controllers."""


class ParentMatcher(DevicePolicy):
    """Properties of an ancestor in sysfs. One ancestor must match all specified fields."""

    subsystem: Subsystem | None = None
    """The ancestor's subsystem, such as ``usb``, ``pci`` or ``platform``."""

    driver: KernelDriver | None = None
    """The ancestor's kernel driver."""

    name: NameGlob | None = None
    """A glob for the name of the ancestor, which is the last component of its sysfs path. Examples:
    ``1-2*``, ``0000:01:00.0``."""


class Matcher(DevicePolicy):
    """Conditions for devices. A device matches if it meets all specified conditions."""

    subsystem: Subsystem
    """The kernel subsystem: a directory of ``/sys/class`` or ``/sys/bus``, such as ``misc``,
    ``tty``, ``video4linux`` or ``block``."""

    paths: tuple[Glob, ...] = Field(default=(), max_length=64)
    """Paths under ``/dev``, with the wildcards ``*``, ``?``, ``[ab]`` and ``[!ab]``. At least one
    path must match the device node, or a symbolic link to it that udev created. A wildcard matches
    within one path component."""

    usb: UsbMatcher | None = None
    """The USB device that the device belongs to."""

    pci: PciMatcher | None = None
    """The PCI function that the device belongs to."""

    driver: KernelDriver | None = None
    """The kernel driver of the device, or of its nearest ancestor that has a driver. Examples:
    ``ftdi_sio``, ``uvcvideo``."""

    udev_properties: dict[Property, TextGlob] = Field(default_factory=dict, max_length=16)
    """Properties in the udev database, such as ``ID_MODEL``, and a glob for each value. All
    specified properties must match. On a node without a udev daemon, no
    device has properties."""

    parent: ParentMatcher | None = None
    """An ancestor of the device in sysfs, such as its controller or hub."""

    @field_validator("subsystem")
    @classmethod
    def _no_raw_disks(cls, subsystem: str) -> str:
        if subsystem in RAW_DISK_SUBSYSTEMS:
            raise ValueError(
                f"devices of {subsystem} can write to mounted disks; use a CSI driver for disks "
                "(docs/admin/disks.md)"
            )
        return subsystem

    @field_validator("usb", "pci", "parent")
    @classmethod
    def _has_a_property(cls, matcher: DevicePolicy | None) -> DevicePolicy | None:
        if matcher is not None and not any(value for _, value in matcher):
            raise ValueError("must have at least one field; remove it to match any device")
        return matcher
