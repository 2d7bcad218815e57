"""Devices and counter sets as the API wants them, and whether two of them mean the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from drakit import Device, Edits, Version
from drakit.device import (
    Capacity,
    CapacityRange,
    CounterSet,
    NodeAllocatableResource,
    Taint,
    Topology,
)
from drakit_formats.resource.device import (
    counter_set_body,
    counter_set_of,
    device_body,
    device_of,
    same_counter_sets,
    same_device,
)
from drakit_formats.resource.inventory import device_problems

FULL = Device(
    name="gpu-0",
    pool="gpus",
    attributes={
        "usb": True,
        "port": 3,
        "model": "x",
        "firmware": Version("1.2.3"),
        "ports": (1, 2),
        "flags": (True, False),
        "links": ("a", "b"),
        "firmwares": (Version("1.2.3"), Version("2.0.0")),
    },
    capacity={
        "memory": Capacity(value="8Gi", default="1Gi", valid_values=("1Gi", "2Gi")),
        "bandwidth": Capacity(
            value="10", default="2", valid_range=CapacityRange(min="1", max="9", step="1")
        ),
        "slots": Capacity(value="4", default="1"),
        "weight": Capacity(value="1"),
        "size": "8Gi",
    },
    topology=Topology(numa_node=0, pcie_root="pci0000:00", pci_bus_id="0000:01:00.0"),
    consumes={"card-0": {"memory": "8Gi", "engines": "2"}},
    allow_multiple_allocations=True,
    taints=(Taint(key="gpu.example.com/loose", effect="NoSchedule"),),
    edits=Edits.of_device_nodes("/dev/gpu0"),
)


NEWER = Device(
    name="part-0",
    consumes={"card-0": {"slots": "1"}, "card-1": {"slots": "2"}},
    compatibility_groups={"card-1": ("mig", "vgpu")},
    binds_to_node=True,
    binding_conditions=("x.y/attached", "Ready"),
    binding_failure_conditions=("x.y/failed",),
    capacity={"memory": "8Gi"},
    node_allocatable_resources={
        "cpu": NodeAllocatableResource(device_multiplier="8"),
        "memory": NodeAllocatableResource(
            capacity_key="memory",
            capacity_multiplier="1",
            overhead_per_pod="64Mi",
            overhead_per_container="0",
        ),
    },
    extra={"skipsLunch": ["always", {"on": 1.5}]},
)
NEWER_BODY = {
    "name": "part-0",
    "skipsLunch": ["always", {"on": 1.5}],
    "consumesCounters": [
        {"counterSet": "card-0", "counters": {"slots": {"value": "1"}}},
        {
            "counterSet": "card-1",
            "counters": {"slots": {"value": "2"}},
            "compatibilityGroups": ["mig", "vgpu"],
        },
    ],
    "bindsToNode": True,
    "bindingConditions": ["x.y/attached", "Ready"],
    "bindingFailureConditions": ["x.y/failed"],
    "capacity": {"memory": {"value": "8Gi"}},
    "nodeAllocatableResources": {
        "cpu": {"mapping": {"deviceMultiplier": "8"}},
        "memory": {
            "mapping": {"capacityKey": "memory", "capacityMultiplier": "1"},
            "overhead": {"perPod": "64Mi", "perContainer": "0"},
        },
    },
}


def test_a_good_device_is_written_as_the_api_wants_it():
    assert device_problems(FULL) == []
    taint = {"key": "gpu.example.com/loose", "effect": "NoSchedule"}
    assert device_body(FULL, taints=[taint]) == {
        "name": "gpu-0",
        "attributes": {
            "usb": {"bool": True},
            "port": {"int": 3},
            "model": {"string": "x"},
            "firmware": {"version": "1.2.3"},
            "ports": {"ints": [1, 2]},
            "flags": {"bools": [True, False]},
            "links": {"strings": ["a", "b"]},
            "firmwares": {"versions": ["1.2.3", "2.0.0"]},
            "resource.kubernetes.io/numaNode": {"int": 0},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"},
            "resource.kubernetes.io/pciBusID": {"string": "0000:01:00.0"},
        },
        "capacity": {
            "memory": {
                "value": "8Gi",
                "requestPolicy": {"default": "1Gi", "validValues": ["1Gi", "2Gi"]},
            },
            "bandwidth": {
                "value": "10",
                "requestPolicy": {
                    "default": "2",
                    "validRange": {"min": "1", "max": "9", "step": "1"},
                },
            },
            "slots": {"value": "4", "requestPolicy": {"default": "1"}},
            "weight": {"value": "1"},
            "size": {"value": "8Gi"},
        },
        "consumesCounters": [
            {
                "counterSet": "card-0",
                "counters": {"memory": {"value": "8Gi"}, "engines": {"value": "2"}},
            }
        ],
        "allowMultipleAllocations": True,
        "taints": [taint],
    }


@pytest.mark.parametrize("device", [FULL, NEWER, Device(name="c")], ids=lambda device: device.name)
def test_a_device_can_be_read_from_what_was_written(device: Device):
    body = device_body(device, taints=[{"key": "a/b", "value": "c", "effect": "NoExecute"}])
    read = device_of(json.loads(json.dumps(body)))
    assert device_body(read) | {"taints": body["taints"]} == body
    assert read.taints == (Taint(key="a/b", value="c", effect="NoExecute"),)


def test_a_device_without_anything_is_a_name():
    assert device_body(Device(name="c")) == {"name": "c"}


def test_a_counter_set_is_written_without_its_pool():
    given = CounterSet(name="card-0", pool="gpus", counters={"memory": "8Gi"})
    body = {"name": "card-0", "counters": {"memory": {"value": "8Gi"}}}
    assert counter_set_body(given) == body
    assert counter_set_of(body) == replace(given, pool="")


def capacity(value: str, **policy: object) -> dict:
    return {"size": {"value": value, **({"requestPolicy": policy} if policy else {})}}


def consuming(**amounts: str) -> list[dict]:
    counters = {name: {"value": amount} for name, amount in amounts.items()}
    return [{"counterSet": "s", "counters": counters}]


COMPARED = {
    "quantity": ("capacity", capacity("8Gi"), capacity("8192Mi"), True),
    "other-quantity": ("capacity", capacity("8Gi"), capacity("8Ti"), False),
    "no-capacity": ("capacity", capacity("8Gi"), {}, False),
    "same-nonsense": ("capacity", capacity("x"), capacity("x"), True),
    "nonsense": ("capacity", capacity("8"), capacity("x"), False),
    "values-of-a-policy": (
        "capacity",
        capacity("8", default="1000m", validValues=["1", "2000m"]),
        capacity("8", default="1", validValues=["1", "2"]),
        True,
    ),
    "range-of-a-policy": (
        "capacity",
        capacity("8", default="1", validRange={"min": "1000m", "step": "1"}),
        capacity("8", default="1", validRange={"min": "1", "step": "1000m"}),
        True,
    ),
    "another-range": (
        "capacity",
        capacity("8", default="1", validRange={"min": "1"}),
        capacity("8", default="1", validRange={"min": "1", "max": "4"}),
        False,
    ),
    "policy-dropped": ("capacity", capacity("8", default="1"), capacity("8"), False),
    "attribute": ("attributes", {"a": {"int": 1}}, {"a": {"int": 1}}, True),
    "other-value": ("attributes", {"a": {"int": 1}}, {"a": {"int": 2}}, False),
    "empty-and-null": ("attributes", {}, None, True),
    "lists-have-an-order": (
        "attributes",
        {"a": {"strings": ["x", "y"]}},
        {"a": {"strings": ["y", "x"]}},
        False,
    ),
    "taints-are-compared-elsewhere": ("taints", [{"key": "a"}], [], True),
    "counters": ("consumesCounters", consuming(m="1Gi"), consuming(m="1024Mi"), True),
    "other-counters": ("consumesCounters", consuming(m="1Gi"), consuming(m="2Gi"), False),
    "more-counters": ("consumesCounters", consuming(m="1"), consuming(m="1", n="1"), False),
    "sharing-dropped": ("allowMultipleAllocations", True, None, False),
    "false-and-absent": ("allowMultipleAllocations", False, None, True),
    "a-field-that-we-never-write": ("bindsToNode", None, True, False),
}


@pytest.mark.parametrize(("field", "ours", "theirs", "same"), COMPARED.values(), ids=COMPARED)
def test_devices_are_compared_by_meaning(field, ours, theirs, same):
    mine, stored = {"name": "c", field: ours}, {"name": "c", field: theirs}
    assert same_device(mine, stored) is same
    assert same_device(stored, mine) is same


def test_devices_of_two_names_are_not_the_same():
    assert not same_device({"name": "a"}, {"name": "b"})


def test_counter_sets_are_compared_by_meaning():
    def sets(**amounts: str) -> list[dict]:
        return [{"name": k, "counters": {"m": {"value": v}}} for k, v in amounts.items()]

    assert same_counter_sets(sets(a="1Gi", b="2"), sets(b="2", a="1024Mi"))
    assert not same_counter_sets(sets(a="1Gi"), sets(a="2Gi"))
    assert not same_counter_sets(sets(a="1Gi"), sets(a="1Gi", b="1"))
    assert not same_counter_sets(sets(a="1Gi"), sets(b="1Gi"))


def test_newer_fields_are_written_as_the_api_wants_them():
    assert device_problems(NEWER) == []
    assert device_body(NEWER) == NEWER_BODY


CHANGED = {
    "empty": ({"skipsLunch": ["always", {"on": 1.5, "off": None}]}, True),
    "extra": ({"skipsLunch": ["always", {"on": 2}]}, False),
    "order": ({"bindingConditions": ["Ready", "x.y/attached"]}, False),
    "a-resource": (
        {"nodeAllocatableResources": {"cpu": {"mapping": {"deviceMultiplier": "8"}}}},
        False,
    ),
    "quantity": (
        {
            "nodeAllocatableResources": NEWER_BODY["nodeAllocatableResources"]
            | {"cpu": {"mapping": {"deviceMultiplier": "8000m"}}}
        },
        True,
    ),
}


@pytest.mark.parametrize(("changed", "same"), CHANGED.values(), ids=CHANGED)
def test_newer_fields_are_compared_by_meaning(changed, same):
    assert same_device(NEWER_BODY, NEWER_BODY | changed) is same
