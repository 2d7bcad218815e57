"""
Names of published devices: a name must mean the same device after a restart, reboot or replug.

A name consists of the policy and the device's identity. The identity is, in this order:

1. of a tape drive its world wide id;
2. of a USB device its ids and serial number, or else its controller and port;
3. the kernel's name, if it has no number (``kvm``), or if the number stays: it stands for an
   address of the mainboard (``ttyS0``), or the kernel fixes it (``tty7``, a zram device);
4. the path to the hardware: a PCI function, a platform device, a chip below one of them
   (:mod:`.topology`).

The kernel's numbers (``video0``, ``renderD128``, the bus in ``1-2.3``) are never part of it,
because the kernel can assign them in another order. A device with none of these has only the
kernel's name: it is published only with ``allow.unstableIdentity``.

If two devices would get one name, or it would be too long, they get a hash of their distinguishing
properties. A present device keeps the name that it had before: a twin that is plugged in renames
nothing. A name that a claim holds belongs to its hardware until the claim is released, and no other
hardware gets it (:mod:`.holds`).

The identity of that hardware has more parts than a name: the place in the machine, because serial
numbers are not unique, and what distinguishes the nodes of one device. A device that moves to
another port is therefore other hardware for a claim that holds it: a twin could have moved there.

Pure: it must not know files, sysfs or the API's types.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from drakit_drivers.hostdev.holds import Holds
from drakit_drivers.hostdev.sysfs import HostDevice, UsbParent
from drakit_drivers.hostdev.topology import address

__all__ = (
    "Identity",
    "Wish",
    "assign",
    "hardware_identity",
    "identity_of_node",
    "identity_of_unit",
    "subsystem_of",
    "wish",
)

_MAX_NAME = 63
_HASH_DIGITS = 8

_MAX_IDENTITY = 256
"""The limit of `DeviceNode.identity`."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """The name that a device gets, and the one that it gets if others want the first."""

    key: str
    """The policy, and all that distinguishes the device from others."""

    plain: str
    hashed: str
    is_plain_possible: bool
    hardware: Set[str]
    """The identities of its device nodes, which do not depend on the policy."""


def identity_of_node(host: HostDevice) -> Identity:
    """Return the identity of one device node. Several nodes of one piece of hardware can have the
    same one."""
    usb = host.usb
    name = host.path.removeprefix("/dev/")
    if host.block:
        # A zram or loop device is its number, which is chosen at setup.
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


def hardware_identity(host: HostDevice) -> str:
    """Return the identity of the hardware behind a device node, whatever policy publishes it."""
    identity = identity_of_node(host)
    # The kernel numbers the nodes of USB devices themselves by bus: bus/usb/001/004.
    node = "" if host.subsystem == "usb" else _stem(host.path.removeprefix("/dev/"))
    # What a device reports about itself stands between what the kernel does: no serial number can
    # make it look like a device at another place.
    parts = (host.subsystem, node, host.index, identity.text, identity.place)
    text = " ".join(dict.fromkeys(part for part in parts if part))
    text = "".join(sign if sign.isprintable() else "?" for sign in text)
    if len(text) <= _MAX_IDENTITY:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[: _MAX_IDENTITY - len(digest) - 1]} {digest}"


def subsystem_of(identity: str) -> str:
    """Return the subsystem in the identity of hardware."""
    return identity.partition(" ")[0]


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


def wish(
    policy: str,
    identity: Identity,
    *,
    hardware: Set[str],
    nth: int = 1,
    copy: int | None = None,
) -> Wish:
    """
    Return the names for a device.

    :param nth: the number of the device among those of the same identity and place, from 1. A
        camera has several nodes on one interface; its driver makes them in the same order.
    :param copy: the number of the copy, for a device that is published several times.
    """
    suffix = f"-{nth - 1}" if nth > 1 else ""
    suffix += "" if copy is None else f"-{copy}"
    plain = _label(f"{policy}-{identity.text}{suffix}" if identity.text else f"{policy}{suffix}")
    return Wish(
        key=f"{policy} {identity.text} {identity.place}{suffix}",
        plain=plain,
        hashed=_with_hash(plain, f"{policy} {identity.place}{suffix}"),
        is_plain_possible=len(plain) <= _MAX_NAME,
        hardware=hardware,
    )


def assign(
    wishes: Sequence[Wish], *, before: Mapping[str, str], holds: Holds
) -> dict[str, str | None]:
    """
    Give each device a name, by key; None if it is unclear which device a claim holds.

    :param before: the names that devices had in the last scan, by key.
    """
    wanted = Counter(wish.plain for wish in wishes)
    owners = {
        wish.plain: wish.key
        for wish in wishes
        if wish.is_plain_possible and before.get(wish.key) == wish.plain
    }
    return {
        each.key: _name(
            each,
            is_known_by_hashed=before.get(each.key) == each.hashed,
            owner=owners.get(each.plain),
            is_only_one=wanted[each.plain] == 1,
            holds=holds,
        )
        for each in wishes
    }


def _name(
    each: Wish, *, is_known_by_hashed: bool, owner: str | None, is_only_one: bool, holds: Holds
) -> str | None:
    for name in (each.plain, each.hashed):
        if holds.is_of(name, each.hardware):
            return name
    hashed = None if holds.is_of_other(each.hashed, each.hardware) else each.hashed
    if not each.is_plain_possible or holds.is_of_other(each.plain, each.hardware):
        return hashed
    if is_known_by_hashed or (each.hashed in holds and hashed):
        return hashed
    if is_only_one or owner == each.key:
        return each.plain
    return None if each.plain in holds and owner is None else hashed


def _label(text: str) -> str:
    """Make a DNS label of a text, apart from its length."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _with_hash(name: str, distinct: str) -> str:
    digest = hashlib.sha256(f"{name} {distinct}".encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: _MAX_NAME - _HASH_DIGITS - 1].rstrip('-')}-{digest}"
