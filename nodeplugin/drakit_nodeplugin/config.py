"""
The node plugin's configuration: one file, some flags, some of the pod's environment.

Read once, by the composition root. An unknown key, or a value that cannot be, stops the plugin at
start with file, key and reason.

It must not know what the values are used for.
"""

from __future__ import annotations

import posixpath
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from drakit.cdi.names import InvalidNameError, split_kind
from drakit.resource.names import is_dns_subdomain
from drakit.settings import Address, Duration, Logging, Seconds, Settings, describe, read_file
from drakit.settings import SettingsError as ConfigError

__all__ = (
    "AllowedEndpoint",
    "Backends",
    "ConfigError",
    "DeviceHealthSettings",
    "DevicePlugins",
    "Devices",
    "DriverEntry",
    "NodePluginConfig",
    "OwnerSettings",
    "StaleClaims",
    "load_config",
)


class DriverEntry(Settings):
    """A driver that the plugin hosts."""

    driver: str
    """Name of an entry point of group ``drakit.drivers``, or ``module:Class``."""

    config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The driver's own configuration; the driver says what may stand in it."""


class StaleClaims(Settings):
    """When a prepared claim is unprepared though the kubelet has not asked for it."""

    period: Seconds = 60.0
    """From one look to the next."""

    grace_period: Seconds = 120.0
    """How long a claim must have been stale: gone, replaced, deallocated, or for other devices or
    another node. A living kubelet unprepares what it knows within a minute."""

    unconfirmed_grace_period: Seconds = 3600.0
    """The same where the kubelet's podresources cannot be read, and the claim may be in use."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.unconfirmed_grace_period < self.grace_period:
            raise ValueError("unconfirmedGracePeriod must not be shorter than gracePeriod")
        return self


class DeviceHealthSettings(Settings):
    """What becomes of a device that its driver calls unhealthy."""

    recovery_period: Seconds = 30.0
    """How long it must have been well before its taint is taken away: a device that flaps gets no
    new pods."""

    eviction_delay: Seconds = 10.0
    """How long running work must have been broken, in the driver's words, before pods that use the
    device are evicted (taint with effect NoExecute)."""

    timeout: Seconds = 30.0
    """How long the kubelet believes in a device's health; told again at a third of it."""


class Devices(Settings):
    """What becomes of devices whose driver is away."""

    endpoint_stop_grace_period: Seconds = 300.0
    """How long the devices of a stopped driver stay published, tainted; then they are removed."""

    start_grace_period: Seconds = 30.0
    """How long after a start of the plugin what is published stays as it is, while its driver has
    not spoken yet."""

    health: DeviceHealthSettings = DeviceHealthSettings()


def _absolute(path: Any) -> Any:
    if not str(path).startswith("/"):
        raise ValueError("must be an absolute path")
    return path


AbsolutePath = Annotated[Path, BeforeValidator(_absolute)]


def _normalised(path: str) -> str:
    if not path.startswith("/") or posixpath.normpath(path) != path or path.startswith("//"):
        raise ValueError("must be an absolute path without '..', doubled and trailing slashes")
    return path


def _below_dev(pattern: str) -> str:
    if not pattern.startswith("/dev/") or "**" in pattern:
        raise ValueError("must be a path below /dev; a wildcard matches within one component")
    return pattern


def _cdi_device(name: str) -> str:
    kind, equals, pattern = name.partition("=")
    try:
        split_kind(kind)
    except InvalidNameError as error:
        raise ValueError(str(error)) from None
    if equals and not pattern:
        raise ValueError("must name devices after '=', or leave it out to allow all of the kind")
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


HostPath = Annotated[str, AfterValidator(_normalised)]
DevicePattern = Annotated[HostPath, AfterValidator(_below_dev)]
Identifier = Annotated[int, Field(ge=0, le=2**32 - 2)]


class OwnerSettings(Settings):
    """The owner that a socket must have."""

    uid: Identifier = 0
    """The user's number on the node."""

    gid: Identifier | None = None
    """The group's number on the node; any group if none is given."""


class AllowedEndpoint(Settings):
    """What an allowed backend or device plugin may give to containers; nothing by default."""

    owner: OwnerSettings = OwnerSettings()
    """The owner of its socket: root by default."""

    devices: tuple[DevicePattern, ...] = ()
    """Device nodes of the host, as paths below ``/dev`` without symbolic links. A wildcard matches
    within one path component."""

    mounts: dict[HostPath, Literal["ro", "rw"]] = Field(
        default_factory=dict[HostPath, Literal["ro", "rw"]]
    )
    """Prefixes of host paths, read-only or writable. The longest prefix that matches decides."""

    hooks: tuple[HostPath, ...] = ()
    """Programs of the host that may run as OCI hooks, with any arguments."""

    net_devices: tuple[str, ...] = ()
    """Network interfaces of the host, with wildcards."""

    additional_gids: tuple[Identifier, ...] = ()
    """Groups that a container may be in besides its own."""

    intel_rdt: bool = False
    """Whether containers may get Intel RDT settings."""

    cdi_devices: tuple[Annotated[str, AfterValidator(_cdi_device)], ...] = ()
    """CDI devices that others describe: kinds (``vendor.example/class``), or a kind and a pattern
    of names (``vendor.example/class=card*``)."""

    @model_validator(mode="after")
    def _keeps_its_word(self) -> Self:
        for path, access in self.mounts.items():
            for parent in map(str, Path(path).parents):
                if access == "ro" and self.mounts.get(parent) == "rw":
                    raise ValueError(f"mounts: {path} cannot be ro below {parent}, which is rw")
        return self


