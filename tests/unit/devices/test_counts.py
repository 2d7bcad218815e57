"""Devices by state: each counts once."""

from __future__ import annotations

import itertools

import pytest

from drakit.device import CounterSet, Device
from drakit_nodeplugin.devices.counts import DeviceCounts, count_devices, total
from drakit_nodeplugin.devices.model import Capacity, PoolCapacity
from drakit_nodeplugin.state.holds import Hardware, PoolContent


def capacity(**pools: PoolCapacity) -> Capacity:
    return Capacity(pools=pools, inactive=frozenset())


def test_a_device_counts_in_the_first_state_that_applies():
    states = ("gone", "unhealthy", "tainted", "healthy")
    pool: dict[str, set[str]] = {state: set() for state in states}
    held: set[str] = set()
    for state, use in itertools.product(states, ("used", "unused")):
        name = f"{state}-{use}"
        pool[state].add(name)
        if use == "used":
            held.add(name)
    pool["healthy"] |= pool["tainted"]
    of_pool = PoolCapacity(**{state: frozenset(names) for state, names in pool.items()})
    found = count_devices(
        capacity(a=of_pool, b=PoolCapacity(healthy=frozenset({"x"}))), {"a": held}
    )
    assert found == {
        "a": DeviceCounts(free=1, allocated=2, tainted=1, unhealthy=2, gone=2),
        "b": DeviceCounts(free=1),
    }
    assert total(found.values()) == DeviceCounts(
        free=2, allocated=2, tainted=1, unhealthy=2, gone=2
    )


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param({"b": {"x", "y"}}, {"b": DeviceCounts(gone=2)}, id="of-a-removed-pool"),
        pytest.param({"b": set()}, {}, id="no-device"),
        pytest.param({"a": {"part-0"}}, {"a": DeviceCounts(free=1, allocated=1)}, id="fallback"),
    ],
)
def test_held_devices_that_are_not_in_the_inventory(held, expected):
    pool = PoolCapacity(healthy=frozenset({"whole"}))
    assert count_devices(capacity(a=pool), held) == {"a": DeviceCounts(free=1), **expected}


def test_a_device_whose_hardware_is_held_is_not_free():
    parts = {"whole": "2", "half-0": "1", "half-1": "1"}
    devices = {
        name: Device(name=name, consumes={"card": {"slices": slices}})
        for name, slices in parts.items()
    }
    card = CounterSet(name="card", counters={"slices": "2"})
    hardware = Hardware(
        pools={
            pool: PoolContent(
                devices=devices | {"alone": Device(name="alone")}, counter_sets=(card,)
            )
            for pool in ("a", "b")
        }
    )
    names = frozenset({*devices, "alone"})
    pools = capacity(
        a=PoolCapacity(healthy=names), b=PoolCapacity(healthy=names, tainted=frozenset({"half-0"}))
    )
    assert count_devices(pools, {"a": {"half-0"}}, hardware) == {
        "a": DeviceCounts(free=2, allocated=2),
        "b": DeviceCounts(free=3, tainted=1),
    }
    assert count_devices(pools, {"b": {"whole", "alone"}}, hardware)["b"] == DeviceCounts(
        allocated=4
    )
