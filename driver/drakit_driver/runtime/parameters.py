"""
Converts the opaque parameters of claims and DeviceClasses to an object of the driver's type.

A Python driver's parameters type is vendor code (validators, defaults), so it is used only in the
driver's thread. The caller decides which configs apply to a device, and handles errors.

Does not depend on claims or event loops.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic.alias_generators import to_camel
from pydantic.json_schema import GenerateJsonSchema

from drakit.device import AllocatedDevice
from drakit.driver import DeviceParameters, NoParameters, ParameterVersion
from drakit_driver.runtime.failures import BadParametersError, kind_of, text_of, traceback_of
from drakit_formats.json_schema import MAX_PART, listed, shown

logger = logging.getLogger(__name__)

MAX_PROBLEMS = 5
"""Maximum number of problems to list. A message with all of them might not fit into an Event."""


def merged(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge configs, key by key at the top level. A later config takes precedence."""
    together: dict[str, Any] = {}
    for config in configs:
        together.update(config)
    return together


def with_parameters(
    device: AllocatedDevice,
    kind: type[DeviceParameters],
    *,
    driver: str,
    index: int,
    versions: Sequence[ParameterVersion] = (),
    lenient: bool = False,
) -> AllocatedDevice:
    """
    Return a device with its validated parameters, which can be in any of the versions.

    If the parameters are invalid, raise :class:`BadParametersError` for the device with this
    `index`, or, if `lenient`, set them to None.
    """
    try:
        # Copy the configs, because defaults and validators may modify their input.
        configs = copy.deepcopy(device.configs)
        if versions:
            parameters = _converted(configs, kind, versions)
        else:
            parameters = _validated(kind, merged(configs))
    except Exception as error:
        if lenient:
            return device
        sentence = _sentence(error, kind, driver=driver)
        raise BadParametersError(sentence, index=index) from error
    return replace(device, parameters=parameters)


def _validated(kind: type[DeviceParameters], config: Mapping[str, Any]) -> DeviceParameters:
    try:
        # Accept only aliases, because a field with two names could be set twice, and neither would
        # take precedence.
        return kind.model_validate(config, by_alias=True, by_name=False)
    except ValidationError as error:
        raise _InvalidError(_problems(error, kind)) from error


class _InvalidError(Exception):
    """Parameters are invalid. The message contains fields and reasons, or comes from the driver."""


# ------------------------------------------------------------ versions

_VERSION_KEYS = ("apiVersion", "kind")

_CURRENT = ParameterVersion("")
"""The version that applies to parameters without a version, unless the driver lists a different one
for them."""


class _VersionError(Exception):
    """Parameters have a version that the driver does not list. The message continues a sentence
    whose subject is the parameters."""


def _converted(
    configs: Sequence[Mapping[str, Any]],
    kind: type[DeviceParameters],
    versions: Sequence[ParameterVersion],
) -> DeviceParameters:
    """
    Return the parameters, merged by key.

    Configs of one version are first merged and then converted, because a single config may lack
    required keys. The results for different versions are merged after that. If a later config has
    another parameters type, for example because its kind differs, it replaces the earlier ones.
    """
    runs: list[tuple[ParameterVersion, dict[str, Any]]] = []
    for config in configs:
        version = _version_of(config, versions)
        body = {key: value for key, value in config.items() if key not in _VERSION_KEYS}
        if runs and runs[-1][0] is version:
            runs[-1][1].update(body)
        else:
            runs.append((version, body))
    parameters: DeviceParameters | None = None
    for version, body in runs:
        new = _current(_validated(version.type or kind, body), version, kind)
        if parameters is not None and type(new) is type(parameters):
            new = _together(parameters, new)
        parameters = new
    return _validated(kind, {}) if parameters is None else parameters


def _together(first: DeviceParameters, last: DeviceParameters) -> DeviceParameters:
    """Merge parameters of one type, field by field. Validators see the merged result."""
    kind = type(first)
    given = {key: getattr(each, key) for each in (first, last) for key in each.model_fields_set}
    try:
        return kind(**given)
    except ValidationError as error:
        raise _InvalidError(_problems(error, kind)) from error


def _version_of(
    config: Mapping[str, Any], versions: Sequence[ParameterVersion]
) -> ParameterVersion:
    api_version, kind = (config.get(key, "") for key in _VERSION_KEYS)
    for version in versions:
        if (version.api_version, version.kind) == (api_version, kind):
            return version
    if not any(key in config for key in _VERSION_KEYS):
        return _CURRENT
    given = " ".join(
        listed([each]) if isinstance(each, str) else "?" for each in (api_version, kind)
    )
    known = [f"{each.api_version} {each.kind}" for each in versions if each.api_version]
    raise _VersionError(
        f"have apiVersion and kind {given}, which the driver does not know; known: "
        f"{listed(known) or 'none'}"
    )


