"""
Determines which devices selectors select. An expression is evaluated only once for all devices that
do not differ for it.

An evaluator (:class:`Selectors`) evaluates CEL. This module decides what must be evaluated, and
stores the results for each expression and slice, with one bit per device. If two devices differ
only in fields that an expression does not read, they have the same result.

Does not depend on the evaluation of CEL, claims, or allocations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple, Protocol

from drakit_explain.devices import (
    AttributeFact,
    CapacityFacts,
    DeviceKind,
    ListValue,
    Version,
    bits,
    unpacked,
)
from drakit_explain.model import SliceFacts

MAX_EXPRESSIONS = 512
"""Maximum number of distinct expressions to store results for. With 5,000 slices, each takes 0.3
MiB. The least recently used expression of the owner with the most expressions is dropped first, so
that one tenant cannot displace the others."""

MAX_OF_OWNER = 128
"""Maximum number of distinct expressions to store results for in one namespace."""

MAX_ALIKE = 1_000
"""Maximum number of results for devices, and for former slices, to store for one expression. An
expression that reads a unique attribute has more results. For such an expression, only the results
for slices are stored."""

THE_REQUEST = "the request"
"""The owner of a selector that does not belong to a class."""

OWN_SELECTOR = "its selector"
"""The name of a request's selector, in a sentence about the request."""

SELECTOR_SECONDS = 2.0
"""How long to wait for a result of one selector. The evaluator gives up on a selector after 1 s."""

BATCH = 2_000
"""Maximum number of devices in one call of an evaluator. :meth:`SelectorIndex.needed` returns about
as many: it adds the rest of the last slice."""


_ONE_DRIVER = re.compile(
    r"""\s*device\.driver\s*==\s*(["'])([a-z0-9.-]+)\1\s*(?:\Z|&&(?!.*(?:\|\||\?)))""", re.DOTALL
)


