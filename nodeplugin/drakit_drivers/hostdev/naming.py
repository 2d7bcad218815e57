"""
Names of published devices: a name must mean the same device after a restart, reboot or replug.

A name consists of the policy and the device's identity. The identity is, in this order:

1. of a disk its WWN, EUI, UUID or serial number (:mod:`.identity`);
2. of a tape drive its world wide id;
3. of a USB device its ids and serial number, or else its controller and port;
4. the kernel's name, if it has no number (``kvm``), or if the number stays: it stands for an
   address of the mainboard (``ttyS0``), or the kernel fixes it (``tty7``, a zram device);
5. the path to the hardware: a PCI function, a platform device, a chip below one of them
   (:mod:`.topology`).

The kernel's numbers (``video0``, ``renderD128``, the bus in ``1-2.3``) are never part of it,
because the kernel can assign them in another order. A device with none of these has only the
kernel's name: it is published only with ``allow.unstableIdentity``.

If two devices would get one name, or it would be too long, they get a hash of their distinguishing
properties. A disk's name also gets the hash if it has lost characters of the identity. A present
device keeps the name that it had before, and a name that a claim holds stays: a twin that is
plugged in renames nothing.

Pure: it must not know files, sysfs or the API's types.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from drakit_drivers.hostdev.sysfs import HostDevice, UsbParent
from drakit_drivers.hostdev.topology import address

__all__ = (
    "Identity",
    "Wish",
    "assign",
    "identity_of_node",
    "identity_of_unit",
    "wish",
)

_MAX_NAME = 63
_HASH_DIGITS = 8

_FIXED_NODES = re.compile(r"ttyS\d+|ttyAMA\d+|\D+")
"""Kernel names without a number, or with one that stands for an address of the mainboard."""

_NUMBER_WITHIN = re.compile(r"(snd/[a-zA-Z]+C|dvb/adapter|wwan|vport|mmcblk|mtd|n?st)\d+(?=\D)")
"""Names in which the kernel's number is not the last one: pcmC0D3p is device 3 of sound card 0."""

