"""Conversion of a plugin's list to devices."""

from __future__ import annotations

import pytest

from drakit.device import Health, Topology
from drakit_formats.resource.inventory import check_inventory
from drakit_nodeplugin.endpoints.deviceplugin.messages import (
    DeviceRoom,
    TooManyDevicesError,
    devices_in,
    list_devices,
    resource_name_problem,
)
from drakit_nodeplugin.endpoints.wire import GarbageError
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from tests.unit.endpoints.deviceplugin.conftest import THING


def plugin_device(identity="thing-0", health="Healthy", *nodes):
    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in nodes])
    return pb.Device(ID=identity, health=health, topology=topology)


def only(*devices, resource=THING):
    (device,) = list_devices(devices, resource=resource, before=None).inventory.devices
    return device


@pytest.mark.parametrize(
    ("nodes", "topology", "text"),
    [
        pytest.param((), Topology(), None, id="none"),
        pytest.param((1,), Topology(numa_node=1), None, id="one"),
        pytest.param((0,), Topology(numa_node=0), None, id="the-first"),
        pytest.param((1, 1), Topology(numa_node=1), None, id="one-twice"),
        pytest.param((1, 0), Topology(), "0,1", id="two"),
        pytest.param((-1,), Topology(), None, id="less-than-none"),
    ],
)
def test_numa_nodes_are_topology_or_an_attribute(nodes, topology, text):
    device = only(plugin_device("thing-0", "Healthy", *nodes))
    assert device.topology == topology
    assert device.attributes.get("numaNodes") == text


HEALTH = {
    "healthy": ("Healthy", Health.healthy()),
    "unhealthy": (
        "Unhealthy",
        Health.unhealthy(
            "the device plugin of vendor.example/thing reports that the device is Unhealthy"
        ),
    ),
    "another-word": (
        "healthy",
        Health.unhealthy(
            "the device plugin of vendor.example/thing reports that the device is 'healthy', "
            "which is not Healthy"
        ),
    ),
}


@pytest.mark.parametrize(("said", "health"), HEALTH.values(), ids=HEALTH)
def test_health_is_what_the_plugin_reports(said, health):
    assert only(plugin_device(health=said)).health == health


def test_attributes_that_would_not_be_taken_are_left_out():
    device = only(plugin_device("x" * 65), resource=f"{'a.' * 40}a/thing")
    assert device.attributes == {}


def test_each_device_has_the_attribute_that_classes_choose_it_by():
    longest = f"a/{'x' * 62}"
    assert resource_name_problem(longest) is None
    assert only(plugin_device(), resource=longest).attributes["resource"] == longest


def test_the_last_device_with_an_id_counts_and_the_others_stay():
    twice = [plugin_device(health="Unhealthy"), plugin_device("b"), plugin_device()]
    found = list_devices(twice, resource=THING, before=None)
    assert {d.name: d.health for d in found.inventory.devices} == {
        "thing-0": Health.healthy(),
        "b": Health.healthy(),
    }
    (sentence,) = found.rejected
    assert "lists the device ID 'thing-0' more than once" in sentence


def test_devices_that_did_not_change_are_the_same_objects():
    before = list_devices([plugin_device("a"), plugin_device("b")], resource=THING, before=None)
    after = list_devices(
        [plugin_device("a"), plugin_device("b", "Unhealthy")], resource=THING, before=before
    )
    old, new = before.inventory.devices, after.inventory.devices
    assert [a is b for a, b in zip(old, new, strict=True)] == [True, False]


@pytest.mark.looptime
async def test_all_resources_together_have_room_for_as_many_devices_as_one():
    room = DeviceRoom()
    room.take("a.example/a", 16_000)
    room.take("a.example/b", 384)
    with pytest.raises(TooManyDevicesError, match=r"the 16,000 devices of other"):
        room.take("a.example/b", 385)
    room.take("a.example/a", 15_999)
    room.take("a.example/b", 385)
    room.release("a.example/a")
    room.take("a.example/b", 16_384)


def test_any_list_can_be_published():
    identities = ["GPU-0", "0000:01:00.0", "x" * 256, "é", "\x00", "a b", "-", "--"]
    found = list_devices(
        [plugin_device(i, "x", 0, 1) for i in identities], resource=THING, before=None
    )
    checked = check_inventory(found.inventory, node="node-1")
    assert checked.rejected == {}
    assert sorted(each.identity for each in found.listed.values()) == sorted(identities)


# ------------------------------------------------------------ messages


def test_devices_are_as_they_were_listed():
    nodes = [pb.NUMANode(ID=1), pb.NUMANode()]
    devices = [pb.Device(ID="a", health="Healthy", topology={"nodes": nodes}), pb.Device()]
    assert list(devices_in(pb.ListAndWatchResponse(devices=devices).SerializeToString())) == devices


def test_no_device_is_read_before_it_is_taken():
    raw = pb.ListAndWatchResponse(devices=[pb.Device(ID="a")]).SerializeToString() + b"\xff"
    devices = devices_in(raw)
    assert next(devices).ID == "a"
    with pytest.raises(GarbageError):
        next(devices)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        pytest.param({"topology": {"nodes": [{}] * 3000}}, "more than 4 KiB", id="numa-nodes"),
        pytest.param({"health": "x" * 5000}, "more than 4 KiB", id="health"),
    ],
)
def test_a_device_without_end_is_not_read(device, text):
    raw = pb.ListAndWatchResponse(devices=[device]).SerializeToString()
    with pytest.raises(GarbageError, match=text):
        next(devices_in(raw))
