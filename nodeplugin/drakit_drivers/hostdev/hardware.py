"""
A host device: its properties, its place in the machine, and its identity.

A place is a path that does not depend on the order in which the kernel finds hardware. It follows
the ``ID_PATH`` of udev, but needs no udev daemon. It begins at the nearest bus whose devices are
named after their addresses, such as PCI. Below that bus, it has the parts that hardware, firmware
or a cable determines, such as the chip select of an SPI device or the ports on the way to a USB
device. It omits the numbers of buses and hosts, because the kernel assigns these in order of
discovery.

The identity refers to the same device after a restart, reboot or replug. It is the first of these
that exists:

1. the World Wide ID of a tape drive;
2. the IDs and serial number of a USB device or, if it has no serial number, its controller and
   port;
3. the kernel's name, if it has no number (``kvm``), or if the number is permanent: it stands for an
   address of the mainboard (``ttyS0``), or the kernel fixes it (``tty7``, a zram device);
4. the place: a PCI function, a platform device, a chip below one of them.

The kernel's numbers (``video0``, ``renderD128``, the bus in ``1-2.3``) are never part of the
identity, because the kernel can assign them in another order. A device without any of these has
only the kernel's name, and is published only with ``allow.unstableIdentity``.

The hardware identity, which claims use, has additional parts: the place, because serial numbers are
not unique, and the properties that distinguish the nodes of one device. For a claim, a device that
moves to another port is therefore different hardware, because it could be another device with the
same serial number.

Several device nodes can give access to the same hardware function. Examples are the serial port of
an adapter and the node of the whole USB device, or the card and render nodes of a GPU. Such nodes
overlap. Separate functions, such as two interfaces of a USB device or two connectors of an adapter,
do not overlap.

Pure functions.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from drakit import AttributeValue

_ADDRESSED_BUSES = ("pci", "platform", "pnp", "acpi", "amba", "ccw", "vmbus")
"""Buses whose devices are named after the hardware address. Other buses number their devices."""

_NUMBERED = re.compile(r".*\.(\d+|auto)")
"""Matches platform devices without an address, which the kernel numbers: coretemp.0,
dwc3.2.auto."""

_FIXED_PARTS = {
    # The address of a chip, or its ID in the firmware tables. An adapter (i2c-1) has neither.
    "i2c": re.compile(r"\d+-([0-9a-f]{4,})|i2c-(\w+:\d+)"),
    "spi": re.compile(r"spi\d+\.(\d+)|spi-(\w+:\d+)"),
    # The channel, target and unit, without the host number.
    "scsi": re.compile(r"\d+:(\d+:\d+:\d+)"),
    # The keyboard and mouse of a PS/2 controller, which the driver always registers in this order.
    "serio": re.compile(r"serio(\d+)"),
    # A port of a serial card.
    "serial-base": re.compile(r".+:\d+\.(\d+)"),
}
"""For each subsystem, matches the part of a device name that does not depend on the kernel's
numbering."""

_SEPARATE_NODES = ("gpio", "i2c-dev", "iio", "infiniband_mad", "tty")
"""Subsystems in which each node is a separate connector, chip or bus."""

_MAX_IDENTITY = 256
"""Maximum length of `DeviceNode.identity`."""

_FIXED_NODES = re.compile(r"ttyS\d+|ttyAMA\d+|\D+")
"""Matches kernel names without a number, or with a number that stands for a mainboard address."""

_NUMBER_WITHIN = re.compile(r"(snd/[a-zA-Z]+C|dvb/adapter|wwan|vport|mmcblk|mtd|n?st)\d+(?=\D)")
"""Matches names in which the number assigned by the kernel is not the last number. For example,
pcmC0D3p is device 3 of sound card 0."""

_FIXED_NUMBERS = ("cpuid", "dma_heap", "mem", "misc", "msr", "tty", "vc")
"""Subsystems in which virtual devices have fixed names, chosen by the kernel or the firmware
(``dma_heap/system-dma32``). Other subsystems number devices in order of discovery."""


# ------------------------------------------------------------ properties


@dataclass(frozen=True, kw_only=True, slots=True)
class Ancestor:
    """An ancestor of a device in sysfs."""

    name: str
    subsystem: str | None
    driver: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class UsbParent:
    """The USB device that a device belongs to."""

    vendor_id: str
    product_id: str
    port: str
    """The kernel's bus number and the port path of the device: ``1-2.3``."""

    manufacturer: str | None
    product: str | None
    serial: str | None
    interface: int | None
    """The interface number, if the device belongs to an interface."""

    version: str | None = None
    """The device's release number, as the device reports it: ``02.64``."""

    device_class: str | None = None
    """The USB class: two hexadecimal digits. ``00`` if each interface has its own class."""

    speed: int | None = None
    """The speed in megabits per second."""

    path: str | None = None
    """The controller and port path of the device, as returned by :func:`usb_path`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PciParent:
    """The PCI function that a device belongs to."""

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
    """Properties that only block devices have."""

    size_bytes: int
    has_backing_file: bool
    """Whether the device is a loop device that is set up."""

    backing_device: str | None = None
    """The path of the device to which a zram device writes, if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostDevice:
    """A host device that has a device node."""

    subsystem: str
    kernel_name: str
    path: str
    """The path of the device node on the host: ``/dev/net/tun``."""

    type: Literal["b", "c"]
    major: int
    minor: int
    directory: Path
    """The device's own directory in sysfs, without symbolic links."""

    devtype: str | None = None
    links: tuple[str, ...] = ()
    """The udev links to the device node."""

    links_of_others: tuple[str, ...] = ()
    """Links that the udev database lists for the device, but that lead to the node of another
    device."""

    index: str | None = None
    """Distinguishes the device from the other nodes of the same interface: ``1`` for the second
    node of a camera."""

    serial: str | None = None
    """The serial number in the udev database or, without it, in the sysfs attribute ``serial``. USB
    devices have a separate field."""

    wwid: str | None = None
    """The World Wide ID of a SCSI device, such as a tape drive."""

    driver: str | None = None
    numa_node: int | None = None
    usb: UsbParent | None = None
    pci: PciParent | None = None
    block: BlockFacts | None = None
    properties: Mapping[str, str] = field(default_factory=dict[str, str])
    """The device properties in the udev database."""

    is_settled: bool = True
    """Whether udev has processed the device, or does not run on the host."""

    ancestors: tuple[Ancestor, ...] = ()
    """The ancestors of the device, nearest first."""

    unit: Path | None = None
    """The sysfs directory of the physical unit that the device belongs to. None if it is a unit by
    itself."""

    family: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    """Attributes that are specific to this kind of device."""

    @property
    def number(self) -> str:
        return f"{self.major}:{self.minor}"

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths of the device on the host."""
        return (self.path, *self.links)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The identity of a device, which distinguishes it from others."""

    text: str
    """The identity in readable form: ``0403-6001-A50285BI-i0``."""

    place: str
    """Distinguishes devices with the same `text`, for example by their port."""

    is_stable: bool = True
    """Whether the identity belongs to the same device after a reboot."""