def _current(
    parameters: DeviceParameters, version: ParameterVersion, kind: type[DeviceParameters]
) -> DeviceParameters:
    if version.convert is None:
        return parameters
    try:
        converted: object = version.convert(parameters)
    except ValidationError as error:
        raise _InvalidError(_problems(error, kind)) from error
    except ValueError as error:
        raise _InvalidError(text_of(error)) from error
    if not isinstance(converted, kind):
        raise TypeError(f"its conversion returned {kind_of(converted)}")
    return converted


# ------------------------------------------------------------ schemas


def schemas_of(
    kind: type[DeviceParameters], versions: Sequence[ParameterVersion]
) -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of the parameters as users write them, keyed by ``apiVersion``."""
    known = [*versions, *([] if any(not each.api_version for each in versions) else [_CURRENT])]
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(each.api_version for each in known):
        kinds = [each for each in known if each.api_version == name]
        if len(kinds) == 1:
            found[name] = _schema(kinds[0], kind, root="#")
        else:
            found[name] = {
                "anyOf": [
                    _schema(each, kind, root=f"#/anyOf/{number}")
                    for number, each in enumerate(kinds)
                ]
            }
    return found


class _Schema(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # remove a title that only repeats the name


def _schema(
    version: ParameterVersion, kind: type[DeviceParameters], *, root: str
) -> dict[str, Any]:
    template = f"{root}/$defs/{{model}}"
    schema = (version.type or kind).model_json_schema(
        ref_template=template, schema_generator=_Schema
    )
    if reference := schema.pop("$ref", ""):  # a recursive type
        schema |= schema["$defs"][reference.rpartition("/")[2]]
    if version.api_version:
        keys = dict(zip(_VERSION_KEYS, (version.api_version, version.kind), strict=True))
        fixed = {key: {"const": value} for key, value in keys.items()}
        schema["properties"] = {**fixed, **schema.get("properties", {})}
        required = [key for key, value in keys.items() if value]
        schema["required"] = [*required, *schema.get("required", ())]
    return schema


# ------------------------------------------------------------ messages


def _sentence(error: Exception, kind: type[DeviceParameters], *, driver: str) -> str:
    if kind is NoParameters:
        return (
            f"driver {driver} accepts no opaque parameters; remove them from the claim, its "
            f"template or its DeviceClass, and recreate the pod"
        )
    if isinstance(error, _InvalidError | _VersionError):
        are = "are invalid: " if isinstance(error, _InvalidError) else ""
        return (
            f"the opaque parameters for driver {driver} {are}{error}; correct them in the claim, "
            f"its template or its DeviceClass, and recreate the pod"
        )
    # Only log the exception's message, because it may contain the user's values.
    facts = {"driver": driver, "call": "parameters", "exception": traceback_of(error)}
    logger.error("driver failed", extra=facts)
    return (
        f"the opaque parameters cannot be checked, because driver {driver} failed with "
        f"{kind_of(error)}; see the node plugin's log on this node"
    )


def _problems(error: ValidationError, kind: type[DeviceParameters]) -> str:
    """Describe validation errors by field and reason, without the values, which may be secrets."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    named: list[str] = []
    for problem in problems[:MAX_PROBLEMS]:
        reason = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if problem["type"] == "extra_forbidden":
            reason = f"is not a known key{_hint(problem['loc'])}"
        path = shown(problem["loc"])
        named.append(f"{path}: {reason}" if path else reason)
    if len(problems) > MAX_PROBLEMS:
        named.append("and more")
    # List the known keys only for the top level, because a nested type can be any that pydantic
    # supports.
    if any(each["type"] == "extra_forbidden" and len(each["loc"]) == 1 for each in problems):
        named.append(f"known keys: {_known_keys(kind)}")
    return "; ".join(named)


def _known_keys(kind: type[DeviceParameters]) -> str:
    """Return the keys of a parameters type, as users write them."""
    keys = [
        alias if isinstance(alias := field.validation_alias, str) else name
        for name, field in kind.model_fields.items()
    ]
    return listed(keys) or "none"


def _hint(parts: Sequence[int | str]) -> str:
    """Return the correct spelling of a key that is, or resembles, the Python name of a field."""
    key = parts[-1]
    if (
        not isinstance(key, str)
        or len(key) > MAX_PART
        or not (key.isidentifier() and key.isascii())
    ):
        return ""
    written = to_camel(key)
    return f" (keys are written as in {written})" if "_" in key and written != key else ""
