"""Messages of backends as the library's values, and claims as messages."""

from __future__ import annotations

from typing import Any

import pytest

from drakit.device import (
    AllocatedClaim,
    AllocatedDevice,
    Capacity,
    CapacityRange,
    ClaimReference,
    CounterSet,
    Device,
    DeviceNode,
    Edits,
    Health,
    Hook,
    IntelRdt,
    Inventory,
    Mount,
    NetDevice,
    NodeAllocatableResource,
    Taint,
    Topology,
    Version,
)
from drakit_driver.runtime.contract import DeviceKey
from drakit_formats.resource.inventory import check_inventory, device_problems
from drakit_nodeplugin.endpoints.backend.claimcalls import claim_message
from drakit_nodeplugin.endpoints.backend.convert import (
    MAX_EARLY,
    EarlyHealth,
    InventoryReader,
    counter_set_of,
    device_of,
    edits_of,
    entries_of,
    health_of,
)
from drakit_nodeplugin.endpoints.wire import Turns
from drakit_proto.backend.v1 import backend_pb2 as pb


def test_a_device_has_every_field_of_its_message():
    message = pb.Device(
        name="gpu-0",
        pool="gpus",
        attributes={
            "string": pb.Attribute(string="a"),
            "int": pb.Attribute(int=0),
            "bool": pb.Attribute(bool=False),
            "version": pb.Attribute(version="1.2.3"),
            "strings": pb.Attribute(strings=pb.StringList(values=["a", "b"])),
            "ints": pb.Attribute(ints=pb.IntList(values=[1, 2])),
            "bools": pb.Attribute(bools=pb.BoolList(values=[True])),
            "versions": pb.Attribute(versions=pb.StringList(values=["1.0.0"])),
        },
        capacity={
            "memory": pb.Capacity(value="8Gi"),
            "cores": pb.Capacity(value="8", default="1", valid_values=["1", "2"]),
            "bandwidth": pb.Capacity(
                value="10", default="1", valid_range=pb.CapacityRange(min="1", step="1")
            ),
        },
        topology=pb.Topology(numa_node=0, pcie_root="pci0000:00"),
        consumes={"memory": pb.CounterAmounts(counters={"slices": "1"})},
        allow_multiple_allocations=True,
        taints=[pb.Taint(key="a.example.com/x", value="y", effect=pb.TAINT_EFFECT_NO_EXECUTE)],
        health=pb.Health(status=pb.HEALTH_STATUS_UNHEALTHY, message="hot", broken=True),
        evict_if_gone=True,
        prepare_again=True,
        binding_conditions=["a.example.com/attached"],
        binding_failure_conditions=["a.example.com/failed", "Lost"],
        binds_to_node=True,
        node_allocatable_resources={
            "cpu": pb.NodeAllocatableResource(device_multiplier="8"),
            "memory": pb.NodeAllocatableResource(
                capacity_key="memory",
                capacity_multiplier="1",
                overhead_per_pod="1Gi",
                overhead_per_container="1Mi",
            ),
        },
        compatibility_groups={"memory": pb.CompatibilityGroups(names=["mig", "vgpu"])},
        extra='{"newField": [1, {"a": true}]}',
    )
    assert {field.name for field, _ in message.ListFields()} == {
        *pb.Device.DESCRIPTOR.fields_by_name
    }
    device = device_of(message)
    assert device == Device(
        name="gpu-0",
        pool="gpus",
        attributes={
            "string": "a",
            "int": 0,
            "bool": False,
            "version": Version("1.2.3"),
            "strings": ("a", "b"),
            "ints": (1, 2),
            "bools": (True,),
            "versions": (Version("1.0.0"),),
        },
        capacity={
            "memory": "8Gi",
            "cores": Capacity(value="8", default="1", valid_values=("1", "2")),
            "bandwidth": Capacity(
                value="10", default="1", valid_range=CapacityRange(min="1", step="1")
            ),
        },
        topology=Topology(numa_node=0, pcie_root="pci0000:00"),
        consumes={"memory": {"slices": "1"}},
        allow_multiple_allocations=True,
        taints=(Taint(key="a.example.com/x", value="y", effect="NoExecute"),),
        health=Health.unhealthy("hot", evict_pods=True),
        evict_if_gone=True,
        prepare_again=True,
        binding_conditions=("a.example.com/attached",),
        binding_failure_conditions=("a.example.com/failed", "Lost"),
        binds_to_node=True,
        node_allocatable_resources={
            "cpu": NodeAllocatableResource(device_multiplier="8"),
            "memory": NodeAllocatableResource(
                capacity_key="memory",
                capacity_multiplier="1",
                overhead_per_pod="1Gi",
                overhead_per_container="1Mi",
            ),
        },
        compatibility_groups={"memory": ("mig", "vgpu")},
        extra={"newField": [1, {"a": True}]},
    )
    assert type(device.attributes["bool"]) is bool
    sets = (counter_set_of(pb.CounterSet(name="memory", pool="gpus", counters={"slices": "7"})),)
    assert sets == (CounterSet(name="memory", pool="gpus", counters={"slices": "7"}),)
    assert check_inventory(Inventory(devices=(device,), counter_sets=sets)).rejected == {}


