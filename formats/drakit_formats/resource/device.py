"""
Converts devices and counter sets to and from their form in a ResourceSlice
(``resource.k8s.io/v1``), compares them, and finds the fields that an API server does not support.

:mod:`.inventory` checks the limits first. The node plugin distributes devices over slices, and
:mod:`.objects` converts them to other API versions.

If a feature gate is disabled, or the API server is older than the field, it drops the field
silently. It rejects a slice only in two cases. When it drops a list attribute's field, an attribute
without a value remains, which is invalid. Kubernetes 1.34 requires counter sets and the devices
that consume them in one slice; later versions require them in separate slices. In both cases, the
response shows the missing feature.

Does not depend on clients or pools.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, cast

from drakit.device import (
    AttributeValue,
    Capacity,
    CapacityRange,
    CounterSet,
    Device,
    NodeAllocatableResource,
    Taint,
    Version,
)
from drakit.quantity import same_quantity
from drakit_formats.resource.objects import Object, child, children, text

TOPOLOGY_FIELDS: Mapping[str, str] = {
    "resource.kubernetes.io/numaNode": "numa_node",
    "resource.kubernetes.io/pcieRoot": "pcie_root",
    "resource.kubernetes.io/pciBusID": "pci_bus_id",
}
"""The fields of :class:`~drakit.device.Topology`, keyed by the name of the published attribute."""


KNOWN_FIELDS = frozenset(
    {
        "name",
        "attributes",
        "capacity",
        "consumesCounters",
        "nodeName",
        "nodeSelector",
        "allNodes",
        "taints",
        "bindsToNode",
        "bindingConditions",
        "bindingFailureConditions",
        "allowMultipleAllocations",
        "nodeAllocatableResources",
        "basic",
    }
)
"""The fields of a device that drakit itself writes, or that must not appear in the node plugin's
slices. All other fields can occur in :attr:`Device.extra`."""

_BY_MEANING = ("attributes", "capacity", "taints", "consumesCounters")


def device_body(device: Device, *, taints: Sequence[Object] = ()) -> dict[str, Any]:
    """
    Return a device as in ``ResourceSlice.spec.devices[]``.

    `taints` are all taints of the device, as JSON: the driver's taints with a time, and the node
    plugin's taints.
    """
    body: dict[str, Any] = {"name": device.name}
    if attributes := published_attributes(device):
        body["attributes"] = attributes
    if device.capacity:
        body["capacity"] = {
            name: _capacity_body(amount) for name, amount in device.capacity.items()
        }
    if device.consumes:
        body["consumesCounters"] = [
            {"counterSet": name, "counters": _counters_body(counters)}
            | ({"compatibilityGroups": [*groups]} if (groups := _groups(device, name)) else {})
            for name, counters in device.consumes.items()
        ]
    if device.allow_multiple_allocations:
        body["allowMultipleAllocations"] = True
    if device.binds_to_node:
        body["bindsToNode"] = True
    if device.binding_conditions:
        body["bindingConditions"] = list(device.binding_conditions)
    if device.binding_failure_conditions:
        body["bindingFailureConditions"] = list(device.binding_failure_conditions)
    if device.node_allocatable_resources:
        body["nodeAllocatableResources"] = {
            name: _resource_body(each) for name, each in device.node_allocatable_resources.items()
        }
    if taints:
        body["taints"] = list(taints)
    return {**device.extra, **body} if device.extra else body


def _groups(device: Device, counter_set: str) -> Sequence[str]:
    return device.compatibility_groups.get(counter_set, ())


_RESOURCE_FIELDS = {
    "mapping": {
        "capacityKey": "capacity_key",
        "capacityMultiplier": "capacity_multiplier",
        "deviceMultiplier": "device_multiplier",
    },
    "overhead": {
        "perPod": "overhead_per_pod",
        "perContainer": "overhead_per_container",
    },
}


def _resource_body(given: NodeAllocatableResource) -> dict[str, Any]:
    set_parts = {
        part: {
            key: value
            for key, field in fields.items()
            if (value := getattr(given, field)) is not None
        }
        for part, fields in _RESOURCE_FIELDS.items()
    }
    return {part: fields for part, fields in set_parts.items() if fields}


def published_attributes(device: Device) -> dict[str, Any]:
    """Return the attributes to publish for a device, including those for its topology."""
    attributes = attributes_body(device.attributes)
    for name, member in TOPOLOGY_FIELDS.items():
        place: str | int | None = getattr(device.topology, member)
        if place is not None:
            attributes[name] = _value_body(place)
    return attributes


def attributes_body(attributes: Mapping[str, AttributeValue]) -> dict[str, Any]:
    """Return attributes as in ``ResourceSlice.spec.devices[].attributes``."""
    return {name: _value_body(value) for name, value in attributes.items()}


def counter_set_body(counter_set: CounterSet) -> dict[str, Any]:
    """Return a counter set as in ``ResourceSlice.spec.sharedCounters[]``."""
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
            # All values have the same type, and there is at least one.
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


# ---------------------------------------------------------------- reading


def device_of(body: Object) -> Device:
    """Return the device that :func:`device_body` wrote, with its topology as attributes. Raises
    ValueError, KeyError or TypeError for other content."""
    consumed = children(body, "consumesCounters")
    resources = child(body, "nodeAllocatableResources")
    return Device(
        name=body["name"],
        attributes={name: _value(each) for name, each in child(body, "attributes").items()},
        capacity={name: _capacity(each) for name, each in child(body, "capacity").items()},
        consumes={each["counterSet"]: _counters(each) for each in consumed},
        compatibility_groups={
            each["counterSet"]: tuple(groups)
            for each in consumed
            if (groups := each.get("compatibilityGroups"))
        },
        allow_multiple_allocations=body.get("allowMultipleAllocations", False),
        binds_to_node=body.get("bindsToNode", False),
        binding_conditions=tuple(body.get("bindingConditions", ())),
        binding_failure_conditions=tuple(body.get("bindingFailureConditions", ())),
        node_allocatable_resources={name: _resource(each) for name, each in resources.items()},
        taints=tuple(Taint(**each) for each in children(body, "taints")),
        extra={key: value for key, value in body.items() if key not in KNOWN_FIELDS},
    )


def counter_set_of(body: Object) -> CounterSet:
    """Return the counter set that :func:`counter_set_body` wrote."""
    return CounterSet(name=body["name"], counters=_counters(body))


def _value(body: Object) -> AttributeValue:
    ((kind, value),) = body.items()
    match kind:
        case "version":
            return Version(value)
        case "versions":
            return tuple(map(Version, value))
        case _:
            return tuple(cast("list[str]", value)) if isinstance(value, list) else value


def _capacity(body: Object) -> str | Capacity:
    policy, value = child(body, "requestPolicy"), body["value"]
    if not policy:
        return value
    span = policy.get("validRange")
    return Capacity(
        value=value,
        default=policy.get("default"),
        valid_values=tuple(policy.get("validValues", ())),
        valid_range=CapacityRange(**span) if span else None,
    )


def _counters(body: Object) -> dict[str, str]:
    return {name: each["value"] for name, each in child(body, "counters").items()}


def _resource(body: Object) -> NodeAllocatableResource:
    return NodeAllocatableResource(
        **{
            field: value
            for part, fields in _RESOURCE_FIELDS.items()
            for key, field in fields.items()
            if (value := child(body, part).get(key)) is not None
        }
    )


# ---------------------------------------------------------------- comparison


def same_device(ours: Object, stored: Object) -> bool:
    """
    Return whether the wanted device and the stored device of a slice are equivalent.

    Taints are not compared. Quantities are compared by value. Absent and empty fields are treated
    alike, and the order of counters is ignored.
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
    """Return whether the ``sharedCounters`` of two slices are equivalent."""
    return _same_sets(ours, stored, name="name")


