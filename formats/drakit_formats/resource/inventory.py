"""
Selects the part of an inventory that can be published. It checks each device, and the rules that
apply to several devices together.

Devices come from vendors, some of which are hostile: a value of the wrong type results in a
message, never in an exception, and accepted values have a bounded size. Of a capacity's amounts,
only the default is compared with the value. The API server compares the others, and names the
devices that it rejects.

A device is rejected with a reason if it is malformed, has the name of another device, or consumes
missing counters. The rest is published. A driver lists all of its devices at each change, so a
device that is the same object as before is not checked again.

Does not depend on the API's JSON, clients, or clocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from drakit.device import (
    Capacity,
    CapacityRange,
    CounterSet,
    Device,
    DeviceNode,
    Edits,
    Health,
    Inventory,
    NodeAllocatableResource,
    Taint,
    Topology,
    Version,
)
from drakit.quantity import parse_quantity, quantity_problem
from drakit_formats.resource.device import KNOWN_FIELDS, TOPOLOGY_FIELDS
from drakit_formats.resource.limits import (
    MAX_ATTRIBUTE_VALUES,
    MAX_ATTRIBUTES_AND_CAPACITIES,
    MAX_BINDING_CONDITIONS,
    MAX_COMPATIBILITY_GROUPS,
    MAX_CONSUMED_COUNTER_SETS,
    MAX_COUNTERS,
    MAX_DRIVER_TAINTS,
    MAX_EXTRA_BYTES,
    MAX_EXTRA_DEPTH,
    MAX_NODE_RESOURCES,
    MAX_POOL_NAME_LENGTH,
    MAX_POOLS,
    MAX_STRING_BYTES,
    MAX_VALID_VALUES,
    is_dns_label,
    is_dns_subdomain,
    label_key_problem,
    label_value_problem,
    qualified_name_problem,
)

# ---------------------------------------------------------------- one device

MAX_PROBLEMS = 5
"""Maximum number of problems to report per device, because the message is part of an Event. After a
vendor has fixed these, the next ones are reported."""

MAX_AMOUNT = 2**63 - 1
"""Maximum amount. The API server and the scheduler count steps in 64 bits."""

_VERSION = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(-(?P<pre>(0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*)(\.(0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*))*))?"
    r"(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?",
    re.ASCII,
)
_PCIE_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_PCI_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
_EFFECTS = ("None", "NoSchedule", "NoExecute")


def device_problems(device: object, *, node: str = "") -> list[str]:
    """
    Return the reasons why a device cannot be published, as sentences. Even if there are none, the
    API server can still reject the device.

    Amounts that some API servers accept but that no claim can use are also problems: negative
    amounts, or a default above the capacity. If the node's name is given, the length of the pool's
    full name is also checked.
    """
    if not isinstance(device, Device):
        return [f"it is of type {type(device).__name__}, not a Device"]
    try:
        # Catch all errors, because the mappings can be instances of the vendor's own classes.
        problems = [
            *place_problems(device.name, device.pool, node=node),
            *_attributes_problems(device.attributes, device.capacity, device.topology),
            *_capacities_problems(device.capacity, device.allow_multiple_allocations),
            *_consumes_problems(device.consumes),
            *_groups_problems(device.compatibility_groups, device.consumes),
            *_binding_problems(device),
            *_resources_problems(device.node_allocatable_resources, device.capacity),
            *_extra_problems(device.extra),
            *_taints_problems(device.taints),
        ]
        problems += [
            f"its {name} is {_kind(given)}, not a boolean"
            for name in ("binds_to_node", "evict_if_gone", "prepare_again")
            if not isinstance(given := getattr(device, name), bool)
        ]
        problems += _edits_problems(device.edits)
        health = cast("object", device.health)
        if health is not None and not isinstance(health, Health):
            problems.append(f"its health is {_kind(health)}, not a Health")
    except Exception as error:
        return [f"it cannot be checked ({type(error).__name__}: {str(error)[:200]})"]
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = ["there are more problems"]
    return problems


def shown(value: object) -> str:
    """Format a vendor's value for a message. The result is short and without control characters."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"


