"""
Devices and counter sets in the form of a ResourceSlice (``resource.k8s.io/v1``), and whether two of
them are equivalent.

:mod:`.inventory` checks limits before. The node plugin distributes devices over slices;
:mod:`.versions` converts to other versions of the API.

It must not know clients, pools, or where devices come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drakit.device import AttributeValue, Capacity, CounterSet, Device, Version
from drakit.quantity import same_quantity
from drakit_formats.resource.raw import Object, child, children

__all__ = ("TOPOLOGY_FIELDS", "counter_set_body", "device_body", "same_counter_sets", "same_device")

TOPOLOGY_FIELDS: Mapping[str, str] = {
    "resource.kubernetes.io/numaNode": "numa_node",
    "resource.kubernetes.io/pcieRoot": "pcie_root",
    "resource.kubernetes.io/pciBusID": "pci_bus_id",
}
"""The fields of :class:`~drakit.device.Topology`, by the attribute that each becomes."""


_BY_MEANING = ("attributes", "capacity", "taints", "consumesCounters")


def device_body(device: Device, *, taints: Sequence[Object] = ()) -> dict[str, Any]:
    """
    Write a device as ``ResourceSlice.spec.devices[]``.

    `taints` are all taints that it gets, as JSON: those of its driver with a time, and those of the
    node plugin.
    """
    body: dict[str, Any] = {"name": device.name}
    attributes = {name: _value_body(value) for name, value in device.attributes.items()}
    for name, field in TOPOLOGY_FIELDS.items():
        place: str | int | None = getattr(device.topology, field)
        if place is not None:
            attributes[name] = _value_body(place)
    if attributes:
        body["attributes"] = attributes
    if device.capacity:
        body["capacity"] = {
            name: _capacity_body(amount) for name, amount in device.capacity.items()
        }
    if device.consumes:
        body["consumesCounters"] = [
            {"counterSet": name, "counters": _counters_body(counters)}
            for name, counters in device.consumes.items()
        ]
    if device.allow_multiple_allocations:
        body["allowMultipleAllocations"] = True
    if taints:
        body["taints"] = list(taints)
    return body


def counter_set_body(counter_set: CounterSet) -> dict[str, Any]:
    """Write a counter set as ``ResourceSlice.spec.sharedCounters[]``."""
    return {"name": counter_set.name, "counters": _counters_body(counter_set.counters)}


def _value_body(value: AttributeValue) -> dict[str, Any]:
    match value:
        case bool():
            return {"bool": value}
        case int():
            return {"int": value}
        case str():
            return {"string": value}
        case Version():
            return {"version": value.text}
        case tuple():
            # All of one kind, and at least one.
            bodies = [_value_body(each) for each in value]
            ((kind, _),) = bodies[0].items()
            return {f"{kind}s": [body[kind] for body in bodies]}


def _capacity_body(amount: str | Capacity) -> dict[str, Any]:
    if isinstance(amount, str):
        return {"value": amount}
    policy: dict[str, Any] = {}
    if amount.default is not None:
        policy["default"] = amount.default
    if amount.valid_values:
        policy["validValues"] = list(amount.valid_values)
    if (span := amount.valid_range) is not None:
        fields = {"min": span.min, "max": span.max, "step": span.step}
        policy["validRange"] = {key: value for key, value in fields.items() if value is not None}
    return {"value": amount.value, "requestPolicy": policy} if policy else {"value": amount.value}


def _counters_body(counters: Mapping[str, str]) -> dict[str, Any]:
    return {name: {"value": amount} for name, amount in counters.items()}


# ---------------------------------------------------------------- comparison


def same_device(ours: Object, stored: Object) -> bool:
    """
    Return whether two devices of slices are equivalent: ours, and the one at the API server.

    Taints are not compared. Quantities are compared by value, absent and empty fields are the same,
    the order of counters means nothing.
    """
    if ours == stored:
        return True
    return (
        (ours.get("attributes") or {}) == (stored.get("attributes") or {})
        and _same_rest(ours, stored, besides=_BY_MEANING)
        and _same_capacities(child(ours, "capacity"), child(stored, "capacity"))
        and _same_consumption(
            children(ours, "consumesCounters"), children(stored, "consumesCounters")
        )
    )


def same_counter_sets(ours: Sequence[Object], stored: Sequence[Object]) -> bool:
    """Compare ``sharedCounters`` of two slices by meaning."""
    return _same_sets(ours, stored, name="name")


def _same_rest(ours: Object, stored: Object, *, besides: Sequence[str]) -> bool:
    keys = {key for each in (ours, stored) for key, value in each.items() if value}
    return all(ours.get(key) == stored.get(key) for key in keys.difference(besides))


def _same_consumption(ours: Sequence[Object], stored: Sequence[Object]) -> bool:
    return _same_sets(ours, stored, name="counterSet")


def _same_sets(ours: Sequence[Object], stored: Sequence[Object], *, name: str) -> bool:
    mine = {each.get(name): each for each in ours}
    theirs = {each.get(name): each for each in stored}
    return (
        len(ours) == len(stored)
        and mine.keys() == theirs.keys()
        and all(
            _same_rest(mine[key], theirs[key], besides=("counters",))
            and _same_counters(child(mine[key], "counters"), child(theirs[key], "counters"))
            for key in mine
        )
    )


def _same_counters(mine: Object, theirs: Object) -> bool:
    return mine.keys() == theirs.keys() and all(
        same_quantity(mine[name].get("value"), theirs[name].get("value")) for name in mine
    )


def _same_capacities(mine: Object, theirs: Object) -> bool:
    return mine.keys() == theirs.keys() and all(
        _same_capacity(mine[name], theirs[name]) for name in mine
    )


def _same_capacity(mine: Object, theirs: Object) -> bool:
    return (
        _same_rest(mine, theirs, besides=("value", "requestPolicy"))
        and same_quantity(mine.get("value"), theirs.get("value"))
        and _same_policy(child(mine, "requestPolicy"), child(theirs, "requestPolicy"))
    )


def _same_policy(mine: Object, theirs: Object) -> bool:
    values: list[Any] = mine.get("validValues") or []
    others: list[Any] = theirs.get("validValues") or []
    span, other = child(mine, "validRange"), child(theirs, "validRange")
    return (
        _same_rest(mine, theirs, besides=("default", "validValues", "validRange"))
        and same_quantity(mine.get("default"), theirs.get("default"))
        and len(values) == len(others)
        and all(same_quantity(one, two) for one, two in zip(values, others, strict=True))
        and span.keys() == other.keys()
        and all(same_quantity(span[key], other[key]) for key in span)
    )
