"""
hostdev: devices of the host, declared in policies and found in sysfs, for pods without privileges.

:mod:`.policy` and :mod:`.matchers` define policies; :mod:`.config` configures the driver.
:mod:`.sysfs`, :mod:`.families` and :mod:`.udev` read the host, :mod:`.disks` determines which block
devices are in use, and :mod:`.host` combines them to a scan. :mod:`.matching` compares devices with
policies, :mod:`.naming` gives them stable names, and :mod:`.selection` decides which are published.
:mod:`.attributes` defines the view of selectors, and :mod:`.container` that of containers.
:mod:`.events` detects changes. :mod:`.driver` publishes the devices and prepares them;
:mod:`.reports` adds log lines and outcomes of policies. :mod:`.disk_driver` is the driver with the
disk helper: :mod:`.disk_helper` is its client, and :mod:`.disk_records` records the disks to wipe.

It uses only the public API, as any driver outside this repository would: it must not know the node
plugin, Kubernetes clients or gRPC.
"""

from __future__ import annotations

from drakit_drivers.hostdev.config import HostDevicesConfig
from drakit_drivers.hostdev.driver import HostDevices
from drakit_drivers.hostdev.policy import HostDevicePolicySpec

__all__ = ("HostDevicePolicySpec", "HostDevices", "HostDevicesConfig")
