"""
Takes snapshots of a source's inventories, and detects devices that have not changed since the
previous snapshot.

Devices and edits are frozen, but the vendor controls their contents: mappings that change later,
enums used as strings, or mappings that read hardware. Therefore, a driver's objects are copied to
built-in types, in the driver's thread, before any other code reads them. A value of any other type
becomes an :class:`UnsupportedValue`, so that the validation error for the device can name the type.

Sources list all of their devices at each change, and most are unchanged. Unchanged devices keep
their identity, so that later layers need not compare them again.

Does not depend on threads, rate limits or sources.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from itertools import islice
from operator import attrgetter, is_
from typing import Any, TypeVar, cast, get_args

import orjson

from drakit.device import (
    Capacity,
    CapacityRange,
    Condition,
    CounterSet,
    Device,
    DeviceNode,
    Edits,
    Health,
    Hook,
    IntelRdt,
    Inventory,
    Mount,
    NetDevice,
    NetworkData,
    NodeAllocatableResource,
    PolicyConflict,
    PolicyOutcome,
    PreparedDevice,
    RejectedDevice,
    RejectionReason,
    Taint,
    Topology,
    Version,
)
from drakit.driver import DriverError
from drakit_driver.runtime.contract import MAX_DEVICES
from drakit_driver.runtime.failures import kind_of

MAX_DEPTH = 8
"""Maximum nesting depth. Deeper values are treated as unsupported, because a dict may contain
itself. All allowed values have fewer levels."""

STEP_DEVICES = 64
"""Number of devices to copy between clock checks."""

STEP_SECONDS = 0.002
"""Maximum time to work without a pause. During this time, the daemon's loop and the driver's own
calls wait for the interpreter lock."""

PAUSE_SECONDS = 0.001
"""How long the thread pauses, so that other threads can run."""

ThingT = TypeVar("ThingT", Device, CounterSet)
AnyT = TypeVar("AnyT")
ReportT = TypeVar("ReportT", RejectedDevice, PolicyOutcome)

_SCALARS: frozenset[type] = frozenset({type(None), bool, int, str, float})

_FIELDS: Mapping[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (
        *(Device, Capacity, CapacityRange, CounterSet, Taint, Topology, Health, Version),
        NodeAllocatableResource,
        *(Edits, DeviceNode, Mount, Hook, NetDevice, IntelRdt),
        *(PreparedDevice, Condition, NetworkData),
        *(RejectedDevice, PolicyConflict, PolicyOutcome),
    )
}

_NO_EDITS = Device(name="").edits
"""The default edits, which most devices have: one shared object."""

_EMPTY: dict[Any, Any] = {}
"""Most mappings of most devices are empty. Sharing one object saves memory."""


# ------------------------------------------------------------ one value


class UnsupportedValue:
    """The placeholder for a value of an unsupported type. Each unsupported type has a subclass with
    the same name, which appears in errors."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


@lru_cache(maxsize=1000)
def _unsupported(name: str) -> UnsupportedValue:
    return type(name, (UnsupportedValue,), {"__slots__": ()})()


def snapshot_of(value: Any, depth: int = 0) -> Any:
    """Return a copy of a value, or the value itself if it cannot change. Propagates any exception
    that a vendor's own class raises when it is read."""
    kind = cast("type[Any]", type(value))
    if kind in _SCALARS or value is _NO_EDITS:
        return value
    if kind in _FIELDS and depth < MAX_DEPTH:
        return _copy_of_fields(value, kind, depth)
    if isinstance(value, str):  # a subclass of str, such as an enum
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth < MAX_DEPTH:
        if isinstance(value, tuple):
            given = cast("tuple[Any, ...]", value)
            copies = tuple([snapshot_of(each, depth + 1) for each in given])
            return given if kind is tuple and all(map(is_, copies, given)) else copies
        if isinstance(value, list):
            return [snapshot_of(each, depth + 1) for each in cast("list[Any]", value)]
        if isinstance(value, Mapping):
            return _copy_of_mapping(cast("Mapping[Any, Any]", value), depth)
        for base in kind.__mro__:
            if base in _FIELDS:
                return _copy_of_fields(value, base, depth)
    return _unsupported(kind_of(value))


