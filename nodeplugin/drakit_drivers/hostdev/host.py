"""
One scan of the host: sysfs, its device nodes and its disks, combined for the selection.

It must not know claims, or attributes of devices.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drakit import DriverError
from drakit_drivers.hostdev.config import HostDevicesConfig, Policy
from drakit_drivers.hostdev.dangerous import is_dangerous
from drakit_drivers.hostdev.disks import (
    DiskUsage,
    UsageUnknownError,
    read_usage,
    reason_not_to_publish,
)
from drakit_drivers.hostdev.globs import has_wildcard, matches
from drakit_drivers.hostdev.selection import Published, Selection, select
from drakit_drivers.hostdev.sysfs import HostDevice, Sysfs
from drakit_drivers.hostdev.udev import UdevDatabase

__all__ = ("Host", "Misplaced", "Scan")


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A path in a policy whose device is in another subsystem than the policy's."""

    policy: str
    path: str
    subsystem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """The result of a scan."""

    selection: Selection
    misplaced: tuple[Misplaced, ...]
    usage_unknown: str | None
    """Why no block device is published; None if that is possible."""


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
        for name, policy in config.enabled_policies.items():
            for number, path in enumerate(policy.paths):
                if has_wildcard(path):
                    continue
                reason = self._reason_against_path(path)
                if reason:
                    raise DriverError(f"policies.{name}.paths[{number}]: {path} {reason}")

    def scan(self, policies: Mapping[str, Policy]) -> Scan:
        """Find the present devices of these policies."""
        found = [
            host
            for subsystem in dict.fromkeys(policy.subsystem for policy in policies.values())
            for host in self._sysfs.devices(subsystem, wanted=_wanted(policies, subsystem))
        ]
        usage: DiskUsage | str | None = None
        if any(host.block for host in found):
            usage = self._usage()

        consoles = self._sysfs.active_consoles()

        def refuse(published: Published) -> str | None:
            host = published.host
            if not published.policy.allow_dangerous and _is_dangerous(host, consoles):
                return "it gives a container control of the node, and allowDangerous is not set"
            reason = self._reason_against_node(host)
            if reason or not host.block:
                return reason
            if not isinstance(usage, DiskUsage):
                return f"the driver cannot determine which block devices are in use: {usage}"
            return reason_not_to_publish(
                host,
                usage,
                allow_disks=self._config.allow_disks,
                allow_formatted=published.policy.allow_formatted,
                allow_unstable_names=published.policy.allow_unstable_names,
            )

        return Scan(
            selection=select(policies, found, refuse=refuse),
            misplaced=tuple(self._misplaced(policies, found)),
            usage_unknown=usage if isinstance(usage, str) else None,
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

    def _reason_against_path(self, path: str) -> str | None:
        # A device is not opened to see whether it can be: for some, opening does something.
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
        self, policies: Mapping[str, Policy], found: Collection[HostDevice]
    ) -> Iterator[Misplaced]:
        known = {(host.subsystem, path) for host in found for path in host.paths}
        for name, policy in policies.items():
            for path in policy.paths:
                if has_wildcard(path) or (policy.subsystem, path) in known:
                    continue
                subsystem = self._subsystem_of_node(path)
                if subsystem and subsystem != policy.subsystem:
                    yield Misplaced(name, path, subsystem)

    def _subsystem_of_node(self, path: str) -> str | None:
        try:
            node = self._node(path).stat()
        except OSError:
            return None
        kind: Literal["block", "char"] = "block" if stat.S_ISBLK(node.st_mode) else "char"
        number = f"{os.major(node.st_rdev)}:{os.minor(node.st_rdev)}"
        return self._sysfs.subsystem_of(kind, number)


def _wanted(policies: Mapping[str, Policy], subsystem: str) -> Callable[[str], bool]:
    globs = [glob for p in policies.values() if p.subsystem == subsystem for glob in p.paths]
    return lambda path: any(matches(glob, path) for glob in globs)


def _is_dangerous(host: HostDevice, consoles: Collection[str]) -> bool:
    # By the kernel's path: a udev link can have any name.
    return is_dangerous(host.path) or (host.subsystem == "tty" and host.kernel_name in consoles)
