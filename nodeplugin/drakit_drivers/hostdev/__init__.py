"""
hostdev: gives unprivileged pods access to host devices, which policies declare and sysfs describes.

:mod:`.policy` defines what an administrator writes, with :mod:`.matching` (which devices match) and
:mod:`.container` (how they appear in containers). :mod:`.sysfs` reads the host devices, and
:mod:`.hardware` defines their identity. :mod:`.host` combines them into a scan, applying the rules
in :mod:`.dangerous` and :mod:`.block_usage`. :mod:`.policy_devices` decides which devices to
publish, under the names from :mod:`.naming`, and with which attributes for selectors.
:mod:`.events` detects changes. :mod:`.driver` publishes, reports and prepares the devices.
:mod:`.candidates` lists all devices for the command line.

Uses only the public API, as a driver outside this repository would.
"""

from __future__ import annotations

from drakit_drivers.hostdev.driver import HostDevices
from drakit_drivers.hostdev.policy import HostDevicePolicySpec, HostDevicesConfig

__all__ = ("HostDevicePolicySpec", "HostDevices", "HostDevicesConfig")
