"""
The attributes of a device that CEL selectors can match, and its size.

A string that the API rejects (over 64 bytes) is left out: half a serial number would match
the wrong device. Names are C identifiers; the standard ones carry Kubernetes' domain, so that
claims can request devices of several drivers that are close to each other.

It must not know how facts are found, or which devices are published.
"""

from __future__ import annotations

from collections.abc import Iterator

from drakit import AttributeValue
from drakit_drivers.hostdev.sysfs import HostDevice

__all__ = ("MAX_STRING_BYTES", "attributes", "capacity", "left_out")

MAX_STRING_BYTES = 64
"""The API's limit for a string value; it counts bytes."""

_STANDARD = "resource.kubernetes.io/"


def attributes(device: HostDevice, *, policy: str) -> dict[str, AttributeValue]:
    """List the attributes of a device: at most 31 (the API allows 32 with capacity)."""
    return {
        name: value for name, value in _facts(device, policy) if value is not None and _fits(value)
    }


def left_out(device: HostDevice, *, policy: str) -> tuple[str, ...]:
    """Return the names of attributes that are too long to publish."""
    facts = _facts(device, policy)
    return tuple(name for name, value in facts if value is not None and not _fits(value))


def capacity(device: HostDevice) -> dict[str, str]:
    """Return a block device's size in bytes, as a Kubernetes quantity."""
    if device.block is None or not device.block.size_bytes:
        return {}
    return {"size": str(device.block.size_bytes)}


def _fits(value: AttributeValue) -> bool:
    return not isinstance(value, str) or len(value.encode()) <= MAX_STRING_BYTES


def _facts(device: HostDevice, policy: str) -> Iterator[tuple[str, AttributeValue | None]]:
    yield "subsystem", device.subsystem
    yield "policy", policy
    yield "path", device.path
    yield "devname", device.path.removeprefix("/dev/")
    yield "devtype", device.devtype
    yield "major", device.major
    yield "minor", device.minor
    yield "driver", device.driver
    yield "byIdLink", _link(device, "by-id")
    yield "byPathLink", _link(device, "by-path")
    yield "serial", device.usb.serial if device.usb and device.usb.serial else device.serial
    yield f"{_STANDARD}numaNode", device.numa_node
    if device.usb:
        yield "usbVendorID", device.usb.vendor_id
        yield "usbProductID", device.usb.product_id
        yield "usbManufacturer", device.usb.manufacturer
        yield "usbProduct", device.usb.product
        yield "usbInterface", device.usb.interface
        yield "usbPort", device.usb.port
    if device.pci:
        yield "pciVendorID", device.pci.vendor_id
        yield "pciDeviceID", device.pci.device_id
        yield "pciClass", device.pci.class_id
        yield f"{_STANDARD}pciBusID", device.pci.bus_id
        yield f"{_STANDARD}pcieRoot", device.pci.root
    if device.block:
        yield "identity", device.block.identity
        yield "model", device.block.model
        yield "readOnly", device.block.read_only
        yield "removable", device.block.removable
        yield "rotational", device.block.rotational


def _link(device: HostDevice, kind: str) -> str | None:
    return next((link for link in device.links if f"/{kind}/" in link), None)
