"""
Devices as sysfs shows them: number, path, driver, and the USB or PCI device that they belong to.
:mod:`.families` reads the attributes that only devices of one kind have.

Attributes may vanish at any moment, because the device is being unplugged. A device that is no
longer the same after all reads counts as unplugged: half of its attributes would make it another
device. A device with an unreadable file (:mod:`.files`) is unknown, and the result reports it.

It must not depend on policies, what may be published, or where device nodes are mounted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from drakit import AttributeValue
from drakit_drivers.hostdev.families import family_attributes
from drakit_drivers.hostdev.files import (
    UnreadableError,
    is_missing,
    link_name,
    listing,
    read_attribute,
)
from drakit_drivers.hostdev.topology import Ancestor, is_root_hub, usb_path
from drakit_drivers.hostdev.udev import UdevDatabase

__all__ = ("BlockFacts", "Found", "HostDevice", "PciParent", "Sysfs", "UsbParent")

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_INDICES = {
    "i2c-dev": "name",
    "iio": "name",
    "infiniband_mad": "port",
    "input": "device/name",
    "tty": "device/port_number",
    "video4linux": "index",
}
"""By subsystem: the attribute that distinguishes the nodes of one interface of a device."""

_PCI_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


@dataclass(frozen=True, kw_only=True, slots=True)
class UsbParent:
    """The USB device behind a device."""

    vendor_id: str
    product_id: str
    port: str
    """The kernel's number of the bus, and the ports on the way to it: ``1-2.3``."""

    manufacturer: str | None
    product: str | None
    serial: str | None
    interface: int | None
    """Number of the interface, where the device belongs to one."""

    version: str | None = None
    """The device's release number, as it reports it: ``02.64``."""

    device_class: str | None = None
    """Two hexadecimal digits; ``00`` where each interface has its own class."""

    speed: int | None = None
    """Megabits per second."""

    path: str | None = None
    """Controller and ports on the way to it, as :func:`.topology.usb_path` returns them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PciParent:
    """The PCI function behind a device."""

    bus_id: str
    root: str | None
    vendor_id: str | None
    device_id: str | None
    class_id: str | None
    subsystem_vendor_id: str | None = None
    subsystem_device_id: str | None = None
    iommu_group: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFacts:
    """What only block devices have."""

    size_bytes: int
    has_backing_file: bool
    """A loop device that is set up."""

    backing_device: str | None = None
    """The path of the device to which a zram device writes, if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostDevice:
    """One device that has a device node."""

    subsystem: str
    kernel_name: str
    path: str
    """Where the host has its node: ``/dev/net/tun``."""

    type: Literal["b", "c"]
    major: int
    minor: int
    directory: Path
    """The device's own directory in sysfs, without symbolic links."""

    devtype: str | None = None
    links: tuple[str, ...] = ()
    index: str | None = None
    """What distinguishes it from the other nodes of the same interface: ``1`` for the second node
    of a camera."""

    serial: str | None = None
    """As udev read it; USB devices have their own."""

    wwid: str | None = None
    """The world wide id of a SCSI device, such as a tape drive."""

    driver: str | None = None
    numa_node: int | None = None
    usb: UsbParent | None = None
    pci: PciParent | None = None
    block: BlockFacts | None = None
    properties: Mapping[str, str] = field(default_factory=dict[str, str])
    """The properties in udev's database."""

    ancestors: tuple[Ancestor, ...] = ()
    """The devices above it, nearest first."""

    unit: Path | None = None
    """The directory of the physical unit that it is part of; None if it is one by itself."""

    family: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    """Attributes that only devices of its kind have."""

    @property
    def is_virtual(self) -> bool:
        """Return whether no hardware is behind it."""
        return "/devices/virtual/" in str(self.directory)

    @property
    def number(self) -> str:
        return f"{self.major}:{self.minor}"

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths under which the host has it."""
        return (self.path, *self.links)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The devices of a subsystem."""

    devices: tuple[HostDevice, ...]
    unreadable: str | None = None
    """The reason why it is unknown whether there are more devices; None if there are none."""


