"""
Scans the host: combines sysfs, device nodes and mounts as input for the selection, and applies the
rules for publishing a single device.

A scan distinguishes between missing devices and unknown ones, which have an unreadable file. If a
file of a subsystem is unreadable, the devices that the last scan found in that subsystem are kept
as doubtful until other hardware is found in their place.

The driver publishes only two kinds of block devices: zram devices, and loop devices without a
backing file, while the host does not use them. Disks, partitions and volumes belong to CSI, which
has a controller, fencing and volume modes for them. The same applies to a zram device that writes
to a disk, and to a loop device that exposes a host file. The block devices that are published
contain no host data. Cluster tests use them as devices that appear and vanish.

Does not depend on device attributes, or on how the driver reports devices.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from drakit import DriverError, HeldDevice
from drakit_drivers.hostdev.block_usage import read_usage
from drakit_drivers.hostdev.dangerous import danger_of, danger_of_path, directories_below
from drakit_drivers.hostdev.hardware import HostDevice, hardware_identity, subsystem_of
from drakit_drivers.hostdev.matching import (
    RAW_DISK_SUBSYSTEMS,
    has_wildcard,
    is_matched,
    wanted_paths,
)
from drakit_drivers.hostdev.naming import Holds
from drakit_drivers.hostdev.policy import HostDevicesConfig, HostPolicy
from drakit_drivers.hostdev.policy_devices import Refusal, Selection, select
from drakit_drivers.hostdev.sysfs import Sysfs, UnreadableError, entries

T = TypeVar("T")

_IN_POLICY = "allow.dangerous: Always in its policy"
_IN_CHART = "hostdev.allowDangerous: true in the chart's values"

_USE_CSI = "use a CSI driver: see 'Disks: use CSI' in the documentation (docs/admin/disks.md)"


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A path in a matcher whose device is in a different subsystem."""

    policy: str
    path: str
    subsystem: str


