"""
The attributes of a device that CEL selectors can match, and its capacities.

A string that the API rejects (over 64 bytes) is left out: half a serial number would match
the wrong device. Names are C identifiers; the standard ones carry Kubernetes' domain, so that
claims can request devices of several drivers that are close to each other. The facts stand in the
order of their importance: if there are more than the API allows, the last ones are left out.

It must not depend on how facts are found, or which devices are published.
"""

from __future__ import annotations

from collections.abc import Iterator

from drakit import AttributeValue, Capacity, CapacityRange
from drakit_drivers.hostdev.hardware import HostDevice
from drakit_drivers.hostdev.policy_devices import Published

MAX_STRING_BYTES = 64
"""The API's limit for a string value; it counts bytes."""

_MAX_FACTS = 32
"""The API's limit for attributes and capacities of a device together."""

_STANDARD = "resource.kubernetes.io/"


def attributes(published: Published) -> dict[str, AttributeValue]:
    """List the attributes of a device."""
    facts = {
        name: value
        for name, value in _facts(published)
        if not isinstance(value, str) or len(value.encode()) <= MAX_STRING_BYTES
    }
    room = _MAX_FACTS - len(capacity(published))
    return dict(list(facts.items())[:room])


def left_out(published: Published) -> tuple[str, ...]:
    """Return the names of attributes that are too long to publish, or too many."""
    published_names = attributes(published).keys()
    return tuple(name for name, _ in _facts(published) if name not in published_names)


def capacity(published: Published, *, is_copy: bool = False) -> dict[str, str | Capacity]:
    """
    Return a block device's size in bytes, and the users of a device with a shared capacity.

    :param is_copy: the device is one of the copies for clusters without DRAConsumableCapacity.
    """
    found: dict[str, str | Capacity] = {}
    block, sharing = published.host.block, published.spec.sharing
    if block and block.size_bytes:
        found["size"] = str(block.size_bytes)
    if sharing.mode == "Capacity":
        users = Capacity(
            value=str(sharing.users), default="1", valid_range=CapacityRange(min="1", step="1")
        )
        found["users"] = "1" if is_copy else users
    return found


def _facts(published: Published) -> Iterator[tuple[str, AttributeValue]]:
    # The standard attributes are the most widely used; only a policy's own are as important.
    own = published.spec.attributes.items()
    extra = ((name, attribute.value) for name, attribute in own)
    for name, value in (*_common(published), *extra, *_specific(published.host)):
        if value is not None:
            yield name, value


def _common(published: Published) -> Iterator[tuple[str, AttributeValue | None]]:
    device = published.host
    yield "subsystem", device.subsystem
    yield "policy", published.policy.name
    yield "path", device.path
    yield "devname", device.path.removeprefix("/dev/")
    yield "devtype", device.devtype
    yield "major", device.major
    yield "minor", device.minor
    yield "driver", device.driver
    yield "identity", published.identity.text if published.identity.is_stable else None
    yield "byIdLink", _link(device, "by-id")
    yield "byPathLink", _link(device, "by-path")
    yield "serial", device.usb.serial if device.usb and device.usb.serial else device.serial
    yield "nodeCount", len(published.hosts) if published.spec.group == "Unit" else None
    yield f"{_STANDARD}numaNode", device.numa_node
    if device.pci:
        yield f"{_STANDARD}pciBusID", device.pci.bus_id
        yield f"{_STANDARD}pcieRoot", device.pci.root


def _specific(device: HostDevice) -> Iterator[tuple[str, AttributeValue | None]]:
    if device.usb:
        yield "usbVendorID", device.usb.vendor_id
        yield "usbProductID", device.usb.product_id
        yield "usbManufacturer", device.usb.manufacturer
        yield "usbProduct", device.usb.product
        yield "usbInterface", device.usb.interface
        yield "usbPort", device.usb.port
        yield "usbPath", device.usb.path
    yield from device.family.items()
    if device.pci:
        yield "pciVendorID", device.pci.vendor_id
        yield "pciDeviceID", device.pci.device_id
        yield "pciClass", device.pci.class_id
    if device.usb:
        # The PCI function of a USB device is the host controller; users do not select by it.
        yield "usbVersion", device.usb.version
        yield "usbClass", device.usb.device_class
        yield "usbSpeed", device.usb.speed
    elif device.pci:
        yield "pciSubsystemVendorID", device.pci.subsystem_vendor_id
        yield "pciSubsystemDeviceID", device.pci.subsystem_device_id
        yield "iommuGroup", device.pci.iommu_group


def _link(device: HostDevice, kind: str) -> str | None:
    return next((link for link in device.links if f"/{kind}/" in link), None)
