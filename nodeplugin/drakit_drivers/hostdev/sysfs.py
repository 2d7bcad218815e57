"""
Reads devices from sysfs and the host's udev database: number, path, driver, the USB or PCI device
that they belong to, and kind-specific attributes (serial ports, cameras, sound cards, GPUs).

Missing is different from unknown. A missing file or value is definite: the device does not exist,
is being unplugged, or does not have the attribute. After any other error (no file descriptor, no
memory, no permission), the value is unknown, and :class:`UnreadableError` is raised. A caller that
treated an unknown device as missing would remove a device that is still present.

Attributes may vanish at any moment, when the device is unplugged. If a device is no longer the same
after all reads, it is treated as unplugged, because half of its attributes might describe another
device.

Most hosts have a udev database, but minimal ones do not. Therefore, the kernel's attributes take
precedence over udev's properties. The database lists a link for every device that requests it, but
the link leads to only one of them. The other devices are treated as not having the link.

Does not depend on policies.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from drakit import AttributeValue
from drakit_drivers.hostdev.hardware import (
    Ancestor,
    BlockFacts,
    HostDevice,
    PciParent,
    UsbParent,
    is_root_hub,
    usb_path,
)

ValueT = TypeVar("ValueT")

_MISSING = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO))
"""Errors that occur if a file does not exist, or if its device is being unplugged."""

_WITHOUT_VALUE = frozenset((errno.EINVAL, errno.EISDIR, errno.ENODATA, errno.EOPNOTSUPP))
"""Errors that occur if the kernel driver does not have a value for the attribute, or if the path is
another type of file."""

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_PCI_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")

_INDICES = {
    "i2c-dev": "name",
    "iio": "name",
    "infiniband_mad": "port",
    "input": "device/name",
    "tty": "device/port_number",
    "video4linux": "index",
}
"""The attribute that distinguishes the nodes of one device interface, keyed by subsystem."""


# ------------------------------------------------------------ files


class UnreadableError(Exception):
    """A file that may exist cannot be read. The message is a clause that names the file."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(f"{path} cannot be read: {reason}")


def read_attribute(directory: Path, name: str) -> str | None:
    """Read an attribute. Return None if it is missing or has no value."""
    path = directory / name
    content = _value(path, path.read_bytes)
    return content.decode(errors="replace").strip().strip("\0") or None if content else None


def link_name(link: Path) -> str | None:
    """Return the name of a link's target, or None if there is no link."""
    target = _value(link, link.readlink)
    return target.name if target else None


def entries(directory: Path) -> list[Path]:
    """List a directory in sorted order. The result is empty if the directory is missing."""
    return _listing(directory) or []


def _listing(directory: Path) -> list[Path] | None:
    return _value(directory, lambda: sorted(directory.iterdir()))


def _value(path: Path, read: Callable[[], ValueT]) -> ValueT | None:
    try:
        return read()
    except OSError as error:
        if error.errno in _MISSING | _WITHOUT_VALUE:
            return None
        raise UnreadableError(path, error.strerror) from error