def test_a_device_of_a_name_alone_is_one_with_all_defaults():
    assert device_of(pb.Device(name="gpu-0")) == Device(name="gpu-0")


@pytest.mark.parametrize(
    ("message", "health"),
    [
        pytest.param(pb.Health(), Health.unknown(), id="no-status"),
        pytest.param(pb.Health(status=9, message="?"), Health.unknown("?"), id="a-later-version"),
        pytest.param(pb.Health(status=1), Health.healthy(), id="healthy"),
        pytest.param(pb.Health(status=1, broken=True), Health.healthy(), id="broken-but-healthy"),
        pytest.param(
            pb.Health(status=2, message="x" * 5000),
            Health.unhealthy("x" * 1024),
            id="a-long-message",
        ),
    ],
)
def test_health(message, health):
    assert health_of(message) == health


def test_edits_have_every_field_of_their_message():
    nodes = [
        {"path": "/dev/a"},
        {"path": "/dev/b", "host_path": "/dev/c", "type": "c", "major": 0, "minor": 3}
        | {"permissions": "rw", "file_mode": 0o600, "uid": 0, "gid": 5, "identity": "usb:a"},
    ]
    mount = {"host_path": "/a", "container_path": "/b"}
    mounts = [mount, mount | {"options": ("rw",), "type": "tmpfs"}]
    hook = {"name": "prestart", "path": "/h", "args": ("h",), "env": {"X": "y"}}
    hook["timeout_seconds"] = 0
    interface = {"host_interface_name": "eth1", "name": "net1"}
    rdt = {"clos_id": "a", "schemata": ("L3:0=f",), "enable_monitoring": True}
    message = pb.Edits(
        env={"A": "1"},
        device_nodes=[pb.DeviceNode(**each) for each in nodes],
        mounts=[pb.Mount(**each) for each in mounts],
        hooks=[pb.Hook(**hook)],
        net_devices=[pb.NetDevice(**interface)],
        additional_gids=[44],
        intel_rdt=pb.IntelRdt(**rdt),
        cdi_devices=["vendor.example/gpu=0"],
    )
    assert edits_of(message) == Edits(
        env={"A": "1"},
        device_nodes=tuple(DeviceNode(**each) for each in nodes),
        mounts=tuple(Mount(**each) for each in mounts),
        hooks=(Hook(**hook),),
        net_devices=(NetDevice(**interface),),
        additional_gids=(44,),
        intel_rdt=IntelRdt(**rdt),
        cdi_devices=("vendor.example/gpu=0",),
    )
    assert entries_of(message) == 13
    assert edits_of(pb.Edits()) == Edits()


def test_variables_have_an_order_that_no_message_has():
    names = [f"V{count}" for count in range(50)]
    env = dict.fromkeys(names, "")
    edits = edits_of(pb.Edits(env=env, hooks=[pb.Hook(env=env)]))
    assert list(edits.env) == list(edits.hooks[0].env) == sorted(names)


def attributes(**values):
    return {name: pb.Attribute(**{kind: value}) for name, (kind, value) in values.items()}


def listing(device: pb.Device, *, backwards: bool = False) -> bytes:
    """Serialize one device, with its attributes in one order or the other."""
    fields = b"".join(
        pb.Device(attributes={name: value}).SerializeToString()
        for name, value in sorted(device.attributes.items(), reverse=backwards)
    )
    device.ClearField("attributes")
    raw = device.SerializeToString() + fields
    assert len(raw) < 0x80
    return b"\x0a" + bytes([len(raw)]) + raw


