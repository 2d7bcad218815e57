"""
Devices as sysfs shows them: number, path, driver, and the USB or PCI device that they belong to.
:mod:`.families` reads the attributes that only devices of one kind have.

Attributes may vanish or fail to be read at any moment (the device is being unplugged): what cannot
be read is missing, never an error.

It must not know policies, what may be published, or where device nodes are mounted.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from drakit import AttributeValue
from drakit_drivers.hostdev.families import family_attributes
from drakit_drivers.hostdev.files import link_name, read_attribute
from drakit_drivers.hostdev.identity import disk_identity
from drakit_drivers.hostdev.topology import Ancestor, is_root_hub, usb_path
from drakit_drivers.hostdev.udev import UdevDatabase, UdevEntry

__all__ = ("BlockFacts", "HostDevice", "PciParent", "Sysfs", "UsbParent")

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
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
    read_only: bool
    removable: bool
    rotational: bool | None
    model: str | None
    disk: str
    """Kernel name of the whole disk; the device's own name unless it is a partition."""

    has_backing_file: bool
    """A loop device that is set up."""

    partition: str | None = None
    """Number of a partition."""

    identity: str | None = None
    """The identity of the whole disk, which does not depend on the kernel's numbering."""

    lower: frozenset[str] = frozenset()
    """Kernel names of the underlying devices: a partition's disk, the members of a volume."""

    udev: UdevEntry | None = None
    """The device's entry in udev's database, if there is one."""

    @property
    def is_zram(self) -> bool:
        return re.fullmatch(r"zram\d+", self.disk) is not None

    @property
    def is_loop(self) -> bool:
        """Return whether it is a loop device, set up or not, or a partition of one."""
        return re.fullmatch(r"loop\d+", self.disk) is not None


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


class Sysfs:
    """Reads devices below one mount of sysfs."""

    def __init__(self, root: Path, udev: UdevDatabase) -> None:
        self.root = root.resolve()
        self._udev = udev

    def devices(self, subsystem: str, *, wanted: Callable[[str], bool]) -> Iterator[HostDevice]:
        """Find a subsystem's devices that have a node and a wanted path."""
        for entry in sorted(self._listing(subsystem) or ()):
            device = self.device(entry, wanted=wanted)
            if device:
                yield device

    def device(self, entry: Path, *, wanted: Callable[[str], bool]) -> HostDevice | None:
        """Read one device; None if it has no node, is not wanted, or is being unplugged."""
        uevent = _uevent(entry)
        try:
            major, minor = int(uevent["MAJOR"]), int(uevent["MINOR"])
            path = f"/dev/{uevent['DEVNAME']}"
            directory = entry.resolve(strict=True)
        except (KeyError, ValueError, OSError):
            return None
        subsystem = link_name(directory / "subsystem") or entry.parent.name
        node_type: Literal["b", "c"] = "b" if subsystem == "block" else "c"
        entry_of_udev = self._udev.entry(node_type, f"{major}:{minor}")
        udev = entry_of_udev or UdevEntry()
        if not any(wanted(name) for name in (path, *udev.links)):
            return None
        family = [directory, *self._ancestors(directory)]
        ancestors = tuple(
            Ancestor(
                name=part.name,
                subsystem=link_name(part / "subsystem"),
                driver=link_name(part / "driver"),
            )
            for part in family[1:]
            # A directory such as 0000:00:1f.3/sound is no device.
            if (part / "subsystem").is_symlink()
        )
        usb = _usb_parent(family, ancestors, udev)
        return HostDevice(
            subsystem=subsystem,
            kernel_name=directory.name,
            path=path,
            type=node_type,
            major=major,
            minor=minor,
            directory=directory,
            devtype=uevent.get("DEVTYPE"),
            links=udev.links,
            serial=udev.properties.get("ID_SERIAL_SHORT") or read_attribute(directory, "serial"),
            wwid=_wwid(family) if node_type == "c" else None,
            driver=link_name(directory / "driver")
            or next((each.driver for each in ancestors if each.driver), None),
            numa_node=_numa_node(family),
            usb=usb,
            pci=_pci_parent(family),
            block=self._block_facts(directory, entry_of_udev) if node_type == "b" else None,
            properties=udev.properties,
            ancestors=ancestors,
            unit=_unit(family, subsystem),
            family=family_attributes(subsystem, family, udev.properties),
        )

    def disk_identity(self, disk: Path) -> str | None:
        """Return the identity of a whole disk, given its directory."""
        number = read_attribute(disk, "dev")
        udev = self._udev.entry("b", number) if number else None
        return disk_identity(
            disk.name, partial(read_attribute, disk), udev.properties if udev else {}
        )

    def block_directories(self) -> dict[str, Path]:
        """Every block device and partition of the host: kernel name to its own directory."""
        return {entry.name: entry.resolve() for entry in self._listing("block") or ()}

    def active_consoles(self) -> list[str]:
        """Kernel names of the terminals that the kernel uses as its console (``ttyS0``)."""
        active = read_attribute(self.root / "class" / "tty" / "console", "active")
        return (active or "").split()

    def subsystem_of(self, kind: Literal["block", "char"], number: str) -> str | None:
        """Return the subsystem of a device number."""
        return link_name(self.root / "dev" / kind / number / "subsystem")

    def links(self, node_type: str, number: str) -> tuple[str, ...]:
        """Return the links that udev made for a device number."""
        entry = self._udev.entry(node_type, number)
        return entry.links if entry else ()

    def _block_facts(self, directory: Path, udev: UdevEntry | None) -> BlockFacts:
        partition = read_attribute(directory, "partition")
        disk = directory.parent if partition else directory
        sectors = read_attribute(directory, "size") or "0"
        rotational = read_attribute(disk / "queue", "rotational")
        return BlockFacts(
            size_bytes=int(sectors) * 512 if sectors.isdigit() else 0,  # always of 512 bytes
            read_only=read_attribute(directory, "ro") == "1",
            removable=read_attribute(disk, "removable") == "1",
            rotational=None if rotational is None else rotational == "1",
            model=read_attribute(disk / "device", "model"),
            disk=disk.name,
            has_backing_file=(disk / "loop" / "backing_file").exists(),
            partition=partition,
            identity=self.disk_identity(disk),
            lower=_lower(directory),
            udev=udev,
        )

    def _listing(self, subsystem: str) -> list[Path] | None:
        for directory in (
            self.root / "class" / subsystem,
            self.root / "bus" / subsystem / "devices",
            self.root / subsystem,  # /sys/block, where there is no /sys/class/block
        ):
            try:
                return list(directory.iterdir())
            except OSError:
                continue
        return None

    def _ancestors(self, directory: Path) -> Iterator[Path]:
        for parent in directory.parents:
            if parent == self.root or parent.parent == self.root:  # /sys/devices is no device
                return
            yield parent


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


def _usb_parent(
    family: list[Path], ancestors: Sequence[Ancestor], udev: UdevEntry
) -> UsbParent | None:
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
                serial=read_attribute(part, "serial") or udev.properties.get("ID_USB_SERIAL_SHORT"),
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


def _lower(directory: Path) -> frozenset[str]:
    found: set[str] = set()
    due = [directory]
    while due:
        device = due.pop()
        below = [device.parent] if (device / "partition").exists() else []
        with contextlib.suppress(OSError):
            below += [slave.resolve() for slave in (device / "slaves").iterdir()]
        due += [path for path in below if path.name not in found]
        found.update(path.name for path in below)
    return frozenset(found)