# ------------------------------------------------------------ place


def address(ancestors: Sequence[Ancestor]) -> str | None:
    """Return the place of a device with these ancestors (nearest first), or None if no bus above it
    has addresses."""
    below: list[str] = []
    for each in ancestors:
        subsystem = each.subsystem or ""
        numbered = subsystem == "platform" and _NUMBERED.fullmatch(each.name)
        if subsystem in _ADDRESSED_BUSES and not numbered:
            return "-".join((f"{subsystem}-{each.name}", *reversed(below)))
        pattern = _FIXED_PARTS.get(subsystem)
        match = pattern and pattern.fullmatch(each.name)
        if match:
            below.append(f"{subsystem}-{match[match.lastindex or 0]}")
    return None


def is_root_hub(name: str) -> bool:
    """Return whether a kernel name is the name of a root hub, such as ``usb1``."""
    return re.fullmatch(r"usb\d+", name) is not None


def usb_path(name: str, ancestors: Sequence[Ancestor], *, root_hub_speed: int | None) -> str | None:
    """
    Return the path to a USB device. For example, ``pci-0000:00:14.0-usbv2-0:1.2`` is port 2 of the
    hub at port 1 of the controller's USB 2 root hub. Return None if the controller does not have an
    address, as with usbip.

    A controller has up to two root hubs, whose ports have the same numbers. Only the USB revision
    distinguishes them. The format is that of udev's ``ID_PATH_WITH_USB_REVISION``, with 0 instead
    of the bus number.

    :param name: the kernel name of the USB device: ``1-1.2``.
    :param ancestors: the ancestors of one of the device's nodes, nearest first.
    :param root_hub_speed: in megabits per second.
    """
    ports = name.partition("-")[2]
    names = [each.name for each in ancestors]
    root = next((index for index, name in enumerate(names) if is_root_hub(name)), None)
    if root is None or not ports or root_hub_speed is None:
        return None
    controller = address(ancestors[root + 1 :])
    revision = 1 if root_hub_speed < 480 else 2 if root_hub_speed < 5000 else 3
    return f"{controller}-usbv{revision}-0:{ports}" if controller else None


