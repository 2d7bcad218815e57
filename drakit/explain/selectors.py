"""
Which devices a class or request means, as far as its CEL is simple; else: unknown.

Understood are conjunctions of ``device.driver == "x"`` and ``device.attributes["d"].a == literal``
with strings, integers and bools: the form of nearly every DeviceClass. Anything else makes the
answer *unknown*, and who asks must then claim nothing. The API server's CEL is not imitated.

It must not know clients, claims, or who asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from drakit.explain.model import AttributeFact, DeviceFacts, DeviceID
from drakit.explain.pools import Published

__all__ = ("Matches", "Test", "match_devices", "parse")

_DRIVER = "driver"
"""The left side ``device.driver``; attributes have a slash in their full name."""

_TERM = re.compile(
    r"""\s*device\.
    (?: driver
      | attributes\[ \s* (?P<q1>["']) (?P<domain>[a-z0-9.-]+) (?P=q1) \s* \]
        (?: \.(?P<name>[A-Za-z_]\w*) | \[ \s* (?P<q2>["']) (?P<key>[A-Za-z_]\w*) (?P=q2) \s* \] )
    )
    \s*==\s*
    (?: "(?P<double>[^"\\\n]*)" | '(?P<single>[^'\\\n]*)'
      | (?P<integer>-?(?:0|[1-9][0-9]*))(?![\w.]) | (?P<bool>true|false)\b )
    \s*""",
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Test:
    """The left side must equal the literal."""

    __test__ = False  # not a test case, whatever a test runner thinks of the name

    left: str
    literal: str | int | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Matches:
    """Devices that fulfil selectors for certain, and those of which we cannot tell."""

    certain: tuple[DeviceID, ...] = ()
    possible: tuple[DeviceID, ...] = ()
    special: Mapping[DeviceID, DeviceFacts] = field(default_factory=dict[DeviceID, DeviceFacts])
    """The certain ones that not only a holder can make unavailable: they have taints, capacities or
    counters, or can be shared."""


@lru_cache(maxsize=1024)
def parse(expression: str) -> tuple[Test, ...] | None:
    """Read a conjunction of simple tests; None if the expression is anything else."""
    tests: list[Test] = []
    position = 0
    while (term := _TERM.match(expression, position)) is not None:
        tests.append(Test(_left(term), _literal(term)))
        position = term.end()
        if position == len(expression):
            return tuple(tests)
        if not expression.startswith("&&", position):
            return None
        position += len("&&")
    return None


def _left(term: re.Match[str]) -> str:
    if term["domain"] is None:
        return _DRIVER
    return f"{term['domain']}/{term['name'] or term['key']}"


def _literal(term: re.Match[str]) -> str | int | bool:
    if term["bool"] is not None:
        return term["bool"] == "true"
    if term["integer"] is not None:
        return int(term["integer"])
    return term["double"] if term["double"] is not None else term["single"]


def match_devices(devices: Iterable[Published], expressions: Sequence[str]) -> Matches:
    """Sort devices by what all the expressions together say of them."""
    parsed = [parse(expression) for expression in expressions]
    tests = [test for conjunction in parsed if conjunction is not None for test in conjunction]
    all_known = None not in parsed
    certain: list[DeviceID] = []
    possible: list[DeviceID] = []
    special: dict[DeviceID, DeviceFacts] = {}
    for origin, device, complete in devices:
        verdict = _all_hold(tests, origin.driver, device)
        if verdict is False:
            continue
        identity = DeviceID(origin.driver, origin.pool, device.name)
        if not (verdict and all_known and complete):
            possible.append(identity)
            continue
        certain.append(identity)
        if device.taints or device.capacity or device.consumes or device.shareable:
            special[identity] = device
    return Matches(certain=tuple(certain), possible=tuple(possible), special=special)


def _all_hold(tests: Iterable[Test], driver: str, device: DeviceFacts) -> bool | None:
    """Evaluate a conjunction: False wins over unknown (None), as it does in CEL."""
    verdict: bool | None = True
    for test in tests:
        if test.left == _DRIVER:
            holds: bool | None = _equal(driver, test.literal)
        elif test.left in device.attributes:
            fact = device.attributes[test.left]
            holds = None if fact is None else _equal(fact, test.literal)
        else:
            holds = False  # CEL fails on an absent attribute, and such a device is never allocated
        if holds is False:
            return False
        if holds is None:
            verdict = None
    return verdict


def _equal(fact: AttributeFact, literal: AttributeFact) -> bool:
    return type(fact) is type(literal) and fact == literal  # in CEL, true is not 1
