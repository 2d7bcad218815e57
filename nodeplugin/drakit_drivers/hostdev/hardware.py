"""
A device of the host: its facts, its place in the machine, and its identity.

A place is a path that does not depend on the order in which the kernel finds hardware. It follows
the ``ID_PATH`` of udev, and needs no udev daemon. It begins at the nearest bus whose devices are
named after their addresses, such as PCI. Below it, it has the parts that hardware, firmware or a
cable decides: the chip select of an SPI device, the ports on the way to a USB device. The numbers
of buses and hosts are left out, because the kernel counts these as they come.

The identity means the same device after a restart, reboot or replug. It is, in this order:

1. of a tape drive its world wide id;
2. of a USB device its ids and serial number, or else its controller and port;
3. the kernel's name, if it has no number (``kvm``), or if the number stays: it stands for an
   address of the mainboard (``ttyS0``), or the kernel fixes it (``tty7``, a zram device);
4. the place: a PCI function, a platform device, a chip below one of them.

The kernel's numbers (``video0``, ``renderD128``, the bus in ``1-2.3``) are never part of it,
because the kernel can assign them in another order. A device with none of these has only the
kernel's name: it is published only with ``allow.unstableIdentity``.

The identity of the hardware has more parts: the place, because serial numbers are not unique, and
what distinguishes the nodes of one device. A device that moves to another port is therefore other
hardware for a claim that holds it: a twin could have moved there.

Several device nodes can reach one function of the hardware: the serial port of an adapter and the
node of the whole USB device, or the card and render nodes of a GPU. They overlap. Separate
functions, such as two interfaces of a USB device or two connectors of an adapter, do not.

Pure: it must not depend on files, policies, or names of published devices.
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
"""Buses whose devices have names with the address of the hardware. Others number their devices."""

_NUMBERED = re.compile(r".*\.(\d+|auto)")
"""Platform devices without an address, which the kernel numbers: coretemp.0, dwc3.2.auto."""

_FIXED_PARTS = {
    # The address of a chip, or its id in the tables of the firmware. An adapter (i2c-1) has none.
    "i2c": re.compile(r"\d+-([0-9a-f]{4,})|i2c-(\w+:\d+)"),
    "spi": re.compile(r"spi\d+\.(\d+)|spi-(\w+:\d+)"),
    # Channel, target and unit, without the host's number.
    "scsi": re.compile(r"\d+:(\d+:\d+:\d+)"),
    # Keyboard and mouse of one PS/2 controller, which the driver registers in this order.
    "serio": re.compile(r"serio(\d+)"),
    # A port of a serial card.
    "serial-base": re.compile(r".+:\d+\.(\d+)"),
}
"""By subsystem: what in the name of a device does not depend on the kernel's numbering."""

_SEPARATE_NODES = ("gpio", "i2c-dev", "iio", "infiniband_mad", "tty")
"""Subsystems in which each node is a connector, a chip or a bus of its own."""

_MAX_IDENTITY = 256
"""The limit of `DeviceNode.identity`."""

_FIXED_NODES = re.compile(r"ttyS\d+|ttyAMA\d+|\D+")
"""Kernel names without a number, or with one that stands for an address of the mainboard."""

_NUMBER_WITHIN = re.compile(r"(snd/[a-zA-Z]+C|dvb/adapter|wwan|vport|mmcblk|mtd|n?st)\d+(?=\D)")
"""Names in which the kernel's number is not the last one: pcmC0D3p is device 3 of sound card 0."""

_FIXED_NUMBERS = ("cpuid", "dma_heap", "mem", "misc", "msr", "tty", "vc")
"""Subsystems whose devices without hardware have fixed numbers in their names, which the kernel or
the firmware chooses: ``dma_heap/system-dma32``. Others number them as they come."""