def _copy_of_mapping(value: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
    # Copy a dict in one step, because another driver thread may be changing it.
    copy = value.copy() if isinstance(value, dict) else dict(value.items())
    if not copy:
        return _EMPTY
    if {str}.issuperset(map(type, copy)) and _SCALARS.issuperset(map(type, copy.values())):
        return copy
    return {_copy_of_key(key): snapshot_of(each, depth + 1) for key, each in copy.items()}


def _copy_of_key(key: object) -> object:
    copy = snapshot_of(key, MAX_DEPTH)
    return copy if type(copy) in _SCALARS else _unsupported(kind_of(key))


def _copy_of_fields(value: Any, kind: type[Any], depth: int) -> Any:
    names = _FIELDS[kind]
    given = [getattr(value, name) for name in names]
    copies = [snapshot_of(each, depth + 1) for each in given]
    if type(value) is kind and all(map(is_, copies, given)):
        return value
    return kind(**dict(zip(names, copies, strict=True)))


# ------------------------------------------------------------ inventories


def inventory_of(listed: object) -> Inventory:
    """Convert the yielded value to an inventory whose collections are tuples of the driver's
    objects. Raises DriverError if it is not an inventory."""
    if not isinstance(listed, Inventory):
        return Inventory(devices=_all_of(listed, Device, "devices"))
    fallback = listed.fallback
    return Inventory(
        devices=_all_of(listed.devices, Device, "devices"),
        counter_sets=_all_of(listed.counter_sets, CounterSet, "counter sets"),
        fallback=None if fallback is None else _all_of(fallback, Device, "devices"),
        rejected=_all_of(listed.rejected, RejectedDevice, "rejected devices"),
        policies=_all_of(listed.policies, PolicyOutcome, "outcomes of policies"),
        withdrawn=_names(listed.withdrawn),
        ordered=_of_type(listed.ordered, bool, "ordered"),
        partition_type_attribute=str.__str__(
            _of_type(listed.partition_type_attribute, str, "partition_type_attribute")
        ),
    )


def _of_type(given: object, kind: type[AnyT], name: str) -> AnyT:
    if not isinstance(given, kind):
        raise DriverError(
            f"it listed an Inventory whose {name} is {kind_of(given)}, not {kind.__name__}; this "
            "is a bug in the driver"
        )
    return given


def _names(listed: object) -> tuple[str, ...]:
    return tuple([str.__str__(name) for name in _all_of(listed, str, "withdrawn devices")])


def _all_of(listed: object, kind: type[AnyT], plural: str) -> tuple[AnyT, ...]:
    # Reject a string, whose characters would otherwise be treated as names.
    if not isinstance(listed, Iterable) or (kind is str and isinstance(listed, str)):
        raise DriverError(
            f"it listed {kind_of(listed)}, which is not a collection of {plural}; this is a bug in "
            "the driver"
        )
    # Limit the number, because a generator may be endless.
    things = tuple(islice(cast("Iterable[Any]", listed), MAX_DEVICES + 1))
    if len(things) > MAX_DEVICES:
        raise DriverError(
            f"it listed more than {MAX_DEVICES:,} {plural}, which no node can publish; this is a "
            "bug in the driver"
        )
    if set(map(type, things)) - {kind}:  # a fast check, because it runs at each yield
        for thing in things:
            if not isinstance(thing, kind):
                raise DriverError(
                    f"it listed {kind_of(thing)}, which is not a {kind.__name__}; this is a bug in "
                    "the driver"
                )
    return things


class InventorySnapshots:
    """Takes the snapshots of one run of a driver, in its loop. An unchanged device is the same
    object as in the previous snapshot."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_at = 0.0
        """The time at which the current work without a pause began (loop clock)."""
        self._known: dict[str, dict[tuple[str, str], Any]] = {}
        """For each collection, the last snapshots, keyed by pool and name. If several have the same
        key, the first one is kept."""

    async def of(self, given: Inventory) -> Inventory:
        """Return the snapshot of an inventory. Raises the errors of :func:`snapshot_of`, and
        DriverError if a report has a wrong type."""
        self._began_at = self._loop.time()
        fallback = given.fallback
        return Inventory(
            devices=await self._snapshots("devices", given.devices),
            counter_sets=await self._snapshots("counter sets", given.counter_sets),
            fallback=None if fallback is None else await self._snapshots("fallback", fallback),
            rejected=_reports(given.rejected),
            policies=_reports(given.policies),
            withdrawn=given.withdrawn,
            ordered=given.ordered,
            partition_type_attribute=given.partition_type_attribute,
        )

    async def _snapshots(self, kind: str, given: Collection[ThingT]) -> tuple[ThingT, ...]:
        before: dict[tuple[str, str], ThingT] = self._known.get(kind, {})
        known: dict[tuple[str, str], ThingT] = {}
        ours: list[ThingT] = []
        for number, thing in enumerate(given, start=1):
            key = key_of(thing)
            old = None if key is None else before.get(key)
            if old is None or not is_unchanged(thing, old):
                copy = cast("ThingT", snapshot_of(thing))
                # Compare again, because a vendor's enums and mappings can be compared only after
                # they are copied.
                if old is None or not is_unchanged(copy, old):
                    old = copy
            ours.append(old)
            if key is not None:
                known.setdefault(key, old)
            if not number % STEP_DEVICES and self._loop.time() - self._began_at > STEP_SECONDS:
                await asyncio.sleep(PAUSE_SECONDS)
                self._began_at = self._loop.time()
        self._known[kind] = known
        return tuple(ours)


_TEXTS = ("device", "policy", "reason", "message", "problem", "in_use_by")
_NUMBERS = ("matched", "published", "in_use")
_REASONS = frozenset(get_args(RejectionReason))


def _reports(given: Collection[ReportT]) -> tuple[ReportT, ...]:
    """Return copies of the driver's reports about rejected devices or policies. They are shown to
    users unchanged, so their types are checked here. Raises DriverError."""
    reports = tuple([cast("ReportT", snapshot_of(each)) for each in given])
    for each in reports:
        _check_report(each)
        if isinstance(each, RejectedDevice) and each.reason not in _REASONS:
            raise DriverError(
                f"it listed a RejectedDevice with reason {each.reason!r}, which is none of "
                f"{', '.join(sorted(_REASONS))}; this is a bug in the driver"
            )
        if isinstance(each, PolicyOutcome):
            for conflict in _all_of(each.conflicts, PolicyConflict, "conflicts"):
                _check_report(conflict)
    return reports


def _check_report(report: RejectedDevice | PolicyConflict | PolicyOutcome) -> None:
    for name, kind in (*((text, str) for text in _TEXTS), *((number, int) for number in _NUMBERS)):
        value = getattr(report, name, kind())
        if not isinstance(value, kind):
            raise DriverError(
                f"it listed a {type(report).__name__} whose {name} is {kind_of(value)}, not "
                f"{kind.__name__}; this is a bug in the driver"
            )


def key_of(thing: Device | CounterSet) -> tuple[str, str] | None:
    """Return the pool and name as plain strings, or None if either is not a string."""
    pool, name = cast("object", thing.pool), cast("object", thing.name)
    if isinstance(pool, str) and isinstance(name, str):
        return str.__str__(pool), str.__str__(name)
    return None


def by_key(inventory: Inventory) -> dict[tuple[str, str] | None, Device]:
    """Return the devices of an inventory, keyed by pool and name. If several have the same key, the
    first one applies. The fallback comes last."""
    listed = (*inventory.devices, *(inventory.fallback or ()))
    return {key_of(each): each for each in reversed(listed)}


# ---------------------------------------------------------------- unchanged devices

_device_values = attrgetter(*(each.name for each in fields(Device) if each.compare))
_set_values = attrgetter(*(each.name for each in fields(CounterSet)))


def is_unchanged(new: ThingT, old: ThingT) -> bool:
    """
    Return whether a device or counter set equals its previous version, which can then be used
    instead.

    Compares fields rather than objects, because a vendor's class may define its own comparison.
    """
    if new is old:
        return True
    try:
        if isinstance(new, CounterSet) or isinstance(old, CounterSet):
            return bool(_set_values(new) == _set_values(old))
        return bool(_device_values(new) == _device_values(old)) and _same_types(new, old)
    except Exception:  # a value has the wrong type, so validation will reject the copy
        return False


_FLAGS = ("allow_multiple_allocations", "binds_to_node", "evict_if_gone", "prepare_again")


def _same_types(new: Device, old: Device) -> bool:
    """Return whether the values of two equal devices also have equal types. Python treats 1, 1.0
    and True as equal, but the API does not."""
    if type(new.topology.numa_node) is not type(old.topology.numa_node):
        return False
    if any(type(getattr(new, name)) is not type(getattr(old, name)) for name in _FLAGS):
        return False
    if new.extra and _text_of(new.extra) != _text_of(old.extra):
        return False
    for name, value in new.attributes.items():
        other = old.attributes[name]
        if type(value) is not type(other):
            return False
        if isinstance(value, tuple) and [*map(type, value)] != [*map(type, other)]:  # pyright: ignore[reportArgumentType]
            return False
    return True


def _text_of(fields: Mapping[str, Any]) -> bytes:
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)


_other_parts = attrgetter(
    "rejected", "policies", "withdrawn", "ordered", "partition_type_attribute"
)


def same_inventory(one: Inventory, other: Inventory) -> bool:
    """Return whether two inventories are equal. Unchanged devices must be the same objects in
    both."""
    if (one.fallback is None) != (other.fallback is None):
        return False
    pairs = (
        (one.devices, other.devices),
        (one.counter_sets, other.counter_sets),
        (one.fallback or (), other.fallback or ()),
    )
    if not all(len(new) == len(old) and all(map(is_, new, old)) for new, old in pairs):
        return False
    return bool(_other_parts(one) == _other_parts(other))
