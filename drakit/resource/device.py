"""
Devices and counter sets in the form of a ResourceSlice (``resource.k8s.io/v1``).

What is written here is in order: limits are checked in :mod:`.checks` and :mod:`.inventory`, before
anything is written. How devices are spread over slices is the node plugin's business, other
versions of the API are :mod:`.versions`'.

It must not know clients, pools, or where devices come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drakit.device import AttributeValue, Capacity, CounterSet, Device, Version
from drakit.resource.checks import device_problems
from drakit.resource.comparison import same_counter_sets, same_device
from drakit.resource.names import is_dns_label, is_dns_subdomain
from drakit.resource.raw import Object
from drakit.resource.topology import TOPOLOGY_FIELDS

__all__ = (
    "counter_set_body",
    "device_body",
    "device_problems",
    "is_dns_label",
    "is_dns_subdomain",
    "same_counter_sets",
    "same_device",
)


def device_body(device: Device, *, taints: Sequence[Object] = ()) -> dict[str, Any]:
    """
    Write a device as ``ResourceSlice.spec.devices[]``.

    The taints are all that it is to have, as JSON: those of its driver have a time as well, and the
    node plugin adds its own.
    """
    body: dict[str, Any] = {"name": device.name}
    if attributes := _attributes_body(device):
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


def _attributes_body(device: Device) -> dict[str, Any]:
    body = {name: _value_body(value) for name, value in device.attributes.items()}
    for name, field in TOPOLOGY_FIELDS.items():
        value: str | int | None = getattr(device.topology, field)
        if value is not None:
            body[name] = _value_body(value)
    return body


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
