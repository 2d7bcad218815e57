"""
Finds the classes of the configured drivers and checks their configurations.

A driver is found by entry point (group ``drakit.drivers``) or as ``module:Class``. Nothing is
started here.

It must not know claims, slices, gRPC or the kubelet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from drakit.driver import Driver, Node
from drakit.resource.device import is_dns_subdomain
from drakit.settings import describe
from drakit_nodeplugin.config import ConfigError, DriverEntry
from drakit_nodeplugin.endpoints.thread import AnyDriver
from drakit_nodeplugin.endpoints.traits import DriverTraits, traits_of

__all__ = ("LoadedDriver", "load_drivers")

GROUP = "drakit.drivers"
MAX_DRIVER_NAME = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedDriver:
    """A driver that can be started."""

    name: str
    make: Callable[[], AnyDriver]
    """Makes it; called in the driver's own thread, each time that it is started."""

    traits: DriverTraits
    """Which calls it needs; known of its class, also while it is stopped."""

    where: str
    """File and key of its configuration, for errors that come up when it is made."""


def load_drivers(entries: Sequence[DriverEntry], *, file: Path, node: Node) -> list[LoadedDriver]:
    """Load the configured drivers; raise :class:`ConfigError` naming file, key and reason."""
    drivers: list[LoadedDriver] = []
    for index, entry in enumerate(entries):
        key = f"drivers[{index}]"
        kind = _find(entry.driver, where=f"{file}: {key}.driver")
        try:
            config = kind.config_type.model_validate(entry.config)
        except ValidationError as error:
            raise ConfigError(describe(error, file=str(file), below=f"{key}.config")) from error
        name = kind.name_of(config)
        # It is the vendor in CDI names, too, and those begin with a letter.
        if not is_dns_subdomain(name, max_length=MAX_DRIVER_NAME) or name[0].isdigit():
            raise ConfigError(
                f"{file}: {key}.driver: {entry.driver} calls itself {name!r}, which is not a DNS "
                f"subdomain of at most {MAX_DRIVER_NAME} characters that begins with a letter"
            )
        if any(driver.name == name for driver in drivers):
            raise ConfigError(f"{file}: {key}.driver: driver {name} is configured twice")

        def make(kind: type[AnyDriver] = kind, config: Any = config) -> AnyDriver:
            return kind(config, node)

        drivers.append(
            LoadedDriver(
                name=name, make=make, traits=traits_of(kind), where=f"{file}: {key}.config"
            )
        )
    return drivers


def _find(reference: str, *, where: str) -> type[AnyDriver]:
    try:
        if ":" in reference:
            module, _, attribute = reference.partition(":")
            found: object = getattr(import_module(module), attribute)
        else:
            found = _entry_point(reference, where=where)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where}: {reference} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Driver)):
        raise ConfigError(f"{where}: {reference} is no class derived from drakit.Driver")
    return cast("type[AnyDriver]", found)


def _entry_point(name: str, *, where: str) -> object:
    known = entry_points(group=GROUP)
    for point in known:
        if point.name == name:
            return point.load()
    names = ", ".join(sorted(point.name for point in known)) or "none"
    raise ConfigError(f"{where}: there is no driver {name!r}; installed are: {names}")