# ------------------------------------------------------------ facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Ancestor:
    """A device above another one in sysfs."""

    name: str
    subsystem: str | None
    driver: str | None


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
    """Controller and ports on the way to it, as :func:`usb_path` returns them."""


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
    """The links of udev that lead to its node."""

    links_of_others: tuple[str, ...] = ()
    """Links that udev's database lists for it, and that lead to the node of another device."""

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

    is_settled: bool = True
    """Whether udev has processed it, or does not run on the host."""

    ancestors: tuple[Ancestor, ...] = ()
    """The devices above it, nearest first."""

    unit: Path | None = None
    """The directory of the physical unit that it is part of; None if it is one by itself."""

    family: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    """Attributes that only devices of its kind have."""

    @property
    def number(self) -> str:
        return f"{self.major}:{self.minor}"

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths under which the host has it."""
        return (self.path, *self.links)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What distinguishes a device from others."""

    text: str
    """The identity, for people: ``0403-6001-A50285BI-i0``."""

    place: str
    """What distinguishes two devices of the same identity: a port, for example."""

    is_stable: bool = True
    """Whether the identity belongs to the same device after a reboot."""


# ------------------------------------------------------------ place


def address(ancestors: Sequence[Ancestor]) -> str | None:
    """Return the path to a device with these ancestors, nearest first; None if no bus above it has
    addresses."""
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
    """Return whether the kernel's name of a device is that of a bus's root hub: ``usb1``."""
    return re.fullmatch(r"usb\d+", name) is not None


