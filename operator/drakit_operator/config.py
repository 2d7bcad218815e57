"""
The operator's settings: one frozen model, read once, unknown keys refused.

The docstrings below the fields are the manual: schema, chart values and docs come from them. Every
setting has a default, so that no file is needed.

It must not know what is done with a setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel

__all__ = ("Config", "ConfigError", "parse_listen", "read_config")

_DURATION = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>ms|s|m|h)")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class ConfigError(Exception):
    """The configuration cannot be used; the text names file, key and reason."""


def _seconds(value: Any) -> Any:
    """Take durations as Kubernetes writes them; numbers are seconds."""
    if not isinstance(value, str):
        return value
    form = _DURATION.fullmatch(value)
    if form is None:
        raise ValueError(f"{value!r} is not a duration (such as 500ms, 10s or 5m)")
    return float(form["number"]) * _UNIT_SECONDS[form["unit"]]


def _address(text: str) -> str:
    parse_listen(text)
    return text


def parse_listen(text: str) -> tuple[str, int]:
    """Split ``host:port``; IPv6 addresses stand in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not host:port (such as [::]:8080 or 127.0.0.1:8080)")
    return host.removeprefix("[").removesuffix("]"), int(port)


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )


class Logging(_Model):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level of what is logged."""

    format: Literal["json", "text"] = "json"
    """One JSON object a line, or lines for people."""


class Election(_Model):
    lease_name: str = "drakit-operator"
    """Name of the Lease, in the operator's own namespace."""

    lease_duration: Annotated[Seconds, Field(ge=1, multiple_of=1)] = 8.0
    """How long a leader that gives no sign of life keeps the others waiting; whole seconds."""

    renew_deadline: Seconds = 5.0
    """A leader that could not renew for so long stops; must be less than leaseDuration."""

    retry_period: Seconds = 1.0
    """Pause between two attempts to renew or to acquire."""

    @model_validator(mode="after")
    def _leaders_do_not_overlap(self) -> Self:
        if not self.retry_period < self.renew_deadline < self.lease_duration:
            raise ValueError(
                "retryPeriod, renewDeadline and leaseDuration must each be longer than the one "
                "before, else a leader goes on while another begins"
            )
        return self


class Events(_Model):
    debounce: Seconds = 1.0
    """A pod or template younger than this gets no Event: it may just be about to be scheduled."""

    change_pause: Seconds = 60.0
    """Least pause between two Events of the same reason whose sentences differ, per object."""

    repeat_pause: Seconds = 1800.0
    """Pause before an unchanged Event is counted up: the API server forgets Events after 1 h."""


class Config(_Model):
    """Settings of ``drakit-operator``."""

    listen: Annotated[str, AfterValidator(_address)] = "[::]:8080"
    """Address of /healthz, /readyz and /metrics."""

    logging: Logging = Logging()
    election: Election = Election()
    events: Events = Events()

    sweep_period: Seconds = 300.0
    """Pause between two lists that look for deletions which the watch did not report."""

    workers: Annotated[int, Field(ge=1, le=64)] = 4
    """How many objects are judged, and Events written, at once."""

    queue_size: Annotated[int, Field(ge=1000)] = 100_000
    """Most objects that wait to be judged."""


def read_config(path: Path | None, *, arguments: Mapping[str, Any] | None = None) -> Config:
    """
    Read the file, if there is one; arguments (nested as the file) win over it.

    A ConfigError names file, key and reason.
    """
    source = str(path) if path is not None else "arguments"
    content: Any = None
    if path is not None:
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: is not YAML: {error}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of settings")
    try:
        return Config.model_validate(_merged(cast("dict[str, Any]", content), arguments or {}))
    except ValidationError as error:
        told = "; ".join(
            f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}"
            for each in error.errors(include_url=False)
        )
        raise ConfigError(f"{source}: {told}") from None


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = _merged(cast("dict[str, Any]", old), cast("dict[str, Any]", value))
        merged[key] = value
    return merged
