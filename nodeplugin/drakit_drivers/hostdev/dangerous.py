"""
Detects devices that give a container control of the node or its data.

Most of these devices are in a table of kernel paths. For most entries, the container needs no
additional capability: it only has to open the device node. A path does not show whether
``/dev/input/event3`` is a keyboard, or whether a node of subsystem ``usb`` bypasses the rules for
disks. For that, the module reads input capabilities, sysfs and USB descriptors.

The kernel keeps the descriptors that a USB device reported when it was connected: the device
descriptor, then each configuration with its interfaces in all alternate settings. This includes
interfaces without a driver, and interfaces in an inactive configuration. The device node gives
access to all of them. The device is untrusted, so malformed descriptors are treated as dangerous,
and the parsing effort is limited.

Does not depend on policies: the result for a path or a device is the same for every policy.
"""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from drakit_drivers.hostdev.hardware import HostDevice, is_root_hub
from drakit_drivers.hostdev.matching import matches

# ------------------------------------------------------------ paths

DANGEROUS_NODES: Mapping[tuple[str, ...], str] = {
    ("mem", "kmem", "oldmem", "port", "crash", "vc-mem", "vcio"): (
        "accesses the node's memory or I/O ports"
    ),
    ("snapshot",): "stores and replaces the node's memory for hibernation",
    ("cpu/*/msr", "cpu/microcode"): "changes registers or microcode of the node's processors",
    ("cxl/*", "dax*", "ndctl*", "nmem*"): "maps or erases the node's memory modules",
    ("iommu", "uio*", "vfio/noiommu-*", "vfio/vfio"): (
        "lets hardware read and write memory directly (DMA)"
    ),
    ("efi_capsule_loader", "efi_test", "nvram", "wmi/*", "cros_ec", "mei*"): (
        "changes the node's firmware or its settings"
    ),
    ("mtd*", "mtd/*", "ubi*"): "writes flash memory that can contain the node's firmware",
    ("watchdog*",): "resets the node",
    ("ipmi*", "ipmi/*", "ipmidev/*", "ipmb-*", "hpilo/*"): (
        "sends commands to the node's management controller"
    ),
    ("xen/*", "vmcp"): "sends commands to the hypervisor on behalf of the node",
    ("kmsg", "ttyprintk"): "reads or writes the kernel's log",
    ("console", "tty[0-9]", "tty[0-9][0-9]", "vcs*"): "is a console of the node",
    ("uinput", "input/uinput", "uhid", "userio"): "creates keyboards whose input the node accepts",
    ("cuse", "ublk-control", "ublkc*", "vduse/*", "vhci", "vtpmx"): (
        "creates devices that the node uses"
    ),
    ("usbmon*",): "records the traffic of all USB devices, including keystrokes",
    ("tpm[0-9]*",): "accesses the keys and sessions of other programs in the TPM",
    ("rfkill",): "disables the node's Wi-Fi and Bluetooth",
    ("autofs",): "controls the node's automatic mounts",
    ("mapper/control", "loop-control", "btrfs-control", "nvme-fabrics", "zfs", "raw/*"): (
        "controls the node's disks, volumes or file systems"
    ),
    ("megaraid_sas_ioctl_node", "megadev*", "mpt*ctl", "aac[0-9]*", "tw[ael][0-9]*"): (
        "sends commands to the node's RAID controllers"
    ),
}
"""Globs for paths below ``/dev``, with a clause for each group that describes the danger of such a
device. A glob contains only letters, digits, ``-``, ``_``, ``/``, ``*`` and brackets."""

_PATTERNS = {
    # Compile one expression per row, because each scan compares each device with the table.
    re.compile(f"/dev/(?:{'|'.join(globs)})".replace("*", "[^/]*")): danger
    for globs, danger in DANGEROUS_NODES.items()
}

_PROBES = ("mem", "sda1", "TTY_9", "0", "zz-zz.z")
"""Names without a common character. A pattern that matches all of them matches any name."""


def danger_of_path(path: str) -> str | None:
    """
    Return how a device at this path endangers the node, or None if the path is not in the table.

    The path can also be a glob. A glob that also matches paths outside the table returns None.
    """
    # A glob can be matched like a literal path: the pattern for "watchdog*" also matches the string
    # "/dev/watchdog*".
    found = (danger for pattern, danger in _PATTERNS.items() if pattern.fullmatch(path))
    return next(found, None)


def matches_everything(glob: str) -> bool:
    """Return whether a glob matches all device nodes in /dev or in one of its subdirectories."""
    depth = len(glob.split("/")) - 2
    return all(matches(glob, "/".join(("", "dev", *[probe] * depth))) for probe in _PROBES)


# ------------------------------------------------------------ hardware

_BITS_OF_WORD = 8 * struct.calcsize("l")
"""The word size in bits. The kernel prints bitmaps in words of the reading process's size."""

_KEY_CODES = 0x300


def _bits(codes: Iterable[int]) -> int:
    return sum(1 << code for code in codes)


# Codes of linux/input-event-codes.h.
_TYPING_KEYS = _bits([*range(2, 12), *range(16, 26), *range(30, 39), *range(44, 51), 99])
"""The keys for digits, letters and SysRq. A headset, a mouse or a game controller does not have any
of them."""

_STOPPING_KEYS = _bits([116, 142, 205, 356, 408])
"""The keys power, sleep, suspend, power 2 and restart, which make the node shut down or sleep."""

_SMBUS_CLASS = "0c05"

