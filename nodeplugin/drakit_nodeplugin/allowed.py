"""
The settings of backends and device plugins: the fields of an entry, and their validation.

The name of an entry is also the name of its directory. Only the backend or device plugin in that
directory can announce the driver or resources of the entry. The plugin imports this module only if
its configuration has such an entry, because the models use memory. :mod:`.endpoints.allowlist`
applies an entry.

Does not depend on sockets or edits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, TypeAdapter, model_validator

from drakit.settings import Settings, normalized
from drakit_formats.cdi.checks import InvalidNameError, split_kind
from drakit_formats.resource.limits import is_dns_label, is_dns_subdomain, is_driver_name

MAX_NAME = 20
"""Maximum length of an entry's name, which is part of the paths of its sockets."""

CLAIM_CLASS = "claim"
"""The CDI class of claim devices. Only the pods of a claim can use the claim's CDI devices."""

_VARIABLE = re.compile(r"[^=*\0\s]+\*?")


def _below_dev(pattern: str) -> str:
    if not pattern.startswith("/dev/") or "**" in pattern:
        raise ValueError("must be a path under /dev; a wildcard matches within one component")
    return pattern


def _cdi_device(name: str) -> str:
    kind, equals, pattern = name.partition("=")
    try:
        split_kind(kind)
    except InvalidNameError as error:
        raise ValueError(str(error)) from None
    if equals and not pattern:
        raise ValueError("must name devices after '=', or omit '=' to allow the whole kind")
    if kind.partition("/")[2] == CLAIM_CLASS:
        raise ValueError("must not have the class 'claim': these are the devices of claims")
    return name


def _variable(name: str) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ValueError("must be a variable's name, or a prefix and '*', such as NVIDIA_*")
    return name


def _entry(name: str) -> str:
    if len(name) > MAX_NAME or not is_dns_label(name):
        raise ValueError(
            f"must be at most {MAX_NAME} lower-case letters, digits and dashes, because it is the "
            "name of a directory"
        )
    return name


def _driver(name: str) -> str:
    if not is_driver_name(name):
        raise ValueError("must be a driver's name, such as gpu.example.com")
    return name


def _group(name: str) -> str:
    if not is_dns_subdomain(name) or "." not in name:
        raise ValueError("must be an API group, such as lamps.example.com")
    return name


def _plural(name: str) -> str:
    if not is_dns_label(name):
        raise ValueError("must be the plural name of a resource, such as lamppolicies")
    return name


def _resource(name: str) -> str:
    domain, slash, own = name.partition("/")
    if not (slash and own and is_dns_subdomain(domain)):
        raise ValueError("must be a resource's name, such as vendor.example/thing")
    return name


HostPath = Annotated[str, AfterValidator(normalized)]
DevicePattern = Annotated[HostPath, AfterValidator(_below_dev)]
Identifier = Annotated[int, Field(ge=0, le=2**32 - 2)]


class OwnerSettings(Settings):
    """The required owner of a socket."""

    uid: Identifier = 0
    """The user ID on the node."""

    gid: Identifier | None = None
    """The group ID on the node. If null, any group is accepted."""


class AllowedEndpoint(Settings):
    """The edits that a backend or device plugin can make. By default, it can make none."""

    owner: OwnerSettings = OwnerSettings()
    """The required owner of the backend's or device plugin's socket. The default is root."""

    devices: tuple[DevicePattern, ...] = ()
    """Host device nodes: paths under ``/dev`` without symbolic links. A wildcard matches within one
    path component."""

    mounts: dict[HostPath, Literal["ro", "rw"]] = Field(
        default_factory=dict[HostPath, Literal["ro", "rw"]]
    )
    """Host paths that can be mounted: path prefixes, each read-only or writable. The longest
    matching prefix applies."""

    hooks: tuple[HostPath, ...] = ()
    """Programs on the host that can run as OCI hooks, with any arguments."""

    net_devices: tuple[str, ...] = ()
    """Host network interfaces, with wildcards."""

    additional_gids: tuple[Identifier, ...] = ()
    """Supplementary groups that containers may get."""

    intel_rdt: bool = False
    """Whether containers may get Intel RDT settings."""

    cdi_devices: tuple[Annotated[str, AfterValidator(_cdi_device)], ...] = ()
    """CDI devices from other CDI files: kinds (``vendor.example/class``), or a kind and a name
    pattern (``vendor.example/class=card*``). The class ``claim`` is never allowed."""

    env: tuple[Annotated[str, AfterValidator(_variable)], ...] = ()
    """Environment variables of containers: names, or prefixes such as ``NVIDIA_*``."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        for path, access in self.mounts.items():
            for parent in map(str, Path(path).parents):
                if access == "ro" and self.mounts.get(parent) == "rw":
                    raise ValueError(f"mounts: {path} cannot be ro inside {parent}, which is rw")
        return self


class PolicyResourceSettings(Settings):
    """The cluster-scoped custom resource for a driver's policies."""

    group: Annotated[str, AfterValidator(_group)]
    """The API group, such as ``lamps.example.com``."""

    version: Annotated[str, Field(pattern=r"^v[0-9]+((alpha|beta)[0-9]+)?$")]
    """The API version, such as ``v1``."""

    plural: Annotated[str, AfterValidator(_plural)]
    """The plural resource name, such as ``lamppolicies``."""


class AllowedBackend(AllowedEndpoint):
    """A backend: its driver, and the edits that it can make. By default, it can make none."""

    driver: Annotated[str, AfterValidator(_driver)]
    """The name of the driver that the backend can announce."""

    policies: PolicyResourceSettings | None = None
    """The custom resource for the driver's policies, if it has policies. The node plugin reads all
    objects of this resource, and sends them to the backend. The chart grants the permission."""


class AllowedPlugin(AllowedEndpoint):
    """A device plugin: its resources, and the edits that it can make."""

    resources: Annotated[tuple[Annotated[str, AfterValidator(_resource)], ...], Field(min_length=1)]
    """The resources that the device plugin can register, such as ``vendor.example/thing``."""


_Name = Annotated[str, AfterValidator(_entry)]
_BACKENDS = TypeAdapter(dict[_Name, AllowedBackend])
_PLUGINS = TypeAdapter(dict[_Name, AllowedPlugin])


def check(
    setting: Literal["backends", "devicePlugins"], given: Any
) -> Mapping[str, AllowedEndpoint]:
    """Return the validated entries of a setting. Raises ValueError, as pydantic validators do."""
    if setting == "backends":
        backends = _BACKENDS.validate_python(given)
        _refuse_twice({name: [entry.driver] for name, entry in backends.items()}, "driver")
        return backends
    plugins = _PLUGINS.validate_python(given)
    _refuse_twice({name: entry.resources for name, entry in plugins.items()}, "resource")
    return plugins


def _refuse_twice(announced: Mapping[str, Iterable[str]], what: str) -> None:
    """Raise ValueError if two entries list the same driver or resource."""
    owners: dict[str, str] = {}
    for entry, names in announced.items():
        for name in names:
            if name in owners:
                raise ValueError(f"{what} {name} is in the entries {owners[name]} and {entry}")
            owners[name] = entry
