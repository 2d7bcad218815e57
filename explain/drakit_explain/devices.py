"""
Stores the devices of a slice in packed form, because most of a slice's values also occur in other
slices.

A cluster has hundreds of thousands of devices. Their values are stored by column: one column per
attribute and kind of device. Equal columns are the same object, so slices that differ only in a few
attributes share the others. A column of unique strings is stored as one string. A device is
unpacked when it is read.

Does not depend on JSON or claims.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar, overload

from drakit_formats.resource.nodes import NodeSelector


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of a capacity or a counter, as a quantity."""

    name: str
    quantity: str


class Version(str):
    """A semantic version (API: ``DeviceAttribute.version``). The scheduler never treats it as
    equal to a string, but in Python, it equals the string with the same text."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ListValue:
    """A list attribute (API: ``ints``, ``bools``, ``strings``, ``versions``)."""

    kind: str
    values: tuple[str | int | bool, ...]


AttributeFact = str | int | bool | Version | ListValue


@dataclass(frozen=True, kw_only=True, slots=True)
class TaintFacts:
    """
    A taint that new pods must tolerate, regardless of its age.

    Taints that are only informative (effect None, or an unknown effect) are omitted. Only a
    DeviceTaintRule can contain one (see :attr:`.TaintRuleFacts.adds_taints`).
    """

    key: str
    effect: str
    value: str = ""

    @property
    def shown(self) -> str:
        """The taint as ``key`` or ``key=value``, as in kubectl."""
        return f"{self.key}={self.value}" if self.value else self.key


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPolicy:
    """The amounts of a capacity that a claim can consume. A request is rounded up to one of
    them."""

    default: str | None = None
    valid_values: tuple[str, ...] = ()
    min: str | None = None
    max: str | None = None
    step: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityFacts:
    name: str
    """The name in the slice. Requests and allocations must use the same spelling."""

    value: str
    policy: CapacityPolicy | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterSetFacts:
    """The amounts in a counter set that the partitions of a hardware device share, or that one
    partition consumes."""

    name: str
    counters: tuple[Amount, ...]
    grouped: bool = False
    """Whether only devices with a common group may consume the counters (API:
    ``compatibilityGroups``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The nodes that can use a device: one node, all nodes, or those that a selector selects."""

    node: str = ""
    every: bool = False
    selector: NodeSelector | None = None
    """The field ``nodeSelector`` in the API."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKind:
    """The values that similar devices have in common. Thousands of devices share one DeviceKind
    object."""

    attributes: tuple[str, ...] = ()
    """The attributes' names in the slice. The devices' `values` have the same order."""

    capacity: tuple[CapacityFacts, ...] = ()
    shareable: bool = False
    """Whether claims can have shares of the device (API: ``allowMultipleAllocations``)."""

    binding: bool = False
    """Whether the device has binding conditions. If so, the scheduler uses its pool after pools
    without such devices."""

    unusual: bool = False
    """Whether an attribute's value is a list, or of a type that this version does not know.
    Selectors may fail for such a device."""

    extra: bool = False
    """Whether the device has a value or a policy that this version does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    name: str
    kind: DeviceKind = DeviceKind()
    values: tuple[AttributeFact | None, ...] = ()
    """The values of the kind's attributes. None for a type that this version does not know."""

    taints: tuple[TaintFacts, ...] = ()
    consumes: tuple[CounterSetFacts, ...] = ()
    """The amounts of its pool's counters that the device consumes while it is allocated. Empty
    unless the device is a partition."""

    place: Place | None = None
    """The nodes that can use the device, if each device in the slice has its own node selection
    (API: ``perDeviceNodeSelection``)."""

    def attribute(self, name: str, driver: str) -> AttributeFact | None:
        """Return the value of the attribute with this full name, according to the scheduler's
        rules."""
        names = self.kind.attributes
        if name in names:
            return self.values[names.index(name)]
        domain, _, identifier = name.partition("/")
        if domain == driver and identifier in names:
            return self.values[names.index(identifier)]
        return None


Column = tuple[AttributeFact | None, ...] | str
"""The values of one attribute. Unique strings are stored as one string, joined by
``_SEPARATOR``."""

_SEPARATOR = "\n"

_FEW = 8
"""Minimum number of values in a column to store it as one string."""

_MAX_SHARED = 4096
"""Maximum number of columns to cache, so that equal columns are the same object."""

_MAX_UNPACKED = 64
"""Maximum number of slices to keep unpacked: those that were unpacked last."""


class Group(NamedTuple):
    """The devices of one kind in a slice."""

    kind: DeviceKind
    mask: int
    """A bitmask of the devices, with a bit for each index in the slice."""

    columns: tuple[Column, ...]
    """The values of the devices, for each attribute of the kind."""


class Devices(Sequence[DeviceFacts]):
    """The devices of a slice. Immutable."""

    __slots__ = ("_unpacked", "consumes", "groups", "names", "places", "taints")

    def __init__(
        self,
        *,
        names: tuple[str, ...],
        groups: tuple[Group, ...],
        taints: tuple[tuple[TaintFacts, ...], ...],
        consumes: tuple[tuple[CounterSetFacts, ...], ...],
        places: tuple[Place | None, ...],
    ) -> None:
        """Use :meth:`of`."""
        self.names: tuple[str, ...] = names
        self.groups: tuple[Group, ...] = groups
        self.taints: tuple[tuple[TaintFacts, ...], ...] = taints
        """The taints of each device. Empty if no device has taints. The same applies to `consumes`
        and `places`."""

        self.consumes: tuple[tuple[CounterSetFacts, ...], ...] = consumes
        self.places: tuple[Place | None, ...] = places
        self._unpacked: tuple[DeviceFacts, ...] | None = None

    @classmethod
    def of(cls, facts: Iterable[DeviceFacts]) -> Devices:
        """Pack devices."""
        devices = facts if isinstance(facts, (list, tuple)) else list(facts)
        by_kind: dict[DeviceKind, list[int]] = {}
        last: DeviceKind | None = None
        indexes: list[int] = []
        for index, device in enumerate(devices):
            # Compare by identity first, because computing the hash would take longer than
            # everything else.
            if device.kind is not last:
                last = device.kind
                indexes = by_kind.setdefault(last, [])
            indexes.append(index)
        return cls(
            names=_shared_names(tuple([device.name for device in devices])),
            groups=tuple(_group(kind, found, devices) for kind, found in by_kind.items()),
            taints=_rare(tuple([device.taints for device in devices])),
            consumes=_rare(tuple([device.consumes for device in devices])),
            places=_rare(tuple([device.place for device in devices])),
        )

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> DeviceFacts: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DeviceFacts]: ...
    def __getitem__(self, index: int | slice) -> DeviceFacts | Sequence[DeviceFacts]:
        return self._facts()[index]

    def __iter__(self) -> Iterator[DeviceFacts]:
        return iter(self._facts())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Devices):
            return isinstance(other, tuple) and self._facts() == other
        return self is other or (
            self.names == other.names
            and self.groups == other.groups
            and all(map(_same_types, self.groups, other.groups))
            and self.taints == other.taints
            and self.consumes == other.consumes
            and self.places == other.places
        )

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return f"Devices.of({self._facts()!r})"

    def named(self, name: str) -> DeviceFacts | None:
        """Return the first device with a name, without unpacking the others."""
        if name not in self.names:
            return None
        index = self.names.index(name)
        if self._unpacked is not None:
            return self._unpacked[index]
        group = next(each for each in self.groups if each.mask >> index & 1)
        place = (group.mask & ((1 << index) - 1)).bit_count()
        return self._fact(index, group.kind, [unpacked(each)[place] for each in group.columns])

    def _facts(self) -> tuple[DeviceFacts, ...]:
        if self._unpacked is None:
            self._unpacked = self._unpack()
            _recent.append(self)
            if len(_recent) > _MAX_UNPACKED:
                _recent.popleft()._unpacked = None
        return self._unpacked

    def _unpack(self) -> tuple[DeviceFacts, ...]:
        facts: dict[int, DeviceFacts] = {}
        for group in self.groups:
            columns = [unpacked(column) for column in group.columns]
            for place, index in enumerate(bits(group.mask)):
                values = [column[place] for column in columns]
                facts[index] = self._fact(index, group.kind, values)
        return tuple([facts[index] for index in range(len(facts))])

    def _fact(
        self, index: int, kind: DeviceKind, values: Iterable[AttributeFact | None]
    ) -> DeviceFacts:
        return DeviceFacts(
            name=self.names[index],
            kind=kind,
            values=tuple(values),
            taints=self.taints[index] if self.taints else (),
            consumes=self.consumes[index] if self.consumes else (),
            place=self.places[index] if self.places else None,
        )


