"""
Checks the opaque parameters of claims, templates and DeviceClasses against the drivers' schemas.

A DeviceDriver has a schema for each ``apiVersion`` of the parameters. The configs of a DeviceClass
and a claim are merged before the driver reads them, so each by itself may lack required keys. The
driver itself checks the merged parameters when it prepares a claim.

Does not depend on clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from drakit_formats.json_schema import MAX_STEPS, SCHEMA, JsonSchema, listed
from drakit_formats.resource.objects import Object, child, children, text

VERSION_KEYS = ("apiVersion", "kind")
"""The keys that select a schema. Each config contains them, because configs of different versions
are not merged."""

MAX_CONFIGS = 32
"""The API's limit for the configs of a claim or class."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverSchemas:
    """The schemas of a driver's parameters."""

    driver: str
    versions: Mapping[str, JsonSchema] = field(default_factory=dict[str, JsonSchema])
    """The schemas, keyed by ``apiVersion``. The empty string is the key for parameters without
    apiVersion and kind."""

    problems: tuple[str, ...] = ()
    """The problems with malformed schemas, which are not used for checks."""


def schemas_of(device_driver: Object) -> DriverSchemas:
    """Read the schemas of a DeviceDriver."""
    versions: dict[str, JsonSchema] = {}
    problems: list[str] = []
    for version, schema in child(device_driver, "spec", "parameters").items():
        versions[version] = JsonSchema(schema)
        problems += [f"spec.parameters[{version!r}]: {each}" for each in SCHEMA.problems(schema)]
    name = text(device_driver, "metadata", "name")
    return DriverSchemas(driver=name, versions=versions, problems=tuple(problems))


def parameter_problems(body: Object, schemas: Mapping[str, DriverSchemas]) -> Iterator[str]:
    """
    Yield the problems with the opaque parameters in an object, as one sentence for each config.

    :param body: a ResourceClaim, ResourceClaimTemplate or DeviceClass in the version v1, v1beta2 or
        v1beta1, which have the same configs.
    :param schemas: the schemas, keyed by driver. The parameters of other drivers are not checked.
    """
    kind, path = text(body, "kind"), ["spec"]
    if kind == "ResourceClaimTemplate":
        path.append("spec")
    if kind != "DeviceClass":
        path.append("devices")
    configs = children(child(body, *path), "config")[:MAX_CONFIGS]
    for number, config in enumerate(configs):
        driver = text(config, "opaque", "driver")
        known = schemas.get(driver)
        if known is None or known.problems or not known.versions:
            continue
        if found := _of_config(
            child(config, "opaque").get("parameters"), known, MAX_STEPS // len(configs)
        ):
            where = f"{'.'.join(path)}.config[{number}].opaque.parameters"
            yield f"{where}: the parameters for driver {driver} {found}"


def _of_config(parameters: Any, known: DriverSchemas, max_steps: int) -> str:
    version = _version_of(parameters)
    if list(known.versions) == [""]:  # apiVersion and kind may be the driver's own keys
        version = ""
    schema = known.versions.get(version)
    if schema is None:
        has = f"apiVersion {listed([version])}" if version else "no apiVersion"
        return f"have {has}; known: {listed([each or 'none' for each in known.versions])}"
    problems = schema.problems(parameters, required=VERSION_KEYS, max_steps=max_steps)
    of = f" (apiVersion {version})" if version else ""
    return f"are invalid{of}: {'; '.join(problems)}" if problems else ""


def _version_of(parameters: Any) -> str:
    if not isinstance(parameters, dict):
        return ""
    version: Any = cast("Object", parameters).get(VERSION_KEYS[0], "")
    return version if isinstance(version, str) else "?"
