"""
The page of configuration files: the fields of the pydantic models, with their docstrings.

It must not know what a setting does.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from drakit import settings
from drakit_drivers.hostdev.config import HostDevicesConfig
from drakit_drivers.hostdev.policy import HostDevicePolicySpec
from drakit_drivers.hostdev.policy import _parse_mode as _PARSE_MODE
from drakit_drivers.simulated.config import SimulatedConfig
from drakit_drivers.simulated.parameters import SimulatedParameters
from drakit_nodeplugin.allowed import AllowedBackend, AllowedPlugin
from drakit_nodeplugin.config import NodePluginConfig
from drakit_operator.config import Config
from tools.reference import docstrings, markdown

FILES: Mapping[str, tuple[str, type[BaseModel]]] = {
    "Node plugin": (
        "The chart renders this file from its values and mounts it at `/etc/drakit/nodeplugin.yaml`. The option\n"
        "`--config` of [`drakit-nodeplugin`](cli.md#drakit-nodeplugin) sets its path.",
        NodePluginConfig,
    ),
    "Operator": (
        "The chart renders this file from `logging`, `events` and `operator.config`, and mounts it at\n"
        "`/etc/drakit/operator.yaml`. The option `--config` of [`drakit-operator`](cli.md#drakit-operator) sets its path.\n"
        "The operator also runs without a file.",
        Config,
    ),
    "Driver hostdev": (
        "The `config` of the driver `hostdev`. The chart renders this configuration from the values under `hostdev`, without\n"
        "`policies`: it applies the policies as HostDevicePolicy objects. [Host device policies](host-device-policy.md) lists their\n"
        "fields.",
        HostDevicesConfig,
    ),
    "Driver simulated": (
        "The `config` of the driver `simulated`. The chart renders it from `simulated.config`.",
        SimulatedConfig,
    ),
    "Parameters of simulated devices": (
        "Opaque parameters that claims and DeviceClasses can have for the driver `simulated`.",
        SimulatedParameters,
    ),
}

ENTRIES: Mapping[str, type[BaseModel]] = {"allowed": AllowedBackend, "plugins": AllowedPlugin}
"""The models of fields that are typed as anything at run time: they load when there is an entry."""

ELSEWHERE = (HostDevicePolicySpec,)
"""Models that have a page of their own."""


def page() -> str:
    """Return the page."""
    return markdown.document(
        "Configuration files",
        description="Every key of the configuration files of the node plugin, the operator and the included drivers.",
        source="the pydantic models of the daemons and drivers",
        body=[
            "This page lists the keys of the configuration files of both daemons and of the drivers that drakit includes.\n"
            "If you install with the chart, set [its values](values.md) instead: the chart renders these files.",
            "The files are in YAML. If a key is unknown or a value is invalid, the daemon does not start, and the error names\n"
            "the file, the key and the reason. A duration is a string with units: `500ms`, `10s`, `1m30s` or `1h`.",
            *(
                block
                for title, (intro, model) in FILES.items()
                for block in section(title, intro, model)
            ),
        ],
    )


def section(title: str, intro: str, model: type[BaseModel]) -> Iterator[str]:
    """Yield the blocks for a model: its fields, and those of each model below it."""
    yield f"## {title}"
    yield intro
    yield _table(model)
    paths: dict[type[BaseModel], list[str]] = {}
    for nested, path in _nested(model, ""):
        paths.setdefault(nested, []).append(path)
    for nested, of in paths.items():
        yield f"### {_heading(nested, of)}"
        keys = " and ".join(map(markdown.code, of))
        yield markdown.paragraph(f"Fields of {keys}. {markdown.prose(_summary(nested))}")
        yield _table(nested)


def _heading(model: type[BaseModel], paths: list[str]) -> str:
    # Entries of lists and maps have no key of their own.
    is_entry = len(paths) > 1 or any(sign in paths[0] for sign in "[<")
    return model.__name__ if is_entry else paths[0]


def _summary(model: type[BaseModel]) -> str:
    own = model.__dict__.get("__doc__")
    return inspect.cleandoc(own) if own else ""


def _nested(model: type[BaseModel], above: str) -> Iterator[tuple[type[BaseModel], str]]:
    """Find the models of a model's fields, each with its path in the file."""
    for name, field in model.model_fields.items():
        path = f"{above}{_key(name, field)}"
        annotation = _annotation(name, field)
        origin = get_origin(_bare(annotation))
        path += {tuple: "[]", dict: ".<name>"}.get(origin, "")
        for nested in _models(annotation):
            if nested in ELSEWHERE:
                continue
            yield nested, path
            yield from _nested(nested, f"{path}.")


