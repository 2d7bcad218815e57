"""
One scan of the host: sysfs, its device nodes and its mounts, combined for the selection.

A scan distinguishes a device that is no longer there from one that is unknown, because a file
cannot be read. What the last scan found of a subsystem with an unreadable file counts as found,
with that doubt, until other hardware is found in its place.

It must not depend on claims, or on attributes of devices.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from drakit import DriverError, HeldDevice
from drakit_drivers.hostdev.block_devices import read_usage, reason_not_to_publish
from drakit_drivers.hostdev.config import HostDevicesConfig
from drakit_drivers.hostdev.dangerous import danger_of_path
from drakit_drivers.hostdev.dangerous_hardware import danger_of
from drakit_drivers.hostdev.files import UnreadableError
from drakit_drivers.hostdev.globs import has_wildcard
from drakit_drivers.hostdev.holds import Holds
from drakit_drivers.hostdev.matching import wanted_paths
from drakit_drivers.hostdev.naming import hardware_identity, subsystem_of
from drakit_drivers.hostdev.refusal import Refusal
from drakit_drivers.hostdev.selection import HostPolicy, Selection, deciding_policies, select
from drakit_drivers.hostdev.sysfs import HostDevice, Sysfs
from drakit_drivers.hostdev.udev import UdevDatabase

__all__ = ("Host", "Misplaced", "Scan")

_IN_POLICY = "allow.dangerous: true in its policy"
_IN_CHART = "hostdev.allowDangerous: true in the chart's values"


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A path in a matcher whose device is in another subsystem than the matcher's."""

    policy: str
    path: str
    subsystem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """The result of a scan."""

    selection: Selection
    found: tuple[HostDevice, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reasons why devices of a subsystem cannot be checked, by the subsystem."""

    withdrawn: tuple[str, ...] = ()
    """Held devices that are not published, although their hardware is there or unknown."""

    misplaced: tuple[Misplaced, ...] = ()
    problems: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Problems in policies, by the policy's name."""


class Host:
    """The host, at the paths of a config. Calls read files, and block for a moment."""

    def __init__(self, config: HostDevicesConfig) -> None:
        self._config = config
        self._sysfs = Sysfs(config.sys_root, UdevDatabase(config.udev_root))

    def check(self) -> None:
        """Raise for a config that is invalid on this host; missing devices are allowed."""
        config = self._config
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
        Find the present devices of these policies.

        :param policies: the policies of the node, the first in conflicts first.
        :param before: the last scan.
        :param held: the devices that claims hold.
        :param only: scan only what these devices need, by their names. The rules are the same.
        """
        last = before.selection if before else None
        holds = Holds(held, remembered=last.hardware if last else None)
        if only is not None:
            policies = deciding_policies(policies, only, before=last)
        found, unknown = self._read(policies)
        if only is None:
            self._find_held(holds, found, unknown)
        stale = _stale(before.found, found, unknown) if before else []
        found += stale
        used, consoles = self._used(found), self._consoles(found)
        forbidden = self._forbidden(policies)
        selection = select(
            policies,
            found,
            refuse=self._rules(
                used,
                consoles,
                forbidden=forbidden,
                stale={host.path: unknown[host.subsystem] for host in stale},
            ),
            before=last,
            holds=holds,
        )
        doubts = {
            subsystem: str(facts)
            for subsystem, facts in (("block", used), ("tty", consoles))
            if isinstance(facts, UnreadableError)
        }
        if only is not None:
            return Scan(selection=selection, unknown=doubts | unknown)
        return Scan(
            selection=selection,
            found=tuple(found),
            unknown=doubts | unknown,
            withdrawn=tuple(sorted(_withdrawn(selection, holds, found, unknown))),
            misplaced=tuple(self._misplaced(policies, found)),
            problems={
                policy.name: problems
                for policy in policies
                if (
                    problems := (
                        *self._problems(policy, forbidden),
                        *_doubts(policy, doubts | unknown),
                    )
                )
            },
        )

    def _read(self, policies: Sequence[HostPolicy]) -> tuple[list[HostDevice], dict[str, str]]:
        """Read the devices that policies can match, and the reasons why others are unknown."""
        specs = [policy.spec for policy in policies]
        found: list[HostDevice] = []
        unknown: dict[str, str] = {}
        for subsystem in dict.fromkeys(each for spec in specs for each in spec.subsystems):
            self._add(subsystem, wanted_paths(specs, subsystem), found, unknown)
        return found, unknown

    def _find_held(self, holds: Holds, found: list[HostDevice], unknown: dict[str, str]) -> None:
        """Add the held devices that no policy reaches: they may only have lost their policy."""
        present = {hardware_identity(host) for host in found}
        missing = {each for name in holds for each in holds.hardware(name)} - present
        for subsystem in sorted({subsystem_of(identity) for identity in missing}):
            others: list[HostDevice] = []
            self._add(subsystem, lambda path: True, others, unknown)
            found += [host for host in others if hardware_identity(host) in missing]

    def _add(
        self,
        subsystem: str,
        wanted: Callable[[str], bool],
        found: list[HostDevice],
        unknown: dict[str, str],
    ) -> None:
        its = self._sysfs.devices(subsystem, wanted=wanted)
        found += its.devices
        if its.unreadable:
            unknown[subsystem] = its.unreadable

    def _rules(
        self,
        used: Mapping[str, str] | UnreadableError,
        consoles: Collection[str] | UnreadableError,
        *,
        forbidden: Mapping[str, str],
        stale: Mapping[str, str],
    ) -> Callable[[HostPolicy, HostDevice], Refusal | None]:
        """Return the rules for single devices. `stale`: reasons by the path of devices that only
        the last scan found."""

        def refuse(policy: HostPolicy, host: HostDevice) -> Refusal | None:
            if policy.name in forbidden:
                return Refusal("Dangerous", f"its policy is refused: {forbidden[policy.name]}")
            refusal = self._refusal_of_danger(policy, host, consoles, is_stale=host.path in stale)
            if refusal:
                return refusal
            if host.path in stale:
                return _unknown(f"the driver cannot determine if it is there: {stale[host.path]}")
            refusal = self._refusal_by_node(host)
            if refusal or not host.block:
                return refusal
            if isinstance(used, UnreadableError):
                return _unknown(
                    f"the driver cannot determine which block devices are in use: {used}"
                )
            try:
                return reason_not_to_publish(host, used)
            except UnreadableError as error:
                return _unknown(f"the driver cannot determine whether it is in use: {error}")

        return refuse

    def _used(self, found: Collection[HostDevice]) -> Mapping[str, str] | UnreadableError:
        """Return the uses of block devices, if a rule needs them."""
        config = self._config
        if not any(host.block for host in found):
            return {}
        try:
            return read_usage(
                self._sysfs,
                dev_root=config.dev_root,
                mountinfo=config.mountinfo,
                swaps=config.swaps,
            )
        except UnreadableError as error:
            return error

    def _consoles(self, found: Collection[HostDevice]) -> Collection[str] | UnreadableError:
        """Return the kernel's consoles, if a rule needs them."""
        if not any(host.subsystem == "tty" for host in found):
            return ()
        try:
            return self._sysfs.active_consoles()
        except UnreadableError as error:
            return error

    def _node(self, path: str) -> Path:
        return self._config.dev_root / path.removeprefix("/dev/")

    def _forbidden(self, policies: Sequence[HostPolicy]) -> Mapping[str, str]:
        """Return the policies that need ``allow.dangerous`` although the config does not allow it,
        with the reason."""
        if self._config.allow_dangerous:
            return {}
        return {
            policy.name: f"{first[0]}; to publish its devices, set {_IN_CHART}"
            for policy in policies
            if (first := next(policy.spec.dangers(), None))
        }

    def _refusal_of_danger(
        self,
        policy: HostPolicy,
        host: HostDevice,
        consoles: Collection[str] | UnreadableError,
        *,
        is_stale: bool,
    ) -> Refusal | None:
        settings = {
            _IN_POLICY: policy.spec.allow.dangerous,
            _IN_CHART: self._config.allow_dangerous,
        }
        missing = [setting for setting, is_set in settings.items() if not is_set]
        if not missing:
            return None
        known = () if isinstance(consoles, UnreadableError) else consoles
        try:
            # The files of a device that only the last scan found may be missing.
            danger = danger_of_path(host.path) if is_stale else danger_of(host, known)
        except OSError as error:
            reason = f"the driver cannot determine whether it is dangerous: {error.strerror}"
            return _unknown(reason)
        if danger:
            remedy = " and ".join(missing)
            return Refusal(
                "Dangerous", f"it is dangerous: it {danger}; to publish it, set {remedy}"
            )
        if isinstance(consoles, UnreadableError) and host.subsystem == "tty":
            return _unknown(f"the driver cannot determine the consoles: {consoles}")
        return None

    def _problems(self, policy: HostPolicy, forbidden: Mapping[str, str]) -> Iterator[str]:
        """Return what prevents a policy from publishing devices on this host. Missing paths are
        allowed."""
        if policy.name in forbidden:
            yield forbidden[policy.name]
        for index, matcher in enumerate(policy.spec.match):
            for number, path in enumerate(matcher.paths):
                reason = None if has_wildcard(path) else self._reason_against_path(path)
                if reason:
                    yield f"match[{index}].paths[{number}]: {path} {reason}"

    def _reason_against_path(self, path: str) -> str | None:
        # The device is not opened for the check, because opening some devices has side effects.
        try:
            mode = self._node(path).stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            return None
        return f"is not a device node, but a {'directory' if stat.S_ISDIR(mode) else 'file'}"

    def _refusal_by_node(self, host: HostDevice) -> Refusal | None:
        try:
            node = self._node(host.path).stat()
        except OSError as error:
            # The kernel removes the node before the device in sysfs, and creates it afterwards.
            return _unknown(f"its device node cannot be read: {error.strerror}")
        is_type = stat.S_ISBLK if host.type == "b" else stat.S_ISCHR
        if is_type(node.st_mode) and node.st_rdev == os.makedev(host.major, host.minor):
            return None
        return Refusal(
            "Unreadable",
            f"its device node does not have the number {host.number} that sysfs reports",
        )

    def _misplaced(
        self, policies: Sequence[HostPolicy], found: Collection[HostDevice]
    ) -> Iterator[Misplaced]:
        known = {(host.subsystem, path) for host in found for path in host.paths}
        for policy in policies:
            for matcher in policy.spec.match:
                for path in matcher.paths:
                    if has_wildcard(path) or (matcher.subsystem, path) in known:
                        continue
                    subsystem = self._subsystem_of_node(path)
                    if subsystem and subsystem != matcher.subsystem:
                        yield Misplaced(policy.name, path, subsystem)

    def _subsystem_of_node(self, path: str) -> str | None:
        try:
            node = self._node(path).stat()
        except OSError:
            return None
        kind: Literal["block", "char"] = "block" if stat.S_ISBLK(node.st_mode) else "char"
        number = f"{os.major(node.st_rdev)}:{os.minor(node.st_rdev)}"
        try:
            return self._sysfs.subsystem_of(kind, number)
        except UnreadableError:
            return None


def _unknown(reason: str) -> Refusal:
    return Refusal("Unreadable", reason, is_unknown=True)


def _stale(
    before: Collection[HostDevice], found: Collection[HostDevice], unknown: Mapping[str, str]
) -> list[HostDevice]:
    """Return the devices of the last scan that may still be there."""
    known = {(hardware_identity(host), host.path) for host in before}
    # Two nodes can have one identity: only one at a new path can be the former one.
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
    selection: Selection,
    holds: Holds,
    found: Collection[HostDevice],
    unknown: Collection[str],
) -> Iterator[str]:
    present = {hardware_identity(host) for host in found}
    for name in holds:
        if selection.find(name):
            continue
        hardware = holds.hardware(name)
        # Only hardware that is known, and known to be missing, may have its pods evicted.
        if not (hardware and present.isdisjoint(hardware)) or any(
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
