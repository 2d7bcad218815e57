"""A driver's devices and edits, as the kubelet gets them from a device plugin: the pure part."""

from __future__ import annotations

from typing import Any, cast

import pytest

from drakit import (
    Capacity,
    Device,
    DeviceNode,
    DeviceParameters,
    Edits,
    Hook,
    Inventory,
    Mount,
    NetDevice,
    Version,
)
from drakit.settings import SettingsError
from drakit_driver import plugin_devices as module
from drakit_driver.plugin_devices import (
    DevicePluginOptions,
    check_supported,
    edits_problem,
    plugin_devices,
    preferred,
    resource_of,
    response_of,
)
from drakit_driver.runtime.contract import DriverTraits

DRIVER = "lamps.example.com"
LAMP = "lamps.example.com/lamp"


def options(*resources: str, **others) -> DevicePluginOptions:
    return DevicePluginOptions(
        resources=tuple(resource_of(each) for each in resources or (LAMP,)), **others
    )


def listed(*devices: Device, given: DevicePluginOptions | None = None, **fields):
    return plugin_devices(
        Inventory(devices=devices, **fields), driver=DRIVER, options=given or options()
    )


# ------------------------------------------------------------ resources


MALFORMED_RESOURCES = {
    "no-domain": ("lamp", "must begin with a domain"),
    "kubernetes": ("kubernetes.io/lamp", "reserved for Kubernetes"),
    "no-value": (f"{LAMP}:model", "NAME:ATTRIBUTE=VALUE"),
    "no-attribute": (f"{LAMP}:=x", "NAME:ATTRIBUTE=VALUE"),
}


@pytest.mark.parametrize(("text", "problem"), MALFORMED_RESOURCES.values(), ids=MALFORMED_RESOURCES)
def test_a_malformed_resource_is_named(text, problem):
    with pytest.raises(ValueError, match=problem) as raised:
        resource_of(text)
    assert text in str(raised.value)


def test_a_resource_may_have_a_longer_name_than_an_attribute_can_hold():
    assert resource_of(f"{'a' * 60}.example.com/lamp").name == f"{'a' * 60}.example.com/lamp"


def test_devices_go_to_the_first_resource_that_they_match():
    found = listed(
        Device(name="one", attributes={"model": "big", "hot": True}),
        Device(name="two", attributes={"model": "small", "hot": True}),
        Device(name="three", attributes={"version": Version("1.2.0")}),
        Device(name="four", attributes={"tags": ("a", "b")}),
        Device(name="five"),
        given=options(
            "l.example/big:model=big",
            "l.example/hot:hot=true",
            "l.example/version:version=1.2.0",
            "l.example/tag:tags=b",
        ),
    )
    assert {name: list(devices) for name, devices in found.by_resource.items()} == {
        "l.example/big": ["one"],
        "l.example/hot": ["two"],
        "l.example/version": ["three"],
        "l.example/tag": ["four"],
    }
    assert found.problems == ("device 'five' matches no --resource option",)


# ------------------------------------------------------------ devices and shares


def test_a_device_has_its_name_as_its_id_and_the_same_claim_every_time():
    found, again = (listed(Device(name="a"), Device(name="b", pool="x")) for _ in range(2))
    devices = found.by_resource[LAMP]
    assert list(devices) == ["a", "x/b"]
    assert [str(each.claim) for each in devices.values()] == [
        "device-plugin/a",
        "device-plugin/x/b",
    ]
    assert len({each.claim.uid for each in devices.values()}) == 2
    assert [each.claim for each in again.by_resource[LAMP].values()] == [
        each.claim for each in devices.values()
    ]
    assert devices["a"].allocated.share_id is None


RPM = Capacity(value="3k", default="1000")
MEMORY = Capacity(value="8Gi", default="4Gi")


SHARES = {
    "whole-over-default": ({"rpm": RPM}, None, 3),
    "the-scarcest-capacity-counts": ({"rpm": RPM, "memory": MEMORY}, None, 2),
    "limited": ({"rpm": RPM}, 2, 2),
    "never-more-than-the-capacity": ({"rpm": RPM}, 9, 3),
    "a-share-consumes-all-by-default": ({"rpm": "3k"}, None, 1),
    "without-capacity": ({}, 4, 4),
}


@pytest.mark.parametrize(("capacity", "limit", "shares"), SHARES.values(), ids=SHARES)
def test_a_shared_device_becomes_as_many_as_its_capacity_has_defaults(capacity, limit, shares):
    device = Device(name="west", capacity=capacity, allow_multiple_allocations=True)
    found = listed(device, Device(name="east"), given=options(shares=limit))
    assert list(found.by_resource[LAMP]) == [
        *(f"west::{number}" for number in range(shares)),
        "east",
    ]
    first, *others = [found.by_resource[LAMP][f"west::{number}"] for number in range(shares)]
    assert first.allocated.name == "west"
    assert len({each.allocated.share_id for each in (first, *others)}) == shares
    assert len({each.claim.uid for each in (first, *others)}) == shares


