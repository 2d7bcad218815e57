"""
hostdev: devices of the host, declared in policies and found in sysfs, for pods without privileges.

:mod:`.policy` and :mod:`.matchers` define policies; :mod:`.config` configures the driver.
:mod:`.sysfs`, :mod:`.families` and :mod:`.udev` read the host, :mod:`.block_devices` decides which
block devices may be published, and :mod:`.host` combines them to a scan. :mod:`.dangerous`,
:mod:`.dangerous_hardware` and :mod:`.usb_descriptors` decide which devices control the node.
:mod:`.matching` compares devices with policies, :mod:`.naming` gives them stable names,
:mod:`.holds` compares them with the devices that claims hold, and :mod:`.selection` decides which
are published. :mod:`.attributes` defines the view of selectors, and :mod:`.container` that of
containers. :mod:`.events` detects changes. :mod:`.driver` publishes the devices and prepares them;
:mod:`.reports` adds log lines and outcomes of policies.

A file that is missing is a fact, and one that cannot be read is not (:mod:`.files`): only a device
that is known to be missing is removed.

It uses only the public API, as any driver outside this repository would: it must not know the node
plugin, Kubernetes clients or gRPC.
"""

from __future__ import annotations

from drakit_drivers.hostdev.config import HostDevicesConfig
from drakit_drivers.hostdev.driver import HostDevices
from drakit_drivers.hostdev.policy import HostDevicePolicySpec

__all__ = ("HostDevicePolicySpec", "HostDevices", "HostDevicesConfig")
