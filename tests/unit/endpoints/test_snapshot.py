"""Snapshots are independent of the driver's objects, and unchanged devices keep their identity."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum, IntEnum
from typing import Any

import pytest

from drakit import Device, DriverError, PolicyConflict, PolicyOutcome, RejectedDevice, Version
from drakit.device import Capacity, CounterSet, Health, Inventory, Taint, Topology
from drakit_driver.runtime import snapshot as snapshot
from drakit_driver.runtime.snapshot import InventorySnapshots, UnsupportedValue, inventory_of
from drakit_formats.resource.inventory import check_inventory
from tests.fakes.tasks import counted_turns
from tests.unit.endpoints.camera import Camera, listing, new_endpoint, running, until

FULL = Device(
    name="a",
    pool="gpus",
    attributes={"n": 1, "v": Version("1.0.0"), "l": (1, 2), "t": "text"},
    capacity={"m": "1Gi", "s": Capacity(value="8", default="1", valid_values=("1", "2"))},
    topology=Topology(numa_node=1),
    consumes={"card": {"memory": "1"}},
    taints=(Taint(key="example.com/x", effect="NoSchedule"),),
    health=Health.unhealthy("it is dirty"),
)


class Word(str, Enum):  # noqa: UP042 - vendors write it, and its text is another one
    GPUS = "gpus"
    BAD = "unhealthy"


class Number(IntEnum):
    TWO = 2


class Lazy(Mapping[str, Any]):
    """A vendor's mapping, which records the threads that read it."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values_ = values
        self.readers: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.readers.add(threading.current_thread().name)
        return self.values_[key]

    def __iter__(self) -> Iterator[str]:
        self.readers.add(threading.current_thread().name)
        return iter(self.values_)

    def __len__(self) -> int:
        self.readers.add(threading.current_thread().name)
        return len(self.values_)


class Failing(Lazy):
    def __getitem__(self, key: str) -> Any:
        raise ValueError("the bus is gone")


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("nobody may see me")


def assert_plain(value: object) -> None:
    """Check that a value consists only of Python's own types and ours, at every level."""
    if is_dataclass(value):
        assert type(value).__module__ == "drakit.device"
        for field in fields(value):
            assert_plain(getattr(value, field.name))
    elif isinstance(value, dict):
        assert type(value) is dict
        for key, each in value.items():
            assert_plain(key)
            assert_plain(each)
    elif isinstance(value, tuple | list):
        assert type(value) in (tuple, list)
        for each in value:
            assert_plain(each)
    else:
        assert isinstance(value, UnsupportedValue) or type(value) in (
            type(None),
            bool,
            int,
            str,
            float,
        )


async def taken(
    *devices: object, snapshots: InventorySnapshots | None = None, **parts: Any
) -> Inventory:
    given = inventory_of(Inventory(devices=devices, **parts))
    return await (snapshots or InventorySnapshots()).of(given)


ODD_DEVICES = {
    "all-that-there-is": FULL,
    "an-enum-as-a-pool": replace(FULL, pool=Word.GPUS),
    "enums-as-attributes": replace(FULL, attributes={Word.GPUS: Word.BAD}),
    "an-enum-of-integers": replace(FULL, attributes={"n": Number.TWO}),
    "a-mapping-of-its-own": replace(FULL, attributes=Lazy({"n": 1})),
    "enums-as-health": replace(FULL, health=Health(Word.BAD, Word.GPUS)),
}


@pytest.mark.parametrize("device", ODD_DEVICES.values(), ids=ODD_DEVICES)
async def test_a_snapshot_is_plain_all_the_way_down(device):
    given = await taken(device, fallback=[device])
    assert_plain(given)
    assert given.fallback == given.devices


async def test_plain_values_stay_unchanged():
    given = await taken(FULL, counter_sets=[CounterSet(name="card", counters={"memory": "8Gi"})])
    assert given.devices == (FULL,)
    assert given.counter_sets == (CounterSet(name="card", counters={"memory": "8Gi"}),)
    assert given.devices[0].topology is FULL.topology


async def test_changes_after_the_yield_do_not_affect_the_snapshot():
    amounts = {"memory": "8Gi"}
    counters = {"memory": "8Gi"}
    device = Device(name="a", capacity=amounts, consumes={"card": amounts})
    sets = [CounterSet(name="card", counters=counters)]
    snapshots = InventorySnapshots()
    first = await taken(device, snapshots=snapshots, counter_sets=sets)
    checked = check_inventory(first)
    amounts["memory"] = counters["memory"] = 2
    assert first.devices[0].capacity == first.counter_sets[0].counters == {"memory": "8Gi"}
    second = await taken(device, snapshots=snapshots, counter_sets=sets)
    after = check_inventory(second, previous=checked)
    assert after.devices == ()
    assert "is of type int, not a quantity as a string" in after.rejected["a"]


