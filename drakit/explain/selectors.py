"""
Selects the devices of a class or request, if its CEL is simple; otherwise, the result is unknown.

Supported are conjunctions of ``device.driver == "x"`` and ``device.attributes["d"].a == literal``
with strings, integers and bools: the form of nearly every DeviceClass. Anything else makes the
answer *unknown*, from which the caller must conclude nothing. The API server's CEL is not imitated.

It must not know clients, claims, or the caller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from drakit.explain.pools import Published

__all__ = ("Matches", "Test", "match_devices", "parse")

_DRIVER = "driver"
"""The left side ``device.driver``; attributes have a slash in their full name."""

_ABSENT = ()
"""Equals no literal: CEL fails on an absent attribute, and such a device is never allocated."""

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
    """Devices that certainly fulfil selectors, and those for which it is unknown."""

    certain: tuple[Published, ...] = ()
    possible: tuple[Published, ...] = ()

    def __len__(self) -> int:
        """The number of devices in it."""
        return len(self.certain) + len(self.possible)


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
    """
    Sort devices by the combined result of all expressions.

    False wins over unknown, as in CEL. The function handles every device of a cluster in one call,
    hence one flat loop.
    """
    parsed = [parse(expression) for expression in expressions]
    tests = [
        (test.left, test.literal, type(test.literal))
        for conjunction in parsed
        for test in conjunction or ()
    ]
    drivers = [literal for left, literal, _ in tests if left == _DRIVER]
    tests = [test for test in tests if test[0] != _DRIVER]
    all_known = None not in parsed
    certain: list[Published] = []
    possible: list[Published] = []
    for published in devices:
        identity, device, complete = published
        if not identity.driver:  # of a slice that could not be read
            possible.append(published)
            continue
        if drivers and any(identity.driver != driver for driver in drivers):
            continue
        known = all_known and complete
        attributes = device.attributes
        for left, literal, kind in tests:
            fact = attributes.get(left, _ABSENT)
            if fact is None:
                known = False
            elif fact != literal or type(fact) is not kind:  # in CEL, true is not 1
                break
        else:
            (certain if known else possible).append(published)
    return Matches(certain=tuple(certain), possible=tuple(possible))
