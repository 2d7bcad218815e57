"""
The page of configuration files: the fields of the pydantic models, with their docstrings.

The page of the chart's values describes the keys that a value sets. This page links to the value.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from drakit import settings
from drakit_drivers.hostdev.container import _parse_mode as _PARSE_MODE
from drakit_drivers.hostdev.policy import HostDevicePolicySpec, HostDevicesConfig
from drakit_drivers.simulated.config import SimulatedConfig, SimulatedParameters
from drakit_nodeplugin.allowed import AllowedBackend, AllowedPlugin
from drakit_nodeplugin.config import NodePluginConfig
from drakit_operator.config import Config
from tools.reference import docstrings, markdown
from tools.site.links import anchor


@dataclass(frozen=True, kw_only=True)
class File:
    """A configuration file: its introduction, its model, and the chart values of its keys."""

    intro: str
    model: type[BaseModel]
    values: Mapping[str, str]


FILES: Mapping[str, File] = {
    "Node plugin": File(
        intro="The chart mounts this file at `/etc/drakit/nodeplugin.yaml`. The option `--config` of\n"
        "[`drakit-nodeplugin`](cli.md#drakit-nodeplugin) sets its path. The chart sets `listen` to `:8081` and `:8080`.",
        model=NodePluginConfig,
        values={
            "kubeletRoot": "nodeplugin.kubeletRoot",
            "cdiDirectory": "nodeplugin.cdiDirectory",
            "bootIDFile": "nodeplugin.bootIDFile",
            "events": "events",
            "staleClaims": "nodeplugin.staleClaims",
            "opaqueParameters": "nodeplugin.opaqueParameters",
            "claimStatus": "nodeplugin.claimStatus",
            "devices": "nodeplugin.devices",
            "kubeletStateFile": "nodeplugin.kubeletStateDirectory",
            "logging": "logging",
            "backends": "backends",
            "devicePlugins": "devicePlugins",
        },
    ),
    "Operator": File(
        intro="The chart mounts this file at `/etc/drakit/operator.yaml`. The chart sets `listen`, and every\n"
        "key whose comment names a chart value. Set other keys in the value `operator.config`. The option `--config` of\n"
        "[`drakit-operator`](cli.md#drakit-operator) sets the path. The operator also runs without a file.",
        model=Config,
        values={"logging": "logging", "events.nameHolders": "events.nameHolders"},
    ),
    "Driver hostdev": File(
        intro="The `config` of the driver `hostdev`. Instead of setting `policies`, the chart applies HostDevicePolicy objects.",
        model=HostDevicesConfig,
        values={
            "allowDangerous": "hostdev.allowDangerous",
            "rescanInterval": "hostdev.rescanInterval",
        },
    ),
    "Driver simulated": File(
        intro="The `config` of the driver `simulated`.",
        model=SimulatedConfig,
        values={
            key: f"simulated.config.{key}"
            for key in ("driverName", "numaNodes", "gpu", "nic", "cpu")
        },
    ),
    "Parameters of simulated devices": File(
        intro="Opaque parameters that claims and DeviceClasses can have for the driver `simulated`.",
        model=SimulatedParameters,
        values={},
    ),
}

ENTRIES: Mapping[str, type[BaseModel]] = {"allowed": AllowedBackend, "plugins": AllowedPlugin}
"""The models of fields whose type is Any at run time, because the models are loaded only if
needed."""


def page() -> str:
    """Return the page."""
    described: dict[type[BaseModel], str] = {
        HostDevicePolicySpec: "[Host device policies](host-device-policy.md#fields)"
    }
    return markdown.document(
        "Configuration files",
        description="Every key of the configuration files of the node plugin, the operator and the included drivers.",
        source="the pydantic models of the daemons and drivers",
        body=[
            "This page lists the keys of the configuration files of both daemons and of drakit's own drivers. The chart\n"
            "renders these files from [its values](values.md), which describe the keys that they set.",
            "If a key is unknown or a value is invalid, the daemon does not start, and the error names the file, the key and\n"
            "the reason. A duration is a string with units: `500ms`, `10s`, `1m30s` or `1h`.",
            *(
                block
                for title, file in FILES.items()
                for block in section(
                    title, file.intro, file.model, values=file.values, described=described
                )
            ),
        ],
    )


def section(
    title: str,
    intro: str,
    model: type[BaseModel],
    *,
    values: Mapping[str, str] | None = None,
    described: dict[type[BaseModel], str] | None = None,
) -> Iterator[str]:
    """
    Yield the blocks for a model: its fields, and those of each model below it.

    `values` are the chart values that describe fields. `described` are models that a page has
    already described, with links to them. The section adds its own.
    """
    values = {} if values is None else values
    described = {} if described is None else described
    yield f"## {title}"
    yield intro
    yield _block(model, "", values, described)
    paths: dict[type[BaseModel], list[str]] = {}
    meanings = set(_meanings(model))
    for nested, path in _nested(model, "", described):
        if not _is_chart_value(path, values):
            paths.setdefault(nested, []).append(path)
    for nested, of in paths.items():
        heading = _heading(nested, of)
        base = next((each for each in nested.__mro__[1:] if each in described), None)
        for each in (nested, *_bases(nested)):
            described.setdefault(each, f"[{heading}](#{anchor(heading)})")
        yield f"### {heading}"
        keys = " and ".join(map(markdown.code, of))
        text = f"Fields of {keys}."
        summary = markdown.prose(_summary(nested))
        if summary not in meanings:
            text += f" {summary}"
        if base:
            text += f" The other fields are those of {described[base]}."
        yield markdown.paragraph(text)
        yield _block(nested, f"{of[0]}.", values, described, leave_out=base)


def _is_chart_value(path: str, values: Mapping[str, str]) -> bool:
    """Return whether the page of chart values describes a key. It does not list keys of entries."""
    return not _has_entry(path) and any(f"{path}.".startswith(f"{key}.") for key in values)


def _has_entry(path: str) -> bool:
    """Return whether a key belongs to an entry of a list or map, which has no key of its own."""
    return any(sign in path for sign in "[<")


def _bases(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield the classes from which a model has fields."""
    return (each for each in model.__mro__[1:] if getattr(each, "model_fields", None))