def place_problems(name: object, pool: object, *, node: str = "") -> Iterator[str]:
    """Yield the problems with the name and the pool of a device or counter set."""
    if not isinstance(name, str):
        yield f"its name is not a string, but {_kind(name)}"
    elif not is_dns_label(name):
        yield "its name is not a DNS label of at most 63 characters (a-z, 0-9 and -)"
    if pool == "":
        return
    if not isinstance(pool, str):
        yield f"its pool is not a string, but {_kind(pool)}"
    elif not is_dns_subdomain(pool):
        yield "its pool is not a DNS label, or several joined by dots (a-z, 0-9, - and .)"
    elif len(node) + 1 + len(pool) > MAX_POOL_NAME_LENGTH:
        yield (
            f"its pool is too long: with the node's name before it, it would have more than "
            f"{MAX_POOL_NAME_LENGTH} characters"
        )


def attribute_problems(attributes: object) -> Iterator[str]:
    """Yield the problems with attributes that do not belong to a published device."""
    return _attributes_problems(attributes, {}, Topology())


def _attributes_problems(attributes: object, capacity: object, topology: object) -> Iterator[str]:
    wrong = [
        f"its {what} field is not a mapping, but {_kind(given)}"
        for what, given in (("attributes", attributes), ("capacity", capacity))
        if not isinstance(given, Mapping)
    ]
    if not isinstance(topology, Topology):
        wrong.append(f"its topology is {_kind(topology)}, not a Topology")
    if wrong or not isinstance(topology, Topology):
        yield from wrong
        return
    attributes = cast("Mapping[object, object]", attributes)
    places = {
        name: value
        for name, field in TOPOLOGY_FIELDS.items()
        if (value := getattr(topology, field)) is not None
    }
    count = len(attributes) + len(cast("Mapping[object, object]", capacity)) + len(places)
    if count > MAX_ATTRIBUTES_AND_CAPACITIES:
        yield (
            f"it has {count} attributes and capacities (those of its topology included), "
            f"but at most {MAX_ATTRIBUTES_AND_CAPACITIES} are allowed"
        )
        return
    values = len(places) + sum(
        len(cast("tuple[object]", each)) if isinstance(each, tuple) else 1
        for each in attributes.values()
    )
    if values > MAX_ATTRIBUTE_VALUES:
        yield (
            f"its attributes have {values} values (each element of a list is a value), "
            f"but at most {MAX_ATTRIBUTE_VALUES} are allowed"
        )
        return  # don't check each attribute, because a backend can send tens of thousands
    for name, value in attributes.items():
        if problem := _name_problem(name) or _value_problem(value):
            yield f"attribute {shown(name)} {problem}"
    for name in places:
        if name in attributes:
            yield f"attribute {name!r} is set, although its topology sets it too"
    if places:
        yield from _topology_problems(topology)


def _topology_problems(topology: Topology) -> Iterator[str]:
    numa = cast("object", topology.numa_node)
    if numa is not None and (
        isinstance(numa, bool) or not isinstance(numa, int) or not 0 <= numa < 2**31
    ):
        yield f"its numa_node {shown(numa)} is not the number of a NUMA node (0, 1, ...)"
    root = cast("object", topology.pcie_root)
    if root is not None and not (isinstance(root, str) and _PCIE_ROOT.fullmatch(root)):
        yield f"its pcie_root {shown(root)} does not have the form 'pci0000:00'"
    bus = cast("object", topology.pci_bus_id)
    if bus is not None and not (isinstance(bus, str) and _PCI_BUS_ID.fullmatch(bus)):
        yield f"its pci_bus_id {shown(bus)} does not have the form '0000:01:00.0'"


def _name_problem(name: object) -> str | None:
    if not isinstance(name, str):
        return f"has a name that is not a string, but {_kind(name)}"
    return qualified_name_problem(name)