def selector_of(owner: str) -> str:
    """Return the name of a selector of a request, or of its class, as the subject of a clause."""
    return OWN_SELECTOR if owner == THE_REQUEST else f"the selector of {owner}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """The facts that an expression reads, which determine its result together with the driver."""

    error: str = ""
    """The reason why the expression does not compile. Empty if it does. An expression that does not
    compile selects nothing, and no request can use it."""

    everything: bool = False
    attributes: frozenset[str] = frozenset()
    """The full names of the attributes, as ``domain/identifier``. ``domain/*`` means all attributes
    of a domain."""

    capacity: frozenset[str] = frozenset()
    shareable: bool = False


@dataclass(frozen=True, slots=True)
class SelectorResult:
    """The result for one device: whether it is selected, or the evaluator's error."""

    selected: bool = False
    error: str = ""
    unknown: str = ""
    """The reason why this evaluator cannot evaluate the expression for the device."""

    expensive: bool = False
    """Whether the reason is that the expression takes too much time, which also applies to other
    devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureGates:
    """
    Feature gates of Kubernetes that change the meaning of a selector. Unknown gates are treated as
    enabled.

    The API server rejects an expression that does not compile with its own gates. Therefore, a gate
    that is enabled here and disabled in the cluster changes the result only for objects from before
    it was disabled.
    """

    consumable_capacity: bool = True
    """``DRAConsumableCapacity`` (KEP-5075): ``device.allowMultipleAllocations``."""

    list_attributes: bool = True
    """``DRAListTypeAttributes`` (KEP-5491): attributes with lists of values, and ``includes``."""


class Selectors(Protocol):
    """Evaluates selectors. Devices have the JSON fields of the API and ``driver``. ``seconds`` is
    the time limit for a result."""

    def use(self, gates: FeatureGates) -> None: ...
    def reads(
        self, expressions: Sequence[str], *, seconds: float = SELECTOR_SECONDS
    ) -> list[Reads]: ...
    def select(
        self,
        expression: str,
        devices: Sequence[Mapping[str, Any]],
        *,
        seconds: float = SELECTOR_SECONDS,
    ) -> list[SelectorResult]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The results of one expression for the devices of a slice."""

    matches: int = 0
    errors: Mapping[int, str] = field(default_factory=dict[int, str])
    unknown: str = ""


class _Profile(NamedTuple):
    """
    The facts that determine the results for all devices of a slice.

    Kinds and columns are compared by identity: equal ones are usually the same object, and
    computing their hash would take longer than everything else.
    """

    driver: str
    groups: tuple[tuple[int, int, tuple[int, ...]], ...]
    """For each kind: its identity, its mask, and the identities of the columns that the expression
    reads."""


@dataclass(slots=True)
class _Lookup:
    """The slices of one profile whose results are missing."""

    slices: list[SliceFacts]
    devices: list[SelectorResult | int]
    """For each device: its result, or the number of the device that will be evaluated."""


@dataclass(slots=True)
class Evaluations:
    """The next evaluations of an expression. One device represents all devices that do not differ
    for the expression."""

    expression: str
    devices: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    """The devices to evaluate. Empty if all results are known from other slices."""

    numbers: dict[object, int] = field(default_factory=dict[object, int])
    """The number of each device, keyed by the facts that determine its result."""

    queries: dict[_Profile, _Lookup] = field(default_factory=dict["_Profile", "_Lookup"])


class _Positions(NamedTuple):
    """The positions of the values that an expression reads from a kind of device."""

    kind: DeviceKind
    """The kind. The reference keeps it alive, because it is looked up by its identity."""

    values: Sequence[int]
    """The indexes of the attributes."""

    fixed: object
    """Further facts that determine the result. They are the same for all devices of the kind."""

    capacity: Sequence[CapacityFacts]


@dataclass(slots=True)
class _Expression:
    reads: Reads
    owner: str = ""
    driver: str | None = None
    """The only driver whose devices the expression can select. None if it may select those of
    several drivers."""

    outcomes: dict[object, SelectorResult] = field(default_factory=dict[object, SelectorResult])
    positions: dict[tuple[str, int], _Positions] = field(
        default_factory=dict[tuple[str, int], _Positions]
    )
    slices: dict[str, Evaluated] = field(default_factory=dict[str, Evaluated])
    profiles: dict[_Profile, tuple[SliceFacts, Evaluated]] = field(
        default_factory=dict["_Profile", "tuple[SliceFacts, Evaluated]"]
    )
    """A slice with each profile, and its results. The reference to the slice keeps the objects
    alive that the profile identifies."""

    complete: object = None
    """The version of the slices (see `needed`) for which all results are known."""

    expensive: SelectorResult | None = None
    """The result for all further devices after the evaluator has given up. None if it has not."""


_NOTHING = Evaluated()


class SelectorIndex:
    """Stores the results for each expression and slice. Not thread-safe."""

    def __init__(self) -> None:
        self._expressions: dict[str, _Expression] = {}
        """The expressions, in the order of their last use."""

        self._owners: Counter[str] = Counter()
        """The number of expressions of each owner."""

        self._slices: dict[str, SliceFacts] = {}
        self._equal: dict[object, Evaluated] = {}

    def clear(self) -> None:
        """Drop everything, because the evaluation rules have changed."""
        self._expressions.clear()
        self._owners.clear()
        self._slices.clear()

    def unread(self, expressions: Iterable[str]) -> list[str]:
        """Return the expressions whose fields are unknown, because they have not been determined
        yet or were dropped."""
        return [each for each in dict.fromkeys(expressions) if each not in self._expressions]

    def learn(self, reads: Mapping[str, Reads], *, owner: str = "") -> None:
        """
        Store which fields expressions read. If there are too many expressions, drop others.

        :param owner: the namespace that needs them. An empty namespace has no separate limit.
        """
        for expression, each in reads.items():
            self._expressions[expression] = _Expression(each, owner, only_driver(expression))
            self._owners[owner] += 1
            if owner and self._owners[owner] > MAX_OF_OWNER:
                self._drop_one(owner)
            elif len(self._expressions) > MAX_EXPRESSIONS:
                self._drop_one(self._owners.most_common(1)[0][0])

    def _drop_one(self, owner: str) -> None:
        """Drop the least recently used expression of an owner."""
        found = next(text for text, each in self._expressions.items() if each.owner == owner)
        del self._expressions[found]
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]

    def needed(
        self, expression: str, slices: Collection[SliceFacts], *, version: object = None
    ) -> Evaluations | None:
        """
        Return the next evaluations. Return None if all results for these slices are known, or if
        the expression was not stored because there was no room for it.

        :param version: a value that is the same for equal slices. Each expression is checked once
            per value.
        """
        entry = self._expressions.pop(expression, None)
        if entry is None:
            return None
        self._expressions[expression] = entry  # mark the expression as the most recently used
        if entry.reads.error or (version is not None and entry.complete == version):
            return None
        needed = Evaluations(expression)
        for of in slices:
            if self._find(entry, of) is not None:
                continue
            profile = _profile(entry, of)
            if profile in needed.queries:
                needed.queries[profile].slices.append(of)
            elif len(needed.devices) < BATCH:
                needed.queries[profile] = _Lookup([of], _ask(entry, of, needed))
            else:
                break  # the next call returns the remaining evaluations
        if needed.queries:
            return needed
        entry.complete = version
        entry.expensive = None
        return None

    def store(self, needed: Evaluations, outcomes: Sequence[SelectorResult]) -> None:
        """Store the results of evaluations, in their order."""
        entry = self._expressions.get(needed.expression)
        if entry is None:
            return
        for profile, query in needed.queries.items():
            evaluated = self._combined(
                [outcomes[each] if isinstance(each, int) else each for each in query.devices]
            )
            entry.profiles[profile] = (query.slices[0], evaluated)
            for of in query.slices:
                if self._slices.get(of.name) is of:
                    entry.slices[of.name] = evaluated
        if len(entry.profiles) > len(entry.slices) + MAX_ALIKE:
            entry.profiles.clear()  # most profiles belong to former slices
        if outcomes and outcomes[-1].expensive:
            entry.expensive = outcomes[-1]
        if len(outcomes) < MAX_ALIKE:  # otherwise, the expression reads a unique attribute
            if len(entry.outcomes) > MAX_ALIKE:
                entry.outcomes.clear()
            entry.outcomes.update(zip(needed.numbers, outcomes, strict=True))

    def forget(self, slices: Iterable[str]) -> None:
        """Drop the results for slices with these names, because they have changed or were
        deleted."""
        for name in slices:
            self._slices.pop(name, None)
            for entry in self._expressions.values():
                entry.slices.pop(name, None)

    def problem(self, expression: str) -> str:
        """Return the reason why an expression does not compile, or an empty string."""
        return self._expressions[expression].reads.error

    def evaluated(self, expression: str, of: SliceFacts) -> Evaluated:
        """Return the results for a slice. Raises KeyError if they were not evaluated."""
        found = self._find(self._expressions[expression], of)
        if found is None:
            raise KeyError(expression)
        return found

    def _find(self, entry: _Expression, of: SliceFacts) -> Evaluated | None:
        if entry.driver not in (None, of.driver):
            return _NOTHING
        if self._slices.get(of.name) is not of:
            self.forget([of.name])
            self._slices[of.name] = of
        found = entry.slices.get(of.name)
        if found is None:
            known = entry.profiles.get(_profile(entry, of))
            if known is not None:
                found = entry.slices[of.name] = known[1]
        return found

    def _combined(self, outcomes: Sequence[SelectorResult]) -> Evaluated:
        """Combine the results for the devices of a slice. Equal results share one object."""
        matches, unknown = 0, ""
        errors: dict[int, str] = {}
        for index, outcome in enumerate(outcomes):
            if outcome.selected:
                matches |= 1 << index
            elif outcome.error:
                errors[index] = outcome.error
            unknown = unknown or outcome.unknown
        if len(self._equal) > MAX_ALIKE:
            self._equal.clear()
        key = (matches, unknown, tuple(errors.items()))
        return self._equal.setdefault(
            key, Evaluated(matches=matches, errors=errors, unknown=unknown)
        )


def only_driver(expression: str) -> str | None:
    """
    Return the only driver for whose devices an expression can be true, or None.

    Such an expression is a conjunction that begins with a comparison of the driver, as in most
    classes.
    """
    found = _ONE_DRIVER.match(expression)
    return found[2] if found else None


def evaluate(
    selectors: Selectors,
    expression: str,
    devices: Sequence[Mapping[str, Any]],
    *,
    seconds: float = SELECTOR_SECONDS,
) -> list[SelectorResult]:
    """
    Evaluate an expression for any number of devices. Each batch can take ``seconds``.

    If the evaluator gives up during a batch, the expression is treated as too expensive for all
    further batches.
    """
    outcomes: list[SelectorResult] = []
    for start in range(0, len(devices), BATCH):
        outcomes += selectors.select(expression, devices[start : start + BATCH], seconds=seconds)
        if outcomes[-1].expensive:
            break
    return outcomes + outcomes[-1:] * (len(devices) - len(outcomes))


def bring_up_to_date(
    index: SelectorIndex,
    selectors: Selectors,
    expressions: Collection[str],
    slices: Collection[SliceFacts],
) -> None:
    """Evaluate the missing results of an index for these expressions and slices. This may take
    seconds."""
    if unread := index.unread(expressions):
        index.learn(dict(zip(unread, selectors.reads(unread), strict=True)))
    for expression in dict.fromkeys(expressions):
        while needed := index.needed(expression, slices):
            index.store(needed, evaluate(selectors, expression, needed.devices))


def _profile(entry: _Expression, of: SliceFacts) -> _Profile:
    groups: list[tuple[int, int, tuple[int, ...]]] = []
    for kind, mask, columns in of.devices.groups:
        read = _positions_of(entry, of.driver, kind).values
        groups.append((id(kind), mask, tuple([id(columns[index]) for index in read])))
    return _Profile(of.driver, tuple(groups))


def _ask(entry: _Expression, of: SliceFacts, needed: Evaluations) -> list[SelectorResult | int]:
    """Return for each device in a slice its result, or its number in the evaluations."""
    found: list[SelectorResult | int] = [0] * len(of.devices)
    for kind, mask, columns in of.devices.groups:
        positions = _positions_of(entry, of.driver, kind)
        read = [unpacked(columns[index]) for index in positions.values]
        rows: Iterable[Sequence[AttributeFact | None]]
        rows = zip(*read, strict=True) if read else repeat((), mask.bit_count())
        for index, values in zip(bits(mask), rows, strict=True):
            key = (positions.fixed, _typed(values))
            answer: SelectorResult | int | None = entry.outcomes.get(key) or entry.expensive
            if answer is None:
                answer = needed.numbers.get(key)
            if answer is None:
                answer = needed.numbers[key] = len(needed.devices)
                needed.devices.append(_body(positions, of.driver, values))
            found[index] = answer
    return found


def _positions_of(entry: _Expression, driver: str, kind: DeviceKind) -> _Positions:
    place = (driver, id(kind))
    found = entry.positions.get(place)
    if found is None:
        if len(entry.positions) > MAX_ALIKE:
            entry.positions.clear()
        found = entry.positions[place] = _positions(entry.reads, driver, kind)
    return found


def _typed(values: Sequence[object]) -> tuple[object, ...]:
    """Distinguish 1 from true, and the string "1.0.0" from the version, because they are equal in
    Python."""
    return tuple(
        [value if type(value) is str else (type(value).__name__, value) for value in values]
    )


def _positions(reads: Reads, driver: str, kind: DeviceKind) -> _Positions:
    if reads.everything or kind.unusual:
        everything = range(len(kind.attributes))
        return _Positions(kind, everything, (driver, id(kind)), kind.capacity)
    values = tuple(
        index
        for index, name in enumerate(kind.attributes)
        if _is_read(name, driver, reads.attributes)
    )
    capacity = tuple(each for each in kind.capacity if _is_read(each.name, driver, reads.capacity))
    names = tuple(kind.attributes[index] for index in values)
    amounts = tuple((each.name, each.value) for each in capacity)
    shareable = kind.shareable if reads.shareable else None
    return _Positions(kind, values, (driver, names, amounts, shareable), capacity)


def _is_read(name: str, driver: str, read: frozenset[str]) -> bool:
    full = name if "/" in name else f"{driver}/{name}"
    return full in read or f"{full.partition('/')[0]}/*" in read


def _body(
    positions: _Positions, driver: str, values: Sequence[AttributeFact | None]
) -> dict[str, Any]:
    """Return the device fields that an expression reads, as JSON of the API, and the device's
    driver."""
    kind = positions.kind
    return {
        "driver": driver,
        "allowMultipleAllocations": kind.shareable,
        "attributes": {
            kind.attributes[index]: attribute_body(value)
            for index, value in zip(positions.values, values, strict=True)
        },
        "capacity": {each.name: {"value": each.value} for each in positions.capacity},
    }


def attribute_body(value: object) -> dict[str, object]:
    """Return an attribute's value as JSON of the API."""
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
