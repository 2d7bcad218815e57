"""
The admin's configuration: which devices of the host are published, and where the host is mounted.

Every error names the key and the remedy. Whether a path exists is checked at start (:mod:`.host`).

It must not know the host: a config is checked without one.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from drakit import DriverConfig, Duration
from drakit_drivers.hostdev.dangerous import is_dangerous, matches_everything
from drakit_drivers.hostdev.globs import check_glob, has_wildcard

__all__ = ("HostDevicesConfig", "Policy")

_PAST_THE_DISK_RULES = ("bsg", "nvme", "nvme-generic", "scsi_generic")
"""Character devices that reach the blocks of a disk, mounted or not."""


def _parse_mode(value: Any) -> int:
    # A number is refused: YAML reads 0660 as 432, and 660 as an unintended mode.
    if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
        raise ValueError('must be octal digits in quotes, like "0660"')
    return int(value, 8)


def _mode_text(mode: int) -> str:
    return f"{mode:04o}"


def _check_absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} must be an absolute path")
    return path


Mode = Annotated[
    int,
    BeforeValidator(_parse_mode),
    PlainSerializer(_mode_text, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": "^0?[0-7]{3}$"}),
]
Glob = Annotated[str, AfterValidator(check_glob)]
AbsolutePath = Annotated[Path, AfterValidator(_check_absolute)]
Id = Annotated[int, Field(ge=0, lt=2**32 - 1)]


PolicyName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=40)]
"""The value of the device attribute ``policy``, and the prefix of device names. The limit
of 40 characters leaves room for the device."""


class Policy(DriverConfig):
    """The devices that a policy publishes, and how containers get them."""

    enabled: bool = True
    """Whether the policy publishes devices. The policies that the chart predefines are disabled."""

    subsystem: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    """The subsystem of the kernel, such as ``misc``, ``tty``, ``video4linux`` or ``block``: a
    directory of ``/sys/class`` or ``/sys/bus``."""

    paths: tuple[Glob, ...] = Field(min_length=1, max_length=64)
    """Paths below ``/dev`` of devices, or of links that udev created for them. The wildcards ``*``,
    ``?``, ``[ab]`` and ``[!ab]`` match within one path component."""

    count: int | None = Field(default=None, ge=1, le=1024)
    """How many times to publish the one device. For device nodes that the kernel shares, such as
    ``/dev/kvm``."""

    permissions: str = Field(default="rw", pattern=r"^[rwm]{1,3}$")
    """The access of the container: letters of ``rwm`` (read, write, mknod)."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes on which the policy applies. If empty, all nodes."""

    uid: Id | None = None
    """The owner of the device node in the container. If null, the runtime decides."""

    gid: Id | None = None
    """The group of the device node in the container. If null, the runtime decides."""

    mode: Mode | None = None
    """The mode of the device node in the container, such as ``"0660"``. If null, the runtime
    decides."""

    allow_formatted: bool = False
    """Whether to publish disks with a file system, another signature or a partition table, disks
    that udev's database does not know, and partitions. The driver still refuses disks in use."""

    allow_unstable_names: bool = False
    """Whether to publish disks without WWN, EUI and serial number, under the kernel's name. After a
    reboot, a claim may get another disk."""

    allow_dangerous: bool = False
    """Whether to publish devices that give a container control of the node (``/dev/mem``, consoles,
    watchdogs), and to accept paths that match everything, such as ``/dev/*``."""

    @field_validator("subsystem")
    @classmethod
    def _not_past_the_disk_rules(cls, subsystem: str) -> str:
        if subsystem in _PAST_THE_DISK_RULES:
            raise ValueError(
                f"devices of {subsystem} can write to mounted disks; publish the block device "
                "instead"
            )
        return subsystem

    @field_validator("permissions")
    @classmethod
    def _each_letter_once(cls, permissions: str) -> str:
        if len(set(permissions)) != len(permissions):
            raise ValueError(f"{permissions!r} has a letter twice")
        return permissions

    @model_validator(mode="after")
    def _dangerous_paths_are_allowed(self) -> Self:
        if self.allow_dangerous:
            return self
        for path in self.paths:
            if is_dangerous(path):
                raise ValueError(
                    f"{path} gives a container control of the node; set allowDangerous: true only "
                    "if you trust every pod that may claim it with the node"
                )
            if matches_everything(path):
                raise ValueError(
                    f"{path} matches every device; name the devices that pods may claim, or set "
                    "allowDangerous: true"
                )
        return self

    @model_validator(mode="after")
    def _count_is_for_one_shared_node(self) -> Self:
        if self.count is None:
            return self
        if len(self.paths) != 1 or has_wildcard(self.paths[0]):
            raise ValueError("with count, paths must be exactly one path without wildcards")
        if self.subsystem == "block":
            raise ValueError(
                "count is not supported for block devices: two pods could write to one disk"
            )
        return self


class HostDevicesConfig(DriverConfig):
    """The configuration of the driver ``hostdev``."""

    policies: dict[PolicyName, Policy] = Field(default_factory=dict, max_length=256)
    """The policies by name. If two policies match a device, the policy whose name sorts first
    publishes it."""

    allow_disks: bool = False
    """Whether to publish disks, volumes and loop devices with a backing file, if they are blank and
    not in use. If false, the driver publishes only zram and free loop devices of the subsystem
    ``block``."""

    rescan_interval: Duration = Field(
        default=timedelta(seconds=10), ge=timedelta(seconds=1), le=timedelta(hours=1)
    )
    """The longest time until the driver notices a device that was plugged in or out."""

    sys_root: AbsolutePath = Path("/sys")
    """The mount point of sysfs."""

    udev_root: AbsolutePath = Path("/run/udev")
    """The mount point of the host's udev database. It may be missing."""

    dev_root: AbsolutePath = Path("/dev")
    """The mount point of the host's ``/dev``. Containers always get ``/dev`` paths."""

    mountinfo: AbsolutePath = Path("/proc/1/mountinfo")
    """The mounts of the host. If the file cannot be read, the driver publishes no block device."""

    swaps: AbsolutePath = Path("/proc/swaps")
    """The swap areas of the host. If the file cannot be read, the driver publishes no block
    device."""

    @property
    def enabled_policies(self) -> dict[str, Policy]:
        """The enabled policies, sorted by name, as Helm sorts the keys of a map."""
        return {name: policy for name, policy in sorted(self.policies.items()) if policy.enabled}