def _value_problem(value: object) -> str | None:
    if not isinstance(value, tuple):
        return _scalar_problem(value)
    values = cast("tuple[object, ...]", value)
    if not values:
        return "is an empty list"
    if len({_scalar_type(each) for each in values}) > 1:
        return "is a list of values of several types"
    for each in values:
        if problem := _scalar_problem(each):
            return f"has a value in its list that {problem}"
    return None


def _scalar_type(value: object) -> type:
    for kind in (bool, int, str):
        if isinstance(value, kind):
            return kind
    return type(value)


def _scalar_problem(value: object) -> str | None:
    if isinstance(value, str):
        return _string_problem(value)
    if isinstance(value, Version):
        text = cast("object", value.text)
        if not (
            isinstance(text, str) and len(text) <= MAX_STRING_BYTES and _VERSION.fullmatch(text)
        ):
            return "is not a semantic version (such as 1.2.3) of at most 64 characters"
    elif isinstance(value, list):
        return "is of type list; use a tuple for a list attribute"
    elif not isinstance(value, int):
        return f"is {_kind(value)}, which is neither a string, an integer, a boolean nor a Version"
    elif not -(2**63) <= value < 2**63:
        return "is not a 64-bit integer"
    return None


def _string_problem(value: str) -> str | None:
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:  # for example, a file name that is not UTF-8
        return "has characters that cannot be written as UTF-8"
    return f"has more than {MAX_STRING_BYTES} bytes (in UTF-8)" if size > MAX_STRING_BYTES else None


def _capacities_problems(capacity: object, shared: object) -> Iterator[str]:
    if not isinstance(shared, bool):
        yield f"its allow_multiple_allocations is {_kind(shared)}, not a boolean"
    if not isinstance(capacity, Mapping) or len(cast("Mapping[object, object]", capacity)) > (
        MAX_ATTRIBUTES_AND_CAPACITIES
    ):
        return  # the check of the attributes reports the problem
    for name, amount in cast("Mapping[object, object]", capacity).items():
        if problem := _name_problem(name):
            yield f"capacity {shown(name)} {problem}"
        for problem in _capacity_problems(amount):
            yield f"capacity {shown(name)}: {problem}"
        # Check this here, because an API server without DRAConsumableCapacity silently drops the
        # policy.
        if not shared and isinstance(amount, Capacity) and _has_policy(amount):
            yield (
                f"capacity {shown(name)} has a request policy, but the device is not "
                f"shared (allow_multiple_allocations)"
            )


def _has_policy(capacity: Capacity) -> bool:
    """Return whether a capacity limits the amounts that claims can request (API:
    ``requestPolicy``)."""
    return (
        capacity.default is not None
        or bool(capacity.valid_values)
        or capacity.valid_range is not None
    )


def _capacity_problems(capacity: object) -> Iterator[str]:
    if not isinstance(capacity, Capacity):
        if problem := quantity_problem(capacity):
            yield f"{shown(capacity)} {problem}"
        return
    consumable: list[tuple[str, object]] = [("default", capacity.default)]
    values = cast("object", capacity.valid_values)
    if not isinstance(values, tuple | list):
        yield f"its valid_values are {_kind(values)}, not a tuple of quantities"
    elif len(given := cast("tuple[object, ...]", values)) > MAX_VALID_VALUES:
        yield f"it has {len(given)} valid_values, but at most {MAX_VALID_VALUES} are allowed"
    else:
        consumable += [("valid value", value) for value in given]
    span = cast("object", capacity.valid_range)
    if isinstance(span, CapacityRange):
        consumable += [("min", span.min), ("max", span.max), ("step", span.step)]
    elif span is not None:
        yield f"its valid_range is {_kind(span)}, not a CapacityRange"
    optional = ("default", "max", "step")
    consumable = [each for each in consumable if each[1] is not None or each[0] not in optional]
    wrong = False
    for name, amount in [("value", capacity.value), *consumable]:
        if problem := quantity_problem(amount):
            wrong = True
            yield f"its {name} {shown(amount)} {problem}"
    if wrong:
        return
    amounts = [(name, parse_quantity(cast("str", amount))) for name, amount in consumable]
    # Before 1.37, the API server divides by the step in 64 bits, and panics if the step is 0 or
    # overflows to 0. Its error response does not name a device, so the whole pool would not be
    # published.
    if any(amount > MAX_AMOUNT for _, amount in amounts):
        yield f"one of the amounts that claims can consume is more than {MAX_AMOUNT}"
    if ("step", 0) in amounts:
        yield "the step of its valid_range is zero"
    if any(
        name == "default" and amount > parse_quantity(capacity.value) for name, amount in amounts
    ):
        yield f"its default {capacity.default} is more than the capacity ({capacity.value})"


