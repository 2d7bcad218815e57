"""Facts from sysfs, and the attributes of a device."""

from __future__ import annotations

import pytest

from drakit_drivers.hostdev.hardware import HostDevice
from drakit_drivers.hostdev.policy_devices import MAX_STRING_BYTES, attributes, capacity, left_out
from tests.fakes.sysfs import FakeHost, published

USB = "pci0000:00/0000:00:14.0/usb1/1-2/1-2.3"


def plug_serial_stick(host: FakeHost, **attributes: str) -> HostDevice:
    host.parent(
        "pci0000:00/0000:00:14.0",
        "pci",
        driver="xhci_hcd",
        vendor="0x8086",
        device="0xa36d",
        numa_node="0",
        **{"class": "0x0c0330"},
    )
    host.parent(
        USB,
        "usb",
        idVendor="10c4",
        idProduct="ea60",
        manufacturer="Silicon Labs",
        product="CP2102N",
        **attributes,
    )
    host.parent(f"{USB}/1-2.3:1.0", "usb", driver="cp210x", bInterfaceNumber="00")
    host.device(f"{USB}/1-2.3:1.0/ttyUSB0/tty/ttyUSB0", "188:0", subsystem="tty")
    return host.find("tty")["ttyUSB0"]


def test_a_usb_device_below_pci(host):
    host.udev_entry(
        "c188:0", "S:serial/by-path/pci-0", "S:serial/by-id/usb-Silabs", "E:ID_SERIAL_SHORT=0001"
    )
    host.node("ttyUSB0", "c", "188:0")
    for link in ("by-path/pci-0", "by-id/usb-Silabs"):
        host.link(f"serial/{link}", "../../ttyUSB0")
    stick = plug_serial_stick(host, serial="0001")
    assert attributes(published(stick, "zigbee")) == {
        "subsystem": "tty",
        "policy": "zigbee",
        "path": "/dev/ttyUSB0",
        "devname": "ttyUSB0",
        "major": 188,
        "minor": 0,
        "driver": "cp210x",
        "identity": "10c4-ea60-0001-i0",
        "byIdLink": "/dev/serial/by-id/usb-Silabs",
        "byPathLink": "/dev/serial/by-path/pci-0",
        "serial": "0001",
        "resource.kubernetes.io/numaNode": 0,
        "usbVendorID": "10c4",
        "usbProductID": "ea60",
        "usbManufacturer": "Silicon Labs",
        "usbProduct": "CP2102N",
        "usbInterface": 0,
        "usbPort": "1-2.3",
        "pciVendorID": "8086",
        "pciDeviceID": "a36d",
        "pciClass": "0c0330",
        "resource.kubernetes.io/pciBusID": "0000:00:14.0",
        "resource.kubernetes.io/pcieRoot": "pci0000:00",
    }
    assert capacity(published(stick)) == {}


@pytest.mark.parametrize(
    ("serial", "is_published"),
    [
        pytest.param("x" * MAX_STRING_BYTES, True, id="at-the-limit"),
        pytest.param("x" * (MAX_STRING_BYTES + 1), False, id="over-the-limit"),
        pytest.param("é" * 33, False, id="the-limit-counts-bytes"),
    ],
)
def test_a_string_that_the_api_would_refuse_is_left_out(host, serial, is_published):
    stick = plug_serial_stick(host, serial=serial)
    given = published(stick)
    assert ("serial" in attributes(given)) is is_published
    assert ("serial" in left_out(given)) is not is_published


def test_a_subsystem_may_be_a_bus(host):
    directory = host.device(USB, "189:3", subsystem="usb", devname="bus/usb/001/004", idVendor="1")
    host.write(directory, idVendor="1a86", idProduct="7523")
    (host.sys / "bus/usb/devices").mkdir(parents=True)
    (host.sys / "class/usb/1-2.3").rename(host.sys / "bus/usb/devices/1-2.3")
    (host.sys / "bus/usb/devices/1-2.3").unlink()
    (host.sys / "bus/usb/devices/1-2.3").symlink_to(directory)
    for link in (host.sys / "class/usb").iterdir():
        link.unlink()
    (host.sys / "class/usb").rmdir()
    (device,) = host.find("usb").values()
    assert device.path == "/dev/bus/usb/001/004"
    assert device.usb is not None
    assert device.usb.vendor_id == "1a86"


def test_only_what_is_wanted_is_read(host):
    host.device("virtual/misc/kvm", "10:232")
    host.device("virtual/misc/tun", "10:200", devname="net/tun")
    host.udev_entry("c10:232", "S:by-link")
    asked: list[str] = []

    def wanted(path: str) -> bool:
        asked.append(path)
        return path == "/dev/by-link"

    (found,) = host.sysfs().devices("misc", wanted=wanted).devices
    assert found.kernel_name == "kvm"
    assert asked == ["/dev/kvm", "/dev/by-link", "/dev/net/tun"]


def test_a_device_without_node_or_just_going_is_not_there(host):
    host.device("virtual/misc/kvm", "10:232")
    (host.sys / "devices/virtual/misc/kvm/uevent").write_text("")
    (host.sys / "class/misc/gone").symlink_to("../../devices/gone")
    assert host.find("misc") == {}


def test_a_subsystem_that_this_kernel_lacks_has_no_devices(host):
    assert host.find("video4linux") == {}


def test_numbers_that_make_no_sense_are_missing(host):
    directory = host.block("virtual/block/zram0", "253:0")
    host.write(directory, size="?", numa_node="-1")
    zram = host.find("block")["zram0"]
    assert zram.numa_node is None
    assert capacity(published(zram)) == {}
