"""
Facts written as JSON of the API, for the allocator.

What changes no verdict is left out: parameters of drivers, names of binding conditions. A slice
with fields that this version does not know is written as it was read.

Does not depend on a pod, or on what is asked.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Sequence
from typing import Any

import orjson

from drakit_explain.allocation import AskedClaim
from drakit_explain.devices import (
    Amount,
    CapacityFacts,
    CounterSetFacts,
    DeviceFacts,
    Place,
    TaintFacts,
)
from drakit_explain.model import ClassFacts, Constraint, DeviceID, Request, SliceFacts
from drakit_explain.selectors import attribute_body
from drakit_formats.resource.nodes import Requirement
from drakit_formats.resource.objects import Object, children

Taints = Callable[[DeviceID, DeviceFacts], Sequence[TaintFacts]]


def claim_body(claim: AskedClaim, number: int) -> Object:
    """Write a claim to allocate."""
    name = claim_name(number)
    devices = {
        "requests": [_request(each) for each in claim.requests],
        "constraints": [_constraint(each) for each in claim.constraints],
    }
    return {
        "metadata": {"namespace": "", "name": name, "uid": name},
        "spec": {"devices": devices},
    }


def claim_name(number: int) -> str:
    """Return the name of a claim in a question: equal pods ask the same."""
    return f"claim-{number}"


def _request(request: Request) -> Object:
    if request.alternatives:
        return {
            "name": request.name,
            "firstAvailable": [_exact(each) for each in request.alternatives],
        }
    exact = _exact(request)
    return {"name": exact.pop("name"), "exactly": exact}


def _exact(request: Request) -> dict[str, Any]:
    body: dict[str, Any] = {
        "name": request.name,
        "deviceClassName": request.device_class,
        "allocationMode": "All" if request.every else "ExactCount",
        **({} if request.every else {"count": request.count}),
        "selectors": _selectors(request.selectors),
        **orjson.loads(request.extra or b"{}"),
    }
    if request.admin_access:
        body["adminAccess"] = True
    if request.tolerations:
        body["tolerations"] = [
            {"key": each.key, "operator": each.operator, "value": each.value, "effect": each.effect}
            for each in request.tolerations
        ]
    if request.capacity:
        body["capacity"] = {"requests": _amounts(request.capacity)}
    return body


def _constraint(constraint: Constraint) -> Object:
    kind = "distinctAttribute" if constraint.distinct else "matchAttribute"
    compared = {kind: constraint.attribute} if constraint.attribute else {}
    extra = orjson.loads(constraint.extra or b"{}")
    return {"requests": list(constraint.requests), **compared, **extra}


def _selectors(expressions: Sequence[str]) -> list[Object]:
    return [{"cel": {"expression": each}} for each in expressions]


def _amounts(amounts: Sequence[Amount]) -> Object:
    return {each.name: each.quantity for each in amounts}


def class_body(of: ClassFacts) -> Object:
    """Write a DeviceClass."""
    return {"metadata": {"name": of.name}, "spec": {"selectors": _selectors(of.selectors)}}


def slice_body(of: SliceFacts, taints: Taints, *, without: Container[int] = ()) -> Object:
    """
    Write a slice.

    :param taints: returns the taints of a device, those of DeviceTaintRules included.
    :param without: indexes of devices that are left out.
    """
    spec = orjson.loads(zlib.decompress(of.raw)) if of.raw else _spec(of)
    devices: list[Object] = []
    for index, (facts, body) in enumerate(zip(of.devices, children(spec, "devices"), strict=True)):
        if index not in without:
            found = taints(DeviceID(of.driver, of.pool, facts.name), facts)
            devices.append({**body, "taints": [_taint(each) for each in found]})
    return {"metadata": {"name": of.name}, "spec": {**spec, "devices": devices}}


def _spec(of: SliceFacts) -> dict[str, Any]:
    spec = {
        "driver": of.driver,
        "pool": {
            "name": of.pool,
            "generation": of.generation,
            "resourceSliceCount": of.pool_slices,
        },
        **_place(of.place),
        "devices": [_device(each) for each in of.devices],
    }
    if of.by_device:
        spec["perDeviceNodeSelection"] = True
    if of.counter_sets:
        spec["sharedCounters"] = [
            {"name": each.name, "counters": _counters(each)} for each in of.counter_sets
        ]
    return spec


def _place(place: Place | None) -> Object:
    if place is None:
        return {}
    if place.node:
        return {"nodeName": place.node}
    if place.every or place.selector is None:
        return {"allNodes": place.every}
    terms = [
        {"matchFields": _requirements(fields), "matchExpressions": _requirements(expressions)}
        for fields, expressions in place.selector
    ]
    return {"nodeSelector": {"nodeSelectorTerms": terms}}


def _requirements(found: Sequence[Requirement]) -> list[Object]:
    return [{"key": each.key, "operator": each.operator, "values": each.values} for each in found]


def _device(device: DeviceFacts) -> Object:
    kind = device.kind
    body: dict[str, Any] = {
        "name": device.name,
        "attributes": {
            name: attribute_body(value)
            for name, value in zip(kind.attributes, device.values, strict=True)
        },
        "capacity": {each.name: _capacity(each) for each in kind.capacity},
        **_place(device.place),
    }
    if kind.shareable:
        body["allowMultipleAllocations"] = True
    if kind.binding:
        body["bindingConditions"] = body["bindingFailureConditions"] = ["drakit.dev/any"]
    if device.consumes:
        body["consumesCounters"] = [
            {"counterSet": each.name, "counters": _counters(each)} for each in device.consumes
        ]
    return body


def _capacity(capacity: CapacityFacts) -> Object:
    policy = capacity.policy
    if policy is None:
        return {"value": capacity.value}
    span = {"min": policy.min, "max": policy.max, "step": policy.step}
    span = {name: value for name, value in span.items() if value is not None}
    found = {"default": policy.default, "validValues": policy.valid_values, "validRange": span}
    rules = {name: value for name, value in found.items() if value}
    return {"value": capacity.value, "requestPolicy": rules}


def _counters(of: CounterSetFacts) -> Object:
    return {each.name: {"value": each.quantity} for each in of.counters}


def _taint(taint: TaintFacts) -> Object:
    return {"key": taint.key, "value": taint.value, "effect": taint.effect}
