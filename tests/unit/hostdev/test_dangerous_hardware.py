"""Devices that are dangerous by their hardware: USB devices, keyboards, raw HID nodes, SMBus."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from drakit import AllocatedClaim, AllocatedDevice, ClaimReference, Edits
from drakit_drivers.hostdev import HostDevices
from drakit_drivers.hostdev.dangerous import danger_of
from drakit_drivers.hostdev.hardware import HostDevice
from tests.fakes.hostdev import Rig, inventory, taints
from tests.fakes.node import StaticNode
from tests.fakes.sysfs import FakeHost, policy, unreadable
from tests.fakes.usb_descriptors import DANGEROUS, FTDI, HARMLESS, HUB, MODEM, STICK, UVC_CAMERA

CONTROLLER = "pci0000:00/0000:00:14.0"
BUS = f"{CONTROLLER}/usb1"
WORD_BITS = 8 * struct.calcsize("l")


def judge(host: FakeHost, subsystem: str, name: str) -> str | None:
    return danger_of(host.find(subsystem)[name], consoles=())


def keys(*codes: int) -> str:
    """The bitmap of these keys, as the kernel prints it."""
    bits = sum(1 << code for code in codes)
    words: list[str] = []
    while bits or not words:
        words.append(f"{bits & ((1 << WORD_BITS) - 1):x}")
        bits >>= WORD_BITS
    return " ".join(reversed(words))


LETTERS = (*range(16, 26), *range(30, 39), *range(44, 51))
FULL_KEYBOARD = keys(*range(1, 89), 116, 142)
HEADSET = keys(113, 114, 115, 163, 164, 165, 582)
GAME_CONTROLLER = keys(*range(0x130, 0x13F))
MOUSE_BUTTONS = keys(0x110, 0x111, 0x112, 272)


# ------------------------------------------------------------ USB devices


@pytest.mark.parametrize("name", HARMLESS)
def test_a_usb_device_without_a_dangerous_interface_is_harmless(host, name):
    host.usb_device(f"{BUS}/1-1", "189:1", HARMLESS[name])
    host.usb_device(f"{BUS}/1-2", "189:2", STICK)
    assert judge(host, "usb", "1-1") is None
    assert judge(host, "usb", "1-2")


@pytest.mark.parametrize("name", DANGEROUS)
def test_a_usb_device_with_a_dangerous_interface_is_dangerous(host, name):
    descriptors, danger = DANGEROUS[name]
    host.usb_device(f"{BUS}/1-1", "189:1", descriptors)
    host.usb_device(f"{BUS}/1-2", "189:2", FTDI)
    assert danger in (judge(host, "usb", "1-1") or "")
    assert judge(host, "usb", "1-2") is None


@pytest.mark.parametrize("descriptors", [FTDI, HUB, None], ids=["any", "hub", "unreadable"])
@pytest.mark.parametrize("name", ["usb1", "usb12"])
def test_every_root_hub_is_dangerous_whatever_its_descriptors(host, name, descriptors):
    host.usb_device(f"{CONTROLLER}/{name}", "189:0", descriptors)
    assert "root hub" in (judge(host, "usb", name) or "")


@pytest.mark.parametrize(
    ("below", "danger"),
    [
        pytest.param("1-1:1.0/host6/target6:0:0/6:0:0:0/block/sdb", "a disk", id="disk"),
        pytest.param("1-1:1.0/net/eth1", "a network adapter", id="network-interface"),
        # The name of an interface is visible in its own network namespace only.
        pytest.param("1-1:1.0/net", "a network adapter", id="invisible-network-interface"),
        pytest.param("1-1:1.0/bluetooth/hci0", "a Bluetooth adapter", id="bluetooth"),
        pytest.param("1-1:1.0/tty/ttyUSB0", None, id="serial-port"),
        pytest.param("1-1:1.0/video4linux/video0", None, id="camera"),
    ],
)
def test_what_the_node_uses_below_a_usb_device_makes_it_dangerous(host, below, danger):
    """The interface can be vendor-specific: descriptors do not show what its driver makes of it."""
    first = host.usb_device(f"{BUS}/1-1", "189:1", FTDI)
    host.usb_device(f"{BUS}/1-2", "189:2", UVC_CAMERA)
    (first / below).mkdir(parents=True)
    (first / "1-1:1.0" / "port").symlink_to(host.sys)
    found = judge(host, "usb", "1-1")
    assert (found is None) if danger is None else (danger in (found or ""))
    assert judge(host, "usb", "1-2") is None


def test_a_usb_device_with_a_keyboard_of_any_protocol_is_dangerous(host):
    for number, bitmap in enumerate((HEADSET, FULL_KEYBOARD), start=1):
        directory = host.usb_device(f"{BUS}/1-{number}", f"189:{number}", HARMLESS["fido-key"])
        place = directory / f"1-{number}:1.0/0003:0D8C:0014.0001/input/input7"
        host.write(place, capabilities__key=bitmap)
    assert judge(host, "usb", "1-1") is None
    assert judge(host, "usb", "1-2") == "is a keyboard of the node"


def test_a_device_with_too_many_directories_counts_as_unreadable(host):
    directory = host.usb_device(f"{BUS}/1-1", "189:1", FTDI)
    for number in range(4100):
        (directory / f"ep_{number}").mkdir()
    with pytest.raises(OSError, match="too many directories"):
        judge(host, "usb", "1-1")


# ------------------------------------------------------------ input


def event(host: FakeHost, number: int, bitmap: str | None) -> str:
    directory = host.device(
        f"platform/i8042/serio0/input/input{number}/event{number}",
        f"13:{64 + number}",
        subsystem="input",
        devname=f"input/event{number}",
    )
    if bitmap is not None:
        host.write(directory.parent, capabilities__key=bitmap)
    return f"event{number}"


@pytest.mark.parametrize(
    ("bitmap", "danger"),
    [
        pytest.param(FULL_KEYBOARD, "is a keyboard", id="keyboard"),
        pytest.param(keys(LETTERS[0]), "is a keyboard", id="one-letter"),
        pytest.param(keys(2), "is a keyboard", id="one-digit"),
        pytest.param(keys(99), "is a keyboard", id="sysrq"),
        pytest.param(keys(116), "stops the node", id="power-button"),
        pytest.param(keys(142, 0x110), "stops the node", id="mouse-with-a-sleep-key"),
        pytest.param(keys(408), "stops the node", id="restart-key"),
        pytest.param(HEADSET, None, id="headset"),
        pytest.param(GAME_CONTROLLER, None, id="game-controller"),
        pytest.param(MOUSE_BUTTONS, None, id="mouse"),
        pytest.param("0", None, id="accelerometer"),
    ],
)
def test_the_keys_of_an_input_device_decide(host, bitmap, danger):
    judged, beside = event(host, 1, bitmap), event(host, 2, HEADSET)
    found = judge(host, "input", judged)
    assert (found is None) if danger is None else (danger in (found or ""))
    assert judge(host, "input", beside) is None


def test_udev_can_add_a_keyboard_but_not_remove_one(host):
    first, second = event(host, 1, HEADSET), event(host, 2, FULL_KEYBOARD)
    host.udev_entry("c13:65", "E:ID_INPUT_KEYBOARD=1")
    host.udev_entry("c13:66", "E:ID_INPUT_KEYBOARD=0")
    assert judge(host, "input", first) == judge(host, "input", second)


@pytest.mark.parametrize(
    "bitmap",
    [
        pytest.param(None, id="missing"),
        pytest.param("", id="empty"),
        pytest.param("7f zz", id="not-hexadecimal"),
        pytest.param("-1", id="negative"),
        pytest.param("1" * 17, id="word-too-long"),
        pytest.param("1 " * 25, id="too-many-words"),
    ],
)
def test_unreadable_keys_raise(host, bitmap):
    name = event(host, 1, bitmap)
    with pytest.raises(OSError):
        judge(host, "input", name)


def test_nodes_of_an_input_device_that_only_read_positions_are_harmless(host):
    host.device("platform/x/input/input1/js0", "13:0", subsystem="input", devname="input/js0")
    assert judge(host, "input", "js0") is None


# ------------------------------------------------------------ raw HID nodes


def raw(
    host: FakeHost, number: int, subclass: str, protocol: str, *, bitmap: str | None = None
) -> tuple[HostDevice, HostDevice]:
    """The nodes hidraw and hiddev of one USB interface."""
    interface = f"{BUS}/1-1/1-1:1.{number}"
    host.parent(interface, "usb", bInterfaceSubClass=subclass, bInterfaceProtocol=protocol)
    device = f"{interface}/0003:1050:0407.000{number}"
    if bitmap is not None:
        host.write(host.sys / "devices" / device / "input/input9", capabilities__key=bitmap)
    host.device(f"{device}/hidraw/hidraw{number}", f"240:{number}", subsystem="hidraw")
    host.device(
        f"{interface}/usbmisc/hiddev{number}",
        f"180:{number}",
        subsystem="usbmisc",
        devname=f"usb/hiddev{number}",
    )
    return host.find("hidraw")[f"hidraw{number}"], host.find("usbmisc")[f"hiddev{number}"]


@pytest.mark.parametrize(
    ("subclass", "protocol", "bitmap", "danger"),
    [
        pytest.param("01", "01", None, "is a keyboard of the node", id="boot-keyboard"),
        pytest.param("01", "02", None, "is a mouse of the node", id="boot-mouse"),
        pytest.param("00", "00", FULL_KEYBOARD, "is a keyboard of the node", id="other-keyboard"),
        pytest.param("00", "00", HEADSET, None, id="headset"),
        pytest.param("00", "00", None, None, id="fido"),
        pytest.param("00", "01", None, None, id="protocol-without-boot-subclass"),
        pytest.param("01", "00", None, None, id="boot-subclass-without-protocol"),
    ],
)
def test_the_interface_and_the_keys_of_a_raw_hid_node_decide(
    host, subclass, protocol, bitmap, danger
):
    judged = raw(host, 0, subclass, protocol, bitmap=bitmap)
    beside = raw(host, 1, "00", "00", bitmap=HEADSET)
    assert [danger_of(each, consoles=()) for each in judged] == [danger, danger]
    assert [danger_of(each, consoles=()) for each in beside] == [None, None]


def test_a_keyboard_without_usb_is_dangerous_too(host):
    for number, bitmap in enumerate((FULL_KEYBOARD, HEADSET)):
        device = f"virtual/misc/uhid/0005:046D:B33{number}.0001"
        host.write(host.sys / "devices" / device / "input/input9", capabilities__key=bitmap)
        host.device(f"{device}/hidraw/hidraw{number}", f"240:{number}", subsystem="hidraw")
    assert judge(host, "hidraw", "hidraw0") == "is a keyboard of the node"
    assert judge(host, "hidraw", "hidraw1") is None


# ------------------------------------------------------------ I2C


@pytest.mark.parametrize(
    ("where", "kind", "danger"),
    [
        pytest.param("pci0000:00/0000:00:1f.4/i2c-0", "0x0c0500", True, id="smbus"),
        pytest.param("pci0000:00/0000:00:1f.4/i2c-0", None, True, id="class-unreadable"),
        pytest.param("pci0000:00/0000:00:15.0/i2c-0", "0x0c8000", False, id="serial-bus"),
        pytest.param("platform/soc/fe804000.i2c/i2c-0", None, False, id="single-board-computer"),
    ],
)
def test_an_i2c_bus_is_dangerous_if_it_is_the_mainboard_s_smbus(host, where, kind, danger):
    parent = str(Path(where).parent)
    host.parent(
        parent, "pci" if "pci" in where else "platform", **({"class": kind} if kind else {})
    )
    host.device(f"{where}/i2c-dev/i2c-0", "89:0", subsystem="i2c-dev")
    assert bool(judge(host, "i2c-dev", "i2c-0")) is danger


# ------------------------------------------------------------ the driver


def driver(host: FakeHost) -> HostDevices:
    policies = {"usb": policy("usb", "/dev/bus/usb/*/*")}
    return HostDevices(host.config(policies), StaticNode(name="node-1"))


async def test_the_driver_publishes_only_harmless_usb_devices(host):
    host.parent(CONTROLLER, "pci")
    host.usb_device(BUS, "189:0", HUB, node=True)
    host.usb_device(f"{BUS}/1-1", "189:1", FTDI, node=True)
    host.usb_device(f"{BUS}/1-2", "189:2", STICK, node=True)
    host.usb_device(f"{BUS}/1-3", "189:3", UVC_CAMERA, node=True)
    host.usb_device(f"{BUS}/1-4", "189:4", None, node=True)
    made = await inventory(driver(host))
    assert {each.attributes["path"] for each in made.devices} == {
        "/dev/bus/usb/001/002",
        "/dev/bus/usb/001/004",
    }
    assert {each.device: each.reason for each in made.rejected} == {
        "/dev/bus/usb/001/001": "Dangerous",
        "/dev/bus/usb/001/003": "Dangerous",
        "/dev/bus/usb/001/005": "Unreadable",
    }
    (unreadable,) = (each for each in made.rejected if each.reason == "Unreadable")
    assert "cannot determine whether it is dangerous" in unreadable.message


async def test_a_published_device_whose_descriptors_are_unreadable_stays_with_a_taint(host):
    host.parent(CONTROLLER, "pci")
    for number in (1, 2):
        host.usb_device(f"{BUS}/1-{number}", f"189:{number}", FTDI, node=True)
    rig = Rig(host, {"usb": policy("usb", "/dev/bus/usb/*/*")})
    first, second = sorted(await rig.devices())
    with unreadable(host.sys / f"devices/{BUS}/1-1/descriptors"):
        host.usb_device(f"{BUS}/1-3", "189:3", STICK, node=True)
        found = await rig.devices()
    unknown = {"hostdev.drakit.dev/unreadable": "NoSchedule"}
    assert {name: taints(each) for name, each in found.items()} == {first: unknown, second: {}}


async def test_a_device_that_became_a_stick_is_not_prepared(host):
    """The firmware of a device can change its descriptors, so the device is checked again for each
    claim."""
    host.parent(CONTROLLER, "pci")
    for number in (1, 2):
        host.usb_device(f"{BUS}/1-{number}", f"189:{number}", FTDI, node=True)
    made = driver(host)
    first, second = sorted(each.name for each in (await inventory(made)).devices)
    (host.sys / f"devices/{BUS}/1-1/descriptors").write_bytes(STICK)
    claims = [
        AllocatedClaim(
            claim=ClaimReference(namespace="lab", name=name, uid=name),
            devices=(AllocatedDevice(name=name, pool="", request="main"),),
        )
        for name in (first, second)
    ]
    results = await made.prepare_claims(claims)
    assert "mass storage interface" in str(results[first])
    (edits,) = cast("Sequence[Edits]", results[second])
    assert [node.path for node in edits.device_nodes] == ["/dev/bus/usb/001/003"]


def test_a_device_whose_directory_is_gone_is_unreadable(host):
    host.usb_device(f"{BUS}/1-1", "189:1", FTDI)
    device = host.find("usb")["1-1"]
    shutil.rmtree(device.directory)
    with pytest.raises(OSError):
        danger_of(device, consoles=())


# ------------------------------------------------------------ harmless ways


async def test_a_refusal_names_the_harmless_way_before_the_switches(host):
    """Two of each: a modem with a serial port, and a stick with a disk, at one hub."""
    host.parent(CONTROLLER, "pci")
    host.usb_device(BUS, "189:0", HUB, node=True)
    for number in (1, 2):
        host.usb_device(f"{BUS}/1-{number}", f"189:{number}", MODEM, node=True)
        tty = f"ttyACM{number}"
        where = f"{BUS}/1-{number}/1-{number}:1.0/tty/{tty}"
        host.device(where, f"166:{number}", subsystem="tty", node=True)
        host.usb_device(f"{BUS}/1-{number + 2}", f"189:{number + 2}", STICK, node=True)
        host.block(f"{BUS}/1-{number + 2}/1-{number + 2}:1.0/block/sd{number}", f"8:{number}")
    made = await inventory(driver(host))
    messages = {each.device: each.message for each in made.rejected}
    switches = "to publish it in spite of this, set allow.dangerous: Always"
    for number in (1, 2):
        way = f"use subsystem tty: its node is /dev/ttyACM{number}; {switches}"
        assert way in messages[f"/dev/bus/usb/001/00{number + 1}"]
        refusal = messages[f"/dev/bus/usb/001/00{number + 3}"]
        assert "; use a CSI driver" in refusal
        assert f"(docs/admin/disks.md); {switches}" in refusal
    assert f"; match the devices at its ports; {switches}" in messages["/dev/bus/usb/001/001"]


async def test_a_tpm_is_refused_with_the_node_of_its_resource_manager(host):
    host.parent("platform/MSFT0101:00", "acpi")
    for kind, number in (("tpm", "10:224"), ("tpmrm", "253:65536")):
        host.device(f"platform/MSFT0101:00/{kind}/{kind}0", number, subsystem=kind, node=True)
    by_driver = {"match": [{"subsystem": "tpm", "parent": {"name": "MSFT*"}}]}
    ((_, (reason, message)),) = (await Rig(host, {"tpm": by_driver}).rejected()).items()
    assert reason == "Dangerous"
    assert "use subsystem tpmrm: its node is /dev/tpmrm0; to publish it in spite" in message


async def test_dma_heaps_have_an_identity(host):
    """The firmware fixes their names, with or without a number."""
    names = ("system", "linux,cma", "system-dma32", "reserved@84000000", "cma1", "cma2")
    for minor, name in enumerate(names):
        devname = f"dma_heap/{name}"
        host.device(f"virtual/dma_heap/{name}", f"250:{minor}", subsystem="dma_heap",
                    devname=devname, node=True)  # fmt: skip
    rig = Rig(host, {"heap": policy("dma_heap", "/dev/dma_heap/*")})
    assert set((await rig.paths()).values()) == {f"/dev/dma_heap/{name}" for name in names}
    assert await rig.rejected() == {}


async def test_the_next_port_of_a_serial_card_is_no_way_around_the_console(host):
    card = "pci0000:00/0000:00:16.3"
    host.parent(card, "pci")
    for n in (4, 5):
        host.device(f"{card}/tty/ttyS{n}", f"4:{64 + n}", subsystem="tty", node=True)
    host.write(host.sys / "class/tty/console", active="ttyS4")
    rig = Rig(host, {"serial": policy("tty", "/dev/ttyS*")})
    reason, message = (await rig.rejected())["/dev/ttyS4"]
    assert reason == "Dangerous"
    assert "is the kernel's console; to publish it, set" in message
