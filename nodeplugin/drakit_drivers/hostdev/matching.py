"""
Matchers: how a policy describes the devices to publish, and which devices match.

A matcher is validated without access to a host. Errors name the value and the remedy. In a path
glob, ``*``, ``?`` and brackets match within one path component.

Does not depend on files, on the names of published devices, or on other policy fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from drakit import DevicePolicy
from drakit_drivers.hostdev.hardware import Ancestor, HostDevice, PciParent, UsbParent

RAW_DISK_SUBSYSTEMS = ("bsg", "nvme", "nvme-generic", "scsi_generic")
"""Subsystems of character devices that give access to the blocks of a disk, even while it is
mounted."""


# ------------------------------------------------------------ globs


def check_text(text: str) -> str:
    """Return `text` unchanged. Raises ValueError if it contains an ASCII control character."""
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise ValueError(f"{text!r} has a control character")
    return text


def has_wildcard(glob: str) -> bool:
    """Return whether a path is a glob, rather than the path of one device."""
    return any(sign in glob for sign in "*?[")


def check_glob(glob: str) -> str:
    """Raise an error for globs that match no device, or other devices than intended."""
    if not glob.startswith("/dev/"):
        raise ValueError(f"{glob!r} must be an absolute path under /dev")
    check_text(glob)
    for part in glob.split("/")[2:]:
        if part in ("", ".", ".."):
            raise ValueError(f"{glob!r} has an empty part, '.' or '..' in it")
        if "**" in part:
            raise ValueError(f"{glob!r} has '**', which is not supported; a '*' stays in its part")
        _check_brackets(part, glob)
    return glob


def _check_brackets(part: str, glob: str) -> None:
    rest = part
    while rest:
        sign, rest = rest[0], rest[1:]
        if sign not in "[]":
            continue
        # A ']' at the start is one of the characters, not the end of the set.
        inside = re.match(r"!?+(?:\][^\]]*|[^\]]+)(?=\])", rest)
        if sign == "]" or not inside:
            raise ValueError(f"{glob!r} has a bracket without its counterpart in the same part")
        if inside[0].startswith("^"):
            raise ValueError(f"{glob!r} has '[^': write '[!' for all other characters")
        for first, last in re.findall(r"(.)-(.)", inside[0].removeprefix("!")):
            if first > last:
                raise ValueError(f"{glob!r} has the range {first}-{last}, which matches nothing")
        rest = rest[inside.end() + 1 :]


def matches(glob: str, path: str) -> bool:
    """Return whether a glob matches a path. A ``*`` never matches a ``/``."""
    patterns = _compiled(glob)
    parts = path.split("/")
    return len(parts) == len(patterns) and all(
        pattern.match(part) for pattern, part in zip(patterns, parts, strict=True)
    )


@lru_cache(maxsize=1024)
def _compiled(glob: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(translate(part)) for part in glob.split("/"))


# ------------------------------------------------------------ matchers


def _parse_hex(value: Any) -> Any:
    # YAML parsers can read 0403 as 259, and some of them read 1e10 as a float.
    if not isinstance(value, str):
        raise ValueError('must be hexadecimal digits in quotes, like "0403"')
    return value.lower()


def _check_name_glob(glob: str) -> str:
    # The rules for brackets are the same as in device paths.
    if "/" in glob:
        raise ValueError(f"{glob!r} has a '/'; write a name, not a path")
    check_glob(f"/dev/{glob}")
    return glob


Hex4 = Annotated[str, Field(pattern="^[0-9a-f]{4}$"), BeforeValidator(_parse_hex)]
ClassPrefix = Annotated[str, Field(pattern="^[0-9a-f]{2,6}$"), BeforeValidator(_parse_hex)]
Glob = Annotated[str, Field(max_length=256), AfterValidator(check_glob)]
NameGlob = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_check_name_glob)]
TextGlob = Annotated[str, Field(max_length=256), AfterValidator(check_text)]
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


class _OfSubsystem(DevicePolicy):
    subsystem: Subsystem
    """The kernel subsystem: a directory of ``/sys/class`` or ``/sys/bus``, such as ``misc``,
    ``tty``, ``video4linux`` or ``block``."""

    @field_validator("subsystem")
    @classmethod
    def _no_raw_disks(cls, subsystem: str) -> str:
        if subsystem in RAW_DISK_SUBSYSTEMS:
            raise ValueError(
                f"devices of {subsystem} can write to mounted disks; use a CSI driver for disks "
                "(docs/admin/disks.md)"
            )
        return subsystem


class Conditions(DevicePolicy):
    """Conditions for devices. A device must meet all specified conditions."""

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
    specified properties must match. On a node without a udev daemon, no device has properties."""

    parent: ParentMatcher | None = None
    """An ancestor of the device in sysfs, such as its controller or hub."""

    @field_validator("usb", "pci", "parent")
    @classmethod
    def _has_a_property(cls, matcher: DevicePolicy | None) -> DevicePolicy | None:
        if matcher is not None and not any(value for _, value in matcher):
            raise ValueError("must have at least one field; remove it to match any device")
        return matcher