# ------------------------------------------------------------ identity


def identity_of_node(host: HostDevice) -> Identity:
    """Return the identity of a device node. Several nodes of the same hardware can have the same
    identity."""
    name = host.path.removeprefix("/dev/")
    if host.block:
        # A zram or loop device is identified by its number, which is chosen at setup.
        return Identity(text=name, place=name)
    interface = host.usb.interface if host.usb else None
    return _identity(
        host,
        kernel_name=host.kernel_name,
        name=name,
        prefix=f"{_stem(name)}-",
        suffix="" if interface is None else f"-i{interface}",
    )


def identity_of_unit(host: HostDevice) -> Identity:
    """Return the identity of the physical unit that a device node belongs to. The identity does not
    depend on which nodes the unit currently has."""
    name = (host.unit or host.directory).name
    return _identity(host, kernel_name=name, name=name)


def _identity(
    host: HostDevice, *, kernel_name: str, name: str, prefix: str = "", suffix: str = ""
) -> Identity:
    """Return the identity. `prefix` precedes a World Wide ID or place. `suffix` follows the data
    that a USB device reports."""
    if not host.wwid:
        if usb := _own_usb(host):
            ids = usb.vendor_id, usb.product_id, usb.serial
            return _usb_identity(*ids, _usb_place(usb), suffix)
        if _has_fixed_name(host, kernel_name):
            return Identity(text=name, place=name)
    where = _place(host)
    text = f"{prefix}{where}" if where else name
    return Identity(text=text, place=text, is_stable=bool(where))


def _own_usb(host: HostDevice) -> UsbParent | None:
    """Return the USB device that identifies a node, if any. A Bluetooth keyboard belongs to its USB
    adapter, which does not identify the keyboard."""
    return None if _is_wireless(host) else host.usb


def _is_wireless(host: HostDevice) -> bool:
    return any(each.subsystem == "bluetooth" for each in host.ancestors)


def _place(host: HostDevice) -> str | None:
    """Return the place of the unit that a node belongs to, or None if it is unknown."""
    if host.wwid or _is_wireless(host):
        return host.wwid
    return _usb_place(host.usb) if host.usb else address(host.ancestors)


def _usb_place(usb: UsbParent) -> str:
    return usb.path or f"port-{usb.port}"


class HardwareIdentity(NamedTuple):
    """The parts of the identity of the hardware behind a device node. Missing parts are empty."""

    subsystem: str
    unit: str
    """The bus address or port path of the USB device, PCI function or other parent of the node."""

    interface: str
    node: str
    """The name of the device node without the number assigned by the kernel."""

    instance: str
    """The value of `HostDevice.index`."""

    reported: str
    """The data that the hardware reports about itself. This is the last part, so that a forged
    serial number cannot make a device look like a device at another place."""

    @property
    def usb_ids(self) -> tuple[str, str, str] | None:
        """The vendor ID, product ID and serial number of a USB device, if its port path is
        known."""
        vendor, _, rest = self.reported.partition("-")
        product, _, serial = rest.partition("-")
        return (vendor, product, serial) if "-usbv" in self.unit else None

    def is_node_of(self, identity: str) -> bool:
        """Return whether another identity is the same except for the data that the hardware
        reports."""
        return self[:-1] == HardwareIdentity.parse(identity)[:-1]

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> HardwareIdentity:
        """Parse a string from :func:`hardware_identity`."""
        parts = ["" if part == "-" else part for part in text.split(" ", 5)]
        return cls(*parts, *[""] * (6 - len(parts)))

    def overlaps(self, other: HardwareIdentity) -> bool:
        """Return whether the two device nodes reach the same function of a unit."""
        if not self.unit or self.unit != other.unit or self == other:
            return False
        if self.interface and other.interface and self.interface != other.interface:
            return False
        if (self.subsystem, self.node) != (other.subsystem, other.node):
            return True
        # Nodes of a mainboard device whose names differ only in their numbers are separate devices.
        is_fixed = self.unit.startswith(_FIXED_UNITS) and "-usbv" not in self.unit
        return not (is_fixed or self.subsystem in _SEPARATE_NODES)


