"""
The settings of allow lists: the fields of an entry, and their validation.

The plugin imports it only if its configuration has a list, because the models take memory.
:mod:`.endpoints.allowlist` applies an entry.

It must not know sockets or edits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, TypeAdapter, model_validator

from drakit.cdi.names import InvalidNameError, split_kind
from drakit.resource.names import is_dns_subdomain
from drakit.settings import Settings
from drakit_nodeplugin.config import normalised

__all__ = ("AllowedEndpoint", "OwnerSettings", "check")


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
    return name


def _driver(name: str) -> str:
    if not is_dns_subdomain(name):
        raise ValueError("must be a driver's name, such as gpu.example.com")
    return name


def _resource(name: str) -> str:
    domain, slash, own = name.partition("/")
    if not (slash and own and is_dns_subdomain(domain)):
        raise ValueError("must be a resource's name, such as vendor.example/thing")
    return name


HostPath = Annotated[str, AfterValidator(normalised)]
DevicePattern = Annotated[HostPath, AfterValidator(_below_dev)]
Identifier = Annotated[int, Field(ge=0, le=2**32 - 2)]


class OwnerSettings(Settings):
    """The owner that the socket must have."""

    uid: Identifier = 0
    """The user ID on the node."""

    gid: Identifier | None = None
    """The group ID on the node. If null, any group."""


class AllowedEndpoint(Settings):
    """The edits that a backend or device plugin can make. The default is none."""

    owner: OwnerSettings = OwnerSettings()
    """The required owner of the backend's or device plugin's socket. The default is root."""

    devices: tuple[DevicePattern, ...] = ()
    """Host device nodes, as paths under ``/dev`` without symbolic links. A wildcard matches
    within one path component."""

    mounts: dict[HostPath, Literal["ro", "rw"]] = Field(
        default_factory=dict[HostPath, Literal["ro", "rw"]]
    )
    """Prefixes of host paths, read-only or writable. The longest matching prefix applies."""

    hooks: tuple[HostPath, ...] = ()
    """Programs on the host that can run as OCI hooks, with any arguments."""

    net_devices: tuple[str, ...] = ()
    """Host network interfaces, with wildcards."""

    additional_gids: tuple[Identifier, ...] = ()
    """Supplementary groups that a container may get."""

    intel_rdt: bool = False
    """Whether containers may get Intel RDT settings."""

    cdi_devices: tuple[Annotated[str, AfterValidator(_cdi_device)], ...] = ()
    """CDI devices of other CDI files: kinds (``vendor.example/class``), or a kind and a pattern
    of names (``vendor.example/class=card*``)."""

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        for path, access in self.mounts.items():
            for parent in map(str, Path(path).parents):
                if access == "ro" and self.mounts.get(parent) == "rw":
                    raise ValueError(f"mounts: {path} cannot be ro inside {parent}, which is rw")
        return self


_LISTS: dict[str, TypeAdapter[Any]] = {
    "backends": TypeAdapter(dict[Annotated[str, AfterValidator(_driver)], AllowedEndpoint]),
    "devicePlugins": TypeAdapter(dict[Annotated[str, AfterValidator(_resource)], AllowedEndpoint]),
}


def check(setting: Literal["backends", "devicePlugins"], given: Any) -> dict[str, AllowedEndpoint]:
    """Return the entries of a list; raises pydantic's ValidationError."""
    return _LISTS[setting].validate_python(given)