# ------------------------------------------------------------ devices


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The devices found in a subsystem."""

    devices: tuple[HostDevice, ...]
    unreadable: str | None = None
    """The reason why there may be more devices, or None if the list is complete."""


class Sysfs:
    """Reads devices below one mount of sysfs, with their entries in the udev database and their
    links below ``/dev``."""

    def __init__(self, root: Path, *, udev_root: Path, dev_root: Path) -> None:
        self.root = root.resolve()
        self._udev_data = udev_root / "data"
        self._dev = dev_root

    def devices(self, subsystem: str, *, wanted: Callable[[str], bool]) -> Found:
        """Find the devices of a subsystem that have a device node and a wanted path."""
        devices: list[HostDevice] = []
        unreadable: str | None = None
        try:
            listed = self._entries(subsystem)
        except UnreadableError as error:
            return Found(devices=(), unreadable=str(error))
        for entry in listed:
            try:
                device = self.device(entry, wanted=wanted)
            except UnreadableError as error:
                unreadable = unreadable or str(error)
            else:
                devices += [device] if device else []
        return Found(devices=tuple(devices), unreadable=unreadable)

    def block_directories(self) -> dict[str, Path]:
        """Return the directories of all block devices and partitions on the host, keyed by kernel
        name."""
        found = {entry.name: _resolved(entry) for entry in self._entries("block")}
        return {name: directory for name, directory in found.items() if directory}

    def active_consoles(self) -> list[str]:
        """Return the kernel names of the terminals that the kernel uses as its console
        (``ttyS0``)."""
        active = read_attribute(self.root / "class" / "tty" / "console", "active")
        return (active or "").split()

    def subsystem_of(self, kind: Literal["block", "char"], number: str) -> str | None:
        """Return the subsystem of the device with a number."""
        return link_name(self.root / "dev" / kind / number / "subsystem")

    def device_of(self, kind: str, number: str) -> HostDevice | None:
        """Read the device with a type (``b`` or ``c``) and a number. Return None if there is no
        such device."""
        return self.device(self.root / "dev" / ("block" if kind == "b" else "char") / number)

    def _entries(self, subsystem: str) -> list[Path]:
        for directory in (
            self.root / "class" / subsystem,
            self.root / "bus" / subsystem / "devices",
        ):
            found = _listing(directory)
            if found is not None:
                return found
        if _listing(self.root / "class") is None:
            # Without sysfs, every device would appear unplugged.
            raise UnreadableError(self.root / "class", "it is missing")
        return []

    def device(
        self, entry: Path, *, wanted: Callable[[str], bool] = lambda path: True
    ) -> HostDevice | None:
        """Read one device. Return None if it does not have a device node, is not wanted, or is
        being unplugged. Raises UnreadableError."""
        inode = _inode(entry)
        uevent = _uevent(entry)
        try:
            major, minor = int(uevent["MAJOR"]), int(uevent["MINOR"])
            path = f"/dev/{uevent['DEVNAME']}"
        except (KeyError, ValueError):
            return None
        directory = _resolved(entry)
        if directory is None:
            return None
        subsystem = link_name(directory / "subsystem") or entry.parent.name
        node_type: Literal["b", "c"] = "b" if subsystem == "block" else "c"
        properties, listed, is_settled = self._udev_entry(f"{node_type}{major}:{minor}")
        if not any(wanted(name) for name in (path, *listed)):
            return None
        targets = {link: self._number_of_node(link) for link in listed}
        number = (node_type, major, minor)
        family = [directory, *self._ancestors(directory)]
        ancestors = tuple(
            Ancestor(name=part.name, subsystem=subsystem_of_part, driver=link_name(part / "driver"))
            for part in family[1:]
            # A directory such as 0000:00:1f.3/sound is not a device.
            if (subsystem_of_part := link_name(part / "subsystem"))
        )
        index = _INDICES.get(subsystem)
        device = HostDevice(
            subsystem=subsystem,
            kernel_name=directory.name,
            path=path,
            type=node_type,
            major=major,
            minor=minor,
            directory=directory,
            devtype=uevent.get("DEVTYPE"),
            links=tuple(link for link, target in targets.items() if target == number),
            links_of_others=tuple(link for link, at in targets.items() if at not in (None, number)),
            index=read_attribute(directory, index) if index else None,
            serial=properties.get("ID_SERIAL_SHORT") or read_attribute(directory, "serial"),
            wwid=_wwid(family) if node_type == "c" else None,
            driver=link_name(directory / "driver")
            or next((each.driver for each in ancestors if each.driver), None),
            # -1 means that the firmware does not report the NUMA node.
            numa_node=_whole(_nearest(family, "numa_node")),
            usb=_usb_parent(family, ancestors),
            pci=_pci_parent(family),
            block=_block_facts(directory) if node_type == "b" else None,
            properties=properties,
            is_settled=is_settled,
            ancestors=ancestors,
            unit=_unit(family, subsystem),
            family=_family_attributes(subsystem, family, properties),
        )
        return device if _inode(directory) == inode else None

    def _udev_entry(self, name: str) -> tuple[dict[str, str], tuple[str, ...], bool]:
        """Return a device's properties, its links, and whether it is settled, given its type and
        number. The properties and links are empty if udev has not processed the device yet, or does
        not run on the host. The device is unsettled only in the first case."""
        properties: dict[str, str] = {}
        links: list[str] = []
        content = read_attribute(self._udev_data, name)
        for line in (content or "").splitlines():
            if line.startswith("S:"):
                links.append(f"/dev/{line[2:]}")
            elif line.startswith("E:") and "=" in line:
                key, _, value = line[2:].partition("=")
                properties[key] = value
        is_settled = content is not None or not entries(self._udev_data)
        return properties, tuple(sorted(links)), is_settled

    def _number_of_node(self, path: str) -> tuple[str, int, int] | None:
        """Return the type and number of the device node that a path leads to, or None."""
        node = self._dev / path.removeprefix("/dev/")
        # A path with a symbolic link loop is treated as missing.
        status = _value(node, node.stat) if _value(node, node.exists) else None
        if status is None or not (stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode)):
            return None
        kind = "b" if stat.S_ISBLK(status.st_mode) else "c"
        return kind, os.major(status.st_rdev), os.minor(status.st_rdev)

    def _ancestors(self, directory: Path) -> Iterator[Path]:
        for parent in directory.parents:
            if parent == self.root or parent.parent == self.root:  # /sys/devices is not a device
                return
            yield parent


def _resolved(entry: Path) -> Path | None:
    """Return the device's own directory, with symbolic links resolved, or None if it is missing."""
    return _value(entry, lambda: Path(os.path.realpath(entry, strict=True)))


