"""
Whether a device is unchanged: sources list all of their devices at each change, and most are as
they were. Those keep their identity, so that nobody behind the endpoint compares them again.

It must not know where devices come from, or whether they can be published.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter, is_
from typing import TypeVar

from drakit.device import CounterSet, Device, Inventory

__all__ = ("MAX_DEVICES", "is_unchanged", "same_inventory")

MAX_DEVICES = 16_384
"""Of an endpoint: more than have been seen to be published with ease, and few enough to be gone
through at each change."""

ThingT = TypeVar("ThingT", Device, CounterSet)

_device_values = attrgetter(*(each.name for each in fields(Device) if each.compare))
_set_values = attrgetter(*(each.name for each in fields(CounterSet)))


def is_unchanged(new: ThingT, old: ThingT) -> bool:
    """
    Return whether a device or counter set equals the one before it, and can be replaced by it.

    Fields are compared, not the objects: a class of a vendor's own may compare in its own way.
    """
    if new is old:
        return True
    if isinstance(new, CounterSet) or isinstance(old, CounterSet):
        return bool(_set_values(new) == _set_values(old))
    return bool(_device_values(new) == _device_values(old)) and _same_types(new, old)


def _same_types(new: Device, old: Device) -> bool:
    """Python takes 1, 1.0 and True for equal; the API does not."""
    if type(new.topology.numa_node) is not type(old.topology.numa_node):
        return False
    if type(new.allow_multiple_allocations) is not type(old.allow_multiple_allocations):
        return False
    for name, value in new.attributes.items():
        other = old.attributes[name]
        if type(value) is not type(other):
            return False
        if isinstance(value, tuple) and [*map(type, value)] != [*map(type, other)]:  # pyright: ignore[reportArgumentType]
            return False
    return True


def same_inventory(one: Inventory, other: Inventory) -> bool:
    """Compare inventories whose unchanged devices have kept their identity."""
    if (one.fallback is None) != (other.fallback is None):
        return False
    pairs = (
        (one.devices, other.devices),
        (one.counter_sets, other.counter_sets),
        (one.fallback or (), other.fallback or ()),
    )
    return all(len(new) == len(old) and all(map(is_, new, old)) for new, old in pairs)