_FIXED_UNITS = tuple(f"{bus}-" for bus in _ADDRESSED_BUSES if bus != "pci")


def hardware_identity(host: HostDevice) -> str:
    """Return the identity of the hardware behind a device node. It is the same for every policy."""
    usb = None if host.wwid else _own_usb(host)
    # Omit the name of a USB device's own node, which contains only numbers from the kernel:
    # bus/usb/001/004.
    node = "" if host.subsystem == "usb" else _stem(host.path.removeprefix("/dev/"))
    interface = "" if usb is None or usb.interface is None else f"i{usb.interface}"
    parts = [host.subsystem, _place(host), interface, node, host.index]
    words = ["_".join((part or "").split()) or "-" for part in parts]
    reported = identity_of_node(host).text
    if usb:
        reported = "-".join(filter(None, (usb.vendor_id, usb.product_id, usb.serial)))
    text = " ".join((*words, reported))
    text = "".join(sign if sign.isprintable() else "?" for sign in text)
    if len(text) <= _MAX_IDENTITY:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[: _MAX_IDENTITY - len(digest) - 1]} {digest}"


def subsystem_of(identity: str) -> str:
    """Return the subsystem part of a hardware identity."""
    return identity.partition(" ")[0]


def identity_at_port(host: HostDevice, *, is_unit: bool) -> Identity | None:
    """Return an identity that consists of the USB port of a device node, or None if the node does
    not belong to a USB device."""
    usb = None if host.wwid else _own_usb(host)
    if usb is None:
        return None
    former = HardwareIdentity.parse(hardware_identity(host))
    identity = identity_of_former(former, at_port=True, is_unit=is_unit)
    return replace(identity, is_stable=bool(usb.path))


def identity_of_former(former: HardwareIdentity, *, at_port: bool, is_unit: bool) -> Identity:
    """Return the identity that a USB device's node or unit had, given its former hardware
    identity."""
    suffix = f"-{former.interface}" if former.interface and not is_unit else ""
    if at_port:
        text = f"{former.unit}{suffix}" if is_unit else f"{former.subsystem}-{former.unit}{suffix}"
        return Identity(text=text, place=text)
    vendor_id, product_id, serial = former.usb_ids or ("", "", "")
    return _usb_identity(vendor_id, product_id, serial, former.unit, suffix)


def _usb_identity(
    vendor_id: str, product_id: str, serial: str | None, place: str, suffix: str
) -> Identity:
    # Include the place, because cheap devices often share a serial number.
    return Identity(
        text=f"{vendor_id}-{product_id}-{serial or place}{suffix}",
        place=f"{place}{suffix}",
        is_stable=bool(serial or "-usbv" in place),
    )


def _stem(name: str) -> str:
    """Return a device name without the number assigned by the kernel."""
    within = _NUMBER_WITHIN.match(name)
    return f"{within[1]}{name[within.end() :]}" if within else re.sub(r"[\d.]+$", "", name)


def _has_fixed_name(host: HostDevice, name: str) -> bool:
    if host.pci and name.startswith("ttyS"):  # the kernel numbers the ports of a serial card
        return False
    is_virtual = "/devices/virtual/" in str(host.directory)
    if is_virtual and host.subsystem in _FIXED_NUMBERS:
        return True
    return _FIXED_NODES.fullmatch(name) is not None
