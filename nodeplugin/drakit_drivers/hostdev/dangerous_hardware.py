"""
Devices that give a container control of the node or its data, judged by their hardware.

A path does not show whether ``/dev/input/event3`` is a keyboard, or whether a node of subsystem
``usb`` bypasses the rules for disks. Descriptors, the kernel's capabilities and sysfs do.

It must not depend on policies: it judges a device, whoever wants to publish it.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from drakit_drivers.hostdev.dangerous import danger_of_path
from drakit_drivers.hostdev.sysfs import HostDevice, PciParent
from drakit_drivers.hostdev.topology import is_root_hub
from drakit_drivers.hostdev.usb_descriptors import MAX_DESCRIPTOR_BYTES, danger_of_descriptors

__all__ = ("danger_of",)

_BITS_OF_WORD = 8 * struct.calcsize("l")
"""The kernel writes bitmaps in words of the reading process."""

_KEY_CODES = 0x300


def _bits(codes: Iterable[int]) -> int:
    return sum(1 << code for code in codes)


# Codes of linux/input-event-codes.h.
_TYPING_KEYS = _bits([*range(2, 12), *range(16, 26), *range(30, 39), *range(44, 51), 99])
"""Digits, letters and SysRq. A headset, a mouse or a game controller has none of them."""

_STOPPING_KEYS = _bits([116, 142, 205, 356, 408])
"""Power, sleep, suspend, power 2 and restart, on which the node shuts down or sleeps."""

_SMBUS_CLASS = "0c05"

_DIRECTORIES = {
    "block": "contains a disk of the node",
    "net": "is a network adapter of the node",
    "bluetooth": "is a Bluetooth adapter of the node",
}
"""Directories in sysfs below a device that the node uses. The directory ``net`` exists in each
network namespace, although the names of interfaces in it do not."""

_MAX_DIRECTORIES = 4096
"""Directories in sysfs below a device. A USB device with eight interfaces has about 100."""

_KEYBOARD = "is a keyboard of the node"
_BOOT_PROTOCOLS = {("01", "01"): "keyboard", ("01", "02"): "mouse"}


def danger_of(host: HostDevice, consoles: Collection[str]) -> str | None:
    """
    Return what a device does to the node, as a clause; None if it is not dangerous.

    Raises OSError if sysfs cannot be read: the device can be dangerous.

    :param consoles: kernel names of the terminals that the kernel uses as its console.
    """
    # By the kernel's path: a udev link can have any name.
    danger = danger_of_path(host.path)
    if danger:
        return danger
    if host.subsystem == "tty" and host.kernel_name in consoles:
        return "is the kernel's console"
    if host.subsystem == "usb":
        return _danger_of_usb_device(host)
    if host.subsystem == "input" and host.kernel_name.startswith("event"):
        return _danger_of_input(host.directory.parent, host.properties)
    if host.subsystem == "hidraw" or host.kernel_name.startswith("hiddev"):
        return _danger_of_hid(host.directory.parent.parent)
    if host.subsystem == "i2c-dev" and host.pci:
        return _danger_of_i2c(host.pci)
    return None


def _danger_of_usb_device(host: HostDevice) -> str | None:
    if is_root_hub(host.kernel_name):
        return "is the root hub of a USB controller, which controls the devices at its ports"
    # Buffered: a single read of a file in sysfs returns one page at most.
    with (host.directory / "descriptors").open("rb") as file:
        descriptors = file.read(MAX_DESCRIPTOR_BYTES + 1)
    return danger_of_descriptors(descriptors) or _danger_below(host.directory)


def _danger_of_input(device: Path, properties: Mapping[str, str]) -> str | None:
    keys = _keys(device)
    if keys & _TYPING_KEYS or properties.get("ID_INPUT_KEYBOARD") == "1":
        return _KEYBOARD
    if keys & _STOPPING_KEYS:
        return "has a key that stops the node, which a program can press"
    return None


def _danger_of_hid(device: Path) -> str | None:
    """Judge a raw node of a HID device, which is below a USB interface or another bus."""
    for part in (device, *device.parents):
        try:
            protocol = (part / "bInterfaceProtocol").read_text().strip()
            subclass = (part / "bInterfaceSubClass").read_text().strip()
        except FileNotFoundError:
            continue
        kind = _BOOT_PROTOCOLS.get((subclass, protocol))
        if kind:
            return f"is a {kind} of the node"
        break
    return _danger_below(device)


def _danger_of_i2c(controller: PciParent) -> str | None:
    # A controller without a readable class counts as one of the mainboard.
    if (controller.class_id or _SMBUS_CLASS).startswith(_SMBUS_CLASS):
        return "reaches memory modules and voltage regulators of the node's mainboard (SMBus)"
    return None


def _danger_below(device: Path) -> str | None:
    for directory in _directories_below(device):
        if directory.name in _DIRECTORIES:
            return _DIRECTORIES[directory.name]
        if directory.name == "capabilities" and _keys(directory.parent) & _TYPING_KEYS:
            return _KEYBOARD
    return None


def _directories_below(device: Path) -> Iterator[Path]:
    due = [device]
    left = _MAX_DIRECTORIES
    while due:
        with os.scandir(due.pop()) as entries:
            below = [Path(each) for each in entries if each.is_dir(follow_symlinks=False)]
        left -= len(below)
        if left < 0:
            raise OSError(errno.E2BIG, "too many directories in sysfs below the device")
        yield from below
        due += below


def _keys(device: Path) -> int:
    """Return the keys of an input device, a bit for each code."""
    words = (device / "capabilities" / "key").read_text().split()
    word = re.compile(f"[0-9a-f]{{1,{_BITS_OF_WORD // 4}}}")
    is_valid = 0 < len(words) <= _KEY_CODES // _BITS_OF_WORD and all(map(word.fullmatch, words))
    if not is_valid:
        raise OSError(errno.EINVAL, "capabilities/key is malformed")
    keys = 0
    for each in words:
        keys = keys << _BITS_OF_WORD | int(each, 16)
    return keys