@dataclass(frozen=True, slots=True)
class Twin:
    """A device that a policy would match by a link, if the link did not lead to another device."""

    policy: str
    path: str
    link: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """The result of a scan."""

    selection: Selection
    found: tuple[HostDevice, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each subsystem with unknown devices, the reason why they cannot be checked."""

    withdrawn: tuple[str, ...] = ()
    """Held devices that are not published, although their hardware is present or unknown."""

    misplaced: tuple[Misplaced, ...] = ()
    twins: tuple[Twin, ...] = ()
    problems: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Problems in policies, keyed by policy name."""


class Host:
    """The host, accessed at the paths in the configuration. Methods read files, and block
    briefly."""

    def __init__(self, config: HostDevicesConfig) -> None:
        """Open the host. Raises DriverError if the configuration is invalid on this host. Missing
        devices are allowed."""
        self._config = config
        self._sysfs = Sysfs(config.sys_root, udev_root=config.udev_root, dev_root=config.dev_root)
        for key, root in (("sysRoot", config.sys_root), ("devRoot", config.dev_root)):
            if not root.is_dir():
                raise DriverError(
                    f"{key}: {root} is not a directory: mount the host's directory there"
                )

    def scan(
        self,
        policies: Sequence[HostPolicy],
        *,
        before: Scan | None = None,
        held: Mapping[str, HeldDevice] | None = None,
        only: Collection[str] | None = None,
    ) -> Scan:
        """
        Find the current devices of these policies.

        :param policies: the policies of the node, in order of precedence.
        :param before: the last scan.
        :param held: the devices that claims hold.
        :param only: scan only the files that the devices with these names need. The same rules
            apply.
        """
        last = before.selection if before else None
        holds = Holds(held, remembered=last.hardware if last else None)
        if only is not None:
            policies = _deciding_policies(policies, only, last, holds)
        found, unknown = self._read(policies)
        if only is None:
            self._find_held(holds, found, unknown)
        self._find_numbers(holds, found, unknown)
        stale = _stale(before.found, found, unknown) if before else []
        found += stale
        rules = _Rules(
            config=self._config,
            sysfs=self._sysfs,
            forbidden=self._forbidden(policies),
            stale={host.path: unknown[host.subsystem] for host in stale},
            used=_result(self._used) if any(host.block for host in found) else {},
            consoles=_result(self._sysfs.active_consoles)
            if any(host.subsystem == "tty" for host in found)
            else (),
        )
        selection = select(policies, found, refuse=rules.refusal, before=last, holds=holds)
        doubts = rules.doubts() | unknown
        if only is not None:
            return Scan(selection=selection, unknown=doubts)
        problems = {
            policy.name: (*self._problems(policy, rules.forbidden), *_doubts(policy, doubts))
            for policy in policies
        }
        return Scan(
            selection=selection,
            found=tuple(found),
            unknown=doubts,
            withdrawn=tuple(sorted(_withdrawn(selection, holds, found, unknown))),
            misplaced=tuple(self._misplaced(policies, found)),
            twins=tuple(_twins(policies, found)),
            problems={name: its for name, its in problems.items() if its},
        )

    def _read(self, policies: Sequence[HostPolicy]) -> tuple[list[HostDevice], dict[str, str]]:
        """Read the devices that policies can match. Also return the reason for each subsystem that
        has unknown devices."""
        matchers = [matcher for policy in policies for matcher in policy.spec.match]
        found: list[HostDevice] = []
        unknown: dict[str, str] = {}
        for subsystem in dict.fromkeys(matcher.subsystem for matcher in matchers):
            found += self._devices(subsystem, wanted_paths(matchers, subsystem), unknown)
        return found, unknown

    def _find_held(self, holds: Holds, found: list[HostDevice], unknown: dict[str, str]) -> None:
        """Add the held devices that no policy matches: they may still exist, and only have lost
        their policy."""
        present = {hardware_identity(host) for host in found}
        missing = {each for name in holds for each in holds.hardware(name)} - present
        for subsystem in sorted({subsystem_of(identity) for identity in missing}):
            others = self._devices(subsystem, lambda path: True, unknown)
            found += [host for host in others if hardware_identity(host) in missing]

    def _find_numbers(self, holds: Holds, found: list[HostDevice], unknown: dict[str, str]) -> None:
        """Add the devices whose numbers are held for other hardware, because a container can open
        them."""
        known = {(host.type, host.major, host.minor) for host in found}
        for number, identity in holds.numbers.items():
            kind, major, minor = number
            try:
                host = None if number in known else self._sysfs.device_of(kind, f"{major}:{minor}")
            except UnreadableError as error:
                unknown[subsystem_of(identity)] = str(error)
            else:
                found += [host] if host and hardware_identity(host) != identity else []

    def _devices(
        self, subsystem: str, wanted: Callable[[str], bool], unknown: dict[str, str]
    ) -> Sequence[HostDevice]:
        its = self._sysfs.devices(subsystem, wanted=wanted)
        if its.unreadable:
            unknown[subsystem] = its.unreadable
        return its.devices

    def _used(self) -> Mapping[str, str]:
        config = self._config
        return read_usage(
            self._sysfs, dev_root=config.dev_root, mountinfo=config.mountinfo, swaps=config.swaps
        )

    def _forbidden(self, policies: Sequence[HostPolicy]) -> Mapping[str, str]:
        """Return the policies that need ``allow.dangerous`` although the configuration does not
        allow it, with the reasons."""
        if self._config.allow_dangerous:
            return {}
        return {
            policy.name: "; ".join(
                filter(None, (first[0], first[1], f"to publish its devices, set {_IN_CHART}"))
            )
            for policy in policies
            if (first := next(policy.spec.dangers(), None))
        }

    def _problems(self, policy: HostPolicy, forbidden: Mapping[str, str]) -> Iterator[str]:
        """Yield the problems that prevent a policy from publishing devices on this host. Missing
        paths are allowed."""
        if policy.name in forbidden:
            yield forbidden[policy.name]
        for place, _, path in _exact_paths(policy):
            # Check without opening the device, because opening some devices has side effects.
            try:
                mode = _node(self._config, path).stat().st_mode
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                yield f"{place}: {path} cannot be read: {error.strerror}"
                continue
            if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
                kind = "directory" if stat.S_ISDIR(mode) else "file"
                yield f"{place}: {path} is not a device node, but a {kind}"

    def _misplaced(
        self, policies: Sequence[HostPolicy], found: Collection[HostDevice]
    ) -> Iterator[Misplaced]:
        known = {(host.subsystem, path) for host in found for path in host.paths}
        for policy in policies:
            for _, wanted, path in _exact_paths(policy):
                subsystem = None if (wanted, path) in known else self._subsystem_of_node(path)
                if subsystem and subsystem != wanted:
                    yield Misplaced(policy.name, path, subsystem)

    def _subsystem_of_node(self, path: str) -> str | None:
        try:
            node = _node(self._config, path).stat()
            kind: Literal["block", "char"] = "block" if stat.S_ISBLK(node.st_mode) else "char"
            number = f"{os.major(node.st_rdev)}:{os.minor(node.st_rdev)}"
            return self._sysfs.subsystem_of(kind, number)
        except (OSError, UnreadableError):
            return None


# ------------------------------------------------------------ rules for one device


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rules:
    """The rules for a single device, based on the results of one scan."""

    config: HostDevicesConfig
    sysfs: Sysfs
    forbidden: Mapping[str, str]
    """The reasons why policies are not allowed, keyed by policy name."""

    stale: Mapping[str, str]
    """For each device that only the last scan found, keyed by path, the reason why it is unknown
    whether it still exists."""

    used: Mapping[str, str] | UnreadableError
    consoles: Collection[str] | UnreadableError

    def doubts(self) -> dict[str, str]:
        """Return the reasons why rules cannot be checked, keyed by subsystem."""
        facts = {"block": self.used, "tty": self.consoles}
        return {key: str(its) for key, its in facts.items() if isinstance(its, UnreadableError)}

    def refusal(self, policy: HostPolicy, host: HostDevice) -> Refusal | None:
        """Return the reason why a policy cannot publish a device, or None."""
        if policy.name in self.forbidden:
            return Refusal("Dangerous", f"its policy is refused: {self.forbidden[policy.name]}")
        refusal = self._refusal_of_danger(policy, host)
        if refusal:
            return refusal
        if host.path in self.stale:
            return _unknown(f"the driver cannot determine if it is there: {self.stale[host.path]}")
        refusal = self._refusal_by_node(host)
        if refusal or not host.block:
            return refusal
        if isinstance(self.used, UnreadableError):
            return _unknown(
                f"the driver cannot determine which block devices are in use: {self.used}"
            )
        try:
            return reason_against_block_device(host, self.used)
        except UnreadableError as error:
            return _unknown(f"the driver cannot determine whether it is in use: {error}")

    def _refusal_of_danger(self, policy: HostPolicy, host: HostDevice) -> Refusal | None:
        in_policy = policy.spec.allow.dangerous == "Always"
        settings = {_IN_POLICY: in_policy, _IN_CHART: self.config.allow_dangerous}
        missing = [setting for setting, is_set in settings.items() if not is_set]
        if not missing:
            return None
        consoles = self.consoles
        known = () if isinstance(consoles, UnreadableError) else consoles
        try:
            # The files of a device that only the last scan found may be missing.
            is_stale = host.path in self.stale
            danger = danger_of_path(host.path) if is_stale else danger_of(host, known)
        except OSError as error:
            reason = f"the driver cannot determine whether it is dangerous: {error.strerror}"
            return _unknown(reason)
        if danger:
            if "hub" in danger:
                way = "match the devices at its ports"
            else:
                way = None if is_stale else self._harmless_way(host, known)
            remedy = f"{way}; to publish it in spite of this" if way else "to publish it"
            remedy += f", set {' and '.join(missing)}"
            return Refusal("Dangerous", f"it is dangerous: it {danger}; {remedy}")
        if isinstance(consoles, UnreadableError) and host.subsystem == "tty":
            return _unknown(f"the driver cannot determine the consoles: {consoles}")
        return None

    def _harmless_way(self, host: HostDevice, consoles: Collection[str]) -> str | None:
        """Return how pods can use a dangerous device without this device node, or None if no such
        way is known."""
        if host.unit is None:
            return None
        try:
            directories = [each for each in directories_below(host.unit) if (each / "dev").exists()]
            nodes = [self.sysfs.device(each) for each in sorted(directories)]
            for node in nodes:
                # Skip nodes of the same subsystem, because they belong to other devices, such as
                # the next port of a serial card.
                others = (host.subsystem, *RAW_DISK_SUBSYSTEMS)
                if node is None or node.unit != host.unit or node.subsystem in others:
                    continue
                if node.block:
                    return _USE_CSI
                if not danger_of(node, consoles):
                    return f"use subsystem {node.subsystem}: its node is {node.path}"
        except (OSError, UnreadableError):
            return None
        return None

    def _refusal_by_node(self, host: HostDevice) -> Refusal | None:
        try:
            node = _node(self.config, host.path).stat()
        except OSError as error:
            # When a device vanishes or appears, sysfs can list it while its node does not exist.
            return _unknown(f"its device node cannot be read: {error.strerror}")
        is_type = stat.S_ISBLK if host.type == "b" else stat.S_ISCHR
        if is_type(node.st_mode) and node.st_rdev == os.makedev(host.major, host.minor):
            return None
        return Refusal(
            "Unreadable",
            f"its device node does not have the number {host.number} that sysfs reports",
        )


def reason_against_block_device(device: HostDevice, used: Mapping[str, str]) -> Refusal | None:
    """
    Return the reason why a block device must not be published, or None.

    :param used: the result of :func:`.block_usage.read_usage`.
    """
    block = device.block
    if block is None:
        return None
    is_zram = re.fullmatch(r"zram\d+", device.kernel_name)
    if not (is_zram or re.fullmatch(r"loop\d+", device.kernel_name)):
        return Refusal("NotSupported", f"it is a disk, and hostdev publishes no disk; {_USE_CSI}")
    if block.has_backing_file:
        return Refusal("NotSupported", f"it is a loop device with a backing file; {_USE_CSI}")
    if block.backing_device:
        return Refusal(
            "NotSupported", f"it is a zram device that writes to {block.backing_device}; {_USE_CSI}"
        )
    if is_zram and block.size_bytes == 0:
        return Refusal("Other", "it has no size: its disksize is not set")
    use = used.get(device.number)
    if use:
        return Refusal("InUse", f"it is {use}")
    # A holder keeps the device open even if it is not mounted.
    holder = next(iter(entries(device.directory / "holders")), None)
    return Refusal("InUse", f"{holder.name} is built on it") if holder else None


def _unknown(reason: str) -> Refusal:
    return Refusal("Unreadable", reason, is_unknown=True)


def _node(config: HostDevicesConfig, path: str) -> Path:
    return config.dev_root / path.removeprefix("/dev/")


def _result(read: Callable[[], T]) -> T | UnreadableError:
    try:
        return read()
    except UnreadableError as error:
        return error


# ------------------------------------------------------------ policies and devices in a scan


def _deciding_policies(
    policies: Sequence[HostPolicy], names: Collection[str], before: Selection | None, holds: Holds
) -> Sequence[HostPolicy]:
    """Return the policies that decide about these devices: those that published the devices or held
    nodes of the same functions, and those that can match the same devices. If a device is unknown,
    return all policies."""
    if before is None:
        return policies
    hardware = {text for name in names for text in before.hardware.get(name, ())}
    owners = {before.policy_of(name) for name in (*names, *holds.overlapping(hardware))}
    deciding = [policy for policy in policies if policy.name in owners]
    if len(deciding) < len(owners):
        return policies
    while True:
        # A device has only one subsystem, so policies of other subsystems cannot match it.
        reached = {subsystem for policy in deciding for subsystem in policy.spec.subsystems}
        chosen = [each for each in policies if not reached.isdisjoint(each.spec.subsystems)]
        if len(chosen) == len(deciding):
            return chosen
        deciding = chosen


def _twins(policies: Sequence[HostPolicy], found: Collection[HostDevice]) -> Iterator[Twin]:
    for host in (host for host in found if host.links_of_others):
        for policy in policies:
            match = policy.spec.match
            if is_matched(match, host):
                continue
            for link in host.links_of_others:
                if is_matched(match, replace(host, links=(link,))):
                    yield Twin(policy.name, host.path, link)
                    break


def _exact_paths(policy: HostPolicy) -> Iterator[tuple[str, str, str]]:
    """Yield each path without a wildcard, as a tuple of field, subsystem and path."""
    for index, matcher in enumerate(policy.spec.match):
        for number, path in enumerate(matcher.paths):
            if not has_wildcard(path):
                yield f"match[{index}].paths[{number}]", matcher.subsystem, path


def _stale(
    before: Collection[HostDevice], found: Collection[HostDevice], unknown: Mapping[str, str]
) -> list[HostDevice]:
    """Return the devices from the last scan that may still be present although this scan did not
    find them."""
    known = {(hardware_identity(host), host.path) for host in before}
    # Two nodes can have the same identity. A previous node has moved only if the node is now at a
    # new path.
    moved = {key[0] for host in found if (key := (hardware_identity(host), host.path)) not in known}
    replaced = {each for host in found for each in (host.path, (host.type, host.number))}
    return [
        host
        for host in before
        if host.subsystem in unknown
        and hardware_identity(host) not in moved
        and replaced.isdisjoint((host.path, (host.type, host.number)))
    ]


def _withdrawn(
    selection: Selection, holds: Holds, found: Collection[HostDevice], unknown: Collection[str]
) -> Iterator[str]:
    present = {hardware_identity(host) for host in found}
    for name in holds:
        if selection.find(name):
            continue
        hardware, refused = selection.hardware[name], selection.refused.get(name)
        is_gone = present.isdisjoint(hardware) or (refused and refused.refusal.is_gone)
        # Evict pods only if the hardware is known, and is known to be missing.
        if not (hardware and is_gone) or any(
            subsystem_of(identity) in unknown for identity in hardware
        ):
            yield name


def _doubts(policy: HostPolicy, unknown: Mapping[str, str]) -> Iterator[str]:
    for subsystem in policy.spec.subsystems:
        if subsystem in unknown:
            yield (
                f"devices of {subsystem} cannot be checked, so no new ones are published, and "
                f"those that were published before stay with a taint: {unknown[subsystem]}"
            )