_recent: deque[Devices] = deque()

NO_DEVICES = Devices(names=(), groups=(), taints=(), consumes=(), places=())


def unpacked(column: Column) -> Sequence[AttributeFact | None]:
    """Return the values of a column."""
    return column.split(_SEPARATOR) if isinstance(column, str) else column


def bits(mask: int) -> Iterator[int]:
    """Yield the indexes of the bits that are set, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _group(kind: DeviceKind, indexes: Sequence[int], devices: Sequence[DeviceFacts]) -> Group:
    mask = 0
    for index in indexes:
        mask |= 1 << index
    values = zip(*[devices[index].values for index in indexes], strict=True)
    return Group(kind, mask, tuple([_column(each) for each in values]))


def _column(values: tuple[AttributeFact | None, ...]) -> Column:
    texts = [value for value in values if type(value) is str]
    if len(texts) == len(values) >= _FEW and len(set(texts)) > len(texts) // 2:
        joined = _SEPARATOR.join(texts)
        if joined.count(_SEPARATOR) == len(texts) - 1:
            return joined
    types = set(map(type, values))
    return _shared_column(values, types.pop() if len(types) == 1 else tuple(map(type, values)))


@lru_cache(maxsize=_MAX_SHARED)
def _shared_column(values: tuple[AttributeFact | None, ...], types: object) -> Column:
    """Return the cached column that equals this one. The values 1 and true are treated as
    different, and so are the string and the version "1.0.0"."""
    return values


@lru_cache(maxsize=_MAX_SHARED)
def _shared_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return names


def _same_types(one: Group, other: Group) -> bool:
    """Return whether equal groups have values of equal types: 1 equals true in Python."""
    return all(
        a is b or isinstance(a, str) or list(map(type, a)) == list(map(type, b))
        for a, b in zip(one.columns, other.columns, strict=True)
    )


Rare = TypeVar("Rare")


def _rare(column: tuple[Rare, ...]) -> tuple[Rare, ...]:
    return column if any(column) else ()