_FIXED_NUMBERS = ("mem", "misc", "tty", "vc")
"""Subsystems whose devices without hardware have fixed numbers. Others number them as they come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What distinguishes a device from others."""

    text: str
    """The identity, for people: ``0403-6001-A50285BI-i0``."""

    place: str
    """What distinguishes two devices of the same identity: a port, for example."""

    is_stable: bool = True
    """Whether the identity belongs to the same device after a reboot."""

    is_exact: bool = False
    """Whether the name must be unique to this identity: disks are looked up by name alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """The name that a device gets, and the one that it gets if others want the first."""

    key: str
    """The policy, and all that distinguishes the device from others."""

    plain: str
    hashed: str
    is_plain_possible: bool = True


def identity_of_node(host: HostDevice) -> Identity:
    """Return the identity of one device node. Several nodes of one piece of hardware can have the
    same one."""
    block, usb = host.block, host.usb
    if block and block.identity:
        part = f"-part{block.partition}" if block.partition else ""
        text = f"{block.identity}{part}"
        return Identity(text=text, place=text, is_exact=True)
    name = host.path.removeprefix("/dev/")
    if block:
        # The rules for disks decide whether a disk without identity is published.
        return Identity(text=name, place=name)
    if host.wwid:
        text = f"{_stem(name)}-{host.wwid}"
        return Identity(text=text, place=text)
    if usb and not _is_wireless(host):
        unit = _usb_identity(usb)
        interface = "" if usb.interface is None else f"-i{usb.interface}"
        return replace(unit, text=f"{unit.text}{interface}", place=f"{unit.place}{interface}")
    if _has_fixed_name(host, host.kernel_name):
        return Identity(text=name, place=name)
    where = _address(host)
    if where:
        text = f"{_stem(name)}-{where}"
        return Identity(text=text, place=text)
    return Identity(text=name, place=name, is_stable=False)


def identity_of_unit(host: HostDevice) -> Identity:
    """Return the identity of the physical unit that a device node is part of. It does not depend
    on the nodes that the unit has at the moment."""
    usb = host.usb
    if host.wwid:
        return Identity(text=host.wwid, place=host.wwid)
    if usb and not _is_wireless(host):
        return _usb_identity(usb)
    unit = host.unit or host.directory
    if _has_fixed_name(host, unit.name):
        return Identity(text=unit.name, place=unit.name)
    where = _address(host)
    if where:
        return Identity(text=where, place=where)
    return Identity(text=unit.name, place=unit.name, is_stable=False)


def _usb_identity(usb: UsbParent) -> Identity:
    # Cheap devices share one serial number: then the place distinguishes them.
    place = usb.path or f"port-{usb.port}"
    return Identity(
        text=f"{usb.vendor_id}-{usb.product_id}-{usb.serial or place}",
        place=place,
        is_stable=bool(usb.serial or usb.path),
    )


def _stem(name: str) -> str:
    """Return the kernel's name of a device without the kernel's number."""
    within = _NUMBER_WITHIN.match(name)
    return f"{within[1]}{name[within.end() :]}" if within else re.sub(r"[\d.]+$", "", name)


def _has_fixed_name(host: HostDevice, name: str) -> bool:
    if host.pci and name.startswith("ttyS"):  # a serial card, whose ports the kernel counts
        return False
    if host.is_virtual and host.subsystem in _FIXED_NUMBERS:
        return True
    return _FIXED_NODES.fullmatch(name) is not None


def _is_wireless(host: HostDevice) -> bool:
    """Return whether a device has a connection by Bluetooth."""
    # The USB device is the adapter, which says nothing about the keyboard that is paired with it.
    return any(ancestor.subsystem == "bluetooth" for ancestor in host.ancestors)


def _address(host: HostDevice) -> str | None:
    return None if _is_wireless(host) else address(host.ancestors)


def wish(policy: str, identity: Identity, *, nth: int = 1, copy: int | None = None) -> Wish:
    """
    Return the names for a device.

    :param nth: the number of the device among those of the same identity and place, from 1. A
        camera has several nodes on one interface; its driver makes them in the same order.
    :param copy: the number of the copy, for a device that is published several times.
    """
    suffix = f"-{nth - 1}" if nth > 1 else ""
    suffix += "" if copy is None else f"-{copy}"
    full = f"{policy}-{identity.text}{suffix}" if identity.text else f"{policy}{suffix}"
    plain = _label(full)
    lossy = identity.is_exact and plain != full
    return Wish(
        key=f"{policy} {identity.text} {identity.place}{suffix}",
        plain=plain,
        hashed=_with_hash(plain, f"{policy} {identity.place}{suffix}"),
        is_plain_possible=not lossy and len(plain) <= _MAX_NAME,
    )


def assign(
    wishes: Sequence[Wish], *, before: Mapping[str, str], held: Collection[str]
) -> dict[str, str | None]:
    """
    Give each device a name, by key; None if it is unclear which device a claim holds.

    :param before: the names that devices had in the last scan, by key.
    :param held: names that claims hold.
    """
    wanted = Counter(wish.plain for wish in wishes)
    owners = {
        wish.plain: wish.key
        for wish in wishes
        if wish.is_plain_possible and before.get(wish.key) == wish.plain
    }
    names: dict[str, str | None] = {}
    for each in wishes:
        names[each.key] = each.hashed
        if not each.is_plain_possible or each.hashed in held:
            continue
        if before.get(each.key) == each.hashed:
            continue
        if wanted[each.plain] == 1 or owners.get(each.plain) == each.key:
            names[each.key] = each.plain
        elif each.plain in held and each.plain not in owners:
            names[each.key] = None
    return names


def _label(text: str) -> str:
    """Make a DNS label of a text, apart from its length."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _with_hash(name: str, distinct: str) -> str:
    digest = hashlib.sha256(f"{name} {distinct}".encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: _MAX_NAME - _HASH_DIGITS - 1].rstrip('-')}-{digest}"