class Backends(Settings):
    """Drivers that are programs of their own, in any language."""

    enabled: bool = False
    """Whether backends are looked for."""

    directory: AbsolutePath | None = None
    """The registration directory, in which they have their sockets;
    ``<kubeletRoot>/plugins/drakit.dev/backends`` if none is given."""

    allowed: dict[Annotated[str, AfterValidator(_driver)], AllowedEndpoint] | None = None
    """The drivers that backends may have, by name. Without it any driver may do anything; an empty
    one allows none."""


class DevicePlugins(Settings):
    """Device plugins of the kubelet's kind, which register with this plugin instead."""

    enabled: bool = False
    """Whether they may register."""

    directory: AbsolutePath | None = None
    """What device plugins see as ``/var/lib/kubelet/device-plugins``;
    ``<kubeletRoot>/plugins/drakit.dev/device-plugins`` if none is given."""

    driver_name: str = "deviceplugin.drakit.dev"
    """The name of the driver that publishes their devices. Of two releases with device plugins on
    one node each needs a name and a directory of its own."""

    allowed: dict[Annotated[str, AfterValidator(_resource)], AllowedEndpoint] | None = None
    """The resources that device plugins may have, by name. Without it any device plugin may do
    anything; an empty one allows none."""


class NodePluginConfig(Settings):
    """The configuration file of ``drakit-nodeplugin``."""

    kubelet_root: AbsolutePath = Path("/var/lib/kubelet")
    """The kubelet's root directory. The plugin must see it under the same path as the kubelet,
    because the path of its socket is told to the kubelet."""

    cdi_directory: AbsolutePath = Path("/var/run/cdi")
    """Where CDI specs are written: one of the runtime's directories for generated specs."""

    boot_id_file: Annotated[AbsolutePath, Field(alias="bootIDFile")] = Path(
        "/proc/sys/kernel/random/boot_id"
    )
    """A file that holds another text after each boot of the node."""

    listen: Address = "[::]:8080"
    """Address of ``/healthz``, ``/readyz`` and ``/metrics``."""

    drain_timeout: Annotated[Duration, Field(gt=timedelta(0), le=timedelta(seconds=44))] = (
        timedelta(seconds=40)
    )
    """How long calls in flight may take at a stop; the kubelet itself waits 45 s."""

    stale_claims: StaleClaims = StaleClaims()
    devices: Devices = Devices()

    pod_resources_socket: AbsolutePath | None = None
    """Where the kubelet says which devices its containers have;
    ``<kubeletRoot>/pod-resources/kubelet.sock`` if none is given."""

    kubelet_state_file: AbsolutePath | None = None
    """The kubelet's ``dra_manager_state``, if it can be read: a claim that it names is not stale.
    Its directory must be mounted, for the kubelet replaces the file at each change."""

    logging: Logging = Logging()
    drivers: tuple[DriverEntry, ...] = ()
    """The drivers that this plugin hosts in its own process."""

    backends: Backends = Backends()
    device_plugins: DevicePlugins = DevicePlugins()

    @model_validator(mode="after")
    def _hosts_something(self) -> Self:
        if not (self.drivers or self.backends.enabled or self.device_plugins.enabled):
            raise ValueError(
                "there is nothing to host: name drivers, or set backends.enabled or "
                "devicePlugins.enabled"
            )
        return self

    @property
    def backends_directory(self) -> Path:
        """Where backends have their sockets."""
        return self.backends.directory or self.kubelet_root / "plugins/drakit.dev/backends"

    @property
    def device_plugins_directory(self) -> Path:
        """Where device plugins have their sockets, and find ours."""
        default = self.kubelet_root / "plugins/drakit.dev/device-plugins"
        return self.device_plugins.directory or default

    @property
    def podresources(self) -> Path:
        """The socket of the kubelet's podresources API."""
        return self.pod_resources_socket or self.kubelet_root / "pod-resources" / "kubelet.sock"


def load_config(path: Path, **overrides: Any) -> NodePluginConfig:
    """
    Read a configuration file; what is given beside it (and is not None) comes first.

    Raises :class:`ConfigError`.
    """
    values = read_file(path)
    values.update({key: value for key, value in overrides.items() if value is not None})
    try:
        return NodePluginConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error, file=str(path))) from error
