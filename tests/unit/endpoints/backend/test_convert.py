"""Messages of backends as the library's values, and claims as messages."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from drakit import device as values
from drakit.device import ClaimConfig, Device, Edits, Health, Inventory, PreparedDevice
from drakit_driver.runtime.backend import health_of, value_of
from drakit_driver.runtime.contract import DeviceKey
from drakit_formats.resource.inventory import device_problems
from drakit_nodeplugin.endpoints.backend.convert import MAX_EARLY, EarlyHealth, InventoryReader
from drakit_nodeplugin.endpoints.wire import Turns
from drakit_proto.backend.v1 import backend_pb2 as pb

OTHERS = ("AllocatedDevice", "Health", "HeldDevice", "HeldNode")
"""Classes of which a message has other fields."""

CLASSES = [
    kind
    for name, kind in vars(values).items()
    if is_dataclass(kind) and hasattr(pb, name) and name not in OTHERS
]


HEALTH = {
    "no-status": (pb.Health(), Health.unknown()),
    "a-later-version": (pb.Health(status=9, message="?"), Health.unknown("?")),
    "healthy": (pb.Health(status=1), Health.healthy()),
    "broken-but-healthy": (pb.Health(status=1, broken=True), Health.healthy()),
    "a-long-message": (pb.Health(status=2, message="x" * 5000), Health.unhealthy("x" * 1024)),
}


@pytest.mark.parametrize(("message", "health"), HEALTH.values(), ids=HEALTH)
def test_health(message, health):
    assert health_of(message) == health


def test_variables_have_an_order_that_no_message_has():
    names = [f"V{count}" for count in range(50)]
    env = dict.fromkeys(names, "")
    edits = value_of(pb.Edits(env=env, hooks=[pb.Hook(env=env)]), Edits)
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


NO_OBJECTS = {
    "broken": "{",
    "list": "[1]",
    "deep": "[" * 20000,
    "nan": '{"a": NaN}',
    "text": '"{}"',
}


@pytest.mark.parametrize("extra", NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_extra_fields_that_are_no_json_object_are_a_problem_of_their_device(extra):
    (problem,) = device_problems(value_of(pb.Device(name="gpu-0", extra=extra), Device))
    assert problem.startswith("its extra fields are of type")


def listed(**fields: Any) -> bytes:
    return pb.WatchDevicesResponse(**fields).SerializeToString()


def valued(kind: str, value: object) -> bytes:
    return listing(pb.Device(name="gpu-0", attributes=attributes(a=(kind, value))))


def two_fields() -> pb.Device:
    return pb.Device(name="gpu-0", attributes=attributes(a=("int", 1), b=("string", "x")))


OUTCOME = listed(policies=[pb.PolicyOutcome(policy="hall", matched=1)])
CHANGES = {
    "ordered": (listed(), listed(ordered=True), True),
    "the-same-number-in-more-bytes": (
        listed(ordered=True),
        listed(ordered=True) + b"\x20\x81\x00",
        False,
    ),
    "fields-in-another-order": (
        listing(two_fields()),
        listing(two_fields(), backwards=True),
        False,
    ),
    "a-number-becomes-yes": (valued("int", 1), valued("bool", True), True),
    "numbers-become-yes-and-no": (
        valued("ints", pb.IntList(values=[1, 0])),
        valued("bools", pb.BoolList(values=[True, False])),
        True,
    ),
    "a-text-becomes-a-version": (valued("string", "1.0.0"), valued("version", "1.0.0"), True),
    "the-same-outcome": (OUTCOME, OUTCOME, False),
    "another-outcome": (
        OUTCOME,
        listed(policies=[pb.PolicyOutcome(policy="hall", matched=1, published=1)]),
        True,
    ),
    "a-withdrawn-device": (OUTCOME, OUTCOME + listed(withdrawn=["hall-0"]), True),
}


@pytest.mark.looptime
@pytest.mark.parametrize(("old", "new", "changes"), CHANGES.values(), ids=CHANGES)
async def test_only_a_change_is_an_inventory(old, new, changes):
    first, second = await read_all(old, new)
    assert first is not None
    assert (second is not None) is changes


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


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_attribute_of_a_value_has_a_field_in_its_message(kind):
    without = {Device: {"edits"}, PreparedDevice: {"edits"}, ClaimConfig: {"source"}}
    names = {each.name for each in fields(kind)} - without.get(kind, set())
    assert names <= set(getattr(pb, kind.__name__).DESCRIPTOR.fields_by_name)
