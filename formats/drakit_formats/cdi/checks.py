"""
Checks of a parsed spec: for text, numbers, lists and objects. :mod:`.fields` combines them.

A check inspects one value and adds its problems to a list, so one pass finds everything.
Null is the same as an absent field, as it is for the runtimes' own reader; in a list it is not.

It must not know which fields a spec has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from drakit_formats.cdi.problems import Problem, Severity, kind_of, shown

__all__ = ("Check", "Found", "Listing", "Record", "Rule", "add", "flag", "number", "text")

Found: TypeAlias = list[Problem]
Check: TypeAlias = Callable[[object, str, Found], None]
"""Checks the value at a path, and adds its problems."""

Rule: TypeAlias = Callable[[str], str | None]
"""The problem of a text, as the end of a sentence; None if it is valid."""


def add(found: Found, path: str, severity: Severity, text: str) -> None:
    """Add a problem."""
    found.append(Problem(path=path, severity=severity, text=text))


def text(rule: Rule | None = None, *, advice: Rule | None = None) -> Check:
    """Check a text by two rules: one gives an error, the other a warning."""

    def check(value: object, path: str, found: Found) -> None:
        if not isinstance(value, str):
            add(found, path, "error", f"must be text, not {kind_of(value)}")
        # Printable text has neither null bytes nor half characters.
        elif wrong := (not value.isprintable() and _unreadable(value)) or (rule and rule(value)):
            add(found, path, "error", wrong)
        elif advice and (wrong := advice(value)):
            add(found, path, "warning", wrong)

    return check


def _unreadable(value: str) -> str | None:
    if "\0" in value:
        return f"has a null byte: {shown(value)}"
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"contains half of a surrogate pair, which is not a character: {shown(value)}"
    return None


def number(
    least: int, most: int, *, octal: bool = False, advice: Callable[[int], str | None] | None = None
) -> Check:
    """Check a whole number and its range; `octal` if users write it so."""

    def check(value: object, path: str, found: Found) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            add(found, path, "error", f"must be a whole number, not {kind_of(value)}")
        elif not least <= value <= most:
            add(found, path, "error", _out_of_range(value, least, most, octal=octal))
        elif advice and (wrong := advice(value)):
            add(found, path, "warning", wrong)

    return check


def _out_of_range(value: int, least: int, most: int, *, octal: bool) -> str:
    if not octal:
        return f"must be from {least} to {most}, not {shown(value)}"
    # JSON has no octal numbers, and to write 660 for them is a popular mistake.
    is_octal = value in range(778) and not {"8", "9"} & set(str(value))
    meant = f"; if you meant octal, write {int(str(value), 8)}" if is_octal else ""
    return f"must be from {least} to {most} (octal {most:o}), not {shown(value)}{meant}"


def flag(value: object, path: str, found: Found) -> None:
    """Check a boolean."""
    if not isinstance(value, bool):
        add(found, path, "error", f"must be true or false, not {kind_of(value)}")


@dataclass(frozen=True, eq=False, slots=True)
class Listing:
    """Checks a list: each element, and then all of them together."""

    of: Check
    whole: Callable[[list[Any], str, Found], None] | None = None

    def __call__(self, value: object, path: str, found: Found) -> None:
        if not isinstance(value, list):
            add(found, path, "error", f"must be a list, not {kind_of(value)}")
            return
        elements = cast("list[Any]", value)
        for index, element in enumerate(elements):
            self.of(element, f"{path}[{index}]", found)
        if self.whole:
            self.whole(elements, path, found)


@dataclass(frozen=True, eq=False, slots=True)
class Record:
    """Checks an object: each field, the required fields, and then all of them together."""

    fields: Mapping[str, Check]
    required: tuple[str, ...] = ()
    whole: Callable[[dict[str, Any], str, Found], None] | None = None
    gone: Mapping[str, str] = field(default_factory=dict[str, str])
    """Explains fields that a version of CDI removed."""

    def __call__(self, value: object, path: str, found: Found) -> None:
        if not isinstance(value, dict):
            add(found, path, "error", f"must be an object, not {kind_of(value)}")
            return
        entries = cast("dict[Any, Any]", value)
        prefix = f"{path}." if path else ""
        for name, entry in entries.items():
            check = self.fields.get(name) if isinstance(name, str) else None
            if check is None:
                hint = self.gone.get(name) or _meant(name, self.fields)
                at = name if isinstance(name, str) and name.isidentifier() else shown(name)
                add(found, prefix + at, "error", f"is not a field that runtimes know{hint}")
            elif entry is not None:
                check(entry, prefix + name, found)
        for name in self.required:
            if entries.get(name) is None:
                add(found, prefix + name, "error", "is missing")
        if self.whole:
            self.whole(entries, path, found)


def _meant(name: object, fields: Mapping[str, Check]) -> str:
    from difflib import get_close_matches  # only needed if there is a problem

    by_lower = {field.lower(): field for field in fields}
    close = get_close_matches(str(name)[:64].lower(), by_lower, n=1, cutoff=0.75)
    return f"; {by_lower[close[0]]!r} is probably meant" if close else ""
