"""
Which devices a class or request means, as far as its CEL is simple; else: unknown.

Understood are conjunctions of ``device.driver == "x"`` and ``device.attributes["d"].a == literal``
with strings, integers and bools: the form of nearly every DeviceClass. Anything else makes the
answer *unknown*, and who asks must then claim nothing. The API server's CEL is not imitated.

It must not know clients, claims, or who asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from drakit.explain.model import AttributeFact, DeviceFacts, DeviceID, SliceFacts

__all__ = ("Matches", "Published", "Test", "current_devices", "match_devices", "parse")

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
    shareable: frozenset[DeviceID] = frozenset()
    """Those of both that remain available while a claim holds them."""


class Published(NamedTuple):
    """A device and the slice that publishes it."""

    origin: SliceFacts
    device: DeviceFacts
    complete: bool
    """Whether all slices of its pool are there; the scheduler waits for the others."""


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


def current_devices(slices: Iterable[SliceFacts]) -> list[Published]:
    """
    Give the devices of each pool's highest generation; older slices are on their way out.

    A pool that lacks slices of that generation is being written anew, and nothing is allocated from
    it until it is complete: any of its devices may be there in a moment, the older ones too.
    """
    pools: dict[tuple[str, str], list[SliceFacts]] = {}
    for each in slices:
        pools.setdefault((each.driver, each.pool), []).append(each)
    return [published for pool in pools.values() for published in _devices_of_pool(pool)]


def _devices_of_pool(pool: Sequence[SliceFacts]) -> list[Published]:
    newest = max(each.generation for each in pool)
    current = [each for each in pool if each.generation == newest]
    complete = all(each.pool_slices == len(current) for each in current)
    return [
        Published(each, device, complete)
        for each in (current if complete else pool)
        for device in each.devices
    ]


def match_devices(devices: Iterable[Published], expressions: Sequence[str]) -> Matches:
    """Sort devices by what all the expressions together say of them."""
    parsed = [parse(expression) for expression in expressions]
    tests = [test for conjunction in parsed if conjunction is not None for test in conjunction]
    all_known = None not in parsed
    certain: list[DeviceID] = []
    possible: list[DeviceID] = []
    shareable: list[DeviceID] = []
    for origin, device, complete in devices:
        verdict = _all_hold(tests, origin.driver, device)
        if verdict is False:
            continue
        identity = DeviceID(origin.driver, origin.pool, device.name)
        (certain if verdict and all_known and complete else possible).append(identity)
        if device.shareable:
            shareable.append(identity)
    return Matches(certain=tuple(certain), possible=tuple(possible), shareable=frozenset(shareable))


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
