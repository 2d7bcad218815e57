"""
What a driver yields, made plain: an inventory that no vendor's code is behind any more.

A driver yields all of its devices at each change, and most are as they were. Those stay the very
objects that they were, so that nobody else looks at them again; they are compared here, in the
driver's thread, with what was made of them before. What a plain value is says :mod:`.plain`.

It must not know threads, floods, or whether devices can be published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Generic, TypeVar, cast

from drakit.device import CounterSet, Device, Inventory, Topology
from drakit_nodeplugin.endpoints.python.plain import plain

__all__ = ("Freezer",)

STEP_DEVICES = 64
"""Between two looks at the clock."""

STEP_SECONDS = 0.002
"""How long it works without a pause: the daemon's loop, and the driver's own calls, wait for the
interpreter meanwhile."""

PAUSE_SECONDS = 0.001
"""Long enough for who waits to be given the interpreter."""

MAX_SHAPES = 1000
"""Kept, as devices have few; a driver that gives each device other attributes has no use of it."""

ThingT = TypeVar("ThingT", Device, CounterSet)

_Shape = tuple[object, ...]
"""The names of attributes, and the types that Python does not tell apart when it compares."""


@dataclass(frozen=True, slots=True)
class _Known(Generic[ThingT]):
    """What was made of one thing."""

    shape: _Shape | None
    """Of the driver's own object; None if it cannot be told quickly."""
    ours: ThingT


_Things = dict[tuple[str, str], _Known[ThingT]]
"""By pool and name; of those with one name the first."""


class Freezer:
    """Makes the inventories of one life of a driver plain; used in its loop."""

    def __init__(self) -> None:
        self._devices: _Things[Device] = {}
        self._fallback: _Things[Device] = {}
        self._counter_sets: _Things[CounterSet] = {}
        self._shapes: dict[_Shape, _Shape] = {}

    async def frozen(self, given: Inventory) -> Inventory:
        """
        Give an inventory of tuples as a plain one; what did not change is as it was, and is the
        same object. Raises what :func:`.plain` does.
        """
        steps = _Steps()
        devices, self._devices = await self._all(given.devices, self._devices, steps)
        sets, self._counter_sets = await self._all(given.counter_sets, self._counter_sets, steps)
        fallback = None
        if given.fallback is not None:
            fallback, self._fallback = await self._all(given.fallback, self._fallback, steps)
        return Inventory(devices=devices, counter_sets=sets, fallback=fallback)

    async def _all(
        self, given: Collection[ThingT], before: _Things[ThingT], steps: _Steps
    ) -> tuple[tuple[ThingT, ...], _Things[ThingT]]:
        things = tuple(given)
        ours: list[ThingT] = []
        known: _Things[ThingT] = {}
        for start in range(0, len(things), STEP_DEVICES):
            for thing in things[start : start + STEP_DEVICES]:
                one = self._same(thing, before) or self._new(thing, before)
                ours.append(one.ours)
                key = _key(one.ours)
                if key is not None:
                    known.setdefault(key, one)
            await steps.give_way()
        return tuple(ours), known

    def _same(self, thing: ThingT, before: _Things[ThingT]) -> _Known[ThingT] | None:
        """Give what is known of a thing if it is, at a quick look, as it was."""
        key = _key(thing)
        old = None if key is None else before.get(key)
        if old is None or old.shape is None:
            return None
        try:
            # Not by its own comparison: a class of the vendor's may hold more, and is never equal.
            same = _values(thing) == _values(old.ours) and _shape(thing) == old.shape
        except Exception:  # a vendor's value may refuse to be compared
            return None
        return old if same else None

    def _new(self, thing: ThingT, before: _Things[ThingT]) -> _Known[ThingT]:
        ours = cast("ThingT", plain(thing))
        shape = _shape(thing)
        if shape is not None:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes.setdefault(shape, shape)
        key = _key(ours)
        old = None if key is None else before.get(key)
        if old is not None and ours == old.ours and _types(ours) == _types(old.ours):
            ours = old.ours
        return _Known(shape, ours)


_device_values = attrgetter(*(each.name for each in fields(Device) if each.compare))
_set_values = attrgetter(*(each.name for each in fields(CounterSet)))


def _values(thing: Device | CounterSet) -> object:
    return (_device_values if isinstance(thing, Device) else _set_values)(thing)


def _key(thing: Device | CounterSet) -> tuple[str, str] | None:
    pool, name = cast("object", thing.pool), cast("object", thing.name)
    if type(pool) is type(name) is str:
        return cast("tuple[str, str]", (pool, name))
    texts = issubclass(type(pool), str) and issubclass(type(name), str)
    return (plain(pool), plain(name)) if texts else None


def _shape(thing: Device | CounterSet) -> _Shape | None:
    """Say what of a thing its comparison does not: Python takes 1, 1.0 and True for equal."""
    if not isinstance(thing, Device):
        return ()
    if type(thing.topology) is not Topology:
        return None
    given = cast("object", thing.attributes)
    if type(given) is not dict:
        return None
    attributes = cast("dict[object, object]", given)
    types: list[type] = [type(value) for value in attributes.values()]
    if tuple in types:
        for value in attributes.values():
            if type(value) is tuple:
                types += map(type, cast("tuple[object, ...]", value))
    kinds = type(thing.topology.numa_node), type(thing.allow_multiple_allocations)
    return (*kinds, *attributes, *types)


def _types(thing: Device | CounterSet) -> object:
    """The same of a plain one, in whichever order its attributes are."""
    if isinstance(thing, CounterSet):
        return None
    attributes = cast("object", thing.attributes)
    topology = cast("object", thing.topology)
    numa = topology.numa_node if isinstance(topology, Topology) else None
    types: dict[object, object] = {}
    if isinstance(attributes, dict):
        for name, value in cast("dict[object, object]", attributes).items():
            kinds: list[object] = [type(value)]
            if isinstance(value, tuple):
                kinds += map(type, cast("tuple[object, ...]", value))
            types[name] = kinds
    return type(numa), type(thing.allow_multiple_allocations), types


class _Steps:
    """Gives way to others from time to time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()

    async def give_way(self) -> None:
        if self._loop.time() - self._began_at > STEP_SECONDS:
            await asyncio.sleep(PAUSE_SECONDS)
            self._began_at = self._loop.time()