def _same_rest(ours: Object, stored: Object, *, besides: Sequence[str]) -> bool:
    keys = {key for each in (ours, stored) for key, value in each.items() if value}
    return all(_same_json(ours.get(key), stored.get(key)) for key in keys.difference(besides))


def _same_json(ours: Any, stored: Any) -> bool:
    """Compare values of fields whose types are unknown. The API server may have written quantities
    in another form, and omitted empty values."""
    if ours == stored or not (ours or stored):
        return True
    if isinstance(ours, Mapping) and isinstance(stored, Mapping):
        return _same_rest(cast("Object", ours), cast("Object", stored), besides=())
    if isinstance(ours, list) and isinstance(stored, list):
        one, other = cast("list[Any]", ours), cast("list[Any]", stored)
        return len(one) == len(other) and all(map(_same_json, one, other))
    return isinstance(ours, str) and isinstance(stored, str) and same_quantity(ours, stored)


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


# ---------------------------------------------------------------- dropped fields


class Feature(Enum):
    """A device field that the API server may not support."""

    TAINTS = "taints"
    COUNTERS = "counters"
    LIST_ATTRIBUTES = "list attributes"
    MULTIPLE_ALLOCATIONS = "multiple allocations"
    BINDING_CONDITIONS = "binding conditions"
    COMPATIBILITY_GROUPS = "compatibility groups"
    NODE_ALLOCATABLE_RESOURCES = "node allocatable resources"
    PARTITION_TYPES = "partition types"
    EXTRA = "extra fields"
    """A field in :attr:`Device.extra`."""

    OTHER = "other"
    """A field without a known feature gate."""

    @property
    def gate(self) -> str:
        """The feature gate that is probably disabled. Empty if unknown."""
        return _GATES.get(self, "")