def _consumes_problems(consumes: object) -> Iterator[str]:
    if not isinstance(consumes, Mapping):
        yield f"its consumption is not a mapping, but {_kind(consumes)}"
        return
    sets = cast("Mapping[object, object]", consumes)
    if len(sets) > MAX_CONSUMED_COUNTER_SETS:
        yield (
            f"it consumes from {len(sets)} counter sets, but at most {MAX_CONSUMED_COUNTER_SETS} "
            "are allowed"
        )
        return
    for name, counters in sets.items():
        if not isinstance(name, str) or not is_dns_label(name):
            yield f"it consumes from {shown(name)}, which is not a valid name of a counter set"
        for problem in counters_problems(counters):
            yield f"its consumption from {shown(name)} {problem}"


def counters_problems(counters: object) -> Iterator[str]:
    """Yield the problems with the counters of a set, or of a device's consumption from a set."""
    if not isinstance(counters, Mapping):
        yield f"is not a mapping of counters, but {_kind(counters)}"
        return
    amounts = cast("Mapping[object, object]", counters)
    if not 1 <= len(amounts) <= MAX_COUNTERS:
        yield f"has {len(amounts)} counters, but must have 1 to {MAX_COUNTERS}"
        return
    for name, amount in amounts.items():
        if not isinstance(name, str) or not is_dns_label(name):
            yield f"has a counter {shown(name)}, whose name is not a DNS label"
        elif problem := quantity_problem(amount):
            yield f"has a counter {name!r} of {shown(amount)}, which {problem}"


def _groups_problems(groups: object, consumes: object) -> Iterator[str]:
    if not isinstance(groups, Mapping):
        yield f"its compatibility_groups are {_kind(groups)}, not a mapping by counter set"
        return
    consumed = cast("Collection[object]", consumes if isinstance(consumes, Mapping) else ())
    by_set = cast("Mapping[object, object]", groups)
    if len(by_set) > MAX_CONSUMED_COUNTER_SETS:
        yield (
            f"it has compatibility_groups for {len(by_set)} counter sets, but at most "
            f"{MAX_CONSUMED_COUNTER_SETS} are allowed"
        )
        return
    for name, given in by_set.items():
        if name not in consumed:
            yield f"it has compatibility_groups for {shown(name)}, from which it does not consume"
        else:
            words = f"compatibility groups for {shown(name)}"
            yield from _names_problems(given, words, MAX_COMPATIBILITY_GROUPS, _group_problem)


def _group_problem(name: str) -> str | None:
    return None if is_dns_label(name) else "is not a DNS label"


def _condition_problem(name: str) -> str | None:
    return label_key_problem(name, needs_domain=False)


def _binding_problems(device: Device) -> Iterator[str]:
    conditions, failures = device.binding_conditions, device.binding_failure_conditions
    if not conditions and not failures:
        return
    found = [
        *_names_problems(
            conditions, "binding conditions", MAX_BINDING_CONDITIONS, _condition_problem
        ),
        *_names_problems(
            failures, "binding failure conditions", MAX_BINDING_CONDITIONS, _condition_problem
        ),
    ]
    yield from found
    if found:
        return
    if not conditions or not failures:
        missing = "binding_conditions" if failures else "binding_failure_conditions"
        yield f"it has no {missing}, which the API requires with the other binding conditions"
    for name in sorted({*conditions} & {*failures}):
        yield f"condition {name} is both a binding condition and a binding failure condition"


