"""
One scan of the host: sysfs, its device nodes and its disks, combined for the selection.

It must not know claims, or attributes of devices.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drakit import DriverError
from drakit_drivers.hostdev.config import HostDevicesConfig
from drakit_drivers.hostdev.dangerous import is_dangerous
from drakit_drivers.hostdev.disks import (
    DiskUsage,
    UsageUnknownError,
    read_usage,
    reason_not_to_publish,
)
from drakit_drivers.hostdev.globs import has_wildcard
from drakit_drivers.hostdev.matching import wanted_paths
from drakit_drivers.hostdev.refusal import Refusal
from drakit_drivers.hostdev.selection import HostPolicy, Selection, select
from drakit_drivers.hostdev.sysfs import HostDevice, Sysfs
from drakit_drivers.hostdev.udev import UdevDatabase

__all__ = ("Host", "Misplaced", "Scan")


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
    misplaced: tuple[Misplaced, ...]
    usage_unknown: str | None
    """The reason why no block device is published; None if they can be published."""

    problems: Mapping[str, tuple[str, ...]]
    """Problems in policies, by the policy's name."""


class Host:
    """The host, at the paths of a config. Calls read files, and block for a moment."""

    def __init__(self, config: HostDevicesConfig, *, can_wipe: bool = False) -> None:
        """`can_wipe`: the driver can wipe disks."""
        self._config = config
        self._can_wipe = can_wipe
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
        before: Mapping[str, str] | None = None,
        held: Collection[str] = (),
    ) -> Scan:
        """Find the present devices of these policies; the parameters are those of
        :func:`.selection.select`."""
        specs = [policy.spec for policy in policies]
        found = [
            host
            for subsystem in dict.fromkeys(m.subsystem for spec in specs for m in spec.match)
            for host in self._sysfs.devices(subsystem, wanted=wanted_paths(specs, subsystem))
        ]
        usage: DiskUsage | str | None = None
        if any(host.block for host in found):
            usage = self._usage()

        consoles = self._sysfs.active_consoles()

        def refuse(policy: HostPolicy, host: HostDevice) -> Refusal | None:
            allow = policy.spec.allow
            if not allow.dangerous and _is_dangerous(host, consoles):
                return Refusal(
                    "Dangerous",
                    "it gives a container control of the node, and allow.dangerous is not set",
                )
            if policy.spec.on_release == "Wipe" and not self._can_wipe:
                return Refusal(
                    "NotSupported",
                    "its policy sets onRelease: Wipe, which needs the disk helper "
                    "(hostdev.diskHelper.enabled)",
                )
            reason = self._reason_against_node(host)
            if reason:
                return Refusal("Unreadable", reason)
            if not host.block:
                return None
            if not isinstance(usage, DiskUsage):
                return Refusal(
                    "Unreadable",
                    f"the driver cannot determine which block devices are in use: {usage}",
                )
            return reason_not_to_publish(
                host,
                usage,
                allow_disks=self._config.allow_disks,
                allow_formatted=allow.formatted,
                allow_unstable_identity=allow.unstable_identity,
            )

        return Scan(
            selection=select(policies, found, refuse=refuse, before=before, held=held),
            misplaced=tuple(self._misplaced(policies, found)),
            usage_unknown=usage if isinstance(usage, str) else None,
            problems={
                policy.name: problems
                for policy in policies
                if (problems := tuple(self._path_problems(policy)))
            },
        )

    def _usage(self) -> DiskUsage | str:
        config = self._config
        try:
            return read_usage(
                self._sysfs,
                dev_root=config.dev_root,
                mountinfo=config.mountinfo,
                swaps=config.swaps,
            )
        except UsageUnknownError as error:
            return str(error)

    def _node(self, path: str) -> Path:
        return self._config.dev_root / path.removeprefix("/dev/")

    def _path_problems(self, policy: HostPolicy) -> Iterator[str]:
        """Return the paths of a policy that cannot be devices on this host. Missing paths are
        allowed."""
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

    def _reason_against_node(self, host: HostDevice) -> str | None:
        try:
            node = self._node(host.path).stat()
        except OSError as error:
            return f"its device node cannot be read: {error.strerror}"
        is_type = stat.S_ISBLK if host.type == "b" else stat.S_ISCHR
        if is_type(node.st_mode) and node.st_rdev == os.makedev(host.major, host.minor):
            return None
        return f"its device node does not have the number {host.number} that sysfs reports"

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
        return self._sysfs.subsystem_of(kind, number)


def _is_dangerous(host: HostDevice, consoles: Collection[str]) -> bool:
    # By the kernel's path: a udev link can have any name.
    return is_dangerous(host.path) or (host.subsystem == "tty" and host.kernel_name in consoles)