class Matcher(Conditions, _OfSubsystem):
    """Conditions for devices. A device matches if it meets all specified conditions."""

    exclude: tuple[Conditions, ...] = Field(default=(), max_length=16)
    """Devices that do not match, although they meet the other conditions: those that meet all
    conditions of at least one entry."""

    @field_validator("exclude")
    @classmethod
    def _excludes_some(cls, exclude: tuple[Conditions, ...]) -> tuple[Conditions, ...]:
        if not all(any(value for _, value in each) for each in exclude):
            raise ValueError("an entry without conditions excludes all devices; add one")
        return exclude


# ------------------------------------------------------------ devices that match


def is_matched(matchers: Iterable[Matcher], host: HostDevice) -> bool:
    """Return whether one of a policy's matchers fully matches a device."""
    return any(_matches(matcher, host) for matcher in matchers)


def names_usb_device(
    matchers: Iterable[Matcher], *, vendor_id: str, product_id: str, path: str
) -> bool:
    """Return whether any matcher specifies this USB device by its IDs or by its port."""
    return any(
        (usb.path or (usb.vendor_id and usb.product_id))
        and usb.vendor_id in (None, vendor_id.lower())
        and usb.product_id in (None, product_id.lower())
        and usb.path in (None, path)
        for matcher in matchers
        if (usb := matcher.usb)
    )


def wanted_paths(matchers: Iterable[Matcher], subsystem: str) -> Callable[[str], bool]:
    """Return a filter for the device paths of a subsystem. The other properties of a device are
    read only if one of its paths passes the filter."""
    paths = [matcher.paths for matcher in matchers if matcher.subsystem == subsystem]
    if not all(paths):
        return lambda path: True
    globs = [glob for its in paths for glob in its]
    return lambda path: any(matches(glob, path) for glob in globs)


def _matches(matcher: Matcher, host: HostDevice) -> bool:
    # Wait for udev, because the links and properties by which a device is excluded may be missing
    # until udev has processed it.
    needs_udev = any(each.paths or each.udev_properties for each in matcher.exclude)
    return (
        matcher.subsystem == host.subsystem
        and _meets(matcher, host)
        and (host.is_settled or not needs_udev)
        and not any(_meets(each, host) for each in matcher.exclude)
    )


def _meets(matcher: Conditions, host: HostDevice) -> bool:
    return (
        (
            not matcher.paths
            or any(matches(glob, path) for glob in matcher.paths for path in host.paths)
        )
        and (matcher.driver is None or matcher.driver == host.driver)
        and (matcher.usb is None or _is_usb(matcher.usb, host.usb))
        and (matcher.pci is None or _is_pci(matcher.pci, host.pci))
        and all(
            key in host.properties and fnmatchcase(host.properties[key], glob)
            for key, glob in matcher.udev_properties.items()
        )
        and (
            matcher.parent is None
            or any(_is_parent(matcher.parent, ancestor) for ancestor in host.ancestors)
        )
    )


def _is_usb(matcher: UsbMatcher, usb: UsbParent | None) -> bool:
    return (
        usb is not None
        and matcher.vendor_id in (None, usb.vendor_id.lower())
        and matcher.product_id in (None, usb.product_id.lower())
        and matcher.serial in (None, usb.serial)
        and matcher.path in (None, usb.path)
        and matcher.port in (None, usb.port)
    )


def _is_pci(matcher: PciMatcher, pci: PciParent | None) -> bool:
    return (
        pci is not None
        and matcher.vendor_id in (None, pci.vendor_id)
        and matcher.device_id in (None, pci.device_id)
        and (pci.class_id or "").startswith(matcher.class_id or "")
    )


def _is_parent(matcher: ParentMatcher, ancestor: Ancestor) -> bool:
    return (
        matcher.subsystem in (None, ancestor.subsystem)
        and matcher.driver in (None, ancestor.driver)
        and (matcher.name is None or fnmatchcase(ancestor.name, matcher.name))
    )