def _inode(directory: Path) -> int | None:
    """Return a value that identifies a sysfs directory. A replugged device gets a different
    value."""
    return _value(directory, lambda: directory.stat().st_ino)


def _block_facts(directory: Path) -> BlockFacts:
    sectors = _whole(read_attribute(directory, "size")) or 0
    backing_device = read_attribute(directory, "backing_dev")
    return BlockFacts(
        size_bytes=sectors * 512,  # the unit is always 512 bytes
        has_backing_file=read_attribute(directory, "loop/backing_file") is not None,
        backing_device=None if backing_device == "none" else backing_device,
    )


def _uevent(directory: Path) -> dict[str, str]:
    lines = (read_attribute(directory, "uevent") or "").splitlines()
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def _nearest(family: Iterable[Path], name: str) -> str | None:
    """Read an attribute from the nearest device that has it."""
    return next(filter(None, (read_attribute(part, name) for part in family)), None)


def _wwid(family: list[Path]) -> str | None:
    return _nearest((part for part in family if link_name(part / "subsystem") == "scsi"), "wwid")


def _usb_parent(family: list[Path], ancestors: Sequence[Ancestor]) -> UsbParent | None:
    interface = _nearest(family, "bInterfaceNumber")
    for part in family:
        vendor_id = read_attribute(part, "idVendor")
        product_id = read_attribute(part, "idProduct")
        if vendor_id and product_id:
            root_hub_speed = _nearest(filter(lambda each: is_root_hub(each.name), family), "speed")
            return UsbParent(
                vendor_id=vendor_id,
                product_id=product_id,
                port=part.name,
                manufacturer=read_attribute(part, "manufacturer"),
                product=read_attribute(part, "product"),
                # Don't use udev's copy, because it is missing until udev has processed the device.
                serial=read_attribute(part, "serial"),
                interface=int(interface, 16) if interface else None,
                version=_bcd(read_attribute(part, "bcdDevice")),
                device_class=read_attribute(part, "bDeviceClass"),
                speed=_whole(read_attribute(part, "speed")),
                path=usb_path(part.name, ancestors, root_hub_speed=_whole(root_hub_speed)),
            )
    return None


def _pci_parent(family: list[Path]) -> PciParent | None:
    for part in family:
        if _PCI_ADDRESS.fullmatch(part.name) and link_name(part / "subsystem") == "pci":
            return PciParent(
                bus_id=part.name,
                # The directory of the root bridge, such as pci0000:00.
                root=next(filter(_PCI_ROOT.fullmatch, part.parts), None),
                vendor_id=_hexadecimal(part, "vendor"),
                device_id=_hexadecimal(part, "device"),
                class_id=_hexadecimal(part, "class"),
                subsystem_vendor_id=_hexadecimal(part, "subsystem_vendor"),
                subsystem_device_id=_hexadecimal(part, "subsystem_device"),
                iommu_group=_whole(link_name(part / "iommu_group")),
            )
    return None


def _unit(family: list[Path], subsystem: str) -> Path | None:
    """Find the physical unit: a USB device, a PCI function, another device on a bus, or otherwise
    the outermost device of the same subsystem, such as a virtual sound card."""
    for part in family:
        if read_attribute(part, "idVendor"):
            return part
    found: Path | None = None
    for part in family:
        if (link_name(part / "subsystem") or subsystem) != subsystem:
            return part
        if link_name(part / "subsystem"):
            found = part
    return found


def _bcd(text: str | None) -> str | None:
    return f"{text[:2]}.{text[2:]}" if text and len(text) == 4 else None


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _hexadecimal(directory: Path, name: str) -> str | None:
    number = read_attribute(directory, name)
    return number.removeprefix("0x") if number else None


# ------------------------------------------------------------ attributes of a kind

_Facts = Iterator[tuple[str, AttributeValue | None]]

