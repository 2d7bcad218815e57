"""
What all configuration files of drakit have in common: strict keys, durations, errors for people.

Each daemon, and each driver, declares a model of its own on :class:`Settings`; what stands in it is
theirs.

It must not know any setting.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel

__all__ = ("Duration", "Settings", "describe")

_DURATION = re.compile(r"(?=\d)(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+(?:\.\d+)?)s)?")


class Settings(BaseModel):
    """
    Base of typed settings; an unknown key is an error that names it.

    Field names are snake_case in Python and camelCase in files; the docstring below a field is its
    manual.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        alias_generator=to_camel,
        populate_by_name=True,
    )


def _parse_duration(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        raise ValueError("must be a duration like 10s, 1m or 1m30s, with its unit")
    match = _DURATION.fullmatch(value)
    if not match:
        raise ValueError(f"{value!r} is no duration like 10s, 1m or 1m30s")
    hours, minutes, seconds = (float(match[unit] or 0) for unit in "hms")
    return timedelta(hours=hours, minutes=minutes, seconds=seconds)


def _duration_text(duration: timedelta) -> str:
    return f"{duration.total_seconds():g}s"


Duration = Annotated[
    timedelta,
    BeforeValidator(_parse_duration),
    PlainSerializer(_duration_text, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": r"^([0-9]+h)?([0-9]+m)?([0-9]+(\.[0-9]+)?s)?$"}),
]
"""A duration as Kubernetes' own files have it: ``10s``, ``1m30s``, ``1h``."""


def describe(error: ValidationError, *, file: str, below: str = "") -> str:
    """Write a validation's problems for people: file, key, reason, a line each."""
    lines: list[str] = []
    for problem in error.errors(include_url=False, include_input=False):
        key = below
        for part in problem["loc"]:
            key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
        reason = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            reason = "is no key that is known here"
        lines.append(f"{file}: {key}: {reason}")
    return "\n".join(lines)