def _table(model: type[BaseModel]) -> str:
    return markdown.table(
        ("Key", "Type", "Default", "Meaning"),
        [
            (
                markdown.code(_key(name, field)),
                type_text(_annotation(name, field), field.metadata),
                _default(field),
                _meaning(model, name, field),
            )
            for name, field in model.model_fields.items()
        ],
    )


def _meaning(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    nested = next(_models(field.annotation), None)
    return markdown.prose(docstrings.of_attribute(model, name) or _summary(nested or model))


def _key(name: str, field: FieldInfo) -> str:
    return field.alias or name


def _annotation(name: str, field: FieldInfo) -> Any:
    return dict[str, ENTRIES[name]] if name in ENTRIES else field.annotation


def _bare(annotation: Any) -> Any:
    """Return an annotation without metadata and without None."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        left = [each for each in get_args(annotation) if each is not types.NoneType]
        return _bare(left[0]) if len(left) == 1 else annotation
    return annotation


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    annotation = _bare(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def type_text(annotation: Any, metadata: list[Any]) -> str:
    """Return a field's type as a reader needs it."""
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        return type_text(annotation, [*metadata, *_flat(more)])
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = [each for each in get_args(annotation) if each is not types.NoneType]
        return type_text(annotation, metadata)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(markdown.code(each) for each in arguments)
    if origin is tuple:
        return f"list of {_plural(type_text(arguments[0], []))}{_length(metadata)}"
    if origin in (dict, Mapping):
        if arguments[1] is Any:
            return "map"
        return f"map of {_plural(type_text(arguments[1], []))}{_length(metadata)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "map"
    if annotation is timedelta or _is_seconds(metadata):
        return f"duration{_bounds(metadata, _duration)}"
    if annotation is int:
        return (
            "octal digits in quotes"
            if _PARSE_MODE in _functions(metadata)
            else f"integer{_bounds(metadata)}"
        )
    names = {bool: "boolean", str: "string", Path: "path", float: "number", Any: "anything"}
    return names.get(annotation, "string")


def _flat(metadata: list[Any]) -> Iterator[Any]:
    """Yield constraints; a Field() within Annotated has a list of its own."""
    for each in metadata:
        yield from each.metadata if isinstance(each, FieldInfo) else (each,)


def _plural(text: str) -> str:
    if text.startswith("one of "):
        return text.removeprefix("one of ").replace(", ", " or ")
    if text in ("string", "path", "map"):
        return f"{text}s"
    return text.replace("integer", "integers", 1)


def _length(metadata: list[Any]) -> str:
    return "".join(
        f", at most {each.max_length}"
        for each in metadata
        if isinstance(each, annotated_types.MaxLen)
    )


def _functions(metadata: list[Any]) -> list[Any]:
    return [getattr(each, "func", None) for each in metadata]


def _is_seconds(metadata: list[Any]) -> bool:
    return settings._parse_seconds in _functions(metadata)


def _limits(metadata: list[Any]) -> tuple[Any, Any]:
    low = high = None
    for each in metadata:
        match each:
            case annotated_types.Ge(ge=low):
                pass
            case annotated_types.Le(le=high):
                pass
            case annotated_types.Lt(lt=limit):
                high = limit - 1
            case _:
                pass
    return low, high


def _bounds(metadata: list[Any], write: Callable[[Any], str] = str) -> str:
    match _limits(metadata):
        case None, None:
            return ""
        case low, None:
            return f", at least {write(low)}"
        case None, high:
            return f", at most {write(high)}"
        case low, high:
            return f", {write(low)} to {write(high)}"


def _duration(value: Any) -> str:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    for unit, name in ((3600, "h"), (60, "m")):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds // unit:g}{name}"
    return f"{seconds:g}s"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    if isinstance(value, timedelta) or _is_seconds(field.metadata):
        return markdown.code(_duration(value))
    if isinstance(value, Path):
        value = str(value)
    return markdown.code(value if isinstance(value, str) and value else json.dumps(value))
