"""The publishable part of an inventory; an unchanged inventory is not checked again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drakit import Device, Version
from drakit.device import CounterSet, Inventory, Topology
from drakit_formats.resource import inventory as inventory_module
from drakit_formats.resource.inventory import CheckedInventory, check_inventory


def inventory(*devices: object, **fields: object) -> Inventory:
    return Inventory(devices=devices, **fields)


def names(checked: CheckedInventory) -> list[str]:
    return [f"{device.pool}/{device.name}".lstrip("/") for device in checked.devices]


CARD = CounterSet(name="card", counters={"memory": "8Gi", "engines": "2"})


def part(name: str, pool: str = "", **consumed: str) -> Device:
    return Device(name=name, pool=pool, consumes={"card": consumed})


def test_pools_beyond_the_limit_are_rejected_and_take_no_place_of_known_ones():
    """A backend without any right can list thousands of pools."""

    def pools(checked: CheckedInventory) -> set[str]:
        return {each.pool for each in (*checked.devices, *checked.counter_sets)}

    known = check_inventory(inventory(*(Device(name="a", pool=f"p{n}") for n in range(60))))
    given = [Device(name="b", pool=f"{prefix}{n}") for n in range(60) for prefix in "qp"]
    sets = [replace(CARD, pool=f"r{n}") for n in range(10)]
    checked = check_inventory(
        inventory(*given, counter_sets=sets, fallback=[Device(name="c", pool="s")]), previous=known
    )
    assert pools(checked) == {f"p{n}" for n in range(60)} | {f"q{n}" for n in range(4)}
    assert checked.fallback == ()
    assert checked.rejected_count == 56 + 10 + 1
    assert checked.rejected["q4/b"] == (
        "its pool is beyond the limit of 64 pools; list it in one of the others"
    )


REJECTED = {
    "name": (Device(name="A"), "A"),
    "pool-and-name": (Device(name="A", pool="gpus"), "gpus/A"),
    "control-characters": (Device(name="a\n\x1b[31m"), r"'a\n\x1b[31m'"),
    "no-name": (Device(name=None), "None"),
    "a-list": (Device(name=["a"]), "['a']"),
    "nothing": (Device(name=""), "''"),
    "pool-of-another-type": (Device(name="A", pool=7), "7/A"),
    "a-text-instead-of-a-device": ("cam-0", "cam-0"),
    "nothing-at-all": (None, "None"),
    "a-long-dict": ({"name": "x" * 500}, "{'name': '" + "x" * 70),
}


@pytest.mark.parametrize(("device", "key"), REJECTED.values(), ids=REJECTED)
def test_what_is_rejected_is_named_whatever_it_is(device, key):
    checked = check_inventory(inventory(device, Device(name="b")))
    assert names(checked) == ["b"]
    assert list(checked.rejected) == [key]


def test_a_driver_with_a_bug_in_all_devices_is_named_a_hundred_times():
    checked = check_inventory(inventory(*(Device(name=f"CAM-{n}") for n in range(500))))
    assert checked.devices == ()
    assert len(checked.rejected) == 100
    assert checked.rejected_count == 500


def test_what_a_pool_is_called_with_the_nodes_name_counts():
    long = Device(name="a", pool="p" * 200)
    assert names(check_inventory(inventory(long))) == ["p" * 200 + "/a"]
    assert "too long" in str(check_inventory(inventory(long), node="n" * 60).rejected)


CONSUMERS = {
    "all-that-there-is": (part("a", memory="8Gi"), None),
    "some-of-several": (part("a", memory="1000m", engines="2"), None),
    "more-than-there-is": (part("a", memory="8193Mi"), "has 8Gi"),
    "unknown-counter": (part("a", shaders="1"), "does not have"),
    "unknown-set": (Device(name="a", consumes={"cord": {"memory": "1"}}), "does not have"),
    "set-of-another-pool": (part("a", pool="p", memory="1"), "does not have"),
    "no-quantity": (part("a", memory="x"), "not a Kubernetes quantity"),
}


@pytest.mark.parametrize(("device", "problem"), CONSUMERS.values(), ids=CONSUMERS)
def test_what_a_device_consumes_must_be_there(device, problem):
    checked = check_inventory(inventory(device, counter_sets=(CARD,)))
    assert (checked.devices == (device,)) is (problem is None)
    assert (not checked.rejected) if problem is None else (problem in str(checked.rejected))


BAD_COUNTER_SETS = {
    "name": (CounterSet(name="Card", counters={"m": "1"}), "not a DNS label"),
    "no-counters": (CounterSet(name="card", counters={}), "has 0 counters"),
    "33-counters": (
        CounterSet(name="card", counters={f"m{n}": "1" for n in range(33)}),
        "has 33 counters",
    ),
    "quantity": (CounterSet(name="card", counters={"m": "x"}), "not a Kub"),
    "negative": (CounterSet(name="card", counters={"m": "-1"}), "negative"),
    "no-mapping": (CounterSet(name="card", counters=None), "not a mapping"),
    "pool": (CounterSet(name="card", counters={"m": "1"}, pool=7), "not a string"),
    "no-counter-set": ({"name": "card"}, "not a CounterSet"),
}


@pytest.mark.parametrize(
    ("counter_set", "problem"), BAD_COUNTER_SETS.values(), ids=BAD_COUNTER_SETS
)
def test_a_bad_counter_set_takes_its_devices_with_it(counter_set, problem):
    given_ = inventory(part("a", m="1"), Device(name="b"), counter_sets=(counter_set,))
    checked = check_inventory(given_)
    assert names(checked) == ["b"]
    assert checked.counter_sets == ()
    assert problem in str(checked.rejected)
    assert "which its pool does not have" in checked.rejected["a"]


def test_of_two_counter_sets_with_one_name_the_first_is_kept():
    other = replace(CARD, counters={"memory": "1Ti"})
    elsewhere = replace(CARD, pool="p")
    checked = check_inventory(
        inventory(part("a", memory="1Ti"), counter_sets=(CARD, other, elsewhere))
    )
    assert checked.counter_sets == (CARD, elsewhere)
    assert checked.devices == ()


def test_a_fallback_is_checked_on_its_own():
    whole = Device(name="a", attributes={"parts": False})
    checked = check_inventory(
        inventory(part("a", memory="1"), counter_sets=(CARD,), fallback=(whole, Device(name="B")))
    )
    assert checked.devices == (part("a", memory="1"),)
    assert checked.fallback == (whole,)
    assert checked.rejected["B"].startswith("as a fallback, its name is")


def test_without_a_fallback_there_is_none_and_an_empty_one_is_one():
    assert check_inventory(inventory()).fallback is None
    assert check_inventory(inventory(fallback=())).fallback == ()


FULL = Device(
    name="a",
    attributes={"n": 1, "v": Version("1.0.0"), "l": (1, 2)},
    capacity={"m": "1Gi"},
    topology=Topology(numa_node=1),
    allow_multiple_allocations=True,
)


def test_a_device_that_was_checked_is_not_checked_again(monkeypatch):
    given = inventory(FULL, part("b", memory="1"), counter_sets=(CARD,))
    before = check_inventory(given)
    monkeypatch.setattr(inventory_module, "device_problems", lambda device, *, node: ["checked"])
    assert check_inventory(given, previous=before).devices == before.devices
    changed = inventory(replace(FULL), counter_sets=(CARD,))
    assert check_inventory(changed, previous=before).devices == ()


CHANGED = {
    "value": replace(FULL, attributes={**FULL.attributes, "n": 2}),
    "boolean": replace(FULL, attributes={**FULL.attributes, "n": True}),
    "in-a-list": replace(FULL, attributes={**FULL.attributes, "l": (True, 2)}),
    "float": replace(FULL, attributes={**FULL.attributes, "n": 1.0}),
    "numa-node": replace(FULL, topology=Topology(numa_node=True)),
    "shared": replace(FULL, allow_multiple_allocations=1),
    "name": replace(FULL, name="A"),
}


@pytest.mark.parametrize("changed", CHANGED.values(), ids=CHANGED)
def test_what_python_takes_for_equal_is_checked_again(changed):
    before = check_inventory(inventory(FULL))
    after = check_inventory(inventory(changed), previous=before)
    fresh = check_inventory(inventory(changed))
    assert [id(device) for device in after.devices] == [id(device) for device in fresh.devices]
    assert after.rejected == fresh.rejected


class Unequal:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("I am like nobody")

    __hash__ = None


def test_a_value_that_refuses_to_be_compared_is_a_bad_one():
    before = check_inventory(inventory(FULL))
    strange = replace(FULL, attributes={**FULL.attributes, "n": Unequal()})
    after = check_inventory(inventory(strange), previous=before)
    assert after.devices == ()
    assert "of type Unequal" in after.rejected["a"]


devices = st.builds(
    Device,
    name=st.sampled_from(["a", "b", "c", "D"]),
    pool=st.sampled_from(["", "p", "P"]),
    attributes=st.dictionaries(
        st.sampled_from(["x", "y-z"]), st.sampled_from([1, True, 1.0, "1", (1,), (True,), ()])
    ),
    consumes=st.sampled_from([{}, {"card": {"memory": "8Gi"}}, {"card": {"memory": "9Gi"}}]),
)
inventories = st.builds(
    Inventory,
    devices=st.lists(devices, max_size=6),
    counter_sets=st.sampled_from([(), (CARD,), (CARD, replace(CARD, pool="p"))]),
    fallback=st.one_of(st.none(), st.lists(devices, max_size=2)),
)


@settings(derandomize=True, database=None, deadline=None)
@given(st.lists(inventories, max_size=6))
def test_what_was_checked_before_changes_no_verdict(sequence):
    previous = None
    for each in sequence:
        checked = check_inventory(each, previous=previous)
        fresh = check_inventory(each)
        assert list(map(repr, checked.devices)) == list(map(repr, fresh.devices))
        assert repr(checked.fallback) == repr(fresh.fallback)
        assert checked.counter_sets == fresh.counter_sets
        assert checked.rejected == fresh.rejected
        assert checked.rejected_count == len(each.devices) + len(each.fallback or ()) - (
            len(checked.devices) + len(checked.fallback or ())
        )
        assert len({(device.pool, device.name) for device in checked.devices}) == len(
            checked.devices
        )
        previous = checked


# ------------------------------------------------------------ types of partitions


def test_each_partition_has_its_type():
    sets = [CounterSet(name="card", counters={"m": "8"})]
    consumes = {"card": {"m": "1"}}
    checked = check_inventory(
        inventory(
            Device(name="typed", consumes=consumes, attributes={"profile": "1g"}),
            Device(name="full", consumes=consumes, attributes={"x.y/profile": "7g"}),
            Device(name="untyped", consumes=consumes),
            Device(name="number", consumes=consumes, attributes={"profile": 1}),
            Device(name="whole"),
            counter_sets=sets,
            partition_type_attribute="x.y/profile",
            ordered=True,
        )
    )
    assert names(checked) == ["typed", "full", "whole"]
    assert checked.rejected.keys() == {"untyped", "number"}
    assert "no attribute 'x.y/profile'" in checked.rejected["untyped"]
    assert (checked.partition_type_attribute, checked.ordered) == ("x.y/profile", True)


def test_a_type_of_partitions_that_the_api_refuses_is_left_out():
    given_ = inventory(Device(name="a"), partition_type_attribute="x.y/a-b")
    checked = check_inventory(given_)
    assert names(checked) == ["a"]
    assert checked.partition_type_attribute == ""
    assert "C identifier" in checked.rejected["partition_type_attribute"]