async def test_a_dict_that_a_driver_changes_and_yields_again_is_a_change():
    attributes: dict[str, Any] = {"temp": 1}
    snapshots = InventorySnapshots()
    seen: list[Device] = []
    for value in (1, 2, True, 1, 1.0, (1,), (True,), Word.BAD, "unhealthy"):
        attributes["temp"] = value
        (device,) = (
            await taken(Device(name="a", attributes=attributes), snapshots=snapshots)
        ).devices
        seen.append(device)
    values = [device.attributes["temp"] for device in seen]
    assert list(map(repr, values)) == list(
        map(repr, (1, 2, True, 1, 1.0, (1,), (True,), "unhealthy", "unhealthy"))
    )
    assert seen[-1] is seen[-2], "an enum is the text that it is"


async def test_extra_fields_are_copied_and_their_types_count():
    extra: dict[str, Any] = {"new": [{"a": 1, "b": 2}]}
    snapshots = InventorySnapshots()
    seen: list[Device] = []
    for value in (1, 1, True, 1.5):
        extra["new"][0] = {"b": 2, "a": value} if seen else {"a": value, "b": 2}
        (device,) = (await taken(Device(name="a", extra=extra), snapshots=snapshots)).devices
        seen.append(device)
    assert [device.extra["new"][0]["a"] for device in seen] == [1, 1, True, 1.5]
    assert seen[0] is seen[1] is not seen[2]


UNCHANGED = {
    "the-same-object": lambda: FULL,
    "an-equal-one": lambda: replace(FULL, attributes={**FULL.attributes}),
    "in-another-order": lambda: replace(FULL, attributes=dict(reversed(FULL.attributes.items()))),
    "an-enum": lambda: replace(FULL, pool=Word.GPUS),
    "lazy": lambda: replace(FULL, attributes=Lazy({**FULL.attributes})),
}


@pytest.mark.parametrize("make", UNCHANGED.values(), ids=UNCHANGED)
async def test_a_device_that_did_not_change_is_the_object_that_it_was(make):
    snapshots = InventorySnapshots()
    first = await taken(Device(name="b"), FULL, snapshots=snapshots, fallback=[FULL])
    second = await taken(make(), snapshots=snapshots, fallback=[make()])
    assert second.devices[0] is first.devices[1]
    assert second.fallback[0] is first.fallback[0]


async def test_a_device_of_a_class_of_the_drivers_own_keeps_its_identity():
    class Special(Device):
        def __eq__(self, other: object) -> bool:
            return False

        __hash__ = None

    snapshots = InventorySnapshots()
    first = await taken(Special(name=Word.GPUS, attributes={"n": Word.BAD}), snapshots=snapshots)
    assert_plain(first)
    second = await taken(Special(name=Word.GPUS, attributes={"n": Word.BAD}), snapshots=snapshots)
    assert second.devices[0] is first.devices[0]


async def test_a_device_that_is_gone_is_forgotten():
    snapshots = InventorySnapshots()
    first = await taken(FULL, snapshots=snapshots)
    await taken(snapshots=snapshots)
    again = await taken(FULL, snapshots=snapshots)
    assert again.devices == first.devices
    assert again.devices[0] is not first.devices[0]


async def test_others_have_their_turns_while_many_devices_are_looked_at(monkeypatch):
    monkeypatch.setattr(snapshot, "STEP_SECONDS", 0)
    with counted_turns() as turns:
        given = await taken(*(Device(name=f"a-{number}") for number in range(640)))
    assert len(given.devices) == 640
    assert turns[0] >= 10


# ------------------------------------------------------------ in the driver's thread


async def test_a_mapping_of_the_drivers_own_is_read_in_its_thread_alone(behaviour, listener):
    lazy = Lazy({"n": 1})

    behaviour.devices = listing([Device(name="cam-0", attributes=lazy)])
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        inventory = await listener.hear()
        check_inventory(inventory, previous=check_inventory(inventory))
    assert inventory.devices[0].attributes == {"n": 1}
    assert lazy.readers == {"driver-camera.example.com"}


async def test_a_value_that_raises_when_read_stops_its_driver_with_a_sentence(
    behaviour, listener, caplog
):
    behaviour.devices = listing([Device(name="cam-0", attributes=Failing({"n": 1}))])
    async with running(new_endpoint(lambda: Camera(behaviour), listener)):
        await until(lambda: listener.reasons)
        assert listener.reasons[-1] == (
            "the value that it yielded cannot be read: ValueError: the bus is gone; this is a bug "
            "in the driver"
        )
    (record, *_) = [record for record in caplog.records if record.msg == "driver ended"]
    assert "in __getitem__" in record.exception


