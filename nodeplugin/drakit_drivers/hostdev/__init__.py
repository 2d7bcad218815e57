"""
hostdev: devices of the host, declared in a config and found in sysfs, for pods without privileges.

:mod:`.config` is the admin's configuration. :mod:`.sysfs` and :mod:`.udev` read the host,
:mod:`.disks` determines which block devices are in use, and :mod:`.host` combines them to a scan.
:mod:`.selection` decides which devices are published under which names, :mod:`.attributes` makes
their attributes. :mod:`.driver` publishes the devices and prepares them.

It uses only the public API, as any driver outside this repository would: it must not know the node
plugin, Kubernetes clients or gRPC.
"""

from __future__ import annotations

from drakit_drivers.hostdev.config import HostDevicesConfig, Policy
from drakit_drivers.hostdev.driver import HostDevices

__all__ = ("HostDevices", "HostDevicesConfig", "Policy")
