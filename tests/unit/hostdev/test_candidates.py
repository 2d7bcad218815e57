"""All device nodes of a host, what policies make of them, and policies for one device each."""

from __future__ import annotations

import pytest

from drakit_drivers.hostdev import HostDevicePolicySpec
from drakit_drivers.hostdev.candidates import Candidate, find_candidates
from drakit_drivers.hostdev.host import Host
from tests.fakes.recordings import plug
from tests.fakes.sysfs import FakeHost, as_policies, policy


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
    assert "control of the node" in (states["/dev/mem"].refusal or "")


def test_copies_are_all_named(host):
    host.device("virtual/misc/fuse", "10:229", node=True)
    shared = {"a": policy("misc", "/dev/fuse", sharing={"mode": "Users", "users": 2})}
    assert found(host, shared)["/dev/fuse"].names == ("a-0", "a-1")


def test_a_partition_is_not_refused_because_of_the_trial_of_its_disk(host):
    host.block("virtual/block/loop0", "7:0", node=True)
    host.block("virtual/block/loop0/loop0p1", "259:0", node=True)
    refusal = found(host)["/dev/loop0p1"].refusal or ""
    assert "which policy" not in refusal
