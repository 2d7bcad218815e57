"""
hostdev: devices of the host, declared in policies and found in sysfs, for pods without privileges.

:mod:`.policy` is what an admin declares, with :mod:`.matchers`; :mod:`.config` configures the
driver. :mod:`.sysfs`, :mod:`.families` and :mod:`.udev` read the host, :mod:`.disks` determines
which block devices are in use, and :mod:`.host` combines them to a scan. :mod:`.matching` compares
devices with policies, :mod:`.naming` gives them names that stay, and :mod:`.selection` decides
which are published. :mod:`.attributes` and :mod:`.container` are what selectors and containers see.
:mod:`.events` notices changes. :mod:`.driver` publishes the devices and prepares them;
:mod:`.reports` is what it reports besides. :mod:`.disk_driver` is the driver with the disk helper:
:mod:`.disk_helper` asks it, and :mod:`.disk_records` remembers the disks to wipe.

It uses only the public API, as any driver outside this repository would: it must not know the node
plugin, Kubernetes clients or gRPC.
"""

from __future__ import annotations

from drakit_drivers.hostdev.config import HostDevicesConfig
from drakit_drivers.hostdev.driver import HostDevices
from drakit_drivers.hostdev.policy import HostDevicePolicySpec

__all__ = ("HostDevicePolicySpec", "HostDevices", "HostDevicesConfig")