def _names_problems(
    given: object, words: str, most: int, problem: Callable[[str], str | None]
) -> Iterator[str]:
    """Yield the problems with a short list of unique names."""
    if not isinstance(given, tuple | list):
        yield f"its {words} are {_kind(given)}, not a tuple of names"
        return
    names = cast("tuple[object, ...]", given)
    if len(names) > most:
        yield f"it has {len(names)} {words}, but at most {most} are allowed"
        return
    for name in names:
        if not isinstance(name, str):
            yield f"one of its {words} is {_kind(name)}, not a string"
        elif why := problem(name):
            yield f"one of its {words}, {shown(name)}, {why}"
    if len({*map(str, names)}) < len(names):
        yield f"its {words} have the same name twice"


def _resources_problems(resources: object, capacity: object) -> Iterator[str]:
    if not isinstance(resources, Mapping):
        yield f"its node_allocatable_resources are {_kind(resources)}, not a mapping by resource"
        return
    given = cast("Mapping[object, object]", resources)
    if len(given) > MAX_NODE_RESOURCES:
        yield (
            f"it has {len(given)} node_allocatable_resources, but at most {MAX_NODE_RESOURCES} are "
            "allowed"
        )
        return
    capacities = cast("Collection[object]", capacity if isinstance(capacity, Mapping) else ())
    for name, each in given.items():
        where = f"node_allocatable_resources {shown(name)}"
        if not isinstance(name, str) or not (
            name in ("cpu", "memory") or name.startswith("hugepages-")
        ):
            yield f"{where} is neither cpu, memory nor hugepages-<size>"
        elif not isinstance(each, NodeAllocatableResource):
            yield f"{where} is {_kind(each)}, not a NodeAllocatableResource"
        else:
            for problem in _resource_problems(each, capacities):
                yield f"{where}: {problem}"


def _resource_problems(
    given: NodeAllocatableResource, capacities: Collection[object]
) -> Iterator[str]:
    multipliers = {
        "device_multiplier": given.device_multiplier,
        "capacity_multiplier": given.capacity_multiplier,
    }
    overheads = {
        "overhead_per_pod": given.overhead_per_pod,
        "overhead_per_container": given.overhead_per_container,
    }
    amounts: dict[str, object] = {**multipliers, **overheads}
    if given.capacity_key is None and all(amount is None for amount in amounts.values()):
        yield "it has neither a multiplier nor an overhead"
    for name, amount in amounts.items():
        if amount is None:
            continue
        if problem := quantity_problem(amount):
            yield f"its {name} {shown(amount)} {problem}"
        elif name in multipliers and parse_quantity(cast("str", amount)) == 0:
            yield f"its {name} is zero"
    if (given.capacity_key is None) != (given.capacity_multiplier is None):
        yield "it has one of capacity_key and capacity_multiplier, but needs both or none"
    elif given.capacity_key is not None:
        if given.device_multiplier is not None:
            yield "it has both a device_multiplier and a capacity_key, but only one is allowed"
        if given.capacity_key not in capacities:
            yield f"its capacity_key {shown(given.capacity_key)} is not a capacity of the device"


def _extra_problems(extra: object) -> Iterator[str]:
    if not isinstance(extra, Mapping):
        yield f"its extra fields are {_kind(extra)}, not a mapping (a JSON object)"
        return
    if not extra:
        return
    if problem := _json_problem(cast("object", extra), MAX_EXTRA_DEPTH):
        yield f"its extra fields {problem}"
        return
    fields = cast("Mapping[str, object]", extra)
    for name in sorted(fields.keys() & KNOWN_FIELDS):
        yield f"its extra field {name!r} is a field that drakit sets; use the attribute of Device"
    try:
        size = len(json.dumps(fields, ensure_ascii=False, allow_nan=False).encode())
    except ValueError as error:  # NaN, or a string that is not UTF-8
        yield f"its extra fields are not JSON: {str(error)[:100]}"
        return
    if size > MAX_EXTRA_BYTES:
        yield f"its extra fields have {size} bytes, but at most {MAX_EXTRA_BYTES} are allowed"