def _heading(model: type[BaseModel], paths: list[str]) -> str:
    return model.__name__ if len(paths) > 1 or _has_entry(paths[0]) else paths[0]


def _summary(model: type[BaseModel]) -> str:
    own = model.__dict__.get("__doc__")
    return inspect.cleandoc(own) if own else ""


def _nested(
    model: type[BaseModel], above: str, described: Collection[type[BaseModel]] = ()
) -> Iterator[tuple[type[BaseModel], str]]:
    """Find the models of a model's fields that are not described yet, each with its path."""
    for name, field in model.model_fields.items():
        path = f"{above}{_key(name, field)}"
        annotation = _annotation(name, field)
        origin = get_origin(_bare(annotation))
        path += {tuple: "[]", dict: ".<name>"}.get(origin, "")
        for nested in _models(annotation):
            if nested not in described:
                yield nested, path
                yield from _nested(nested, f"{path}.", described)


def _meanings(model: type[BaseModel]) -> Iterator[str]:
    """Yield the descriptions of all fields that are models."""
    for above in (model, *(nested for nested, _ in _nested(model, ""))):
        for name, field in above.model_fields.items():
            for nested in _models(_annotation(name, field)):
                yield _own_meaning(above, name, nested)


def _block(
    model: type[BaseModel],
    above: str,
    values: Mapping[str, str],
    described: Mapping[type[BaseModel], str],
    *,
    leave_out: type[BaseModel] | None = None,
) -> str:
    """Return the fields of a model as YAML: descriptions above the keys, defaults, and types."""
    known = leave_out.model_fields if leave_out else {}
    declared = [
        (
            _declaration(name, field),
            _meaning(model, name, field, values.get(above + _key(name, field)), described),
        )
        for name, field in model.model_fields.items()
        if name not in known
    ]
    return markdown.code_block("yaml", markdown.members(declared, "#", ""))


def _declaration(name: str, field: FieldInfo) -> str:
    kind = type_text(_annotation(name, field), field.metadata).replace("`", "")
    default = "" if field.is_required() else _default(field)
    shown = f"{_key(name, field)}: {default}".rstrip()
    return f"{shown}  # {kind}{', required' if field.is_required() else ''}"


def _meaning(
    model: type[BaseModel],
    name: str,
    field: FieldInfo,
    value: str | None,
    described: Mapping[type[BaseModel], str],
) -> str:
    if value:
        return f"See the chart value {value}."
    nested = next(_models(_annotation(name, field)), None)
    text = _own_meaning(model, name, nested)
    if nested is not None and nested in described:
        text += f" See {re.sub(r'[][]|[(].*', '', described[nested])}."
    return text


def _own_meaning(model: type[BaseModel], name: str, nested: type[BaseModel] | None) -> str:
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
    """Return a field's type in the form that readers need."""
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
    """Yield constraints. A Field() within Annotated has a list of its own."""
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
        case _, int(high) if high >= 2**32 - 2:
            return ""  # the range of a type
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
    """Return the default as YAML. Empty if there is none."""
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    if isinstance(value, timedelta) or _is_seconds(field.metadata):
        return _duration(value)
    if isinstance(value, Path | str):
        return yaml.safe_dump(str(value), explicit_end=False).removesuffix("...\n").strip()
    return json.dumps(list(value) if isinstance(value, tuple) else value)