_GATES = {
    Feature.TAINTS: "DRADeviceTaints",
    Feature.COUNTERS: "DRAPartitionableDevices",
    Feature.LIST_ATTRIBUTES: "DRAListTypeAttributes",
    Feature.MULTIPLE_ALLOCATIONS: "DRAConsumableCapacity",
    Feature.BINDING_CONDITIONS: "DRADeviceBindingConditions",
    Feature.COMPATIBILITY_GROUPS: "DRADeviceCompatibilityGroups",
    Feature.NODE_ALLOCATABLE_RESOURCES: "DRANodeAllocatableResources",
    Feature.PARTITION_TYPES: "DRAPartitionableDevicesType",
}
_FIELDS = {
    "taints": Feature.TAINTS,
    "consumesCounters": Feature.COUNTERS,
    "allowMultipleAllocations": Feature.MULTIPLE_ALLOCATIONS,
    "bindsToNode": Feature.BINDING_CONDITIONS,
    "bindingConditions": Feature.BINDING_CONDITIONS,
    "bindingFailureConditions": Feature.BINDING_CONDITIONS,
    "nodeAllocatableResources": Feature.NODE_ALLOCATABLE_RESOURCES,
}
_LISTS = ("ints", "bools", "strings", "versions")
_REFUSED_DEVICE = re.compile(
    r"spec\.devices\[(?P<index>\d+)\](\.basic)?\.?"
    r"(?P<field>(attributes\[(?P<attribute>[^]]+)\]|(?P<counters>consumesCounters)\b)?.*)"
)
_REFUSED_COUNTER_SETS = re.compile(r"spec\.sharedCounters\b")


def dropped_from_slice(sent: Object, stored: Object) -> frozenset[Feature]:
    """Return the features that the API server dropped from a ResourceSlice, according to its
    response."""
    dropped: set[Feature] = set()
    theirs = {text(device, "name"): device for device in children(stored, "spec", "devices")}
    for device in children(sent, "spec", "devices"):
        if (kept := theirs.get(text(device, "name"))) is not None and kept != device:
            dropped.update(_dropped(device, kept))
    if children(sent, "spec", "sharedCounters") and not children(stored, "spec", "sharedCounters"):
        dropped.add(Feature.COUNTERS)
    if text(sent, "spec", "partitionTypeAttribute") and not text(
        stored, "spec", "partitionTypeAttribute"
    ):
        dropped.add(Feature.PARTITION_TYPES)
    return frozenset(dropped)


UNSAFE_FEATURES = frozenset(
    {
        Feature.BINDING_CONDITIONS,
        Feature.COMPATIBILITY_GROUPS,
        Feature.EXTRA,
        Feature.NODE_ALLOCATABLE_RESOURCES,
        Feature.TAINTS,
    }
)
"""The features that an API server can drop from a single slice, and without which the devices in
the slice must not be allocated."""


def needed_features(device: Device) -> frozenset[Feature]:
    """Return the features without which a device must not be allocated, except counters and
    taints."""
    rest = UNSAFE_FEATURES - {Feature.TAINTS}
    if without(device, rest) is not None:
        return frozenset()
    return frozenset(feature for feature in rest if without(device, {feature}) is None)


def extra_fields(device: Device) -> Iterator[str]:
    """Yield the paths of a device's extra fields. An API server can drop any of them."""
    yield from _paths(device.extra, "")


