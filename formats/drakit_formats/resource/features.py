"""
Fields of devices that an API server may not know, and the fallback for each of them.

An API server whose feature gate is off, or that is older than the field, drops it silently. It
rejects a slice in two cases. A dropped list attribute leaves an attribute without a value.
Kubernetes 1.34 requires counter sets and the devices that consume them in one slice; later versions
require them in separate slices. In both cases the response shows the missing feature. All JSON is
that of ``resource.k8s.io/v1``.

It must not know clients, or what is published instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from drakit.device import Capacity, Device
from drakit_formats.resource.raw import Object, child, children, text

__all__ = ("Feature", "Refusal", "dropped_fields", "dropped_from_slice", "refusal", "without")


class Feature(Enum):
    """A field of devices that the API server must support."""

    TAINTS = "taints"
    COUNTERS = "counters"
    LIST_ATTRIBUTES = "list attributes"
    MULTIPLE_ALLOCATIONS = "multiple allocations"
    OTHER = "other"
    """A field without a known feature gate."""

    @property
    def gate(self) -> str:
        """The feature gate that is likely off; empty if unknown."""
        return _GATES.get(self, "")


_GATES = {
    Feature.TAINTS: "DRADeviceTaints",
    Feature.COUNTERS: "DRAPartitionableDevices",
    Feature.LIST_ATTRIBUTES: "DRAListTypeAttributes",
    Feature.MULTIPLE_ALLOCATIONS: "DRAConsumableCapacity",
}
_FIELDS = {
    "taints": Feature.TAINTS,
    "consumesCounters": Feature.COUNTERS,
    "allowMultipleAllocations": Feature.MULTIPLE_ALLOCATIONS,
}
_LISTS = ("ints", "bools", "strings", "versions")
_REFUSED_DEVICE = re.compile(
    r"spec\.devices\[(?P<index>\d+)\](\.basic)?\.?"
    r"(?P<field>(attributes\[(?P<attribute>[^]]+)\]|(?P<counters>consumesCounters)\b)?.*)"
)
_REFUSED_COUNTER_SETS = re.compile(r"spec\.sharedCounters\b")


def dropped_fields(sent: Object, stored: Object) -> frozenset[Feature]:
    """Return the features that the API server has dropped from a device: sent, but missing in its
    answer."""
    return frozenset(_dropped(sent, stored))


def dropped_from_slice(sent: Object, stored: Object) -> frozenset[Feature]:
    """Return the features that the API server has dropped from a ResourceSlice, as its answer
    shows."""
    dropped: set[Feature] = set()
    theirs = {text(device, "name"): device for device in children(stored, "spec", "devices")}
    for device in children(sent, "spec", "devices"):
        if (kept := theirs.get(text(device, "name"))) is not None and kept != device:
            dropped.update(_dropped(device, kept))
    if children(sent, "spec", "sharedCounters") and not children(stored, "spec", "sharedCounters"):
        dropped.add(Feature.COUNTERS)
    return frozenset(dropped)


def _dropped(sent: Object, stored: Object) -> Iterator[Feature]:
    for key, value in sent.items():
        if key in ("attributes", "capacity"):
            continue
        if value and not stored.get(key):
            yield _FIELDS.get(key, Feature.OTHER)
    kept = child(stored, "attributes")
    for name, value in child(sent, "attributes").items():
        if value and not kept.get(name):
            yield Feature.LIST_ATTRIBUTES if _is_list(value) else Feature.OTHER
    amounts = child(stored, "capacity")
    for name, value in child(sent, "capacity").items():
        if name not in amounts:
            yield Feature.OTHER
        elif value.get("requestPolicy") and not amounts[name].get("requestPolicy"):
            yield Feature.MULTIPLE_ALLOCATIONS


def _is_list(attribute: Any) -> bool:
    return any(kind in attribute for kind in _LISTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why the API server rejected a slice (422), as far as its answer shows."""

    features: frozenset[Feature] = frozenset()
    """The features that it does not know: without them, it accepts the devices."""

    devices: Mapping[str, str] = field(default_factory=dict[str, str])
    """Problems of single devices, by their names: those devices can be left out."""


def refusal(details: Object, sent: Object) -> Refusal:
    """
    Read the ``details`` of a 422 response to a ResourceSlice in any version of the API.

    An API server that rejects the counters of all devices that consume some has other rules for
    counters. One that rejects those of single devices objects to these devices.
    """
    devices = children(sent, "spec", "devices")
    consumers = {index for index, each in enumerate(devices) if each.get("consumesCounters")}
    refused_consumers: dict[int, str] = {}
    features: set[Feature] = set()
    named: dict[int, str] = {}
    for cause in children(details, "causes"):
        if _REFUSED_COUNTER_SETS.match(text(cause, "field")):
            features.add(Feature.COUNTERS)
            continue
        found = _REFUSED_DEVICE.match(text(cause, "field"))
        if found is None or (index := int(found["index"])) >= len(devices):
            continue
        if _is_list(child(devices[index], "attributes").get(found["attribute"]) or {}):
            features.add(Feature.LIST_ATTRIBUTES)
            continue
        problems = refused_consumers if found["counters"] else named
        problem = ": ".join(filter(None, (found["field"], text(cause, "message"))))
        # The API server reports capacities in random order, but the reason must stay the same.
        problems[index] = min(problems.get(index, problem), problem)
    if refused_consumers and consumers <= refused_consumers.keys():
        features.add(Feature.COUNTERS)
    else:
        named = refused_consumers | named
    by_name = {text(devices[index], "name"): why for index, why in named.items()}
    return Refusal(features=frozenset(features), devices=by_name)


def without(device: Device, features: Collection[Feature]) -> Device | None:
    """
    Return a device as it can be published without these features; None if that is not safe.

    Without its counters, a device would be allocated beside others on the same hardware; without
    its taint, it would be allocated to pods that must not have it. A device that cannot be shared
    is allocated to one claim as a whole. List attributes only matter to selectors.
    """
    if Feature.COUNTERS in features and device.consumes:
        return None
    if Feature.TAINTS in features and device.taints:
        if any(taint.effect != "None" for taint in device.taints):
            return None
        device = replace(device, taints=())
    if Feature.LIST_ATTRIBUTES in features and _has_lists(device):
        scalars = {k: v for k, v in device.attributes.items() if not isinstance(v, tuple)}
        device = replace(device, attributes=scalars)
    if Feature.MULTIPLE_ALLOCATIONS in features and device.allow_multiple_allocations:
        amounts = {
            name: amount.value if isinstance(amount, Capacity) else amount
            for name, amount in device.capacity.items()
        }
        device = replace(device, allow_multiple_allocations=False, capacity=amounts)
    return device


def _has_lists(device: Device) -> bool:
    return any(isinstance(value, tuple) for value in device.attributes.values())