async def read_all(*raws: bytes) -> list[Inventory | None]:
    reader = InventoryReader()
    return [await reader.read(raw, Turns()) for raw in raws]


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param("{", id="broken"),
        pytest.param("[1]", id="list"),
        pytest.param("[" * 20000, id="deep"),
        pytest.param('{"a": NaN}', id="nan"),
        pytest.param('"{}"', id="text"),
    ],
)
def test_extra_fields_that_are_no_json_object_are_a_problem_of_their_device(extra):
    (problem,) = device_problems(device_of(pb.Device(name="gpu-0", extra=extra)))
    assert problem.startswith("its extra fields are of type")


@pytest.mark.looptime
async def test_an_order_and_the_types_of_partitions_are_part_of_the_inventory():
    def listed(**fields: Any) -> bytes:
        devices = [pb.Device(name="gpu-1"), pb.Device(name="gpu-0")]
        return pb.WatchDevicesResponse(devices=devices, **fields).SerializeToString()

    plain, ordered, again, typed = await read_all(
        listed(),
        listed(ordered=True),
        listed(ordered=True) + b"\x20\x81\x00",  # the same number, in more bytes
        listed(ordered=True, partition_type_attribute="a.example.com/profile"),
    )
    assert (plain.ordered, ordered.ordered) == (False, True)
    assert again is None
    assert typed.partition_type_attribute == "a.example.com/profile"
    assert [each.name for each in typed.devices] == ["gpu-1", "gpu-0"]


@pytest.mark.looptime
async def test_a_device_with_its_fields_in_another_order_is_unchanged():
    fields = [
        pb.Device(name="gpu-0", attributes=attributes(a=("int", 1), b=("string", "x")))
        for _ in range(2)
    ]
    first, second = listing(fields[0]), listing(fields[1], backwards=True)
    assert first != second
    (inventory, again) = await read_all(first, second)
    assert [each.name for each in inventory.devices] == ["gpu-0"]
    assert again is None


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(("int", 1), ("bool", True), id="a-number-becomes-yes"),
        pytest.param(
            ("ints", pb.IntList(values=[1, 0])),
            ("bools", pb.BoolList(values=[True, False])),
            id="numbers-become-yes-and-no",
        ),
        pytest.param(("string", "1.0.0"), ("version", "1.0.0"), id="a-text-becomes-a-version"),
    ],
)
async def test_a_value_that_becomes_one_of_another_type_is_a_change(old, new):
    fields = [pb.Device(name="gpu-0", attributes=attributes(a=value)) for value in (old, new)]
    assert None not in await read_all(*map(listing, fields))


@pytest.mark.looptime
async def test_a_device_with_too_many_attributes_is_not_taken_for_one_without():
    crowd = {f"a{count}": pb.Attribute(int=count) for count in range(100)}
    messages = [
        pb.WatchDevicesResponse(devices=[pb.Device(name="gpu-0", attributes=each)])
        for each in ({}, crowd, {})
    ]
    inventories = await read_all(*[each.SerializeToString() for each in messages])
    sizes = [len(each.devices[0].attributes) for each in inventories if each is not None]
    assert sizes == [0, 100, 0]


def test_a_claim_is_written_with_all_that_its_devices_have():
    reference = {"namespace": "lab", "name": "train", "uid": "uid-a"}
    facts = {"name": "gpu-0", "pool": "gpus", "request": "main/small", "share_id": "s1"}
    facts |= {"admin_access": True, "consumed_capacity": {"memory": "1Gi"}}
    device = AllocatedDevice(**facts, configs=({"a": 1}, {"a": None}))
    plain = AllocatedDevice(name="gpu-1", pool="", request="main")
    claim = AllocatedClaim(claim=ClaimReference(**reference), devices=(device, plain))
    written = {"configs": ['{"a":1}', '{"a":null}'], "parameters": '{"a":null}'}
    assert claim_message(claim) == pb.Claim(
        **reference,
        devices=[
            pb.AllocatedDevice(**facts, **written),
            pb.AllocatedDevice(name="gpu-1", request="main", parameters="{}"),
        ],
    )


def test_health_of_devices_that_are_never_listed_is_not_kept_without_end():
    early = EarlyHealth()
    for count in range(MAX_EARLY + 10):
        assert early.keep(DeviceKey("", f"gpu-{count}"), Health.healthy())
    early.keep(DeviceKey("", "x" * 64), Health.healthy())
    inventory = Inventory(
        devices=tuple(Device(name=f"gpu-{count}") for count in range(MAX_EARLY + 10))
    )
    assert len(early.list(inventory)) == MAX_EARLY
    assert early.list(inventory) == {}
    assert not early.keep(DeviceKey("", "gpu-0"), Health.healthy())
