"""
Finds a driver class and validates the driver's configuration.

The driver is given by entry point (group ``drakit.drivers``) or as ``module:Class``. Loading does
not start anything.

Does not depend on claims, slices, gRPC or the kubelet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from math import inf
from typing import Any, cast

from pydantic import ValidationError

from drakit.driver import (
    PREPARE_METHODS,
    UNDO_METHODS,
    DeviceParameters,
    DevicePolicy,
    Driver,
    DriverConfig,
    Node,
    ParameterVersion,
    PolicyResource,
    overrides,
)
from drakit.settings import SettingsError as ConfigError
from drakit.settings import describe
from drakit_driver.runtime.calls import AnyDriver
from drakit_driver.runtime.contract import DriverTraits, EndpointContext, traits_of
from drakit_driver.runtime.endpoint import Endpoint
from drakit_driver.runtime.failures import kind_and_text, text_of
from drakit_driver.runtime.thread import PythonConnector
from drakit_formats.resource.limits import MAX_DRIVER_NAME, is_driver_name

logger = logging.getLogger(__name__)

GROUP = "drakit.drivers"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedDriver:
    """A driver class that is ready to be started. In the node plugin, it is a source of devices."""

    name: str
    make: Callable[[], AnyDriver]
    """Creates the driver. Called in the driver's own thread at each start."""

    traits: DriverTraits
    """The driver's traits. They are read from its class, so they are known even while the driver is
    stopped."""

    where: str
    """The file and key of the driver's configuration, for errors about creating the driver."""

    @property
    def foreign(self) -> bool:
        """False, because the driver runs in this process."""
        return False

    @property
    def expected(self) -> Collection[str]:
        """The name of the single endpoint, which is the driver's name."""
        return (self.name,)

    def endpoint(self, context: EndpointContext) -> Endpoint:
        """Create the endpoint."""
        return PythonEndpoint(self, context)


class PythonEndpoint(Endpoint):
    """The endpoint of a driver in this process."""

    def __init__(self, driver: LoadedDriver, context: EndpointContext) -> None:
        self._connector = PythonConnector(
            driver.name, driver.make, driver.traits, policies=context.policies
        )
        super().__init__(
            driver.name,
            self._connector.connect,
            traits=driver.traits,
            listener=context.listener,
            node=context.node,
        )

    async def ended(self) -> None:
        """Wait until the driver's thread has ended."""
        await self._connector.ended()


def load_driver(
    reference: str, values: Mapping[str, Any], *, node: Node, where: str, file: str, key: str = ""
) -> LoadedDriver:
    """
    Load one driver, with the given values as its configuration. Raises :class:`ConfigError`.

    Errors name `where` for the reference, and `file` and `key` for the values.
    """
    kind = driver_class(reference, where=where)
    at = f"{file}: {key}" if key else file
    try:
        config = kind.config_type.model_validate(values)
        name = cast("object", kind.name_of(config))
    except ValidationError as error:
        raise ConfigError(describe(error, file=file, below=key)) from error
    except Exception as error:  # the vendor's validator may raise anything
        raise ConfigError(f"{at}: {reference} fails to read it: {kind_and_text(error)}") from error
    if not is_driver_name(name):
        raise ConfigError(
            f"{where}: {reference} has the name {name!r}, which is not a DNS subdomain of at most "
            f"{MAX_DRIVER_NAME} characters that begins with a letter"
        )
    if _never_undone(kind):
        logger.warning(
            "driver defines prepare, but not unprepare: define unprepare, or set "
            "side_effects = False",
            extra={"driver": name},
        )

    def make() -> AnyDriver:
        return kind(config, node)

    return LoadedDriver(name=name, make=make, traits=traits_of(kind), where=at)


def driver_class(reference: str, *, where: str) -> type[AnyDriver]:
    """Import and check a driver class. Raises :class:`ConfigError`."""
    kind = _find(reference, where=where)
    if (fault := _fault_of(kind)) is not None:
        raise ConfigError(f"{where}: {reference} {fault}; this is a bug in the driver")
    return kind


