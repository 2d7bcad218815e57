"""
hostdev: devices of the host, declared in a config and found in sysfs, for pods without privileges.

:mod:`.config` is what an admin writes; :mod:`.sysfs` and :mod:`.udev` read the host, :mod:`.disks`
says which block devices are in use; :mod:`.selection` decides what is published under which name,
:mod:`.attributes` what is said of it; :mod:`.driver` puts them together.

It uses the vendor's vocabulary alone, as any driver outside this repository would: it must not
know the node plugin, Kubernetes clients or gRPC.
"""

from __future__ import annotations

from drakit_drivers.hostdev.config import HostDevicesConfig, Policy
from drakit_drivers.hostdev.driver import HostDevices

__all__ = ("HostDevices", "HostDevicesConfig", "Policy")
