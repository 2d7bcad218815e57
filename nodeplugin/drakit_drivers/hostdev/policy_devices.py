"""
Selects the devices to publish: the policy of each device, its name, its copies, and the attributes
and capacities that CEL selectors can match.

If two policies match a device, the older one gets it. If they have the same age, the first by name
gets it. The same applies to device nodes that give access to the same hardware function, unless
both policies share them. A policy that groups by unit gets all nodes of a unit or none. A policy
that publishes a set gets the whole set or nothing.

A device that a claim holds is published only under its held names until it is released, even if its
policy changes. A device whose number a claim holds for other hardware is not published. Some
devices are published with a :class:`Doubt`, so that no new claim gets them. A USB device whose IDs
have changed, at the same port, is still the held device if its policy allows that.

Attribute names are C identifiers. The standard attributes have the Kubernetes domain, so that
claims can request devices of several drivers that are close to each other. A string that the API
rejects (over 64 bytes) is omitted instead of truncated, because half a serial number would match
the wrong device. Attributes are ordered by importance. If there are more than the API allows, the
last ones are omitted.

Pure functions.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from drakit import AttributeValue, Capacity, CapacityRange, RejectionReason
from drakit_drivers.hostdev.hardware import (
    HardwareIdentity,
    HostDevice,
    Identity,
    hardware_identity,
    identity_at_port,
    identity_of_former,
    identity_of_node,
    identity_of_unit,
)
from drakit_drivers.hostdev.matching import is_matched, names_usb_device
from drakit_drivers.hostdev.naming import Holds, NameRequest, Number, Numbers, assign, name_request
from drakit_drivers.hostdev.policy import HostDevicePolicySpec, HostPolicy

_MAX_DEVICES = 2048
"""Maximum number of devices per policy on a node, including copies. A policy with more devices
matches too much."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason for not publishing a device: a machine-readable code and a message for users."""

    reason: RejectionReason
    message: str
    """A clause without times and counters, such as ``it is mounted at /``."""

    is_unknown: bool = False
    """Whether the reason is that a rule cannot be checked, because a file is unreadable. If so, a
    new device is not published, but a previously published device remains published, with a
    taint."""

    is_gone: bool = False
    """Whether a part of the device is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubt:
    """The reason why new claims must not get a published device."""

    kind: Literal["renumbered", "shared", "unreadable"]
    """
    * ``renumbered``: containers use an outdated number of the device.
    * ``shared``: claims hold the device in a different form than the policy offers: shares of it,
      the whole device, or one of its copies.
    * ``unreadable``: it is unknown whether the device is still there and may be published.
    """

    message: str
    """A sentence without times and counters."""

    prepare_again: bool = False
    """Whether claims that hold the device have outdated edits."""

    by_change: bool = False
    """Whether the policy changed while claims held the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A device with its published name."""

    name: str
    policy: HostPolicy
    hosts: tuple[HostDevice, ...]
    """The device nodes: a single node, or the nodes of a unit in the kernel's order."""

    identity: Identity
    doubt: Doubt | None = None

    @property
    def host(self) -> HostDevice:
        """The first device node."""
        return self.hosts[0]

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
    is_by_hold: bool = False
    """Whether the owner has the device only because a claim holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The selected devices. The names of devices, copies and refused devices are all different."""

    devices: Mapping[str, Published]
    copies: Mapping[str, Published]
    """Copies of devices, without capacity, for a cluster without DRAConsumableCapacity."""

    refused: Mapping[str, Refused]
    matched: Mapping[str, int]
    """The number of devices that each policy matches. A device with copies is counted once."""

    names: Mapping[str, str]
    """The device names, keyed by request key, for the next selection."""

    hardware: Mapping[str, Set[str]]
    """The hardware identities of selected devices and held devices, keyed by name, for the next
    selection."""

    outgrown: Set[str] = frozenset()
    """Held copies of devices that are now published with a capacity. A held copy that is not in
    this set shows that the cluster does not support DRAConsumableCapacity."""

    waits_for_release: bool = False
    """Whether the selection will change when a claim releases a device."""

    overlaps: tuple[Overlap, ...] = ()

    def find(self, name: str) -> Published | None:
        """Return a device or a copy by its name."""
        return self.devices.get(name) or self.copies.get(name)

    def policy_of(self, name: str) -> str | None:
        """Return the policy of the device with this name, whether it is published or refused."""
        refused = self.refused.get(name)
        found = self.find(name) or (refused and refused.published)
        return found.policy.name if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A device as a policy would publish it."""

    policy: HostPolicy
    hosts: tuple[HostDevice, ...]
    identity: Identity
    hardware: Set[str]
    devices: tuple[NameRequest, ...] = ()
    copies: tuple[NameRequest, ...] = ()
    is_too_many: bool = False
    set_problem: str = ""
    """The reason why a set cannot be published."""

    @property
    def units(self) -> set[str]:
        """The places of the units that the device nodes belong to."""
        return {HardwareIdentity.parse(each).unit for each in self.hardware}

    def overlaps(self, text: str) -> bool:
        """Return whether an identity belongs to another node of one of the candidate's
        functions."""
        node = HardwareIdentity.parse(text)
        return any(HardwareIdentity.parse(each).overlaps(node) for each in self.hardware)

    @property
    def possible_names(self) -> set[str]:
        return {name for each in self.requests for name in (each.plain, each.hashed)}

    def with_names(self, identity: Identity, *, nth: int = 1) -> _Candidate:
        """Return the candidate with the names for an identity. It is the policy's nth device with
        that identity."""
        spec, hardware = self.policy.spec, self.hardware
        device = name_request(self.policy.name, identity, hardware=hardware, nth=nth)
        if spec.single_path:
            # A policy with a single path has at most one device, so the names of its copies do not
            # need an identity: kvm-0, kvm-1, ...
            identity, nth = Identity(text="", place=self.hosts[0].path), 1
        copies = tuple(
            name_request(self.policy.name, identity, hardware=hardware, nth=nth, copy=index)
            for index in range(0 if self.is_too_many else spec.sharing.users or 0)
        )
        only_copies = spec.sharing.mode == "Users" and not self.is_too_many
        return replace(
            self,
            devices=copies if only_copies else (device,),
            copies=() if only_copies else copies,
        )

    def with_names_of(self, former: HardwareIdentity) -> _Candidate:
        """Return the candidate with the names for its former identity."""
        spec = self.policy.spec
        identity = identity_of_former(
            former, at_port=spec.identity == "Port", is_unit=spec.group == "Unit"
        )
        return self.with_names(identity)

    @property
    def requests(self) -> tuple[NameRequest, ...]:
        return (*self.devices, *self.copies)

    def has_capacity(self, name: str) -> bool:
        """Return whether claims get shares of the device if it has this name."""
        names = {text for its in self.devices for text in (its.plain, its.hashed)}
        return self.policy.spec.sharing.mode == "Capacity" and name in names

    def shares_with(self, other: _Candidate) -> bool:
        """Return whether claims for the two candidates can hold nodes of the same hardware function
        at the same time."""
        return "Exclusive" not in (self.policy.spec.sharing.mode, other.policy.spec.sharing.mode)


def select(
    policies: Sequence[HostPolicy],
    found: Collection[HostDevice],
    *,
    refuse: Callable[[HostPolicy, HostDevice], Refusal | None],
    before: Selection | None = None,
    holds: Holds | None = None,
) -> Selection:
    """
    Return the published devices.

    :param policies: the policies of the node, in order of precedence.
    :param refuse: the rules for a single device.
    :param before: the previous selection.
    """
    holds = holds or Holds()
    candidates = [each for policy in policies for each in _candidates(policy, found)]
    candidates, holds = _with_new_ids(candidates, found, holds)
    requests = [name_request for each in candidates for name_request in each.requests]
    # Assign names to all candidates, because a name must not depend on whether another device is
    # published.
    names = assign(requests, before=before.names if before else {}, holds=holds)
    judged = [(each, _refusal(each, refuse, names)) for each in candidates]
    owned, overlaps = _owned(judged, names, holds)
    numbers: dict[str, set[Number]] = defaultdict(set)
    for host in found:
        numbers[hardware_identity(host)].add((host.type, host.major, host.minor))
    at_unit: dict[str, list[str]] = defaultdict(list)
    for text in numbers:
        at_unit[HardwareIdentity.parse(text).unit].append(text)
    parts = {(it.unit, it.reported) for it in map(HardwareIdentity.parse, numbers)}
    devices: dict[str, Published] = {}
    copies: dict[str, Published] = {}
    outgrown = _outgrown(candidates, names, before, holds)
    refused: dict[str, Refused] = {}
    hardware = {name: holds.hardware(name) for name in holds}
    owners = {names[name_request.key]: each for each, _ in owned for name_request in each.requests}
    waits_for_release = None in owners or any(each.is_by_hold for each in overlaps)
    for each, refusal in owned:
        own_names = {name for its in each.requests if (name := names[its.key])}
        # No claim for other hardware may hold the number of any node of the device's functions.
        near = (text for unit in each.units if unit for text in at_unit[unit])
        reach = each.hardware | {text for text in near if each.overlaps(text)}
        its_numbers = {identity: numbers[identity] for identity in reach}
        for target, all_wishes in ((devices, each.devices), (copies, each.copies)):
            its_names = {names[its.key] or its.hashed for its in all_wishes}
            for its in all_wishes:
                name = names[its.key] or its.hashed
                published = Published(
                    name=name, policy=each.policy, hosts=each.hosts, identity=each.identity
                )
                reason = refusal
                if reason is None and name not in holds:
                    reason = _held_otherwise(each, owners, its_numbers, holds)
                    waits_for_release |= reason is not None
                elif reason is None and each.policy.spec.group == "Set":
                    reason = _changed_set(name, parts, holds)
                    waits_for_release |= reason is not None
                was_published = name in holds or (before is not None and before.find(name))
                if reason and not (reason.is_unknown and was_published):
                    refused[name] = Refused(published, reason)
                    continue
                doubt = _uncertainty(published, its_numbers, holds) or _other_form(
                    published,
                    own_names - its_names,
                    holds,
                    is_copy=target is copies,
                    outgrown=outgrown,
                )
                waits_for_release |= doubt is not None
                if reason:
                    doubt = Doubt(kind="unreadable", message=reason.message)
                target[name] = replace(published, doubt=doubt)
                hardware[name] = hardware.get(name) or each.hardware
    return Selection(
        devices=devices,
        copies=copies,
        refused=refused,
        matched=Counter(each.policy.name for each in candidates),
        names={key: name for key, name in names.items() if name},
        hardware=hardware,
        outgrown=outgrown,
        waits_for_release=waits_for_release,
        overlaps=overlaps,
    )


def _with_former_ids(each: _Candidate, holds: Holds) -> _Candidate:
    """If claims hold a candidate under names that it got with different IDs, return the candidate
    with these names. A claim that was prepared after a reboot does not contain the former IDs."""
    spec, held = each.policy.spec, holds.names(each.hardware)
    if not held or held <= each.possible_names:
        return each
    for text in sorted(each.hardware):
        new = HardwareIdentity.parse(text)
        for usb in (matcher.usb for matcher in spec.match if matcher.usb):
            for serial in {new.usb_ids[2], ""} if new.usb_ids else ():
                ids = filter(None, (usb.vendor_id, usb.product_id, serial))
                old = new._replace(reported="-".join(ids))
                former = each.with_names_of(old)
                if _is_renamed(spec, old, new) and not held.isdisjoint(former.possible_names):
                    return former
    return each


def _with_new_ids(
    candidates: Sequence[_Candidate], found: Collection[HostDevice], holds: Holds
) -> tuple[list[_Candidate], Holds]:
    """Recognize held hardware whose IDs have changed. Return the candidates with the names under
    which the hardware is held, and the holds with the new IDs. For example, an accelerator changes
    its IDs when its first pod loads the firmware."""
    candidates = [_with_former_ids(each, holds) for each in candidates]
    present = {hardware_identity(host) for host in found}
    missing: dict[str, set[str]] = defaultdict(set)
    for text in {text for name in holds for text in holds.hardware(name)} - present:
        missing[HardwareIdentity.parse(text).unit].add(text)
    if not missing:
        return candidates, holds
    at_unit = Counter((each.policy.name, unit) for each in candidates for unit in each.units)
    changed: dict[tuple[str, str], str] = {}
    renamed: list[_Candidate] = []
    for each in candidates:
        for text in sorted(text for unit in each.units for text in missing.get(unit, ())):
            old = HardwareIdentity.parse(text)
            nodes = [it for it in each.hardware if HardwareIdentity.parse(it).unit == old.unit]
            new = min(nodes, key=lambda it: (not old.is_node_of(it), it))
            if not _is_renamed(each.policy.spec, old, HardwareIdentity.parse(new)):
                continue
            former = each.with_names_of(old)
            for its in (each, former):
                names = {name for name in its.possible_names if text in holds.hardware(name)}
                is_sole = at_unit[each.policy.name, old.unit] == 1
                is_only_hold = is_sole and holds.names_at(old.unit) <= names
                is_free = holds.names({new}) <= its.possible_names
                if names and is_free and (old.is_node_of(new) or is_only_hold):
                    changed |= {(name, text): new for name in names}
                    each = its
                    break
        renamed.append(each)
    return renamed, holds.with_identities(changed) if changed else holds


def _is_renamed(spec: HostDevicePolicySpec, old: HardwareIdentity, new: HardwareIdentity) -> bool:
    """Return whether a policy treats two different identities as the same hardware."""
    if old.unit != new.unit or old.usb_ids is None or new.usb_ids is None:
        return False
    if old.reported == new.reported:  # another node of the same hardware
        return False
    if spec.identity == "Port":
        return True
    is_other = old.usb_ids[2] != new.usb_ids[2] and old.usb_ids[2] and new.usb_ids[2]
    return (
        old.usb_ids[:2] != new.usb_ids[:2]
        and not is_other
        and all(
            names_usb_device(spec.match, vendor_id=ids[0], product_id=ids[1], path=old.unit)
            for ids in (old.usb_ids, new.usb_ids)
        )
    )


def _owned(
    judged: Sequence[tuple[_Candidate, Refusal | None]],
    names: Mapping[str, str | None],
    holds: Holds,
) -> tuple[list[tuple[_Candidate, Refusal | None]], tuple[Overlap, ...]]:
    """Assign each device node to one policy. Return the candidates that got all of their nodes,
    each with the reason against it, if any. A candidate that is definitely refused keeps its own
    nodes, but leaves the other nodes of the same functions to others."""

    def is_held(each: _Candidate) -> bool:
        return any(names[name_request.key] in holds for name_request in each.requests)

    owners: dict[str, _Candidate] = {}
    of_units: dict[str, list[tuple[HardwareIdentity, _Candidate]]] = defaultdict(list)

    def owner_of(host: HostDevice, each: _Candidate | None) -> _Candidate | None:
        if host.path in owners or each is None:
            return owners.get(host.path)
        node = HardwareIdentity.parse(hardware_identity(host))
        return next(
            (
                other
                for identity, other in of_units.get(node.unit, ())
                if other.policy.name != each.policy.name
                and identity.overlaps(node)
                and not each.shares_with(other)
            ),
            None,
        )

    owned: list[tuple[_Candidate, Refusal | None]] = []
    overlaps: list[Overlap] = []
    # The sort is stable, so held candidates come first in their original order.
    for each, refusal in sorted(judged, key=lambda pair: not is_held(pair[0])):
        can_own = not refusal or refusal.is_unknown or refusal.reason == "InUse" or is_held(each)
        taken = {h.path: it for h in each.hosts if (it := owner_of(h, each if can_own else None))}
        if taken:
            overlaps += [
                Overlap(path, other.policy.name, each.policy.name, is_by_hold=is_held(other))
                for path, other in taken.items()
            ]
            continue
        owners.update({host.path: each for host in each.hosts})
        if can_own:
            for node in map(HardwareIdentity.parse, each.hardware):
                of_units[node.unit].append((node, each))
        owned.append((each, refusal))
    return owned, tuple(overlaps)


def _refusal(
    each: _Candidate,
    refuse: Callable[[HostPolicy, HostDevice], Refusal | None],
    names: Mapping[str, str | None],
) -> Refusal | None:
    refusals = [refusal for host in each.hosts if (refusal := refuse(each.policy, host))]
    if refusals:
        # reasons that are certain take precedence
        return min(refusals, key=lambda refusal: refusal.is_unknown)
    if each.set_problem:
        return Refusal("Other", each.set_problem, is_gone=True)
    if not each.identity.is_stable and each.policy.spec.allow.unstable_identity == "Never":
        return Refusal(
            "NoIdentity",
            "the kernel may give its name to another device after a reboot, and the policy does "
            "not set allow.unstableIdentity: Always",
        )
    if each.is_too_many:
        return Refusal(
            "TooMany",
            f"policy {each.policy.name} already has {_MAX_DEVICES} devices on this node, the "
            "maximum (each user counts as a device); narrow its matchers, or reduce sharing.users",
        )
    if any(names[name_request.key] is None for name_request in each.requests):
        return Refusal(
            "InUse",
            "a claim holds this device or another device with the same identity; delete the pod "
            "of the claim, or unplug one of the devices",
        )
    return None


def _held_otherwise(
    each: _Candidate, owners: Mapping[str | None, _Candidate], numbers: Numbers, holds: Holds
) -> Refusal | None:
    """
    Return the reason why a device cannot be allocated although no claim holds it under its name, or
    None.

    `owners` contains the devices in the scan, keyed by name. If one of them is held and has the
    same hardware identity, the hold belongs to an equal node, such as another of two chips on a
    controller.
    """
    others = holds.names(each.hardware) - owners.keys()
    others |= {
        name
        for name in holds.overlapping(each.hardware)
        if name not in owners
        or not each.shares_with(owners[name])
        or (owners[name].has_capacity(name) and holds.users(name) is None)
    }
    other = min(others, default=None)
    if other is not None:
        return Refusal(
            "InUse",
            f"{holds.holder(other)} holds it as device {other}; delete the pod that uses the claim",
        )
    if taken := holds.taken(numbers):
        (_, major, minor), name = taken
        return Refusal(
            "InUse",
            f"the kernel gave it the number {major}:{minor}, which {holds.holder(name)} still "
            f"holds for device {name}; delete the pod that uses the claim",
        )
    return None


def _changed_set(name: str, parts: Set[tuple[str, str]], holds: Holds) -> Refusal | None:
    """
    Return the reason why a set is not the set that a claim holds, or None.

    `parts` contains the units that are present, with the data that their hardware reports.
    """
    held = {(it.unit, it.reported) for it in map(HardwareIdentity.parse, holds.hardware(name))}
    if held <= parts:
        return None
    message = (
        f"{holds.holder(name)} holds it with another device, which is gone; connect that device "
        "again"
    )
    return Refusal("InUse", f"{message}, or delete the pod that uses the claim", is_gone=True)


def _outgrown(
    candidates: Sequence[_Candidate],
    names: Mapping[str, str | None],
    before: Selection | None,
    holds: Holds,
) -> Set[str]:
    if before is None:
        return frozenset()
    copies = {name for each in candidates for its in each.copies if (name := names[its.key])}
    grown = before.outgrown | before.devices.keys()
    return frozenset(name for name in copies if name in holds and name in grown)


def _uncertainty(published: Published, numbers: Numbers, holds: Holds) -> Doubt | None:
    name, evicts = published.name, published.spec.on_vanish == "Evict"
    outdated = holds.outdated(name, numbers)
    if outdated:
        remedy = "Kubernetes evicts" if evicts else "restart the containers, or delete"
        old = min(f"{node.major}:{node.minor}" for node in outdated)
        new = min(f"{x}:{y}" for _, x, y in numbers[min(outdated, key=str).identity])
        return Doubt(
            kind="renumbered",
            message=f"the kernel changed the number of device {name} from {old} to {new}; running "
            f"containers of {holds.holder(name)} may have the old number, and cannot open the new "
            f"one; {remedy} the pod that uses the claim",
            prepare_again=any(node.current for node in outdated),
        )
    return None


def _other_form(
    published: Published, other_names: Set[str], holds: Holds, *, is_copy: bool, outgrown: Set[str]
) -> Doubt | None:
    """Return the doubt about a device if claims hold it in a form that its policy does not offer.
    `other_names` contains the names of the other form: the names of the copies for a device with
    capacity, or the name of the device with capacity for a copy."""
    name, sharing = published.name, published.spec.sharing
    if name not in holds:
        other = min((other for other in other_names if other in holds), default=None)
        if other is None:
            return None
        return Doubt(
            kind="shared",
            message=f"device {name} waits for {holds.holder(other)}, which holds it as device "
            f"{other}",
            by_change=not is_copy and other in outgrown,
        )
    users, offered = holds.users(name), sharing.users or 0
    if sharing.mode != "Capacity" or is_copy:
        problem = None if users is None else "holds a share, and the policy no longer shares it"
    elif users is None:
        problem = "holds the whole device, and the policy now shares it"
    else:
        problem = "holds a share: claims hold more of it than sharing.users" * (users > offered)
    if not problem:
        return None
    message = f"device {name} waits for {holds.holder(name)}, which {problem}"
    return Doubt(kind="shared", message=message, by_change=True)


# ------------------------------------------------------------ candidates


def _candidates(policy: HostPolicy, found: Collection[HostDevice]) -> Iterator[_Candidate]:
    spec = policy.spec
    matching = sorted((h for h in found if is_matched(spec.match, h)), key=_natural_order)
    if spec.group == "Unit":
        units: dict[Path, list[HostDevice]] = defaultdict(list)
        for host in matching:
            units[host.unit or host.directory].append(host)
        groups = [tuple(hosts) for hosts in units.values()]
    elif spec.group == "Set":
        of_matcher = {
            h.path: i for i, m in enumerate(spec.match) for h in found if is_matched([m], h)
        }
        matching.sort(key=lambda host: of_matcher[host.path])
        groups = [tuple(matching)] if matching else []
    else:
        groups = [(host,) for host in matching]
    siblings = Counter[Identity]()
    total = 0
    for hosts in groups:
        identity = _identity(spec, hosts)
        siblings[identity] += 1
        total += spec.sharing.users or 1
        candidate = _Candidate(
            policy=policy,
            hosts=hosts,
            identity=identity,
            hardware=frozenset(map(hardware_identity, hosts)),
            is_too_many=total > _MAX_DEVICES,
            set_problem=_set_problem(spec, hosts) if spec.group == "Set" else "",
        )
        yield candidate.with_names(identity, nth=siblings[identity])


def _set_problem(spec: HostDevicePolicySpec, hosts: Sequence[HostDevice]) -> str:
    """Return the reason why device nodes are not the set that a policy describes. Empty if they
    are."""
    for index, matcher in enumerate(spec.match):
        its = {host.unit or host.directory for host in hosts if is_matched([matcher], host)}
        if len(its) != 1:
            problem = "several devices; narrow it, for example by usb.path" if its else "no device"
            return f"it is not a complete set: match[{index}] matches {problem}"
    return ""


def _identity(spec: HostDevicePolicySpec, hosts: Sequence[HostDevice]) -> Identity:
    host, is_unit = hosts[0], spec.group == "Unit"
    if spec.group == "Set":
        is_stable = all(identity_of_node(each).is_stable for each in hosts)
        return Identity(text="", place="", is_stable=is_stable)
    at_port = identity_at_port(host, is_unit=is_unit) if spec.identity == "Port" else None
    return at_port or (identity_of_unit(host) if is_unit else identity_of_node(host))


def _natural_order(host: HostDevice) -> tuple[list[tuple[int, str]], str]:
    # Sort video10 after video9.
    parts = re.findall(r"\d+|\D+", host.path)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts], host.path


# ------------------------------------------------------------ attributes and capacities

MAX_STRING_BYTES = 64
"""The API limit for a string value, in bytes."""

_MAX_FACTS = 32
"""The API limit for a device's attributes and capacities in total."""