def _json_problem(value: object, depth: int) -> str | None:
    """Return the reason why a value is not valid JSON or is nested too deeply, or None."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "have an integer of more than 64 bits"
    if value is None or isinstance(value, str | int | float):
        return None
    if not isinstance(value, Mapping | list | tuple):
        return f"have a value {_kind(value)}, which is not JSON"
    if not depth:
        return f"have more than {MAX_EXTRA_DEPTH} levels"
    if isinstance(value, Mapping):
        fields = cast("Mapping[object, object]", value)
        if wrong := next((key for key in fields if not isinstance(key, str)), None):
            return f"have a key {_kind(wrong)}, not a string"
        parts: Iterable[object] = fields.values()
    else:
        parts = cast("Sequence[object]", value)
    return next(filter(None, (_json_problem(each, depth - 1) for each in parts)), None)


def _taints_problems(taints: object) -> Iterator[str]:
    if not isinstance(taints, tuple | list):
        yield f"its taints are {_kind(taints)}, not a tuple of Taint"
        return
    given = cast("tuple[object, ...]", taints)
    if len(given) > MAX_DRIVER_TAINTS:
        yield f"it has {len(given)} taints, but a driver can set at most {MAX_DRIVER_TAINTS}"
        return
    seen: set[tuple[str, str]] = set()
    for taint in given:
        if not isinstance(taint, Taint):
            yield f"one of its taints is {_kind(taint)}, not a Taint"
            continue
        problem = _taint_problem(taint.key, taint.value, taint.effect)
        if problem:
            yield f"taint {shown(taint.key)} {problem}"
        elif (taint.key, taint.effect) in seen:
            yield f"taint {shown(taint.key)} appears twice with the effect {taint.effect}"
        else:
            seen.add((taint.key, taint.effect))


def _taint_problem(key: object, value: object, effect: object) -> str | None:
    if not isinstance(key, str) or not isinstance(value, str):
        return "has a key or a value that is not a string"
    if problem := label_key_problem(key):
        return problem
    if problem := label_value_problem(value):
        return f"has a value that {problem}"
    if effect not in _EFFECTS:
        return f"has the effect {shown(effect)}, which is none of {', '.join(_EFFECTS)}"
    return None


def _edits_problems(edits: object) -> Iterator[str]:
    """Yield the problems with edits. The other CDI rules are checked when a claim is prepared, as
    for all edits."""
    if not isinstance(edits, Edits):
        yield f"its edits are {_kind(edits)}, not an Edits"
        return
    nodes = cast("object", edits.device_nodes)
    if not isinstance(nodes, tuple | list):
        yield f"the device_nodes of its edits are {_kind(nodes)}, not a tuple of DeviceNode"
        return
    for node in cast("tuple[object, ...]", nodes):
        if not isinstance(node, DeviceNode):
            yield f"a device node of its edits is {_kind(node)}, not a DeviceNode"
            continue
        path = cast("object", node.path)
        if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
            yield f"the device node {shown(path)} of its edits is not an absolute path"


# ---------------------------------------------------------------- all devices

MAX_REJECTED = 100
"""Maximum number of devices to report with a reason, which is enough to find a driver bug."""

_Pools = dict[str, dict[str, Device]]
"""The devices of each pool, keyed by pool name and device name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedInventory:
    """The part of an inventory that can be published."""

    devices: tuple[Device, ...] = ()
    """The devices, in the endpoint's order."""

    counter_sets: tuple[CounterSet, ...] = ()
    fallback: tuple[Device, ...] | None = None
    ordered: bool = False
    """Whether the order of the devices matters."""

    partition_type_attribute: str = ""
    rejected: Mapping[str, str] = field(default_factory=dict[str, str])
    """The reasons for rejecting devices, as sentences, keyed by ``pool/name``, or only by the
    device name in the unnamed pool. At most 100."""

    rejected_count: int = 0
    """The number of all rejected devices, including those without a reason."""

    known: _Pools = field(default_factory=dict[str, dict[str, Device]], repr=False, compare=False)
    """The devices whose own values are valid, to save time in the next check."""


