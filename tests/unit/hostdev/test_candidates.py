"""All device nodes of a host, what policies make of them, and policies for one device each."""

from __future__ import annotations

import pytest

from drakit_drivers.hostdev import HostDevicePolicySpec
from drakit_drivers.hostdev.candidates import Candidate, find_candidates
from drakit_drivers.hostdev.host import Host
from tests.fakes.recordings import plug
from tests.fakes.sysfs import FakeHost, as_policies, policy
from tests.fakes.usb_descriptors import FTDI, STICK


def found(host: FakeHost, policies: dict | None = None, **options) -> dict[str, Candidate]:
    config = host.config({})
    each = find_candidates(config, as_policies(policies or {}), **options)
    return {candidate.host.path: candidate for candidate in each}


@pytest.mark.parametrize(
    ("recording", "path", "matcher"),
    [
        pytest.param(
            "ftdi",
            "/dev/ttyUSB0",
            {"usb": {"vendorID": "0403", "productID": "6001", "serial": "A50285BI"}},
            id="a-serial-number",
        ),
        pytest.param(
            "twins",
            "/dev/ttyUSB1",
            {
                "usb": {
                    "vendorID": "1a86",
                    "productID": "7523",
                    "path": "pci-0000:00:14.0-usbv2-0:4.2",
                }
            },
            id="a-port",
        ),
    ],
)
def test_a_suggested_policy_publishes_only_this_unit(host, recording, path, matcher):
    plug(host, recording)
    one = found(host)[path]
    assert (one.policy, one.names, one.refusal) == (None, (), None)
    assert one.suggestion == {"match": [{"subsystem": "tty", **matcher}]}
    again = found(host, {"one": dict(one.suggestion)})
    assert [each for each, candidate in again.items() if candidate.names] == [path]


def test_the_nodes_of_a_camera_have_one_policy_for_the_unit(host):
    plug(host, "uvc-camera")
    suggestion = found(host, subsystem="video4linux")["/dev/video0"].suggestion
    assert suggestion is not None
    HostDevicePolicySpec.model_validate(suggestion)
    again = found(host, {"one": dict(suggestion)}, subsystem="video4linux")
    names = {candidate.names for candidate in again.values()}
    assert suggestion["group"] == "Unit"
    assert len(names) == 1
    assert names != {()}


def test_the_states_are_those_of_the_driver_s_scan(host):
    host.device("virtual/misc/fuse", "10:229", node=True)
    host.device("virtual/misc/kvm", "10:232")
    host.device("virtual/mem/mem", "1:1", subsystem="mem", node=True)
    host.device("virtual/misc/null2", "10:99", node=True)
    policies = {
        "a": policy("misc", "/dev/fuse", "/dev/kvm"),
        "b": policy("misc", "/dev/fuse", sharing={"mode": "Users", "users": 2}),
    }
    states = found(host, policies)
    fuse, kvm = states["/dev/fuse"], states["/dev/kvm"]
    assert (fuse.policy, fuse.names, fuse.others) == ("a", ("a-fuse",), ("b",))
    refused = Host(host.config({})).scan(as_policies(policies)).selection.refused
    (expected,) = (each for each in refused.values() if each.published.host.path == "/dev/kvm")
    assert (kvm.policy, kvm.reason) == ("a", expected.refusal.message)
    assert states["/dev/null2"].policy is None
    assert states["/dev/mem"].suggestion is None
    assert "it is dangerous: it" in (states["/dev/mem"].refusal or "")


def test_a_policy_for_a_dangerous_usb_device_is_suggested_with_its_refusal(host):
    host.parent("pci0000:00/0000:00:14.0", "pci")
    for number, descriptors in enumerate((FTDI, STICK), start=1):
        where = f"pci0000:00/0000:00:14.0/usb1/1-{number}"
        host.usb_device(where, f"189:{number}", descriptors, node=True)
    adapter, stick = found(host, subsystem="usb").values()
    assert adapter.suggestion
    assert adapter.refusal is None
    assert stick.suggestion
    assert stick.refusal == (
        "it is dangerous: it has a mass storage interface (USB class 08); to publish it, set "
        "allow.dangerous: Always in its policy and hostdev.allowDangerous: true in the chart's "
        "values"
    )


def test_copies_are_all_named(host):
    host.device("virtual/misc/fuse", "10:229", node=True)
    shared = {"a": policy("misc", "/dev/fuse", sharing={"mode": "Users", "users": 2})}
    assert found(host, shared)["/dev/fuse"].names == ("a-0", "a-1")


def test_no_policy_is_suggested_for_a_disk_and_one_for_each_zram_device(host):
    disk = "pci0000:00/0000:00:17.0/block/sda"
    host.parent("pci0000:00/0000:00:17.0", "pci", vendor="0x8086", device="0xa102")
    host.block(disk, "8:0", node=True)
    host.block(f"{disk}/sda1", "8:1", node=True)
    for index in (0, 1):
        host.block(f"virtual/block/zram{index}", f"253:{index}", node=True)
    each = found(host, subsystem="block")
    for path in ("/dev/sda", "/dev/sda1"):
        assert each[path].suggestion is None
        assert "use a CSI driver" in (each[path].refusal or "")
    for path in ("/dev/zram0", "/dev/zram1"):
        assert each[path].suggestion == {"match": [{"subsystem": "block", "paths": [path]}]}
        assert each[path].refusal is None


def test_the_nodes_of_one_function_are_judged_one_by_one(host):
    """In the trial, each of them has a policy of its own."""
    for port in "12":
        host.adapter(port, f"ttyUSB{port}", serial=f"A{port}")
        usb = f"pci0000:00/0000:00:14.0/usb1/1-{port}"
        host.usb_device(usb, f"189:{port}", FTDI if port == "1" else STICK, node=True)
    states = found(host)
    assert len(states) == 4
    assert all(each.attributes["usbVendorID"] for each in states.values())
    refused = {path for path, each in states.items() if each.refusal}
    assert refused == {"/dev/bus/usb/001/003"}