async def test_reports_other_than_devices_are_copied_too():
    rejected = [RejectedDevice(device="/dev/sda", reason="InUse")]
    withdrawn = ["cam-0", Word.GPUS]
    conflicts = [PolicyConflict(device="/dev/sda", policy="other")]
    listed = Inventory(
        devices=(),
        rejected=rejected,
        policies=(PolicyOutcome(policy=Word.GPUS, matched=Number.TWO, conflicts=conflicts),),
        withdrawn=withdrawn,
    )
    ours = await InventorySnapshots().of(inventory_of(listed))
    rejected.clear()
    conflicts.clear()
    withdrawn.clear()
    assert ours.withdrawn == ("cam-0", "gpus")
    assert {*map(type, ours.withdrawn)} == {str}
    assert [each.device for each in ours.rejected] == ["/dev/sda"]
    (outcome,) = ours.policies
    assert (outcome.policy, outcome.matched, len(outcome.conflicts)) == ("gpus", 2, 1)
    assert type(outcome.policy) is str


# ------------------------------------------------------------ what a driver yields

CAM = Device(name="cam-0")
CARD = CounterSet(name="card", counters={"memory": "8Gi"})


class Derived(Device):
    """A vendor's subclass."""


YIELDED = {
    "list": ([CAM], Inventory(devices=(CAM,))),
    "nothing": ([], Inventory(devices=())),
    "view": ({"a": CAM}.values(), Inventory(devices=(CAM,))),
    "generator": ((CAM for _ in range(2)), Inventory(devices=(CAM, CAM))),
    "derived": ([Derived(name="x")], Inventory(devices=(Derived(name="x"),))),
    "inventory": (
        Inventory(devices=[CAM], counter_sets=[CARD], fallback=[]),
        Inventory(devices=(CAM,), counter_sets=(CARD,), fallback=()),
    ),
}


@pytest.mark.parametrize(("listed", "inventory"), YIELDED.values(), ids=YIELDED)
def test_a_yielded_value_becomes_an_immutable_inventory(listed, inventory):
    assert inventory_of(listed) == inventory


def test_as_many_devices_as_are_allowed_are_taken():
    assert len(inventory_of([CAM] * 16_384).devices) == 16_384


def reporting(**fields: Any) -> Inventory:
    return Inventory(devices=(), **fields)


NO_INVENTORIES = {
    "names": (["cam-0"], "it listed str, which is not a Device; this is a bug"),
    "text": ("cam-0", "it listed str, which is not a Device"),
    "one-device": (CAM, "it listed Device, which is not a collection of devices"),
    "nothing-at-all": (None, "it listed NoneType, which is not a collection"),
    "a-hole": ([CAM, None], "it listed NoneType, which is not a Device"),
    "bad-inventory": (Inventory(devices=3), "it listed int, which is not a coll"),
    "devices-as-counter-sets": (
        Inventory(devices=[CAM], counter_sets=[CAM]),
        "it listed Device, which is not a CounterSet",
    ),
    "bad-fallback": (
        Inventory(devices=[CAM], fallback=["whole"]),
        "it listed str, which is not a Device",
    ),
    "endless": (itertools.repeat(CAM), "it listed more than 16,384 devices, which no node"),
    "no-list-of-reports": (reporting(rejected=3), "it listed int, which is not a collection"),
    "text-as-a-report": (
        reporting(rejected=["/dev/sda"]),
        "it listed str, which is not a RejectedDevice",
    ),
    "unknown-reason": (
        reporting(rejected=[RejectedDevice(device="x", reason="Broken")]),
        "a RejectedDevice with reason 'Broken', which is none of Dangerous, InUse",
    ),
    "no-number": (
        reporting(policies=[PolicyOutcome(policy="a", matched="3")]),
        "a PolicyOutcome whose matched is str, not int",
    ),
    "no-conflict": (
        reporting(policies=[PolicyOutcome(policy="a", conflicts=("b",))]),
        "it listed str, which is not a PolicyConflict",
    ),
    "withdrawn-text": (
        reporting(withdrawn="cam-0"),
        "it listed str, which is not a collection of withdrawn devices",
    ),
    "withdrawn-number": (reporting(withdrawn=["cam-0", 1]), "it listed int, which is not a str"),
    "withdrawn-without-end": (
        reporting(withdrawn=map(str, itertools.count())),
        "it listed more than 16,384 withdrawn devices",
    ),
    "order": (reporting(ordered=1), "an Inventory whose ordered is"),
    "types-of-partitions": (
        reporting(partition_type_attribute=None),
        "an Inventory whose partition_type_attribute is",
    ),
}


@pytest.mark.parametrize(("listed", "sentence"), NO_INVENTORIES.values(), ids=NO_INVENTORIES)
async def test_a_value_that_is_not_an_inventory_is_refused_with_a_sentence(listed, sentence):
    with pytest.raises(DriverError, match=sentence):
        await InventorySnapshots().of(inventory_of(listed))