_STANDARD = "resource.kubernetes.io/"


def attributes(published: Published) -> dict[str, AttributeValue]:
    """Return the attributes of a device."""
    facts = {
        name: value
        for name, value in _facts(published)
        if not isinstance(value, str) or len(value.encode()) <= MAX_STRING_BYTES
    }
    room = _MAX_FACTS - len(capacity(published))
    return dict(list(facts.items())[:room])


def left_out(published: Published) -> tuple[str, ...]:
    """Return the names of attributes that are omitted because their values are too long, or because
    there are too many attributes."""
    published_names = attributes(published).keys()
    return tuple(name for name, _ in _facts(published) if name not in published_names)


def capacity(published: Published, *, is_copy: bool = False) -> dict[str, str | Capacity]:
    """
    Return the capacities of a device: the size of a block device in bytes, and the users of a
    device with a shared capacity.

    :param is_copy: the device is one of the copies for clusters without DRAConsumableCapacity.
    """
    found: dict[str, str | Capacity] = {}
    block, sharing = published.host.block, published.spec.sharing
    if block and block.size_bytes:
        found["size"] = str(block.size_bytes)
    if sharing.mode == "Capacity":
        users = Capacity(
            value=str(sharing.users), default="1", valid_range=CapacityRange(min="1", step="1")
        )
        # The API server rejects a range whose first step exceeds the capacity.
        found["users"] = "1" if is_copy or sharing.users == 1 else users
    return found