def test_a_share_consumes_the_default_amounts():
    device = Device(name="w", capacity={"rpm": RPM, "m": MEMORY}, allow_multiple_allocations=True)
    share = listed(device).by_resource[LAMP]["w::1"]
    assert share.allocated.consumed_capacity == {"rpm": "1000", "m": "4Gi"}
    whole = listed(Device(name="w", capacity={"rpm": "3k"})).by_resource[LAMP]["w"]
    assert whole.allocated.consumed_capacity == {}


UNSUPPORTED_DEVICES = {
    "no-limit": (Device(name="x", allow_multiple_allocations=True), "set --shares"),
    "too-many-shares": (
        Device(
            name="x",
            capacity={"m": Capacity(value="80Gi", default="1")},
            allow_multiple_allocations=True,
        ),
        "85,899,345,920 shares, and the limit is 16,384; set --shares",
    ),
    "partition": (Device(name="x", consumes={"gpu": {"memory": "1Gi"}}), "consumes counters"),
    "binding-conditions": (
        Device(name="x", binding_conditions=("a",), binding_failure_conditions=("b",)),
        "needs its binding conditions, which the kubelet does not know",
    ),
    "extra-fields": (Device(name="x", extra={"newField": 1}), "needs its extra fields"),
    "edits": (Device(name="x", edits=Edits(additional_gids=(7,))), "supplementary groups"),
}


@pytest.mark.parametrize(
    ("device", "problem"), UNSUPPORTED_DEVICES.values(), ids=UNSUPPORTED_DEVICES
)
def test_a_device_that_a_device_plugin_cannot_have_is_left_out_with_the_reason(device, problem):
    found = listed(Device(name="good"), device)
    assert list(found.by_resource[LAMP]) == ["good"]
    (text,) = found.problems
    assert text.startswith(f"device {device.name!r} ")
    assert problem in text


def test_partitions_are_replaced_by_the_fallback_of_whole_devices():
    part = Device(name="part", consumes={"gpu": {"memory": "1Gi"}})
    found = listed(part, fallback=(Device(name="whole"),))
    assert (list(found.by_resource[LAMP]), found.problems) == (["whole"], ())
    found = listed(Device(name="other"), fallback=(Device(name="whole"),))
    assert list(found.by_resource[LAMP]) == ["other"], "nothing needs a fallback"


@pytest.mark.parametrize(
    "values",
    [
        {"consumes": 1},
        {"edits": Edits(mounts=cast("Any", ("/a",)))},
        {"edits": Edits(env=cast("Any", 1))},
    ],
    ids=["counters", "mounts", "environment"],
)
def test_a_malformed_device_is_left_out_alone_and_named(values):
    given = (Device(name="bad", **values), Device(name="good"))
    part = Device(name="part", consumes={"gpu": {"memory": "1Gi"}})
    for found in (listed(*given), listed(*given, part, fallback=given)):
        assert list(found.by_resource[LAMP]) == ["good"]
        (problem,) = found.problems
        assert problem.startswith("device 'bad' ")


def test_of_two_devices_with_a_name_the_first_counts():
    found = listed(Device(name="a", attributes={"first": True}), Device(name="a"))
    assert found.by_resource[LAMP]["a"].device.attributes == {"first": True}
    assert "listed twice" in found.problems[0]


def test_more_devices_than_a_message_may_have_are_left_out(monkeypatch):
    monkeypatch.setattr(module, "MAX_DEVICES", 5)
    west = Device(name="west", allow_multiple_allocations=True)
    found = listed(west, Device(name="a"), Device(name="b"), given=options(shares=4))
    assert list(found.by_resource[LAMP])[-1] == "a"
    assert found.problems == ("device 'b' exceeds the limit of 5 devices and shares; set --shares",)


# ------------------------------------------------------------ preferred devices

WEST = Device(name="west", allow_multiple_allocations=True)
EAST = Device(name="east", allow_multiple_allocations=True)


PREFERRED = {
    "the-drivers-order": ("w0 w1 e0 e1", "", 1, "w0"),
    "different-devices-first": ("w0 w1 e0 e1", "", 2, "w0 e0"),
    "then-the-same-again": ("w0 w1 e0 e1", "", 3, "w0 e0 w1"),
    "after-those-that-it-must-have": ("w0 w1 e0 e1", "w1", 2, "w1 e0"),
    "of-those-that-are-free": ("w1 e1", "", 2, "w1 e1"),
    "no-more-than-there-are": ("w0 e0", "", 5, "w0 e0"),
}


