"""
Which of the host's devices are published, under which names.

A name must mean the same device after a restart, a reboot or a replug. A disk's name comes from its
identity, a USB device's from its ids and serial number (its port, if it has none), any other
device's from the kernel. If two devices would get one name, or it would be too long, all of them
get a hash of their distinguishing properties: no name moves between devices that are present. A
disk's name also gets the hash if it has lost characters of the identity.

Pure: it must not know files, sysfs or the API's types.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from drakit_drivers.hostdev.config import Policy
from drakit_drivers.hostdev.globs import matches
from drakit_drivers.hostdev.sysfs import HostDevice

__all__ = ("Overlap", "Published", "Refused", "Selection", "policies_of_node", "select")

_MAX_NAME = 63
_HASH_DIGITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A device under its published name."""

    name: str
    policy_name: str
    policy: Policy
    host: HostDevice


@dataclass(frozen=True, slots=True)
class Refused:
    """A device that a policy matches, and the reason why it is not published."""

    published: Published
    reason: str


@dataclass(frozen=True, slots=True)
class Overlap:
    """A device that two policies match; it belongs to the first, by name."""

    path: str
    first: str
    second: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The selected devices; all names of devices and refused devices differ."""

    devices: Mapping[str, Published]
    refused: Mapping[str, Refused]
    overlaps: tuple[Overlap, ...] = ()


def policies_of_node(
    policies: Mapping[str, Policy], labels: Mapping[str, str] | None
) -> dict[str, Policy]:
    """Return the policies for a node; while its labels are unknown, those without a selector."""
    return {
        name: policy
        for name, policy in policies.items()
        if not policy.node_selector
        or (labels is not None and policy.node_selector.items() <= labels.items())
    }


def select(
    policies: Mapping[str, Policy],
    found: Collection[HostDevice],
    *,
    refuse: Callable[[Published], str | None],
) -> Selection:
    """Return the published devices; a device belongs to the first policy that matches it."""
    overlaps: list[Overlap] = []
    owners: dict[str, str] = {}
    owned: list[Published] = []
    for policy_name, policy in policies.items():
        for host in sorted(_matching(policy, found), key=_natural_order):
            owner = owners.setdefault(host.path, policy_name)
            if owner == policy_name:
                owned.append(Published(name="", policy_name=policy_name, policy=policy, host=host))
            else:
                overlaps.append(Overlap(host.path, first=owner, second=policy_name))
    matched = {p.host.kernel_name: p.policy_name for p in owned if p.host.block}
    reasons = {p.host.path: refuse(p) or _overlap_with_disk(p.host, matched) for p in owned}
    # Refused devices get names too: a name must not depend on whether a neighbour is in use.
    devices: dict[str, Published] = {}
    refused: dict[str, Refused] = {}
    for name, published in _named(owned).items():
        if reason := reasons[published.host.path]:
            refused[name] = Refused(published, reason)
        else:
            devices[name] = published
    return Selection(devices=devices, refused=refused, overlaps=tuple(overlaps))


def _overlap_with_disk(host: HostDevice, matched: Mapping[str, str]) -> str | None:
    # Even if the disk is refused: the pod that uses it may have partitioned it.
    lower = host.block.lower if host.block else frozenset[str]()
    disk = min(lower & matched.keys(), default=None)
    return f"it is on {disk}, which policy {matched[disk]} matches as a whole" if disk else None


def _matching(policy: Policy, found: Collection[HostDevice]) -> list[HostDevice]:
    return [
        host
        for host in found
        if host.subsystem == policy.subsystem
        and any(matches(glob, path) for glob in policy.paths for path in host.paths)
    ]


def _natural_order(host: HostDevice) -> tuple[list[tuple[int, str]], str]:
    # video10 after video9.
    parts = re.findall(r"\d+|\D+", host.path)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts], host.path


def _named(chosen: Sequence[Published]) -> dict[str, Published]:
    wanted: list[tuple[str, str, bool, Published]] = []
    siblings = Counter[tuple[str, str, str]]()
    for published in chosen:
        prefix, host, count = published.policy_name, published.host, published.policy.count
        if count is not None:
            wanted += [
                (f"{prefix}-{i}", f"{host.path} {i}", False, published) for i in range(count)
            ]
            continue
        identity, place = _identity(host)
        siblings[prefix, identity, place] += 1
        nth = siblings[prefix, identity, place]
        # A camera has several nodes on one interface; its driver makes them in the same order.
        suffix = f"-{nth - 1}" if nth > 1 else ""
        name = _label(f"{prefix}-{identity}{suffix}")
        # At prepare, a disk's name is its identity: no other identity may get this name.
        lossy = bool(host.block and host.block.identity) and name != f"{prefix}-{identity}{suffix}"
        wanted.append((name, f"{place}{suffix}", lossy, published))
    used = Counter(name for name, *_ in wanted)
    named: dict[str, Published] = {}
    for name, distinct, lossy, published in wanted:
        if lossy or used[name] > 1 or len(name) > _MAX_NAME:
            name = _with_hash(name, f"{published.policy_name} {distinct}")
        named[name] = replace(published, name=name)
    return named


def _identity(host: HostDevice) -> tuple[str, str]:
    """Return a device's identity and path: two devices with one identity differ in their paths."""
    block, usb = host.block, host.usb
    if block and block.identity:
        part = f"-part{block.partition}" if block.partition else ""
        return f"{block.identity}{part}", f"{block.identity}{part}"
    if usb is None:
        name = host.path.removeprefix("/dev/")
        return name, name
    who = usb.serial or f"port-{usb.port}"
    interface = "" if usb.interface is None else f"-i{usb.interface}"
    # Cheap devices share one serial number: then the port distinguishes them.
    return f"{usb.vendor_id}-{usb.product_id}-{who}{interface}", f"{usb.port}{interface}"


def _label(text: str) -> str:
    """Make a DNS label of a text, apart from its length."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _with_hash(name: str, distinct: str) -> str:
    digest = hashlib.sha256(f"{name} {distinct}".encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: _MAX_NAME - _HASH_DIGITS - 1].rstrip('-')}-{digest}"