def _facts(published: Published) -> Iterator[tuple[str, AttributeValue]]:
    # A policy's own attributes are as important as the standard attributes, which are the most
    # widely used.
    own = published.spec.attributes.items()
    extra = ((name, attribute.value) for name, attribute in own)
    for name, value in (*_common(published), *extra, *_specific(published.host)):
        if value is not None:
            yield name, value


def _common(published: Published) -> Iterator[tuple[str, AttributeValue | None]]:
    device = published.host
    yield "subsystem", device.subsystem
    yield "policy", published.policy.name
    yield "path", device.path
    yield "devname", device.path.removeprefix("/dev/")
    yield "devtype", device.devtype
    yield "major", device.major
    yield "minor", device.minor
    yield "driver", device.driver
    yield "identity", published.identity.text if published.identity.is_stable else None
    yield "byIdLink", _link(device, "by-id")
    yield "byPathLink", _link(device, "by-path")
    yield "serial", device.usb.serial if device.usb and device.usb.serial else device.serial
    yield "nodeCount", len(published.hosts) if published.spec.group != "Node" else None
    yield f"{_STANDARD}numaNode", device.numa_node
    if device.pci:
        yield f"{_STANDARD}pciBusID", device.pci.bus_id
        yield f"{_STANDARD}pcieRoot", device.pci.root


def _specific(device: HostDevice) -> Iterator[tuple[str, AttributeValue | None]]:
    if device.usb:
        yield "usbVendorID", device.usb.vendor_id
        yield "usbProductID", device.usb.product_id
        yield "usbManufacturer", device.usb.manufacturer
        yield "usbProduct", device.usb.product
        yield "usbInterface", device.usb.interface
        yield "usbPort", device.usb.port
        yield "usbPath", device.usb.path
    yield from device.family.items()
    if device.pci:
        yield "pciVendorID", device.pci.vendor_id
        yield "pciDeviceID", device.pci.device_id
        yield "pciClass", device.pci.class_id
    if device.usb:
        # The PCI function of a USB device is the host controller, so its subsystem IDs are not
        # useful for selection.
        yield "usbVersion", device.usb.version
        yield "usbClass", device.usb.device_class
        yield "usbSpeed", device.usb.speed
    elif device.pci:
        yield "pciSubsystemVendorID", device.pci.subsystem_vendor_id
        yield "pciSubsystemDeviceID", device.pci.subsystem_device_id
        yield "iommuGroup", device.pci.iommu_group


def _link(device: HostDevice, kind: str) -> str | None:
    return next((link for link in device.links if f"/{kind}/" in link), None)
