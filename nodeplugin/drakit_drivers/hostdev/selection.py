"""
Selects the devices to publish: the policy of each device, its name, and its copies.

If two policies match a device, the older one gets it; if they have the same age, the first by name.
But a device that a claim holds stays with the policy that published it. A policy that groups by
unit gets all nodes of a unit or none.

Pure: it must not know files, sysfs or the API's types.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drakit import Policy
from drakit_drivers.hostdev.matching import is_matched
from drakit_drivers.hostdev.naming import (
    Identity,
    Wish,
    assign,
    identity_of_node,
    identity_of_unit,
    wish,
)
from drakit_drivers.hostdev.policy import HostDevicePolicySpec
from drakit_drivers.hostdev.refusal import Refusal
from drakit_drivers.hostdev.sysfs import HostDevice

__all__ = ("Overlap", "Published", "Refused", "Selection", "policies_of_node", "select")

HostPolicy = Policy[HostDevicePolicySpec]

_MAX_DEVICES = 2048
"""Devices of a policy on a node, copies included. A policy with more matches too much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A device under its published name."""

    name: str
    policy: HostPolicy
    hosts: tuple[HostDevice, ...]
    """Its device nodes: one, or those of a unit in the kernel's order."""

    identity: Identity

    @property
    def host(self) -> HostDevice:
        """The first device node."""
        return self.hosts[0]

    @property
    def policy_name(self) -> str:
        return self.policy.name

    @property
    def spec(self) -> HostDevicePolicySpec:
        return self.policy.spec


@dataclass(frozen=True, slots=True)
class Refused:
    """A device that a policy matches, and the reason why it is not published."""

    published: Published
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Overlap:
    """A device that two policies match."""

    path: str
    owner: str
    other: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The selected devices; all names of devices, copies and refused devices differ."""

    devices: Mapping[str, Published]
    copies: Mapping[str, Published]
    """Devices without capacity, for a cluster without DRAConsumableCapacity."""

    refused: Mapping[str, Refused]
    matched: Mapping[str, int]
    """Numbers of matched devices by policy; each copy counts as one."""

    names: Mapping[str, str]
    """The names of the devices by their distinctive features, for the next selection."""

    overlaps: tuple[Overlap, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A device as a policy would publish it."""

    policy: HostPolicy
    hosts: tuple[HostDevice, ...]
    identity: Identity
    devices: tuple[Wish, ...]
    copies: tuple[Wish, ...] = ()
    is_too_many: bool = False

    @property
    def wishes(self) -> tuple[Wish, ...]:
        return (*self.devices, *self.copies)


def policies_of_node(
    policies: Iterable[HostPolicy], labels: Mapping[str, str] | None
) -> list[HostPolicy]:
    """Return the policies for a node, the first in conflicts first. While the node's labels are
    unknown, those without a selector."""
    chosen = (
        policy
        for policy in policies
        if not policy.spec.node_selector
        or (labels is not None and policy.spec.node_selector.items() <= labels.items())
    )
    return sorted(chosen, key=lambda policy: (policy.created, policy.name))


def select(
    policies: Sequence[HostPolicy],
    found: Collection[HostDevice],
    *,
    refuse: Callable[[HostPolicy, HostDevice], Refusal | None],
    before: Mapping[str, str] | None = None,
    held: Collection[str] = (),
) -> Selection:
    """
    Return the published devices.

    :param policies: the policies of the node, the first in conflicts first.
    :param refuse: the rules that do not depend on other devices.
    :param before: the names of the last selection.
    :param held: names of devices that claims hold.
    """
    candidates = [each for policy in policies for each in _candidates(policy, found)]
    wishes = [wish for each in candidates for wish in each.wishes]
    # All candidates get names: a name must not depend on whether a neighbour is published.
    names = assign(wishes, before=before or {}, held=held)
    owned, overlaps = _owned(candidates, names, held)
    matched_disks = {
        host.kernel_name: each.policy.name for each in owned for host in each.hosts if host.block
    }
    devices: dict[str, Published] = {}
    copies: dict[str, Published] = {}
    refused: dict[str, Refused] = {}
    for each in owned:
        refusal = _refusal(each, refuse, matched_disks, names)
        for target, all_wishes in ((devices, each.devices), (copies, each.copies)):
            for its in all_wishes:
                name = names[its.key] or its.hashed
                published = Published(
                    name=name, policy=each.policy, hosts=each.hosts, identity=each.identity
                )
                if refusal:
                    refused[name] = Refused(published, refusal)
                else:
                    target[name] = published
    return Selection(
        devices=devices,
        copies=copies,
        refused=refused,
        matched=Counter(each.policy.name for each in candidates),
        names={key: name for key, name in names.items() if name},
        overlaps=overlaps,
    )