_SOUND_NODES = {
    r"controlC\d+": "control",
    r"pcmC\d+D\d+p": "playback",
    r"pcmC\d+D\d+c": "capture",
    r"midiC\d+D\d+": "midi",
    r"hwC\d+D\d+": "hwdep",
    r"timer|seq": "global",
}

_INPUT_KINDS = ("keyboard", "mouse", "touchscreen", "touchpad", "tablet", "joystick", "switch")
"""The kinds in udev's ``ID_INPUT_*`` properties, most specific first, because a device can have
several: every keyboard also has keys."""


def _family_attributes(
    subsystem: str, family: Sequence[Path], properties: Mapping[str, str]
) -> dict[str, AttributeValue]:
    """Return the kind-specific attributes of a device: at most three, because the API allows 32 for
    a device. `family` contains the directories of the device and its ancestors, nearest first."""
    read = _READERS.get(subsystem)
    facts = read(family, properties) if read else ()
    return {name: value for name, value in facts if value is not None}


def _tty(family: Sequence[Path], _: Mapping[str, str]) -> _Facts:
    # An adapter with four connectors has four ports, which the kernel numbers.
    yield "ttyPort", _whole(_nearest(family[:3], "port_number"))
    # 0 means that the kernel provides the port, but there is no UART.
    yield "uartType", _whole(read_attribute(family[0], "type"))


def _video(family: Sequence[Path], properties: Mapping[str, str]) -> _Facts:
    yield "videoName", read_attribute(family[0], "name")
    capabilities = properties.get("ID_V4L_CAPABILITIES")
    if capabilities is not None:
        kinds = capabilities.split(":")
        yield "videoCapture", "capture" in kinds
        yield "videoOutput", "video_output" in kinds


def _sound(family: Sequence[Path], _: Mapping[str, str]) -> _Facts:
    name = family[0].name
    yield "soundNode", next((k for p, k in _SOUND_NODES.items() if re.fullmatch(p, name)), None)
    card = next((part for part in family if re.fullmatch(r"card\d+", part.name)), None)
    if card:
        yield "soundCardID", read_attribute(card, "id")
        streams = (re.match(r"pcmC\d+D(\d+)", entry.name) for entry in entries(card))
        yield "soundPcmCount", len({match[1] for match in streams if match})


def _input(family: Sequence[Path], properties: Mapping[str, str]) -> _Facts:
    parent = next((part for part in family if re.fullmatch(r"input\d+", part.name)), None)
    yield "inputName", read_attribute(parent, "name") if parent else None
    kinds = (kind for kind in _INPUT_KINDS if properties.get(f"ID_INPUT_{kind.upper()}") == "1")
    yield "inputKind", next(kinds, None)


def _hidraw(family: Sequence[Path], _: Mapping[str, str]) -> _Facts:
    for part in family[1:]:
        match = re.search(r"^HID_NAME=(.+)$", read_attribute(part, "uevent") or "", re.MULTILINE)
        if match:
            yield "hidName", match[1].strip()
            return


def _drm(family: Sequence[Path], _: Mapping[str, str]) -> _Facts:
    device = family[0]
    kinds = {"card": "primary", "renderD": "render"}
    kind = kinds.get(device.name.rstrip("0123456789"))
    yield "drmNode", kind
    if kind == "primary":
        outputs = [read_attribute(entry, "status") for entry in entries(device)]
        yield "drmConnected", outputs.count("connected")


def _net(family: Sequence[Path], _: Mapping[str, str]) -> _Facts:
    # For the node of an RDMA device or a modem, look for the network interface of the same
    # hardware.
    for part in family[1:]:
        interfaces = entries(part / "net")
        if interfaces:
            yield "netInterface", interfaces[0].name
            yield "netAddress", read_attribute(interfaces[0], "address")
            return


def _tpm(family: Sequence[Path], _: Mapping[str, str]) -> _Facts:
    directory = family[0]
    # Read the attributes from the chip, because the resource manager node (tpmrm0) does not have
    # any.
    chip = directory.parent.parent / "tpm" / directory.name.replace("rm", "")
    for place in (directory, chip):
        version = _whole(read_attribute(place, "tpm_version_major"))
        if version is not None:
            yield "tpmVersion", version
            return


_READERS: Mapping[str, Callable[[Sequence[Path], Mapping[str, str]], _Facts]] = {
    "tty": _tty,
    "video4linux": _video,
    "sound": _sound,
    "input": _input,
    "hidraw": _hidraw,
    "drm": _drm,
    "infiniband_mad": _net,
    "infiniband_verbs": _net,
    "usbmisc": _net,
    "wwan": _net,
    "tpm": _tpm,
    "tpmrm": _tpm,
}