class Sysfs:
    """Reads devices below one mount of sysfs."""

    def __init__(self, root: Path, udev: UdevDatabase) -> None:
        self.root = root.resolve()
        self._udev = udev

    def devices(self, subsystem: str, *, wanted: Callable[[str], bool]) -> Found:
        """Find a subsystem's devices that have a node and a wanted path."""
        devices: list[HostDevice] = []
        unreadable: str | None = None
        try:
            listed = self._listing(subsystem)
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

    def device(self, entry: Path, *, wanted: Callable[[str], bool]) -> HostDevice | None:
        """Read one device; None if it has no node, is not wanted, or is being unplugged. Raises
        UnreadableError."""
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
        udev = self._udev.entry(node_type, f"{major}:{minor}")
        if not any(wanted(name) for name in (path, *udev.links)):
            return None
        family = [directory, *self._ancestors(directory)]
        ancestors = tuple(
            Ancestor(
                name=part.name,
                subsystem=subsystem_of_part,
                driver=link_name(part / "driver"),
            )
            for part in family[1:]
            # A directory such as 0000:00:1f.3/sound is no device.
            if (subsystem_of_part := link_name(part / "subsystem"))
        )
        usb = _usb_parent(family, ancestors)
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
            links=udev.links,
            index=read_attribute(directory, index) if index else None,
            serial=udev.properties.get("ID_SERIAL_SHORT") or read_attribute(directory, "serial"),
            wwid=_wwid(family) if node_type == "c" else None,
            driver=link_name(directory / "driver")
            or next((each.driver for each in ancestors if each.driver), None),
            numa_node=_numa_node(family),
            usb=usb,
            pci=_pci_parent(family),
            block=_block_facts(directory) if node_type == "b" else None,
            properties=udev.properties,
            ancestors=ancestors,
            unit=_unit(family, subsystem),
            family=family_attributes(subsystem, family, udev.properties),
        )
        return device if _inode(directory) == inode else None

    def block_directories(self) -> dict[str, Path]:
        """Every block device and partition of the host: kernel name to its own directory."""
        found = {entry.name: _resolved(entry) for entry in self._listing("block")}
        return {name: directory for name, directory in found.items() if directory}

    def active_consoles(self) -> list[str]:
        """Kernel names of the terminals that the kernel uses as its console (``ttyS0``)."""
        active = read_attribute(self.root / "class" / "tty" / "console", "active")
        return (active or "").split()

    def subsystem_of(self, kind: Literal["block", "char"], number: str) -> str | None:
        """Return the subsystem of a device number."""
        return link_name(self.root / "dev" / kind / number / "subsystem")

    def _listing(self, subsystem: str) -> list[Path]:
        for directory in (
            self.root / "class" / subsystem,
            self.root / "bus" / subsystem / "devices",
            self.root / subsystem,  # /sys/block, where there is no /sys/class/block
        ):
            found = listing(directory)
            if found is not None:
                return found
        if listing(self.root / "class") is None:
            # Without sysfs, every device would count as unplugged.
            raise UnreadableError(self.root / "class", "it is missing")
        return []

    def _ancestors(self, directory: Path) -> Iterator[Path]:
        for parent in directory.parents:
            if parent == self.root or parent.parent == self.root:  # /sys/devices is no device
                return
            yield parent


def _block_facts(directory: Path) -> BlockFacts:
    sectors = _whole(read_attribute(directory, "size")) or 0
    backing_device = read_attribute(directory, "backing_dev")
    return BlockFacts(
        size_bytes=sectors * 512,  # always of 512 bytes
        has_backing_file=read_attribute(directory, "loop/backing_file") is not None,
        backing_device=None if backing_device == "none" else backing_device,
    )


def _resolved(entry: Path) -> Path | None:
    """Return the device's own directory, without symbolic links; None if it is missing."""
    try:
        return entry.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, in Python 3.12
        if isinstance(error, OSError) and is_missing(error):
            return None
        raise UnreadableError(entry, error) from error


def _inode(directory: Path) -> int | None:
    """Return what identifies a directory in sysfs, which a replugged device does not get again."""
    try:
        return directory.stat().st_ino
    except OSError as error:
        if is_missing(error):
            return None
        raise UnreadableError(directory, error.strerror) from error


def _uevent(directory: Path) -> dict[str, str]:
    lines = (read_attribute(directory, "uevent") or "").splitlines()
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def _numa_node(family: list[Path]) -> int | None:
    text = next(filter(None, (read_attribute(part, "numa_node") for part in family)), None)
    # -1 means that the firmware does not report it.
    return int(text) if text and text.isdigit() else None


def _wwid(family: list[Path]) -> str | None:
    scsi = (part for part in family if link_name(part / "subsystem") == "scsi")
    return next(filter(None, (read_attribute(part, "wwid") for part in scsi)), None)


def _usb_parent(family: list[Path], ancestors: Sequence[Ancestor]) -> UsbParent | None:
    interface = next(filter(None, (read_attribute(p, "bInterfaceNumber") for p in family)), None)
    for part in family:
        vendor_id = read_attribute(part, "idVendor")
        product_id = read_attribute(part, "idProduct")
        if vendor_id and product_id:
            return UsbParent(
                vendor_id=vendor_id,
                product_id=product_id,
                port=part.name,
                manufacturer=read_attribute(part, "manufacturer"),
                product=read_attribute(part, "product"),
                # Not udev's copy, which is missing until udev has processed the device.
                serial=read_attribute(part, "serial"),
                interface=int(interface, 16) if interface else None,
                version=_bcd(read_attribute(part, "bcdDevice")),
                device_class=read_attribute(part, "bDeviceClass"),
                speed=_whole(read_attribute(part, "speed")),
                path=usb_path(part.name, ancestors, root_hub_speed=_root_hub_speed(family)),
            )
    return None


def _root_hub_speed(family: list[Path]) -> int | None:
    root = next((part for part in family if is_root_hub(part.name)), None)
    return _whole(read_attribute(root, "speed")) if root else None


def _pci_parent(family: list[Path]) -> PciParent | None:
    for part in family:
        if _PCI_ADDRESS.fullmatch(part.name) and link_name(part / "subsystem") == "pci":
            # The outermost bridge's directory: pci0000:00.
            roots = [name for name in part.parts if _PCI_ROOT.fullmatch(name)]
            return PciParent(
                bus_id=part.name,
                root=roots[0] if roots else None,
                vendor_id=_without_prefix(read_attribute(part, "vendor")),
                device_id=_without_prefix(read_attribute(part, "device")),
                class_id=_without_prefix(read_attribute(part, "class")),
                subsystem_vendor_id=_without_prefix(read_attribute(part, "subsystem_vendor")),
                subsystem_device_id=_without_prefix(read_attribute(part, "subsystem_device")),
                iommu_group=_whole(link_name(part / "iommu_group")),
            )
    return None


def _unit(family: list[Path], subsystem: str) -> Path | None:
    """Find the physical unit: a USB device, a PCI function, another device on a bus, or else the
    outermost device of the same subsystem, such as a virtual sound card."""
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


def _without_prefix(number: str | None) -> str | None:
    return number.removeprefix("0x") if number else None