@pytest.mark.parametrize(
    ("available", "required", "size", "chosen"), PREFERRED.values(), ids=PREFERRED
)
def test_the_kubelet_prefers_devices_in_the_drivers_order(available, required, size, chosen):
    devices = listed(WEST, EAST, given=options(shares=2)).by_resource[LAMP]
    names = {"w": "west", "e": "east"}

    def ids(text: str) -> list[str]:
        return [f"{names[each[0]]}::{each[1]}" for each in text.split()]

    found = preferred(devices, available=ids(available)[::-1], required=ids(required), size=size)
    assert found == ids(chosen)


# ------------------------------------------------------------ edits


def test_a_container_gets_the_edits_of_all_of_its_devices():
    answer = response_of(
        [
            Edits(
                env={"A": "1", "LAST": "first"},
                device_nodes=(DeviceNode(path="/dev/a"),),
                mounts=(Mount(host_path="/h/a", container_path="/c/a"),),
                cdi_devices=("v.example/c=a", "v.example/c=both"),
            ),
            Edits(
                env={"LAST": "second"},
                device_nodes=(
                    DeviceNode(path="/dev/b", host_path="/dev/other", permissions="r"),
                    DeviceNode(path="/dev/a"),
                ),
                mounts=(Mount(host_path="/h/b", container_path="/c/b", options=("rw", "rbind")),),
                cdi_devices=("v.example/c=both",),
            ),
        ]
    )
    assert dict(answer.envs) == {"A": "1", "LAST": "second"}
    assert [(d.container_path, d.host_path, d.permissions) for d in answer.devices] == [
        ("/dev/a", "/dev/a", "rwm"),
        ("/dev/b", "/dev/other", "r"),
    ]
    assert [(m.container_path, m.host_path, m.read_only) for m in answer.mounts] == [
        ("/c/a", "/h/a", True),
        ("/c/b", "/h/b", False),
    ]
    assert [each.name for each in answer.cdi_devices] == ["v.example/c=a", "v.example/c=both"]


UNSUPPORTED_EDITS = {
    "hooks": (Edits(hooks=(Hook(name="prestart", path="/bin/true"),)), "hooks"),
    "network-devices": (
        Edits(net_devices=(NetDevice(host_interface_name="a", name="b"),)),
        "network devices",
    ),
    "owner": (Edits(device_nodes=(DeviceNode(path="/dev/a", uid=7),)), "/dev/a"),
    "no-access": (
        Edits(device_nodes=(DeviceNode(path="/dev/a", permissions="none"),)),
        "without access",
    ),
    "noexec": (
        Edits(mounts=(Mount(host_path="/a", container_path="/b", options=("noexec",)),)),
        "noexec of mount /b",
    ),
    "file-system": (
        Edits(mounts=(Mount(host_path="t", container_path="/b", type="tmpfs"),)),
        "tmpfs of mount /b",
    ),
    "not-valid-in-cdi-either": (Edits(env={"A=B": ""}), "A=B"),
}


@pytest.mark.parametrize(("edits", "problem"), UNSUPPORTED_EDITS.values(), ids=UNSUPPORTED_EDITS)
def test_edits_that_a_device_plugin_cannot_pass_are_named(edits, problem):
    assert problem in (edits_problem(edits) or "")


def test_the_default_options_of_a_mount_can_be_passed():
    assert edits_problem(Edits(mounts=(Mount(host_path="/a", container_path="/b"),))) is None


# ------------------------------------------------------------ drivers


class Optional(DeviceParameters):
    speed: int = 0


class Required(DeviceParameters):
    speed: int


class _Policies:
    pass


UNSUPPORTED_DRIVERS = {
    "undoes-what-it-prepares": (DriverTraits(side_effects=True), "set --unprepare-late"),
    "required-parameters": (
        DriverTraits(side_effects=False, parameters_type=Required),
        "parameters Required are invalid without speed",
    ),
    "claims": (DriverTraits(side_effects=False, claim_data=True), "there are no claims"),
    "network": (DriverTraits(side_effects=False, network_devices=True), "no node owns"),
    "policies": (DriverTraits(side_effects=False, policies=_Policies()), "policies"),
}


@pytest.mark.parametrize(
    ("traits", "problem"), UNSUPPORTED_DRIVERS.values(), ids=UNSUPPORTED_DRIVERS
)
def test_a_driver_that_needs_more_than_a_device_plugin_is_refused(traits, problem):
    with pytest.raises(SettingsError, match=problem) as raised:
        check_supported(DRIVER, traits, options())
    assert str(raised.value).startswith(f"driver {DRIVER} cannot be a device plugin: ")


def test_other_drivers_are_not_refused():
    check_supported(DRIVER, DriverTraits(side_effects=False, parameters_type=Optional), options())
    check_supported(DRIVER, DriverTraits(side_effects=True), options(unprepare_late=True))