def check_inventory(
    inventory: Inventory, *, node: str = "", previous: CheckedInventory | None = None
) -> CheckedInventory:
    """
    Return the part of an inventory that can be published, and the reasons for rejecting the rest.

    If the node's name is given, the lengths of the pools' full names are also checked. `previous`
    is the result of the previous check, which saves time for unchanged devices.
    """
    known: _Pools = {}
    before = previous.known if previous is not None else {}
    check = _Check(node=node, before=before, pools=_admitted(inventory, before))
    check.set_partition_type(inventory.partition_type_attribute)
    check.add_counter_sets(inventory.counter_sets)
    devices = check.devices(inventory.devices, known=known)
    fallback = None
    if inventory.fallback is not None:
        fallback = check.devices(inventory.fallback, known={}, prefix="as a fallback, ")
    return CheckedInventory(
        devices=devices,
        counter_sets=tuple(each for pool in check.sets.values() for each in pool.values()),
        fallback=fallback,
        ordered=inventory.ordered,
        partition_type_attribute=check.partition_type,
        rejected=check.reasons,
        rejected_count=check.count,
        known=known,
    )


def _admitted(inventory: Inventory, before: Collection[str]) -> Collection[str]:
    """Return the pools of an inventory, without those above the limit. A new pool must not replace
    a known one."""
    lists = (inventory.devices, inventory.counter_sets, inventory.fallback or ())
    pools = dict.fromkeys(
        each.pool
        for given in cast("tuple[Collection[object], ...]", lists)
        for each in given
        if isinstance(each, Device | CounterSet) and isinstance(cast("object", each.pool), str)
    )
    if len(pools) <= MAX_POOLS:
        return pools.keys()
    return frozenset(sorted(pools, key=lambda pool: pool not in before)[:MAX_POOLS])


def shown_place(pool: object, name: object) -> str:
    """Return the name of a device for messages. The names can be values of any type."""
    words = [_word(name)] if pool == "" else [_word(pool), _word(name)]
    return "/".join(words)


def _word(given: object) -> str:
    """Return a name unchanged if it is a printable string of at most 80 characters. Otherwise,
    return its Python representation, truncated."""
    plain = isinstance(given, str) and 0 < len(given) <= 80 and given.isprintable()
    return str(given) if plain else shown(given)


