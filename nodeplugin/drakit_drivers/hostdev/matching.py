"""
Matches devices of the host with policies.

Pure: it must not know files, names of published devices, or other fields of a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from drakit_drivers.hostdev.globs import matches
from drakit_drivers.hostdev.matchers import Matcher, ParentMatcher, PciMatcher, UsbMatcher
from drakit_drivers.hostdev.policy import HostDevicePolicySpec
from drakit_drivers.hostdev.sysfs import HostDevice, PciParent, UsbParent
from drakit_drivers.hostdev.topology import Ancestor

__all__ = ("is_matched", "wanted_paths")


def is_matched(spec: HostDevicePolicySpec, host: HostDevice) -> bool:
    """Return whether one of a policy's matchers matches completely."""
    return any(_matches(matcher, host) for matcher in spec.match)


def wanted_paths(specs: Iterable[HostDevicePolicySpec], subsystem: str) -> Callable[[str], bool]:
    """Return a filter of paths for a subsystem's devices: the rest of a device is read only if one
    of its paths passes."""
    matchers = [m for spec in specs for m in spec.match if m.subsystem == subsystem]
    if not all(matcher.paths for matcher in matchers):
        return lambda path: True
    globs = [glob for matcher in matchers for glob in matcher.paths]
    return lambda path: any(matches(glob, path) for glob in globs)


def _matches(matcher: Matcher, host: HostDevice) -> bool:
    return (
        matcher.subsystem == host.subsystem
        and (not matcher.paths or _has_path(matcher.paths, host))
        and (matcher.driver is None or matcher.driver == host.driver)
        and (matcher.usb is None or _is_usb(matcher.usb, host.usb))
        and (matcher.pci is None or _is_pci(matcher.pci, host.pci))
        and all(
            key in host.properties and fnmatchcase(host.properties[key], glob)
            for key, glob in matcher.udev_properties.items()
        )
        and (
            matcher.parent is None
            or any(_is_parent(matcher.parent, ancestor) for ancestor in host.ancestors)
        )
    )


def _has_path(globs: Iterable[str], host: HostDevice) -> bool:
    return any(matches(glob, path) for glob in globs for path in host.paths)


def _is_usb(matcher: UsbMatcher, usb: UsbParent | None) -> bool:
    return (
        usb is not None
        and matcher.vendor_id in (None, usb.vendor_id.lower())
        and matcher.product_id in (None, usb.product_id.lower())
        and matcher.serial in (None, usb.serial)
        and matcher.path in (None, usb.path)
        and matcher.port in (None, usb.port)
    )


def _is_pci(matcher: PciMatcher, pci: PciParent | None) -> bool:
    return (
        pci is not None
        and matcher.vendor_id in (None, pci.vendor_id)
        and matcher.device_id in (None, pci.device_id)
        and (pci.class_id or "").startswith(matcher.class_id or "")
    )


def _is_parent(matcher: ParentMatcher, ancestor: Ancestor) -> bool:
    return (
        matcher.subsystem in (None, ancestor.subsystem)
        and matcher.driver in (None, ancestor.driver)
        and (matcher.name is None or fnmatchcase(ancestor.name, matcher.name))
    )
