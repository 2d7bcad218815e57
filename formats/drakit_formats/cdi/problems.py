"""
Problems of a CDI spec, and their places: the vocabulary of the linter.

An *error* is rejected by a runtime, prevents a container from starting, or is forbidden by the
specification. A *warning* works, but probably not as intended.

It must not know which problems there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ("Problem", "Severity", "has_errors", "kind_of", "shown")

Severity = Literal["error", "warning"]

_SHOWN_CHARACTERS = 80
"""Characters of a value in a sentence: sentences appear in Events and terminals."""

_KINDS: dict[type, str] = {
    bool: "true or false",
    dict: "an object",
    float: "a number with a fraction",
    int: "a number",
    list: "a list",
    str: "text",
    type(None): "null",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One problem of a spec."""

    file: str = ""
    """Path of the spec's file, or of a directory; empty if the spec came from none."""

    path: str
    """The field (``devices[0].containerEdits.env[2]``); empty for the spec as a whole."""

    severity: Severity
    text: str
    """The problem of the field, as the end of a sentence that begins with it."""

    def __str__(self) -> str:
        where = " ".join(part for part in (self.file and f"{self.file}:", self.path) if part)
        return f"{where} {self.text}" if where else self.text


def has_errors(problems: Iterable[Problem]) -> bool:
    """Return whether any problem is an error."""
    return any(problem.severity == "error" for problem in problems)


def kind_of(value: object) -> str:
    """Return the kind of a value in terms of JSON; other Python types by their names."""
    return _KINDS.get(type(value)) or type(value).__name__


def shown(value: object) -> str:
    """Format a value for a sentence: on one line, and of limited length."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write numbers of thousands of digits
        return "a number with thousands of digits"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