_DIRECTORIES = {
    "block": "contains a disk of the node",
    "net": "is a network adapter of the node",
    "bluetooth": "is a Bluetooth adapter of the node",
}
"""Directories below a device in sysfs that show that the node uses the device. The directory
``net`` is visible in every network namespace, although the interface names in it are not."""

_MAX_DIRECTORIES = 4096
"""Maximum number of directories below a device in sysfs. A USB device with eight interfaces has
about 100."""

_KEYBOARD = "is a keyboard of the node"
_BOOT_PROTOCOLS = {"01": "keyboard", "02": "mouse"}
"""The protocols of USB human interface devices with subclass 01."""


def danger_of(host: HostDevice, consoles: Collection[str]) -> str | None:
    """
    Return how a device endangers the node, as a clause, or None if it is not dangerous.

    Raises OSError if sysfs cannot be read, because the device might then be dangerous.

    :param consoles: names of the terminals that the kernel uses as its console.
    """
    # Use the kernel's path, because a udev link can have any name.
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
    # Treat a controller without a readable class as part of the mainboard.
    if (
        host.subsystem == "i2c-dev"
        and host.pci
        and (host.pci.class_id or _SMBUS_CLASS).startswith(_SMBUS_CLASS)
    ):
        return "reaches memory modules and voltage regulators of the node's mainboard (SMBus)"
    return None


def _danger_of_usb_device(host: HostDevice) -> str | None:
    if is_root_hub(host.kernel_name):
        return "is the root hub of a USB controller, which controls the devices at its ports"
    # Use a buffered read: a single read of a file in sysfs returns at most one page.
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
    """Return the danger of a raw HID node. The device can be below a USB interface or on another
    bus."""
    for part in (device, *device.parents):
        try:
            protocol = (part / "bInterfaceProtocol").read_text().strip()
            subclass = (part / "bInterfaceSubClass").read_text().strip()
        except FileNotFoundError:
            continue
        if subclass == "01" and protocol in _BOOT_PROTOCOLS:
            return f"is a {_BOOT_PROTOCOLS[protocol]} of the node"
        break
    return _danger_below(device)


def _danger_below(device: Path) -> str | None:
    for directory in directories_below(device):
        if directory.name in _DIRECTORIES:
            return _DIRECTORIES[directory.name]
        if directory.name == "capabilities" and _keys(directory.parent) & _TYPING_KEYS:
            return _KEYBOARD
    return None


def directories_below(device: Path) -> Iterator[Path]:
    """Yield the directories below a device in sysfs. Raises OSError."""
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
    """Return the keys of an input device, as a bitmask with one bit per key code."""
    words = (device / "capabilities" / "key").read_text().split()
    word = re.compile(f"[0-9a-f]{{1,{_BITS_OF_WORD // 4}}}")
    is_valid = 0 < len(words) <= _KEY_CODES // _BITS_OF_WORD and all(map(word.fullmatch, words))
    if not is_valid:
        raise OSError(errno.EINVAL, "capabilities/key is malformed")
    keys = 0
    for each in words:
        keys = keys << _BITS_OF_WORD | int(each, 16)
    return keys


# ------------------------------------------------------------ USB descriptors

MAX_DESCRIPTOR_BYTES = 18 + 8 * 65_535
"""Maximum size of all descriptors. The kernel reads at most 8 configurations, and the length of
each has 16 bits."""

_MAX_DESCRIPTORS = 8192
"""Maximum number of descriptors to parse. A camera with many formats has about 1,000."""

_DEVICE, _CONFIGURATION, _INTERFACE = 1, 2, 4
_LENGTHS = {_DEVICE: 18, _CONFIGURATION: 9, _INTERFACE: 9}
"""The minimum length of each type of descriptor whose fields are read."""

_CLASSES = {
    0x02: "has a communications interface (USB class 02), as modems and network adapters have",
    0x08: "has a mass storage interface (USB class 08)",
    0x09: "is a USB hub, which controls the devices at its ports",
    0x0A: "has a CDC data interface (USB class 0a), as modems and network adapters have",
    0xE0: "has a wireless controller interface (USB class e0), as Bluetooth adapters have",
}


class _MalformedError(ValueError):
    pass


def danger_of_descriptors(descriptors: bytes) -> str | None:
    """Return how a device with these descriptors endangers the node, as a clause, or None."""
    try:
        # Parse all descriptors first, because a malformed descriptor that hides the rest must not
        # pass as harmless.
        kinds = list(_classes(descriptors))
    except _MalformedError:
        return "has malformed USB descriptors"
    return next(filter(None, (_danger_of_class(*kind) for kind in kinds)), None)


def _danger_of_class(kind: int, subclass: int, protocol: int) -> str | None:
    if (kind, subclass) == (0x03, 1) and f"{protocol:02x}" in _BOOT_PROTOCOLS:
        return f"is a {_BOOT_PROTOCOLS[f'{protocol:02x}']} (USB class 03, boot protocol)"
    if (kind, subclass) == (0xEF, 4):
        return "is a network adapter (USB class ef, RNDIS)"
    return _CLASSES.get(kind)


def _classes(descriptors: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the class, subclass and protocol of the device and of each interface."""
    configurations = 0
    end = _LENGTHS[_DEVICE]
    for start, kind, body in _descriptors(descriptors):
        # Each configuration must end where the next one begins, because a truncated one could hide
        # an interface.
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
    """Yield the start, type and bytes of each descriptor."""
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
