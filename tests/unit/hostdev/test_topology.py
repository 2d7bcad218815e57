"""Paths to hardware have no number that the kernel can assign in another order."""

from __future__ import annotations

import pytest

from drakit_drivers.hostdev.hardware import Ancestor, address, usb_path


def above(*devices: str) -> tuple[Ancestor, ...]:
    """Ancestors, nearest first: "SUBSYSTEM NAME"."""
    pairs = (each.partition(" ") for each in devices)
    return tuple(Ancestor(subsystem=s or None, name=n, driver=None) for s, _, n in pairs)


XHCI = "pci 0000:00:14.0"


@pytest.mark.parametrize(
    ("name", "ancestors", "speed", "path"),
    [
        pytest.param(
            "1-2", ("usb 1-2", "usb usb1", XHCI), 480, "pci-0000:00:14.0-usbv2-0:2", id="usb-2"
        ),
        pytest.param(
            "2-2", ("usb usb2", XHCI), 5000, "pci-0000:00:14.0-usbv3-0:2", id="usb-3-root-hub"
        ),
        pytest.param(
            "3-1", ("usb usb3", "pci 0000:00:1d.0"), 12, "pci-0000:00:1d.0-usbv1-0:1", id="usb-1"
        ),
        pytest.param(
            "1-1.4.2",
            ("usb 1-1.4.2:1.0", "usb 1-1.4.2", "usb 1-1.4", "usb 1-1", "usb usb1", XHCI),
            480,
            "pci-0000:00:14.0-usbv2-0:1.4.2",
            id="behind-hubs",
        ),
        pytest.param(
            "1-2",
            ("usb usb1", "platform xhci-hcd.0.auto", "platform fe980000.usb"),
            480,
            "platform-fe980000.usb-usbv2-0:2",
            id="controller-of-a-board",
        ),
        pytest.param("3-1", ("usb usb3", "platform vhci_hcd.0"), 480, None, id="usbip"),
        pytest.param("1-2", ("usb usb1", XHCI), None, None, id="root-hub-is-being-removed"),
        pytest.param("usb1", (XHCI,), 480, None, id="root-hub-itself"),
    ],
)
def test_the_path_of_a_usb_device(name, ancestors, speed, path):
    assert usb_path(name, above(*ancestors), root_hub_speed=speed) == path


@pytest.mark.parametrize(
    ("ancestors", "path"),
    [
        pytest.param((XHCI, "pci 0000:00:01.0"), "pci-0000:00:14.0", id="the-nearest-function"),
        pytest.param(("virtio virtio3", XHCI), "pci-0000:00:14.0", id="virtio"),
        pytest.param(
            ("i2c 1-0068", "i2c i2c-1", "platform fe804000.i2c"),
            "platform-fe804000.i2c-i2c-0068",
            id="chip-on-i2c",
        ),
        pytest.param(
            ("i2c i2c-ELAN0001:00", "i2c i2c-1", XHCI),
            "pci-0000:00:14.0-i2c-ELAN0001:00",
            id="chip-of-the-firmware",
        ),
        pytest.param(("i2c i2c-1", XHCI), "pci-0000:00:14.0", id="i2c-adapter"),
        pytest.param(
            ("spi spi0.1", "spi_master spi0", "platform fe204000.spi"),
            "platform-fe204000.spi-spi-1",
            id="chip-select",
        ),
        pytest.param(
            ("input input3", "serio serio1", "platform i8042"),
            "platform-i8042-serio-1",
            id="mouse-beside-keyboard",
        ),
        pytest.param(
            ("scsi 7:0:3:0", "scsi target7:0:3", "scsi host7", XHCI),
            "pci-0000:00:14.0-scsi-0:3:0",
            id="scsi",
        ),
        pytest.param(
            ("serial-base 0000:04:00.0:0.3", "serial-base 0000:04:00.0:0", "pci 0000:04:00.0"),
            "pci-0000:04:00.0-serial-base-3",
            id="port-of-a-serial-card",
        ),
        pytest.param(("platform coretemp.0",), None, id="numbered-platform-device"),
        pytest.param((), None, id="virtual"),
    ],
)
def test_the_address_of_hardware(ancestors, path):
    assert address(above(*ancestors)) == path
