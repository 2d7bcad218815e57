"""
Which devices selectors select, evaluated once for all devices that are alike to an expression.

An evaluator (:class:`Selectors`) evaluates CEL; this module decides what must be evaluated and
keeps the outcomes: by expression and slice, as a bit for each device. A device that differs only in
what an expression does not read has the same outcome.

It must not know how CEL is evaluated, claims, or allocations.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from drakit.explain.model import DeviceFacts, DeviceKind, ListValue, SliceFacts, Version

__all__ = (
    "Evaluated",
    "FeatureGates",
    "Outcome",
    "Reads",
    "SelectorIndex",
    "Selectors",
    "Work",
    "bring_up_to_date",
    "device_body",
    "evaluate",
)

MAX_EXPRESSIONS = 512
"""Different expressions whose outcomes are kept; the oldest go first."""

MAX_ALIKE = 100_000
"""Outcomes that are kept for one expression: one that reads a unique attribute has one for each
device."""

BATCH = 2_000
"""Devices in one call of an evaluator."""


_ONE_DRIVER = re.compile(
    r"""\s*device\.driver\s*==\s*(["'])([a-z0-9.-]+)\1\s*(?:\Z|&&(?!.*(?:\|\||\?)))""", re.DOTALL
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """What the outcome of an expression depends on, besides the driver."""

    error: str = ""
    """Why the expression does not compile; then it selects nothing, and no request can use it."""

    everything: bool = False
    attributes: frozenset[str] = frozenset()
    """Full names, ``domain/identifier``; ``domain/*`` means all of a domain."""

    capacity: frozenset[str] = frozenset()
    shareable: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome for one device: selected or not, or the evaluator's error."""

    selected: bool = False
    error: str = ""
    unknown: str = ""
    """Why this evaluator cannot evaluate the expression for the device."""

    expensive: bool = False
    """Whether that is because it takes too much time, which holds for other devices as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureGates:
    """
    Feature gates of Kubernetes that change what a selector means. Unknown gates count as on.

    The API server rejects an expression that does not compile with its own gates. So a gate that
    is on here and off in the cluster changes the outcome only for objects from before it was off.
    """

    consumable_capacity: bool = True
    """``DRAConsumableCapacity`` (KEP-5075): ``device.allowMultipleAllocations``."""

    list_attributes: bool = True
    """``DRAListTypeAttributes`` (KEP-5491): attributes with lists of values, and ``includes``."""


class Selectors(Protocol):
    """Evaluates selectors; devices have the JSON fields of the API and ``driver``."""

    def use(self, gates: FeatureGates) -> None: ...
    def reads(self, expressions: Sequence[str]) -> list[Reads]: ...
    def select(self, expression: str, devices: Sequence[Mapping[str, Any]]) -> list[Outcome]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The outcomes of one expression for the devices of a slice."""

    matches: int = 0
    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """What an evaluator has to do: devices by expression, one of all that are alike."""

    devices: Mapping[str, Sequence[Mapping[str, Any]]]
    keys: Mapping[str, Sequence[object]]

    def __bool__(self) -> bool:
        return bool(self.devices)


class _Positions(NamedTuple):
    """Where a kind of device has what an expression reads."""

    kind: DeviceKind
    """Kept alive: it is found by its identity, because its hash costs more than the rest."""

    values: tuple[int, ...] | None
    """Indexes of values; None if the outcome can depend on all of a device."""

    fixed: object
    """What else the outcome depends on: the same for all devices of the kind."""


@dataclass(slots=True)
class _Expression:
    reads: Reads
    outcomes: dict[object, Outcome] = field(default_factory=dict[object, Outcome])
    positions: dict[tuple[str, int], _Positions] = field(
        default_factory=dict[tuple[str, int], _Positions]
    )
    slices: dict[str, tuple[SliceFacts, Evaluated]] = field(
        default_factory=dict[str, "tuple[SliceFacts, Evaluated]"]
    )


class SelectorIndex:
    """Outcomes by expression and slice. Not for threads: :meth:`evaluate` alone may run in one."""

    def __init__(self) -> None:
        self._expressions: dict[str, _Expression] = {}

    def clear(self) -> None:
        """Drop everything: expressions are evaluated by other rules from now on."""
        self._expressions.clear()

    def unread(self, expressions: Iterable[str]) -> list[str]:
        """Return the expressions of which it is not known what they read."""
        return [each for each in dict.fromkeys(expressions) if each not in self._expressions]

    def learn(self, reads: Mapping[str, Reads]) -> None:
        for expression, each in reads.items():
            self._expressions[expression] = _Expression(each)
        while len(self._expressions) > MAX_EXPRESSIONS:
            del self._expressions[next(iter(self._expressions))]

    def work(self, expressions: Iterable[str], slices: Collection[SliceFacts]) -> Work:
        """Return what must be evaluated before all outcomes for these slices are known."""
        devices: dict[str, list[Mapping[str, Any]]] = {}
        keys: dict[str, list[object]] = {}
        for expression in dict.fromkeys(expressions):
            entry = self._expressions[expression]
            if entry.reads.error:
                continue
            missing: dict[object, Mapping[str, Any]] = {}
            for of in slices:
                known = entry.slices.get(of.name)
                if known is not None and known[0] is of:
                    continue
                complete = True
                found = _keys(entry, of)
                for index, key in enumerate(found):
                    if key not in entry.outcomes:
                        complete = False
                        if key not in missing:
                            missing[key] = device_body(of.devices[index], of.driver)
                if complete:
                    outcomes = [entry.outcomes[key] for key in found]
                    entry.slices[of.name] = (of, _combined(outcomes))
            if missing:
                keys[expression] = list(missing)
                devices[expression] = list(missing.values())
        return Work(devices, keys)

    def store(self, work: Work, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
        """Keep the outcomes of work, in its order."""
        for expression, found in outcomes.items():
            entry = self._expressions.get(expression)
            if entry is None:
                continue
            if len(entry.outcomes) + len(found) > MAX_ALIKE:
                entry.outcomes.clear()
            entry.outcomes.update(zip(work.keys[expression], found, strict=True))

    def forget(self, slices: Iterable[str]) -> None:
        """Drop the outcomes for slices, by name: they are deleted."""
        names = tuple(slices)
        for entry in self._expressions.values():
            for name in names:
                entry.slices.pop(name, None)

    def problem(self, expression: str) -> str:
        """Return why an expression does not compile, or the empty string."""
        return self._expressions[expression].reads.error

    def evaluated(self, expression: str, of: SliceFacts) -> Evaluated:
        """Return the outcomes for a slice; raise KeyError for what was not evaluated."""
        entry = self._expressions[expression]
        known = entry.slices.get(of.name)
        if known is not None and known[0] is of:
            return known[1]
        found = _combined([entry.outcomes[key] for key in _keys(entry, of)])
        entry.slices[of.name] = (of, found)
        return found


def only_driver(expression: str) -> str | None:
    """
    Return the driver without which an expression is false, whatever the device; None if unknown.

    That is a conjunction that begins with a comparison of the driver, as most classes have it.
    """
    found = _ONE_DRIVER.match(expression)
    return found[2] if found else None


def evaluate(
    selectors: Selectors, expression: str, devices: Sequence[Mapping[str, Any]]
) -> list[Outcome]:
    """
    Evaluate an expression for any number of devices; it may take seconds.

    If the evaluator gives up during a batch, the expression is too expensive for all further ones.
    """
    outcomes: list[Outcome] = []
    for start in range(0, len(devices), BATCH):
        outcomes += selectors.select(expression, devices[start : start + BATCH])
        if outcomes[-1].expensive:
            break
    return outcomes + outcomes[-1:] * (len(devices) - len(outcomes))


def bring_up_to_date(
    index: SelectorIndex,
    selectors: Selectors,
    expressions: Collection[str],
    slices: Collection[SliceFacts],
) -> None:
    """Evaluate what an index lacks for these expressions and slices; it may take seconds."""
    if unread := index.unread(expressions):
        index.learn(dict(zip(unread, selectors.reads(unread), strict=True)))
    work = index.work(expressions, slices)
    index.store(
        work,
        {
            expression: evaluate(selectors, expression, devices)
            for expression, devices in work.devices.items()
        },
    )


def _combined(outcomes: Sequence[Outcome]) -> Evaluated:
    matches, unknown = 0, ""
    errors: dict[int, str] = {}
    for index, outcome in enumerate(outcomes):
        if outcome.selected:
            matches |= 1 << index
        elif outcome.error:
            errors[index] = outcome.error
        unknown = unknown or outcome.unknown
    return Evaluated(matches=matches, errors=errors, unknown=unknown)


def _keys(entry: _Expression, of: SliceFacts) -> list[object]:
    """Return what the outcome for each device of a slice depends on. Hot: a loop a device."""
    keys: list[object] = []
    found: _Positions | None = None
    for device in of.devices:
        kind = device.kind
        if found is None or found.kind is not kind:
            place = (of.driver, id(kind))
            found = entry.positions.get(place)
            if found is None:
                found = entry.positions[place] = _positions(entry.reads, of.driver, kind)
        if found.values is None:
            keys.append((found.fixed, kind, _typed(device.values)))
        elif found.values:
            keys.append((found.fixed, _typed([device.values[index] for index in found.values])))
        else:
            keys.append(found.fixed)
    return keys


def _typed(values: Sequence[object]) -> tuple[object, ...]:
    """Keep 1, true and "1.0.0" the version apart: they are equal to Python."""
    return tuple(
        [value if type(value) is str else (type(value).__name__, value) for value in values]
    )


def _positions(reads: Reads, driver: str, kind: DeviceKind) -> _Positions:
    if reads.everything or kind.unusual:
        return _Positions(kind, None, driver)
    values = tuple(
        index
        for index, name in enumerate(kind.attributes)
        if _is_read(name, driver, reads.attributes)
    )
    capacity = tuple(
        (each.name, each.value)
        for each in kind.capacity
        if _is_read(each.name, driver, reads.capacity)
    )
    names = tuple(kind.attributes[index] for index in values)
    shareable = kind.shareable if reads.shareable else None
    return _Positions(kind, values, (driver, names, capacity, shareable))


def _is_read(name: str, driver: str, read: frozenset[str]) -> bool:
    full = name if "/" in name else f"{driver}/{name}"
    return full in read or f"{full.partition('/')[0]}/*" in read


def device_body(device: DeviceFacts, driver: str) -> dict[str, Any]:
    """Write what an expression can read of a device as the API does, and its driver."""
    kind = device.kind
    return {
        "driver": driver,
        "allowMultipleAllocations": kind.shareable,
        "attributes": {
            name: _attribute_body(value)
            for name, value in zip(kind.attributes, device.values, strict=True)
        },
        "capacity": {each.name: {"value": each.value} for each in kind.capacity},
    }


def _attribute_body(value: object) -> dict[str, object]:
    match value:
        case bool():
            return {"bool": value}
        case int():
            return {"int": value}
        case Version():
            return {"version": str(value)}
        case str():
            return {"string": value}
        case ListValue():
            return {value.kind: list(value.values)}
        case _:
            return {}