def _fault_of(kind: type[AnyDriver]) -> str | None:
    """Return the problem with a driver class, or None. Vendors may write classes that no type
    checker would accept."""
    values: dict[str, Any] = {
        name: getattr(kind, name, None)
        for name in (
            *("name", "config_type", "parameters_type", "health_period_seconds"),
            *("policy_type", "policy_resource"),
        )
    }
    parameters, period = values["parameters_type"], values["health_period_seconds"]
    if abstract := sorted(kind.__abstractmethods__):
        return f"does not define {' and '.join(abstract)}"
    if not isinstance(values["name"], str):
        return "has no name: set the class variable 'name' to a string"
    if not _derives(values["config_type"], DriverConfig):
        return "has a config_type that is not derived from drakit.DriverConfig"
    if not (parameters is None or _derives(parameters, DeviceParameters)):
        return "has a parameters_type that is not derived from drakit.DeviceParameters"
    if (fault := _fault_of_versions(kind)) is not None:
        return fault
    policy_type, resource = values["policy_type"], values["policy_resource"]
    if not (policy_type is None or _derives(policy_type, DevicePolicy)):
        return "has a policy_type that is not derived from drakit.DevicePolicy"
    if not (resource is None or isinstance(resource, PolicyResource)):
        return "has a policy_resource that is not a drakit.PolicyResource"
    if (policy_type is None) != (resource is None):
        return "has only one of policy_type and policy_resource: set both, or neither"
    if policy_type is not None and not overrides(kind, "apply_policies"):
        return "has a policy_type, but does not define apply_policies"
    for name in ("side_effects", "reports_health", "claim_data", "metadata_files"):
        value = getattr(kind, name, False)  # side_effects need not be set
        if not isinstance(value, bool):
            return f"has {name} set to {value!r}, which is neither True nor False"
    if isinstance(period, bool) or not isinstance(period, int | float) or not 0 < period < inf:
        return f"has health_period_seconds set to {period!r}, which is not a number above 0"
    traits = traits_of(kind)
    if traits.resets and not traits.side_effects:
        return (
            "defines reset, but sets side_effects to False, so the node plugin never calls "
            "reset; remove one of the two"
        )
    return None


def _fault_of_versions(kind: type[AnyDriver]) -> str | None:
    """Return the problem with a driver's parameter versions, or None."""
    versions: Any = kind.parameter_versions
    if isinstance(versions, str) or not isinstance(versions, Sequence):
        return "has parameter_versions that are not a tuple of drakit.ParameterVersion"
    seen: set[tuple[str, str]] = set()
    for version in cast("Sequence[object]", versions):
        if not isinstance(version, ParameterVersion):
            return "has parameter_versions that are not a tuple of drakit.ParameterVersion"
        if kind.parameters_type is None:
            return "has parameter_versions, but no parameters_type: set both, or neither"
        name = f"{version.api_version} {version.kind}".strip() or "without apiVersion"
        if (version.api_version, version.kind) in seen:
            return f"has the parameter version {name} twice"
        seen.add((version.api_version, version.kind))
        if version.kind and not version.api_version:
            return f"has the parameter version {name}, which has no apiVersion"
        if version.type is not None and not _derives(version.type, DeviceParameters):
            return (
                f"has a type for the parameter version {name} that is not derived from "
                "drakit.DeviceParameters"
            )
        current = version.type is None or _derives(version.type, kind.parameters_type)
        if version.convert is None and not current:
            return (
                f"has a type for the parameter version {name} that is not derived from "
                "parameters_type, and no conversion: set convert"
            )
    return None


def _never_undone(kind: type[AnyDriver]) -> bool:
    """Return whether a driver defines prepare without a method to undo it, and does not declare
    that it has no side effects. In this case, the name of the undo method may be misspelled."""
    return (
        getattr(kind, "side_effects", True)
        and overrides(kind, *PREPARE_METHODS)
        and not overrides(kind, *UNDO_METHODS)
    )


def _derives(kind: object, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _find(reference: str, *, where: str) -> type[AnyDriver]:
    try:
        if ":" in reference:
            module, _, attribute = reference.partition(":")
            found: object = getattr(import_module(module), attribute)
        else:
            found = _entry_point(reference, where=where)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # importing a vendor's module runs its code
        plain = isinstance(error, ImportError | AttributeError)
        text = text_of(error) if plain else kind_and_text(error)
        if isinstance(error, ModuleNotFoundError):
            text += "; install its package, or set PYTHONPATH to its folder"
        raise ConfigError(f"{where}: {reference} cannot be loaded: {text}") from error
    if not (isinstance(found, type) and issubclass(found, Driver)):
        raise ConfigError(f"{where}: {reference} is not a class derived from drakit.Driver")
    return cast("type[AnyDriver]", found)


def _entry_point(name: str, *, where: str) -> object:
    known = entry_points(group=GROUP)
    for point in known:
        if point.name == name:
            return point.load()
    names = ", ".join(sorted(point.name for point in known)) or "none"
    raise ConfigError(f"{where}: driver {name!r} is not installed; installed drivers: {names}")
