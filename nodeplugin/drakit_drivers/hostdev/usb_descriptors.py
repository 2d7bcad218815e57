"""
The descriptors of a USB device: which of its interfaces give a container control of the node.

The kernel keeps what the device reported when it was connected: the device descriptor, then each
configuration with its interfaces in all alternate settings. Interfaces that no driver is bound to,
or that belong to an inactive configuration, are in it too. A device node of subsystem ``usb`` gives
access to all of them.

The device is hostile: what is malformed counts as dangerous, and the number of steps is limited.

Pure: it must not depend on files, sysfs or policies.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ("MAX_DESCRIPTOR_BYTES", "danger_of_descriptors")

MAX_DESCRIPTOR_BYTES = 18 + 8 * 65_535
"""The kernel reads at most 8 configurations, whose lengths have 16 bits."""

_MAX_DESCRIPTORS = 8192
"""A camera with many formats has about 1,000."""

_DEVICE, _CONFIGURATION, _INTERFACE = 1, 2, 4
_LENGTHS = {_DEVICE: 18, _CONFIGURATION: 9, _INTERFACE: 9}
"""The minimum lengths of the descriptors whose fields are read."""

_MALFORMED = "has malformed USB descriptors"

_CLASSES = {
    0x02: "has a communications interface (USB class 02), as modems and network adapters have",
    0x08: "has a mass storage interface (USB class 08)",
    0x09: "is a USB hub, which controls the devices at its ports",
    0x0A: "has a CDC data interface (USB class 0a), as modems and network adapters have",
    0xE0: "has a wireless controller interface (USB class e0), as Bluetooth adapters have",
}
_BOOT_PROTOCOLS = {1: "keyboard", 2: "mouse"}


class _MalformedError(ValueError):
    pass


def danger_of_descriptors(descriptors: bytes) -> str | None:
    """Return why a device with these descriptors is dangerous, as a clause; None if it is not."""
    try:
        # All are read first: a descriptor that hides the rest must not pass as harmless.
        kinds = list(_classes(descriptors))
    except _MalformedError:
        return _MALFORMED
    return next(filter(None, (_danger_of_class(*kind) for kind in kinds)), None)


def _danger_of_class(kind: int, subclass: int, protocol: int) -> str | None:
    if (kind, subclass) == (0x03, 1) and protocol in _BOOT_PROTOCOLS:
        return f"is a {_BOOT_PROTOCOLS[protocol]} (USB class 03, boot protocol)"
    if (kind, subclass) == (0xEF, 4):
        return "is a network adapter (USB class ef, RNDIS)"
    return _CLASSES.get(kind)


def _classes(descriptors: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield class, subclass and protocol of the device and of its interfaces."""
    configurations = 0
    end = _LENGTHS[_DEVICE]
    for start, kind, body in _descriptors(descriptors):
        # What is cut off can hide an interface: a part must end where the next one begins.
        if (start == 0) != (kind == _DEVICE) or (kind == _CONFIGURATION and start != end):
            raise _MalformedError
        if kind == _DEVICE:
            configurations = body[17]
            yield body[4], body[5], body[6]
        elif kind == _CONFIGURATION:
            configurations -= 1
            end += int.from_bytes(body[2:4], "little")
        elif kind == _INTERFACE:
            yield body[5], body[6], body[7]
    if end != len(descriptors) or end == _LENGTHS[_DEVICE] or configurations != 0:
        raise _MalformedError


def _descriptors(descriptors: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield start, type and bytes of each descriptor."""
    if len(descriptors) > MAX_DESCRIPTOR_BYTES:
        raise _MalformedError
    start = 0
    for _ in range(_MAX_DESCRIPTORS):
        if start == len(descriptors):
            return
        length, kind = descriptors[start : start + 2].ljust(2, b"\0")
        body = descriptors[start : start + length]
        if length < _LENGTHS.get(kind, 2) or len(body) < length:
            raise _MalformedError
        yield start, kind, body
        start += length
    raise _MalformedError
