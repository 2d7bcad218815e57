"""
The common parts of all configuration files: strict keys, durations, readable errors.

Each daemon and each driver defines its settings in its own model, a subclass of :class:`Settings`.
"""

from __future__ import annotations

import posixpath
import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel

_DURATION = re.compile(
    r"(?=\d)(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+(?:\.\d+)?)s)?(?:(?P<ms>\d+)ms)?"
)

_TIMEDELTA = re.compile(r"datetime\.timedelta\((?:seconds=)?(\d+)\)")
"""Matches a duration of less than one day in a pydantic message."""


class SettingsError(Exception):
    """Settings are invalid. The message contains the file, key and reason, one line per problem."""


class Settings(BaseModel):
    """
    Base class of typed settings. An unknown key is an error that names the key.

    Field names are snake_case in Python and camelCase in files. The docstring below a field
    documents it.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True
    )


def _parse_duration(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        raise ValueError("must be a duration like 10s, 1m or 1m30s, with its unit")
    match = _DURATION.fullmatch(value)
    if not match:
        raise ValueError(f"{value!r} is not a duration like 10s, 1m or 1m30s")
    hours, minutes, seconds, thousandths = (float(match[u] or 0) for u in ("h", "m", "s", "ms"))
    try:
        return timedelta(hours=hours, minutes=minutes, seconds=seconds, milliseconds=thousandths)
    except OverflowError:
        raise ValueError(f"{value!r} is too long") from None


def _duration_text(duration: timedelta) -> str:
    return f"{duration.total_seconds():.12g}s"


Duration = Annotated[
    timedelta,
    BeforeValidator(_parse_duration),
    PlainSerializer(_duration_text, when_used="json"),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^([0-9]+h)?([0-9]+m)?([0-9]+(\.[0-9]+)?s)?([0-9]+ms)?$",
            "minLength": 2,
        }
    ),
]
"""A duration in the format used in Kubernetes configuration files: ``10s``, ``1m30s``, ``1h``,
``500ms``."""


def _parse_seconds(value: Any) -> Any:
    return _parse_duration(value).total_seconds() if isinstance(value, str) else value


Seconds = Annotated[float, BeforeValidator(_parse_seconds), Field(gt=0)]
"""A :data:`Duration` that is converted to a number of seconds. A plain number is also in
seconds."""


def parse_address(text: str) -> tuple[str | None, int]:
    """
    Split a listen address, ``host:port``. IPv6 addresses are in brackets.

    An empty host and ``[::]`` mean all addresses of both families. The returned host is then None,
    because asyncio binds ``::`` for IPv6 only.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not host:port (such as [::]:8080 or 127.0.0.1:8080)")
    host = host.removeprefix("[").removesuffix("]")
    return None if host in ("", "::") else host, int(port)


def _check_address(text: str) -> str:
    parse_address(text)
    return text


Address = Annotated[str, AfterValidator(_check_address)]
"""The address on which a server listens: ``host:port``."""


def normalized(path: Any) -> Any:
    """Return the path if it is absolute and in its shortest form. Otherwise, raise ValueError."""
    text = str(path)
    if not text.startswith("/") or posixpath.normpath(text) != text or text.startswith("//"):
        raise ValueError(
            "must be an absolute path without '..', repeated slashes or a trailing slash"
        )
    return path


AbsolutePath = Annotated[Path, BeforeValidator(normalized)]
"""A path on the node, in the form that :func:`normalized` requires."""


class Listen(Settings):
    """The addresses on which a daemon serves HTTP."""

    probes: Address = "[::]:8081"
    """The address of ``/healthz`` and ``/readyz``."""

    metrics: Address = "[::]:8080"
    """The address of ``/metrics``."""


class Logging(Settings):
    """The log settings of a daemon."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """The lowest level of messages that the daemon logs."""

    format: Literal["json", "text"] = "json"
    """``json`` writes one JSON object per line. ``text`` writes human-readable lines."""


def read_file(path: Path) -> dict[str, Any]:
    """Read a settings file. Raises :class:`SettingsError`. For an empty file, return an empty
    mapping."""
    # Imported here because yaml takes 1.5 MiB, and a driver may not have a settings file.
    import yaml

    try:
        body: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # PyYAML raises ValueError for 2001-99-99
        raise SettingsError(f"{path}: is not YAML: {error}") from error
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise SettingsError(f"{path}: the top level must be a mapping of settings")
    return cast("dict[str, Any]", body)


def describe(error: ValidationError, *, file: str, below: str = "") -> str:
    """Format validation errors for users: file, key and reason, one per line."""
    lines: list[str] = []
    for problem in error.errors(include_url=False, include_input=False):
        key = below
        for part in problem["loc"]:
            if part == "[key]":  # the part before "[key]" is the key itself
                continue
            key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
        reason = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            reason = "is not a known key"
        reason = _TIMEDELTA.sub(r"\1s", reason)
        lines.append(f"{file}: {key}: {reason}" if key else f"{file}: {reason}")
    return "\n".join(lines)