def _owned(
    candidates: Sequence[_Candidate], names: Mapping[str, str | None], held: Collection[str]
) -> tuple[list[_Candidate], tuple[Overlap, ...]]:
    """Give each device node to one policy; return the candidates that have all of theirs."""

    def is_held(each: _Candidate) -> bool:
        return any(names[wish.key] in held for wish in each.wishes)

    owners: dict[str, str] = {}
    owned: list[_Candidate] = []
    overlaps: list[Overlap] = []
    for each in sorted(candidates, key=lambda each: not is_held(each)):  # stable
        taken = [host.path for host in each.hosts if host.path in owners]
        if taken:
            overlaps += [Overlap(path, owners[path], each.policy.name) for path in taken]
            continue
        owners.update({host.path: each.policy.name for host in each.hosts})
        owned.append(each)
    return owned, tuple(overlaps)


def _refusal(
    each: _Candidate,
    refuse: Callable[[HostPolicy, HostDevice], Refusal | None],
    matched_disks: Mapping[str, str],
    names: Mapping[str, str | None],
) -> Refusal | None:
    for host in each.hosts:
        refusal = refuse(each.policy, host) or _overlap_with_disk(host, matched_disks)
        if refusal:
            return refusal
    if not each.identity.is_stable and not each.policy.spec.allow.unstable_identity:
        return Refusal(
            "NoIdentity",
            "the kernel may give its name to another device after a reboot, and the policy does "
            "not set allow.unstableIdentity",
        )
    if each.is_too_many:
        return Refusal(
            "TooMany",
            f"policy {each.policy.name} already has {_MAX_DEVICES} devices on this node, the "
            "maximum (each user counts as a device); narrow its matchers, or reduce sharing.users",
        )
    if any(names[wish.key] is None for wish in each.wishes):
        return Refusal(
            "InUse",
            "a claim holds this device or another device with the same identity; delete the pod "
            "of the claim, or unplug one of the devices",
        )
    return None


def _overlap_with_disk(host: HostDevice, matched: Mapping[str, str]) -> Refusal | None:
    # Even if the disk is refused: the pod that uses it may have partitioned it.
    lower = host.block.lower if host.block else frozenset[str]()
    disk = min(lower & matched.keys(), default=None)
    if disk is None:
        return None
    return Refusal("InUse", f"it is on {disk}, which policy {matched[disk]} matches as a whole")


# ------------------------------------------------------------ candidates


def _candidates(policy: HostPolicy, found: Collection[HostDevice]) -> Iterator[_Candidate]:
    spec = policy.spec
    matching = sorted((h for h in found if is_matched(spec, h)), key=_natural_order)
    if spec.group == "Unit":
        units: dict[Path, list[HostDevice]] = defaultdict(list)
        for host in matching:
            units[host.unit or host.directory].append(host)
        pairs = [(identity_of_unit(hosts[0]), tuple(hosts)) for hosts in units.values()]
    else:
        pairs = [(identity_of_node(host), (host,)) for host in matching]
    siblings = Counter[Identity]()
    total = 0
    for identity, hosts in pairs:
        total += spec.sharing.users or 1
        is_too_many = total > _MAX_DEVICES
        users = 0 if is_too_many else spec.sharing.users or 0
        device, *copies = _wishes(policy, identity, hosts, users=users, siblings=siblings)
        only_copies = spec.sharing.mode == "Users" and not is_too_many
        yield _Candidate(
            policy=policy,
            hosts=hosts,
            identity=identity,
            devices=tuple(copies) if only_copies else (device,),
            copies=() if only_copies else tuple(copies),
            is_too_many=is_too_many,
        )


def _wishes(
    policy: HostPolicy,
    identity: Identity,
    hosts: Sequence[HostDevice],
    *,
    users: int,
    siblings: Counter[Identity],
) -> Iterator[Wish]:
    """Yield the wish for a device, then those for its copies. `siblings` counts the devices of the
    same identity."""
    siblings[identity] += 1
    nth = siblings[identity]
    yield wish(policy.name, identity, nth=nth)
    if policy.spec.single_path:
        # One device at most: kvm-0, kvm-1, ...
        identity, nth = Identity(text="", place=hosts[0].path), 1
    for index in range(users):
        yield wish(policy.name, identity, nth=nth, copy=index)


def _natural_order(host: HostDevice) -> tuple[list[tuple[int, str]], str]:
    # video10 after video9.
    parts = re.findall(r"\d+|\D+", host.path)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts], host.path
