"""The published devices and their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drakit import HeldDevice
from drakit_drivers.hostdev.hardware import (
    Ancestor,
    HostDevice,
    PciParent,
    UsbParent,
    identity_of_node,
    identity_of_unit,
)
from drakit_drivers.hostdev.naming import Holds
from drakit_drivers.hostdev.policy_devices import Refusal, select
from tests.fakes.sysfs import as_policies
from tests.fakes.sysfs import policy as spec

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def policy(name: str, *paths: str, subsystem: str = "misc", **fields) -> dict[str, dict]:
    """A policy by its name; several are joined with ``|``."""
    fields.setdefault("allow", {"dangerous": "Always"})
    return {name: spec(subsystem, *(paths or ("/dev/*",)), **fields)}


def users(number: int) -> dict:
    return {"mode": "Users", "users": number}


def selected(policies, found, *, refuse=lambda policy, host: None, held=(), **facts):
    """`held`: names whose hardware is unknown, or what :class:`Holds` takes."""
    if not isinstance(held, Mapping):
        held = {name: HeldDevice(claims=()) for name in held}
    return select(as_policies(policies), found, refuse=refuse, holds=Holds(held), **facts)


def device(devname: str, *, subsystem: str = "misc", **facts) -> HostDevice:
    return HostDevice(
        subsystem=subsystem,
        kernel_name=devname.rpartition("/")[2],
        path=f"/dev/{devname}",
        type="c",
        major=10,
        minor=0,
        directory=Path("/sys/devices/virtual") / devname,
        **facts,
    )


def usb(devname: str, *, serial: str | None = "A1", port: str = "1-2", interface: int = 0):
    bus, _, ports = port.partition("-")
    parent = UsbParent(
        vendor_id="10c4", product_id="EA60", port=port, manufacturer=None, product=None,
        serial=serial, interface=interface, path=f"pci-0000:0{bus}:00.0-usbv2-0:{ports}",
    )  # fmt: skip
    return device(devname, subsystem="tty", usb=parent, unit=Path("/sys/devices/usb1") / port)


def names(policies, found) -> dict[str, str]:
    selection = selected(policies, found)
    assert all(LABEL.fullmatch(name) for name in selection.devices)
    assert all(name == published.name for name, published in selection.devices.items())
    return {name: published.host.path for name, published in selection.devices.items()}


TTY = policy("tty", subsystem="tty")


def test_a_usb_device_at_a_controller_without_address_needs_a_serial_number_or_permission():
    """usbip: the kernel counts its controllers and their buses."""

    def remote(serial: str | None) -> HostDevice:
        host = usb("ttyUSB0", serial=serial, port="5-1")
        assert host.usb
        return replace(host, usb=replace(host.usb, path=None))

    assert set(selected(TTY, [remote("A1")]).devices) == {"tty-10c4-ea60-a1-i0"}
    name = "tty-10c4-ea60-port-5-1-i0"
    assert selected(TTY, [remote(None)]).refused[name].refusal.reason == "NoIdentity"
    allowed = policy("tty", "/dev/ttyUSB*", subsystem="tty", allow={"unstableIdentity": "Always"})
    assert set(selected(allowed, [remote(None)]).devices) == {name}


def test_nodes_of_one_interface_are_numbered_in_the_kernels_order():
    found = [usb("video10"), usb("video9"), usb("video11", interface=1)]
    assert names(TTY, found) == {
        "tty-10c4-ea60-a1-i0": "/dev/video9",
        "tty-10c4-ea60-a1-i0-1": "/dev/video10",
        "tty-10c4-ea60-a1-i1": "/dev/video11",
    }


def test_equal_serial_numbers_are_distinguished_by_port_and_stay_so():
    one, two = usb("ttyUSB0", port="1-1"), usb("ttyUSB1", port="1-2")
    both = names(TTY, [one, two])
    assert len(both) == 2
    swapped = names(TTY, [usb("ttyUSB1", port="1-1"), usb("ttyUSB0", port="1-2")])
    assert both.keys() == swapped.keys()
    by_path = {path: name for name, path in both.items()}
    assert swapped[by_path["/dev/ttyUSB0"]] == "/dev/ttyUSB1"


def test_a_twin_that_is_plugged_in_later_renames_nothing():
    one, two = usb("ttyUSB0", port="1-1"), usb("ttyUSB1", port="1-2")
    alone = selected(TTY, [one])
    (name,) = alone.devices
    both = selected(TTY, [one, two], before=alone)
    assert both.devices[name].host is one
    left = selected(TTY, [two], before=both)
    (other,) = left.devices
    assert both.devices[other].host is two


@pytest.mark.parametrize(
    ("devname", "ancestors", "name"),
    [
        pytest.param(
            "vport3p1",
            ("virtio virtio3", "pci 0000:00:05.0"),
            "a-vportp1-pci-0000-00-05-0",
            id="port-of-virtio-serial",
        ),
        pytest.param(
            "snd/midiC2D1",
            ("sound card2", "pci 0000:00:1f.3"),
            "a-snd-midicd1-pci-0000-00-1f-3",
            id="device-of-a-sound-card",
        ),
        pytest.param(
            "ttyS4",
            ("serial-base 0000:04:00.0:0.1", "pci 0000:04:00.0"),
            "a-ttys-pci-0000-04-00-0-serial-base-1",
            id="serial-card",
        ),
        pytest.param(
            "dri/renderD129",
            ("pci 0000:01:00.0",),
            "a-dri-renderd-pci-0000-01-00-0",
            id="gpu",
        ),
    ],
)
def test_a_name_has_the_fixed_numbers_and_none_of_the_kernels(devname, ancestors, name):
    pairs = [each.split(" ") for each in ancestors]
    pci = PciParent(bus_id="", root=None, vendor_id=None, device_id=None, class_id=None)
    found = replace(
        device(devname),
        directory=Path("/sys/devices/x"),
        ancestors=tuple(Ancestor(subsystem=s, name=n, driver=None) for s, n in pairs),
        pci=pci if pairs[-1][0] == "pci" else None,
    )
    policies = policy("a", "/dev/*", "/dev/*/*")
    assert set(selected(policies, [found]).devices) == {name}


def test_a_tape_drive_goes_by_its_world_wide_id():
    tape = replace(
        device("nst0", subsystem="scsi_tape", wwid="naa.5000c500a1b2c3d4"),
        directory=Path("/sys/devices/x"),
    )
    found = [tape, replace(tape, kernel_name="nst0a", path="/dev/nst0a")]
    assert set(names(policy("a", subsystem="scsi_tape"), found)) == {
        "a-nst-naa-5000c500a1b2c3d4",
        "a-nsta-naa-5000c500a1b2c3d4",
    }


def test_a_unit_belongs_to_one_policy_with_all_of_its_nodes():
    found = [usb("video0"), usb("video1")]
    first = policy("first", "/dev/video1", subsystem="tty")
    unit = policy("unit", "/dev/video*", subsystem="tty", group="Unit")
    selection = selected(first | unit, found)
    assert set(selection.devices) == {"first-10c4-ea60-a1-i0"}
    assert [(each.path, each.other) for each in selection.overlaps] == [("/dev/video1", "unit")]
    assert set(selected(unit | first, found).devices) == {"unit-10c4-ea60-a1"}


def test_a_device_with_a_number_of_the_kernel_needs_the_policys_permission():
    """A device that is neither on USB nor PCI has no stable identity: another one may be gpiochip0
    after a reboot."""
    chip = replace(device("gpiochip0"), directory=Path("/sys/devices/soc/gpiochip0"))
    refused = selected(policy("a"), [chip]).refused["a-gpiochip0"].refusal
    assert (refused.reason, "allow.unstableIdentity" in refused.message) == ("NoIdentity", True)
    allow = {"dangerous": "Always", "unstableIdentity": "Always"}
    assert set(selected(policy("a", allow=allow), [chip]).devices) == {"a-gpiochip0"}
    board = Ancestor(name="fe200000.gpio", subsystem="platform", driver="pinctrl")
    on_board = replace(chip, ancestors=(board,))
    assert set(selected(policy("a"), [on_board]).devices) == {"a-gpiochip-platform-fe200000-gpio"}
    numbered = replace(chip, ancestors=(replace(board, name="gpio-mock.0.auto"),))
    assert not selected(policy("a"), [numbered]).devices


@pytest.mark.parametrize(
    ("subsystem", "directory", "ancestors", "is_stable"),
    [
        pytest.param("tty", "virtual/tty/tty7", (), True, id="virtual-terminal"),
        pytest.param("input", "virtual/input/input5/event5", (), False, id="made-by-uinput"),
        pytest.param("vfio", "virtual/vfio/12", (), False, id="iommu-group"),
        pytest.param(
            "hidraw", "pci0000:00/usb1/1-1/hci0/hidraw0", ("usb", "bluetooth"), False, id="paired"
        ),
        pytest.param("hidraw", "pci0000:00/usb1/1-1/hidraw0", ("hid", "usb"), True, id="usb"),
        pytest.param("i2c-dev", "pci0000:00/0000:00:02.0/i2c-1", ("pci",), True, id="pci"),
    ],
)
def test_a_kernels_number_is_an_identity_only_where_it_stays(
    subsystem, directory, ancestors, is_stable
):
    facts = replace(
        usb("x0") if "usb" in ancestors else device("x0"),
        subsystem=subsystem,
        kernel_name=directory.rpartition("/")[2],
        directory=Path("/sys/devices") / directory,
        ancestors=tuple(Ancestor(name="a", subsystem=each, driver=None) for each in ancestors),
    )
    assert identity_of_node(facts).is_stable is is_stable
    assert identity_of_unit(facts).is_stable is is_stable


@pytest.mark.parametrize(
    ("mode", "published"),
    [
        pytest.param("Users", (2048, 0), id="users"),
        pytest.param("Capacity", (2, 2048), id="copies"),
    ],
)
def test_a_policy_has_at_most_2048_devices_and_each_user_counts_as_one(mode, published):
    policies = policy("a", sharing={"mode": mode, "users": 1024})
    found = [device(f"x{index}") for index in range(3)]
    assert not selected(policies, found[:2]).refused
    selection = selected(policies, found)
    assert (len(selection.devices), len(selection.copies)) == published
    (refused,) = {each.published.host.path: each for each in selection.refused.values()}.values()
    assert refused.refusal.reason == "TooMany"
    assert "policy a already has 2048 devices on this node, the maximum" in refused.refusal.message


def test_no_name_passes_from_one_device_to_another():
    """ttyS0 and ttys0 differ only by case."""
    upper, lower = device("ttyS0"), device("ttys0")
    both = names(policy("a"), [upper, lower])
    assert len(both) == 2
    assert "a-ttys0" not in both


def test_a_collision_of_two_policies_is_resolved():
    policies = policy("k", "/dev/vm-0") | policy("k-vm", "/dev/kvm", sharing=users(1))
    assert len(names(policies, [device("vm-0"), device("kvm")])) == 2


def test_a_long_name_is_cut_and_gets_a_hash():
    found = [device("x" * 40 + "1"), device("x" * 40 + "2")]
    assert len(names(policy("p" * 40), found)) == 2


@given(
    st.lists(
        st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1),
        unique=True,
        max_size=6,
    )
)
def test_any_names_become_different_labels(devnames):
    found = [device(devname) for devname in devnames]
    assert sorted(names(policy("p"), found).values()) == sorted(host.path for host in found)
    assert names(policy("p"), found) == names(policy("p"), found[::-1])


def test_a_device_in_two_paths_of_a_policy_is_published_once():
    assert len(names(policy("a", "/dev/fuse", "/dev/f*"), [device("fuse")])) == 1


def test_a_refused_device_keeps_its_name_and_leaves_its_neighbours_theirs():
    found = [usb("video0"), usb("video1")]
    busy = Refusal("Other", "busy")
    selection = selected(TTY, found, refuse=lambda _, host: busy if host is found[0] else None)
    assert list(selection.devices) == ["tty-10c4-ea60-a1-i0-1"]
    assert selection.refused["tty-10c4-ea60-a1-i0"].refusal == busy