def usb_path(name: str, ancestors: Sequence[Ancestor], *, root_hub_speed: int | None) -> str | None:
    """
    Return the path to a USB device: ``pci-0000:00:14.0-usbv2-0:1.2`` is port 2 of the hub at port 1
    of the controller's USB 2 root hub. None if the controller has no address, as in usbip.

    A controller has up to two root hubs, whose ports have the same numbers: only the revision tells
    them apart. The form is that of udev's ``ID_PATH_WITH_USB_REVISION``, with 0 in place of the
    number of the bus.

    :param name: the kernel's name of the USB device: ``1-1.2``.
    :param ancestors: the devices above a node of it, nearest first.
    :param root_hub_speed: Megabits per second.
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
    """Return the identity of one device node. Several nodes of one piece of hardware can have the
    same one."""
    name = host.path.removeprefix("/dev/")
    if host.block:
        # A zram or loop device is its number, which is chosen at setup.
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
    """Return the identity of the physical unit that a device node is part of. It does not depend
    on the nodes that the unit has at the moment."""
    name = (host.unit or host.directory).name
    return _identity(host, kernel_name=name, name=name)


def _identity(
    host: HostDevice, *, kernel_name: str, name: str, prefix: str = "", suffix: str = ""
) -> Identity:
    """`prefix` stands before a world wide id or place, `suffix` behind what USB reports."""
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
    """Return the USB device that a node belongs to. That of a Bluetooth keyboard is the adapter,
    which says nothing about it."""
    return None if _is_wireless(host) else host.usb


def _is_wireless(host: HostDevice) -> bool:
    return any(each.subsystem == "bluetooth" for each in host.ancestors)


def _place(host: HostDevice) -> str | None:
    """Return the place of the unit that a node belongs to; None if it is unknown."""
    if host.wwid or _is_wireless(host):
        return host.wwid
    return _usb_place(host.usb) if host.usb else address(host.ancestors)


def _usb_place(usb: UsbParent) -> str:
    return usb.path or f"port-{usb.port}"


class HardwareIdentity(NamedTuple):
    """The parts in the identity of the hardware behind a device node; empty if there is none."""

    subsystem: str
    unit: str
    """The place of the USB device, PCI function or other unit."""

    interface: str
    node: str
    """The kernel's name of the device node without the kernel's number."""

    instance: str
    """`HostDevice.index`."""

    reported: str
    """What the hardware reports about itself. It is the last part, so that no serial number can
    make a device look like one at another place."""

    @property
    def usb_ids(self) -> tuple[str, str, str] | None:
        """Vendor, product and serial number of a USB device whose port has a path."""
        vendor, _, rest = self.reported.partition("-")
        product, _, serial = rest.partition("-")
        return (vendor, product, serial) if "-usbv" in self.unit else None

    def is_node_of(self, identity: str) -> bool:
        """Return whether another identity differs only in what the hardware reports."""
        return self[:-1] == HardwareIdentity.parse(identity)[:-1]

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> HardwareIdentity:
        """Return the parts of a text that :func:`hardware_identity` returned."""
        parts = ["" if part == "-" else part for part in text.split(" ", 5)]
        return cls(*parts, *[""] * (6 - len(parts)))

    def overlaps(self, other: HardwareIdentity) -> bool:
        """Return whether it and another device node reach the same function of one unit."""
        if not self.unit or self.unit != other.unit or self == other:
            return False
        if self.interface and other.interface and self.interface != other.interface:
            return False
        if (self.subsystem, self.node) != (other.subsystem, other.node):
            return True
        # Equal nodes of a device of the mainboard are devices of their own.
        is_fixed = self.unit.startswith(_FIXED_UNITS) and "-usbv" not in self.unit
        return not (is_fixed or self.subsystem in _SEPARATE_NODES)


_FIXED_UNITS = tuple(f"{bus}-" for bus in _ADDRESSED_BUSES if bus != "pci")


def hardware_identity(host: HostDevice) -> str:
    """Return the identity of the hardware behind a device node, whatever policy publishes it."""
    usb = None if host.wwid else _own_usb(host)
    # The kernel numbers the nodes of USB devices themselves by bus: bus/usb/001/004.
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
    """Return the subsystem in the identity of hardware."""
    return identity.partition(" ")[0]


def identity_at_port(host: HostDevice, *, is_unit: bool) -> Identity | None:
    """Return the USB port of a device node as its identity; None if it does not belong to a USB
    device."""
    usb = None if host.wwid else _own_usb(host)
    if usb is None:
        return None
    former = HardwareIdentity.parse(hardware_identity(host))
    identity = identity_of_former(former, at_port=True, is_unit=is_unit)
    return replace(identity, is_stable=bool(usb.path))


def identity_of_former(former: HardwareIdentity, *, at_port: bool, is_unit: bool) -> Identity:
    """Return the identity of a node or unit of a USB device from the identity of its hardware."""
    suffix = f"-{former.interface}" if former.interface and not is_unit else ""
    if at_port:
        text = f"{former.unit}{suffix}" if is_unit else f"{former.subsystem}-{former.unit}{suffix}"
        return Identity(text=text, place=text)
    vendor_id, product_id, serial = former.usb_ids or ("", "", "")
    return _usb_identity(vendor_id, product_id, serial, former.unit, suffix)


def _usb_identity(
    vendor_id: str, product_id: str, serial: str | None, place: str, suffix: str
) -> Identity:
    # Cheap devices share one serial number: then the place distinguishes them.
    return Identity(
        text=f"{vendor_id}-{product_id}-{serial or place}{suffix}",
        place=f"{place}{suffix}",
        is_stable=bool(serial or "-usbv" in place),
    )


def _stem(name: str) -> str:
    """Return the kernel's name of a device without the kernel's number."""
    within = _NUMBER_WITHIN.match(name)
    return f"{within[1]}{name[within.end() :]}" if within else re.sub(r"[\d.]+$", "", name)


def _has_fixed_name(host: HostDevice, name: str) -> bool:
    if host.pci and name.startswith("ttyS"):  # a serial card, whose ports the kernel counts
        return False
    is_virtual = "/devices/virtual/" in str(host.directory)
    if is_virtual and host.subsystem in _FIXED_NUMBERS:
        return True
    return _FIXED_NODES.fullmatch(name) is not None
