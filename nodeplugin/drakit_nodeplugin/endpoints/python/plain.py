"""
What a driver made, as plain values that are nobody's but ours.

Devices and edits are frozen, but what they hold is the vendor's: mappings that change later, texts
that are enums, objects whose comparison raises or does not end. So all of it is made anew from
types of Python's own, in the driver's thread, before anybody else looks at it. What is of no such
type stays as something that does nothing and has its type's name, so that who checks can name it.

It must not know event loops, or which values are allowed where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import islice
from typing import Any, cast

from drakit.device import (
    Capacity,
    CapacityRange,
    CounterSet,
    Device,
    DeviceNode,
    Edits,
    Health,
    Hook,
    IntelRdt,
    Mount,
    NetDevice,
    Taint,
    Topology,
    Version,
)

__all__ = ("TooMuchError", "UnsupportedValue", "name_of_type", "plain")

MAX_VALUES = 10_000
"""Of one device, or of the edits of one: a mapping of a vendor's own class may have no end."""

MAX_DEPTH = 8
"""What is below is strange: a dict may hold itself. The values that are allowed have half of it."""

MAX_NAME = 80
"""Characters of a type's name."""

MAX_STRANGE = 1000
"""Types that are told apart by their names: a driver may make new ones without end."""

_SCALARS: frozenset[type] = frozenset({type(None), bool, int, str, float})

_FIELDS: Mapping[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (
        *(Device, Capacity, CapacityRange, CounterSet, Taint, Topology, Health, Version),
        *(Edits, DeviceNode, Mount, Hook, NetDevice, IntelRdt),
    )
}

_NO_EDITS = Device(name="").edits
"""The edits of most devices: one and the same object."""

_EMPTY: dict[Any, Any] = {}
"""Most mappings of most devices are empty; one for all of them saves memory."""

_type_name = type.__dict__["__name__"].__get__
"""Of the type itself: a metaclass may have a `__name__` of its own."""


class TooMuchError(Exception):
    """A value has no end, or nearly so."""

    def __init__(self) -> None:
        super().__init__(f"it has more than {MAX_VALUES:,} values")


class UnsupportedValue:
    """What stands for a value of a type that is nowhere allowed; each such type has a class."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"


_strange: dict[str, UnsupportedValue] = {}


def name_of_type(kind: type) -> str:
    """Give a type's name, in characters that can be shown, without asking the type."""
    name = str.__str__(_type_name(kind))[:MAX_NAME]
    return name if name.isprintable() else ascii(name)


def plain(value: object) -> Any:
    """
    Give a value as a plain one; the value itself if it cannot change and is plain already.

    Raises :class:`TooMuchError`, and whatever a vendor's own class raises when it is read.
    """
    return _Copy().of(value, 0)


class _Copy:
    """One value that is being made anew."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_VALUES

    def of(self, value: object, depth: int) -> Any:
        kind = type(value)
        if kind in _SCALARS or value is _NO_EDITS:
            return value
        if kind is dict:
            # In one step, as another thread of the driver may be changing it.
            return self._dict(cast("dict[Any, Any]", value).copy(), depth)
        if kind in _FIELDS:
            return self._fields(value, kind, depth)
        return self._other(value, kind, depth)

    def _other(self, value: Any, kind: type[Any], depth: int) -> Any:
        # By its real type: `__class__` can say anything. Booleans have no types below theirs.
        if issubclass(kind, str):
            return str.__str__(value)
        if issubclass(kind, int):
            return int.__int__(value)
        if issubclass(kind, float):
            return float.__float__(value)
        if depth < MAX_DEPTH:
            if issubclass(kind, tuple):
                return self._tuple(value, depth)
            if issubclass(kind, list):
                return [self.of(each, depth + 1) for each in self._some(value)]
            if issubclass(kind, Mapping):
                items = cast("Mapping[Any, Any]", value).items()
                return self._dict(dict(islice(items, self._left + 1)), depth)
            for base in kind.__mro__:
                if base in _FIELDS:
                    return self._fields(value, base, depth)
        return _strange_one(kind)

    def _dict(self, ours: dict[Any, Any], depth: int) -> Any:
        if not ours:
            return _EMPTY
        self._take(len(ours))
        if {str}.issuperset(map(type, ours)) and _SCALARS.issuperset(map(type, ours.values())):
            return ours
        if depth >= MAX_DEPTH:
            return _strange_one(dict)
        return {self._key(key): self.of(each, depth + 1) for key, each in ours.items()}

    def _key(self, key: object) -> object:
        plain = self.of(key, MAX_DEPTH)
        return plain if type(plain) in _SCALARS else _strange_one(type(key))

    def _tuple(self, value: Any, depth: int) -> Any:
        given = self._some(value)
        ours = tuple([self.of(each, depth + 1) for each in given])
        same = all(map(lambda one, other: one is other, ours, given))
        return cast("Any", value if same and type(value) is tuple else ours)

    def _some(self, value: Any) -> list[Any]:
        given: list[Any] = list(islice(value, self._left + 1))
        self._take(len(given))
        return given

    def _fields(self, value: Any, kind: type, depth: int) -> Any:
        if depth >= MAX_DEPTH:
            return _strange_one(kind)
        names = _FIELDS[kind]
        self._take(len(names))
        given = [getattr(value, name) for name in names]
        ours = [self.of(each, depth + 1) for each in given]
        if type(value) is kind and all(map(lambda one, other: one is other, ours, given)):
            return value
        return kind(**dict(zip(names, ours, strict=True)))

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise TooMuchError


def _strange_one(kind: type) -> UnsupportedValue:
    name = name_of_type(kind)
    known = _strange.get(name)
    if known is None:
        if len(_strange) >= MAX_STRANGE:
            name = "object"
        # Its texts are ours, and two of one name are one and the same object.
        known = _strange.setdefault(name, type(name, (UnsupportedValue,), {"__slots__": ()})())
    return known