@dataclass(kw_only=True, slots=True)
class _Check:
    """Checks one inventory, and collects its valid counter sets and rejected devices."""

    node: str
    before: _Pools
    pools: Collection[str]
    """The pools within the limit."""

    sets: dict[str, dict[str, CounterSet]] = field(default_factory=dict[str, dict[str, CounterSet]])
    partition_type: str = ""
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    count: int = 0

    def _pool_problems(self, pool: object) -> list[str]:
        if not isinstance(pool, str) or pool in self.pools:
            return []
        return [f"its pool is beyond the limit of {MAX_POOLS} pools; list it in one of the others"]

    def _refuse(self, pool: object, name: object, problems: Collection[str]) -> None:
        self.count += 1
        if len(self.reasons) < MAX_REJECTED:
            # Keep the first reason: if two devices have the same name, either the first one is
            # published, or its reason is sufficient.
            self.reasons.setdefault(shown_place(pool, name), "; ".join(problems))

    def devices(
        self, given: Collection[object], *, known: _Pools, prefix: str = ""
    ) -> tuple[Device, ...]:
        """Return the valid devices. Add all devices whose own values are valid to `known`."""
        kept: list[Device] = []
        for each in given:
            pool, name = (each.pool, each.name) if isinstance(each, Device) else ("", each)
            before: Device | None = None
            if isinstance(cast("object", pool), str) and isinstance(name, str):
                before = self.before.get(pool, {}).get(name)
            problems = self._pool_problems(pool) if isinstance(each, Device) else []
            if not problems and (before is None or before is not each):
                # A device that was valid before is still valid.
                problems = device_problems(each, node=self.node)
            if not problems:
                device = cast("Device", each)
                valid = known.setdefault(device.pool, {})
                if device.name in valid:
                    problems = ["another device of its pool has the same name"]
                else:
                    valid[device.name] = device
                    if device.consumes:
                        problems = _consumption_problems(device, self.sets)
                        problems += _type_problems(device, self.partition_type)
                if not problems:
                    kept.append(device)
                    continue
            self._refuse(pool, name, [prefix + problems[0], *problems[1:]])
        return tuple(kept)

    def set_partition_type(self, attribute: str) -> None:
        """Use an attribute as the partition type, unless its name is malformed."""
        if not attribute:
            return
        problem = qualified_name_problem(attribute)
        if not problem and "/" not in attribute:
            problem = "has no domain before it (such as gpu.example.com/profile)"
        if problem:
            self._refuse("", "partition_type_attribute", [f"its name {problem}"])
        else:
            self.partition_type = attribute

    def add_counter_sets(self, given: Collection[object]) -> None:
        """Add the valid counter sets to `sets`."""
        for each in given:
            if not isinstance(each, CounterSet):
                kind = type(each).__name__
                self._refuse(
                    "", "counter sets", [f"one of them is of type {kind}, not a CounterSet"]
                )
                continue
            problems = self._pool_problems(each.pool) or set_problems(each, node=self.node)
            pool = {} if problems else self.sets.setdefault(each.pool, {})
            if each.name in pool:
                problems = ["as a counter set, another one of its pool has the same name"]
            if problems:
                self._refuse(each.pool, each.name, problems)
            else:
                pool[each.name] = each


def _type_problems(device: Device, attribute: str) -> list[str]:
    """Return the problem with a device that lacks the partition type attribute, which would make
    its whole slice invalid."""
    if not attribute:
        return []
    names = (attribute, attribute.rpartition("/")[2])
    value = next((device.attributes[name] for name in names if name in device.attributes), None)
    if isinstance(value, str):
        return []
    return [f"it consumes counters, but has no attribute {attribute!r} with its type as a string"]


def set_problems(given: CounterSet, *, node: str = "") -> list[str]:
    """Return the reasons why a counter set cannot be published, as in :func:`device_problems`."""
    try:
        problems = list(place_problems(given.name, given.pool, node=node))
        problems += [f"it {problem}" for problem in counters_problems(given.counters)]
        return [f"as a counter set, {problems[0]}", *problems[1:]] if problems else []
    except Exception as error:  # the mapping can be an instance of a vendor's own class
        return [
            f"as a counter set, it cannot be checked ({type(error).__name__}: {str(error)[:200]})"
        ]


def _consumption_problems(
    device: Device, sets: Mapping[str, Mapping[str, CounterSet]]
) -> list[str]:
    """Check that the counters that a valid device consumes exist in its pool, and are large enough.
    Return the problems."""
    pool = sets.get(device.pool, {})
    problems: list[str] = []
    for name, counters in device.consumes.items():
        if (source := pool.get(name)) is None:
            problems.append(
                f"it consumes from the counter set {name!r}, which its pool does not have"
            )
            continue
        for counter, amount in counters.items():
            if (there := source.counters.get(counter)) is None:
                problems.append(
                    f"it consumes the counter {counter!r}, which the counter set {name!r} "
                    f"does not have"
                )
            elif parse_quantity(amount) > parse_quantity(there):
                problems.append(
                    f"it consumes {amount} of the counter {counter!r}, and the counter set "
                    f"{name!r} has {there}"
                )
    return problems[:5]
