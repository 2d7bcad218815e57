"""
Checks values in a CDI spec: names, strings, numbers, lists and objects. :mod:`.fields` combines the
checks into those of whole specs.

An *error* is rejected by a runtime, prevents a container from starting, or is forbidden by the
specification. A value with a *warning* works, but probably not as intended. A runtime rejects the
whole file for one invalid name, so names are checked before a file is written.

A check inspects one value and adds its problems to a list, so that one pass finds all problems.
Like the runtimes' own reader, the checks treat a null field as absent. A null in a list is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

# ---------------------------------------------------------------- problems

Severity = Literal["error", "warning"]

_SHOWN_CHARACTERS = 80
"""Maximum length of a value in a message. Messages appear in Events and on terminals."""

_KINDS: dict[type, str] = {
    bool: "true or false",
    dict: "an object",
    float: "a number with a fraction",
    int: "a number",
    list: "a list",
    str: "a string",
    type(None): "null",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One problem in a spec."""

    file: str = ""
    """The path of the spec's file, or of a directory. Empty if the spec was not read from a
    file."""

    path: str
    """The path of the field, such as ``devices[0].containerEdits.env[2]``. Empty for the spec as a
    whole."""

    severity: Severity
    text: str
    """The problem with the field, as the end of a sentence that begins with the field."""

    def __str__(self) -> str:
        where = " ".join(part for part in (self.file and f"{self.file}:", self.path) if part)
        return f"{where} {self.text}" if where else self.text


def has_errors(problems: Iterable[Problem]) -> bool:
    """Return whether any problem is an error."""
    return any(problem.severity == "error" for problem in problems)


def kind_of(value: object) -> str:
    """Return the JSON type of a value, or the name of its Python type if JSON does not have one for
    it."""
    return _KINDS.get(type(value)) or type(value).__name__


def shown(value: object) -> str:
    """Format a value for a message, on one line and with limited length."""
    try:
        text = repr(value)
    except ValueError:  # Python does not format numbers with thousands of digits
        return "a number with thousands of digits"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


# ---------------------------------------------------------------- names

_KIND_PART = re.compile(r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DEVICE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_FILE_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")


class InvalidNameError(ValueError):
    """A kind, device name or file name that CDI does not allow. The message is a sentence."""


def split_kind(kind: str) -> tuple[str, str]:
    """Split a kind into vendor and class, and check both."""
    vendor, slash, class_ = kind.partition("/")
    if not slash:
        raise InvalidNameError(f"CDI kind {kind!r} must have the form vendor/class")
    for part, what in ((vendor, "vendor"), (class_, "class")):
        if not _KIND_PART.fullmatch(part):
            raise InvalidNameError(
                f"the {what} {part!r} of CDI kind {kind!r} must begin with a letter, end with a "
                "letter or digit, and contain only letters, digits, '_', '-' and '.'"
            )
    return vendor, class_


def check_device_name(name: str) -> None:
    """Raise an error if runtimes reject a device name."""
    if not _DEVICE_NAME.fullmatch(name):
        raise InvalidNameError(
            f"CDI device name {name!r} must begin and end with a letter or digit, and contain "
            "only letters, digits, '_', '-', '.' and ':'"
        )


def split_qualified_name(name: str) -> tuple[str, str]:
    """Split a qualified device name, as the kubelet passes it to the runtime
    (``vendor/class=name``), into kind and device, and check both."""
    kind, equals, device = name.partition("=")
    if not equals:
        raise InvalidNameError(f"qualified CDI name {name!r} must have the form vendor/class=name")
    split_kind(kind)
    check_device_name(device)
    return kind, device


def transient_file_name(kind: str, identifier: str) -> str:
    """Return the file name of a generated, transient spec: ``vendor-class_identifier.json``."""
    vendor, class_ = split_kind(kind)
    if not _FILE_ID.fullmatch(identifier):
        raise InvalidNameError(
            f"the identifier {identifier!r} of a CDI file must begin and end with a letter or "
            "digit, and contain only letters, digits, '_', '-' and '.'"
        )
    return f"{vendor}-{class_}_{identifier}.json"


# ---------------------------------------------------------------- checks

Found: TypeAlias = list[Problem]
Check: TypeAlias = Callable[[object, str, Found], None]
"""Checks the value at a path, and adds its problems."""

Rule: TypeAlias = Callable[[str], str | None]
"""Returns the problem with a string, as the end of a sentence, or None if the string is valid."""


def add(found: Found, path: str, severity: Severity, text: str) -> None:
    """Add a problem."""
    found.append(Problem(path=path, severity=severity, text=text))


def text(
    rule: Rule | None = None, *, advice: Rule | None = None, may_be_empty: bool = False
) -> Check:
    """Return a check that applies two rules to a string. `rule` returns an error, unless the string
    is empty and `may_be_empty` is set. `advice` returns a warning."""

    def check(value: object, path: str, found: Found) -> None:
        if not isinstance(value, str):
            add(found, path, "error", f"must be a string, not {kind_of(value)}")
        # A printable string contains neither null bytes nor lone surrogates.
        elif wrong := (not value.isprintable() and _unreadable(value)) or (
            rule and (value or not may_be_empty) and rule(value)
        ):
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
    """Return a check that a value is an integer in a range. `octal` means that users write the
    integer in octal."""

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
    # JSON does not have octal numbers. Writing 660 for an octal mode is a common mistake.
    is_octal = value in range(778) and not {"8", "9"} & set(str(value))
    meant = f"; if you meant octal, write {int(str(value), 8)}" if is_octal else ""
    return f"must be from {least} to {most} (octal {most:o}), not {shown(value)}{meant}"


def flag(value: object, path: str, found: Found) -> None:
    """Check a boolean."""
    if not isinstance(value, bool):
        add(found, path, "error", f"must be true or false, not {kind_of(value)}")


@dataclass(frozen=True, eq=False, slots=True)
class Listing:
    """Checks a list: each element, and then all elements together."""

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
    """Checks an object: each field, the required fields, and then all fields together."""

    fields: Mapping[str, Check]
    required: tuple[str, ...] = ()
    whole: Callable[[dict[str, Any], str, Found], None] | None = None
    gone: Mapping[str, str] = field(default_factory=dict[str, str])
    """Explanations of fields that a version of CDI has removed."""

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
    from difflib import get_close_matches  # import lazily, because it is needed only for a problem

    by_lower = {field.lower(): field for field in fields}
    close = get_close_matches(str(name)[:64].lower(), by_lower, n=1, cutoff=0.75)
    return f"; {by_lower[close[0]]!r} is probably meant" if close else ""
