"""
The admin's configuration of the driver: the mount points of the host, and settings that no policy
can override.

The policies themselves are in :mod:`.policy`. Every error names the key and the remedy. Whether a
path exists is checked at start (:mod:`.host`).

It must not know the host: a config is checked without one.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from drakit import DriverConfig, Duration
from drakit_drivers.hostdev.policy import HostDevicePolicySpec, PolicyName

__all__ = ("HostDevicesConfig",)


def _check_absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f"{path} must be an absolute path")
    return path


AbsolutePath = Annotated[Path, AfterValidator(_check_absolute)]


class HostDevicesConfig(DriverConfig):
    """The configuration of the driver ``hostdev``."""

    policies: dict[PolicyName, HostDevicePolicySpec] = Field(default_factory=dict, max_length=256)
    """The policies by name. If two policies match a device, the policy whose name sorts first
    publishes it. A policy in this file takes precedence over a policy in the cluster that matches
    the same device."""

    allow_dangerous: bool = False
    """Whether policies can set ``allow.dangerous``. If false, the driver refuses everything that
    needs it: devices that give a container control of the node or its data, matchers that match all
    devices, and mounts of any host path."""

    rescan_interval: Duration = Field(
        default=timedelta(seconds=10), ge=timedelta(seconds=1), le=timedelta(hours=1)
    )
    """The interval between full scans. The kernel reports immediately when a device is plugged in
    or unplugged. The scan detects other changes, such as a mount."""

    sys_root: AbsolutePath = Path("/sys")
    """The mount point of sysfs."""

    udev_root: AbsolutePath = Path("/run/udev")
    """The mount point of the host's udev database. Optional."""

    dev_root: AbsolutePath = Path("/dev")
    """The mount point of the host's ``/dev``. Containers always get ``/dev`` paths."""

    mountinfo: AbsolutePath = Path("/proc/1/mountinfo")
    """The host's mounts. If the file cannot be read, the driver publishes no new block device."""

    swaps: AbsolutePath = Path("/proc/swaps")
    """The host's swap areas. If the file cannot be read, the driver publishes no new block
    device."""