def _paths(value: Any, above: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in cast("Object", value).items():
            path = f"{above}.{key}"
            yield path
            yield from _paths(each, path)
    elif isinstance(value, list | tuple):
        for each in cast("Sequence[Any]", value):
            yield from _paths(each, above)


def used_features(devices: Iterable[Object]) -> frozenset[Feature]:
    """Return the features that devices (as JSON) use."""
    used: set[Feature] = set()
    for each in devices:
        used.update(_dropped(each, {}))
        if any(consumed.get("compatibilityGroups") for consumed in _consumption(each)):
            used.add(Feature.COMPATIBILITY_GROUPS)
    return frozenset(used)


def _consumption(device: Object) -> list[Object]:
    return children(device, "consumesCounters")


def _dropped(sent: Object, stored: Object) -> Iterator[Feature]:
    for key, value in sent.items():
        if key in ("attributes", "capacity"):
            continue
        if key not in KNOWN_FIELDS:
            if _is_lost(value, stored.get(key)):
                yield Feature.EXTRA
        elif value and not stored.get(key):
            yield _FIELDS.get(key, Feature.OTHER)
    consumed = {text(each, "counterSet"): each for each in _consumption(stored)}
    for each in _consumption(sent):
        left = consumed.get(text(each, "counterSet"))
        if left and each.get("compatibilityGroups") and not left.get("compatibilityGroups"):
            yield Feature.COMPATIBILITY_GROUPS
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


def _is_lost(sent: Any, stored: Any) -> bool:
    """Return whether any part of a value is missing from the response. The API server may add
    fields, write values in another form, and omit empty values."""
    if not sent:
        return False
    if isinstance(sent, Mapping):
        kept: Object = cast("Object", stored) if isinstance(stored, Mapping) else {}
        fields = cast("Object", sent).items()
        return not kept or any(_is_lost(value, kept.get(key)) for key, value in fields)
    if isinstance(sent, list):
        given = cast("list[Any]", sent)
        left = cast("list[Any]", stored) if isinstance(stored, list) else []
        return len(left) < len(given) or any(map(_is_lost, given, left))
    return stored is None


def _is_list(attribute: Any) -> bool:
    return any(kind in attribute for kind in _LISTS)


_UNDECLARED = re.compile(r"does not support DRANodeAllocatableResources feature\b")


def forbidden_features(message: str, sent: Object) -> frozenset[Feature]:
    """Return the features that caused the API server to forbid a slice (403), according to the
    message. A kubelet declares the features that it supports, and since Kubernetes 1.37, the API
    server checks them when a slice is written."""
    devices = children(sent, "spec", "devices")
    if _UNDECLARED.search(message) and any(d.get("nodeAllocatableResources") for d in devices):
        return frozenset({Feature.NODE_ALLOCATABLE_RESOURCES})
    return frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The reasons why the API server rejected a slice (422), if its response contains them."""

    features: frozenset[Feature] = frozenset()
    """The features that the API server does not support. It accepts the devices without them."""

    devices: Mapping[str, str] = field(default_factory=dict[str, str])
    """The problems with single devices, keyed by device name. These devices can be omitted."""


def refusal(details: Object, sent: Object) -> Refusal:
    """
    Parse the ``details`` of a 422 response to a ResourceSlice in any API version.

    If the API server rejects the counters of all devices that consume counters, it has different
    rules for counters. If it rejects the counters of only some devices, those devices have a
    problem.
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
        # Use the smallest message: the API server reports capacities in random order, but the
        # reason must stay the same.
        problems[index] = min(problems.get(index, problem), problem)
    if refused_consumers and consumers <= refused_consumers.keys():
        features.add(Feature.COUNTERS)
    else:
        named = refused_consumers | named
    by_name = {text(devices[index], "name"): why for index, why in named.items()}
    return Refusal(features=frozenset(features), devices=by_name)


def without(device: Device, features: Collection[Feature]) -> Device | None:
    """
    Return a device without these features, or None if it is not safe to publish it without them.

    Without its counters, a device would be allocated although other devices use the same hardware.
    Without its taint, it would be allocated to pods that must not use it. Without its compatibility
    groups or its mapping of the node's resources, it would be allocated where it does not fit.
    Without its binding conditions, it would be allocated before it is ready. Extra fields are not
    safe to omit, because their meaning is unknown. The other features are safe to omit: without
    sharing, a device is allocated to one claim as a whole, list attributes matter only to
    selectors, and overheads only to a node's total.
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
    return _without_newer(device, features)


def _without_newer(device: Device, features: Collection[Feature]) -> Device | None:
    if Feature.EXTRA in features and device.extra:
        return None
    if Feature.COMPATIBILITY_GROUPS in features and any(device.compatibility_groups.values()):
        return None
    if Feature.BINDING_CONDITIONS in features:
        if device.binding_conditions:
            return None
        if device.binds_to_node:
            device = replace(device, binds_to_node=False)
    if Feature.NODE_ALLOCATABLE_RESOURCES in features and device.node_allocatable_resources:
        if any("mapping" in _resource_body(each) for each in _resources(device)):
            return None
        device = replace(device, node_allocatable_resources={})
    return device


def _resources(device: Device) -> Collection[NodeAllocatableResource]:
    return device.node_allocatable_resources.values()


def _has_lists(device: Device) -> bool:
    return any(isinstance(value, tuple) for value in device.attributes.values())
