"""
The node plugin's configuration: one file, some flags, and some of the pod's environment variables.

The composition root reads it once. If a key is unknown or a value is invalid, the plugin does not
start, and the error contains the file, key and reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from drakit import layout
from drakit.settings import (
    AbsolutePath,
    Duration,
    Listen,
    Logging,
    Seconds,
    Settings,
    describe,
    read_file,
)
from drakit.settings import SettingsError as ConfigError

SOCKET_NAME_BYTES = 24
"""Number of bytes that the path of an entry's directory must leave for a socket name. The node
plugin does not need them, but a program that mounts the directory at the same path as on the host
does."""


MAX_BACKENDS = 64
"""Maximum number of backend drivers on a node, as protection against a program that keeps changing
its name. Each driver takes about 1 MiB and ten open files."""

MAX_RESOURCES = 256
"""Maximum number of device plugin resources on a node. Each has a pool, a connection and a task."""


class DriverEntry(Settings):
    """A driver that runs in the node plugin."""

    driver: str
    """The name of an entry point in the group ``drakit.drivers``, or ``module:Class``."""

    name: str | None = None
    """The name that the driver must have. If every entry sets a name, the chart's admission policy
    restricts the plugin to ResourceSlices of these drivers."""

    config: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The configuration of the driver. The driver defines its schema."""


class StaleClaims(Settings):
    """Controls when the plugin unprepares claims that the kubelet no longer tracks."""

    period: Seconds = 60.0
    """The time between two checks."""

    grace_period: Seconds = 120.0
    """How long a claim must be stale before the plugin unprepares it. A claim is stale if it was
    deleted, replaced or deallocated, or if its allocation now has different devices or a different
    node. A running kubelet unprepares the claims that it tracks within a minute."""

    unconfirmed_grace_period: Seconds = 3600.0
    """The grace period while the kubelet's podresources API does not respond. The claim might be in
    use."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.unconfirmed_grace_period < self.grace_period:
            raise ValueError("unconfirmedGracePeriod must not be shorter than gracePeriod")
        return self


class OpaqueParameters(Settings):
    """Limits for the opaque parameters of a claim, for each driver. A config counts once for each
    device that it applies to. A claim that exceeds a limit fails, and its pod's Event names the
    limit."""

    # The API server accepts 64 configs of 10 KiB for 32 devices: 20 MiB of JSON, which takes much
    # more memory when parsed. With these defaults, 110 pods (the kubelet's default), each with a
    # claim just below the limits, can start at once on a node.
    max_bytes: Annotated[int, Field(ge=10 * 1024)] = 128 * 1024
    """The maximum size, in bytes of JSON. The API server accepts 10 KiB per config."""

    max_values: Annotated[int, Field(ge=1024)] = 8192
    """The maximum number of keys and values. Each takes up to 100 bytes of the plugin's memory
    while a claim is prepared, even if it is short."""


class DeviceHealthSettings(Settings):
    """How the plugin handles a device that its driver reports as unhealthy."""

    recovery_period: Seconds = 30.0
    """How long the device must have been healthy before the plugin removes its taint. New pods do
    not get a device that flaps."""

    eviction_delay: Seconds = 10.0
    """How long the driver must report that the pods that use a device can no longer work. The
    plugin then sets a NoExecute taint, which causes Kubernetes to evict the pods."""

    timeout: Seconds = 30.0
    """How long the kubelet considers a device's health valid. The plugin reports it again after a
    third of this time."""


class Devices(Settings):
    """How the plugin handles devices whose driver is stopped, and unhealthy devices."""

    endpoint_stop_grace_period: Seconds = 300.0
    """How long the devices of a stopped driver stay published, with a taint. Afterwards, the plugin
    removes them."""

    start_grace_period: Seconds = 30.0
    """How long the plugin waits after its start for a driver to report its devices. Until then, the
    published devices stay unchanged."""

    gone_eviction_delay: Seconds = 10.0
    """How long a device must be missing from its driver's inventory before the plugin evicts the
    pods that use the device, if the driver requests that (``evict_if_gone``, or ``onVanish: Evict``
    of a host device). The plugin then sets a NoExecute taint. When a USB hub resets, its devices
    disappear for a few seconds."""

    health: DeviceHealthSettings = DeviceHealthSettings()


def _entries(setting: Literal["backends", "devicePlugins"]) -> BeforeValidator:
    """Check the entries of a setting. If there are none, do not load their models, to save
    memory."""

    def check(given: Any) -> Any:
        if given == {}:
            return given
        from drakit_nodeplugin import allowed

        return allowed.check(setting, given)

    return BeforeValidator(check)


if TYPE_CHECKING:
    from drakit_nodeplugin.allowed import AllowedBackend, AllowedPlugin

    BackendEntries = Mapping[str, AllowedBackend]
    PluginEntries = Mapping[str, AllowedPlugin]
else:
    BackendEntries = PluginEntries = Any


class Backends(Settings):
    """Backends: drivers that run as separate programs, in any language."""

    enabled: bool = False
    """Whether backends can register."""

    directory: AbsolutePath | None = None
    """The directory that contains a directory for each entry of ``allowed``. The default is
    ``<kubeletRoot>/plugins/drakit.dev/backends``."""

    allowed: Annotated[BackendEntries, _entries("backends")] = Field(default_factory=dict)
    """The backends, keyed by the names of their directories. A backend creates its socket in its
    directory, and can announce only the driver of its entry."""


class DevicePlugins(Settings):
    """Kubelet device plugins that register with the node plugin instead of the kubelet."""

    enabled: bool = False
    """Whether device plugins can register."""

    directory: AbsolutePath | None = None
    """The directory that contains a directory for each entry of ``plugins``. The default is
    ``<kubeletRoot>/plugins/drakit.dev/device-plugins``."""

    driver_name: str = "deviceplugin.drakit.dev"
    """The name of the driver that publishes their devices. Two releases with device
    plugins on one node need different names and directories."""

    metadata_files: bool = False
    """Whether containers can read the attributes of their devices in metadata files (KEP-5304)."""

    plugins: Annotated[PluginEntries, _entries("devicePlugins")] = Field(default_factory=dict)
    """The device plugins, keyed by the names of their directories. A device plugin mounts its
    directory as ``/var/lib/kubelet/device-plugins``, and can register only the resources of its
    entry."""


class Events(Settings):
    """The Events that the plugin and the kubelet write."""

    name_holders: Literal["namespace", "all"] = "namespace"
    """The claims that an error may name as holders of a device. The kubelet writes errors into the
    pod's Events. With ``namespace``, errors name claims of the pod's own namespace, and report the
    UID of others. With ``all``, errors name every claim."""


class ClaimStatus(Settings):
    """The claim status, which shows the data that drivers report about prepared devices."""

    enabled: bool = False
    """Whether the plugin writes ``status.devices`` of the claims that it prepares. It needs the
    permissions that the chart grants with this setting."""


class MetricsSettings(Settings):
    """The metrics of the plugin."""

    pod_devices: bool = False
    """Whether the metric ``drakit_pod_devices`` names the devices of each pod. Everyone who can
    read the metrics can then read the names of pods in all namespaces. The plugin asks the kubelet
    at each scrape."""


class NodePluginConfig(Settings):
    """The configuration file of ``drakit-nodeplugin``."""

    kubelet_root: AbsolutePath = Path("/var/lib/kubelet")
    """The kubelet's root directory. It must have the same path for the plugin as for the kubelet,
    because the plugin reports the paths of its sockets."""

    cdi_directory: AbsolutePath = Path("/var/run/cdi")
    """A directory from which the container runtime reads generated CDI specs."""

    boot_id_file: Annotated[AbsolutePath, Field(alias="bootIDFile")] = Path(
        "/proc/sys/kernel/random/boot_id"
    )
    """A file whose content differs after each boot of the node."""

    listen: Listen = Listen()
    drain_timeout: Annotated[Duration, Field(gt=timedelta(0), le=timedelta(seconds=44))] = (
        timedelta(seconds=40)
    )
    """How long the plugin waits for calls in flight when it stops. The kubelet waits 45 s."""

    events: Events = Events()
    metrics: MetricsSettings = MetricsSettings()
    stale_claims: StaleClaims = StaleClaims()
    opaque_parameters: OpaqueParameters = OpaqueParameters()
    claim_status: ClaimStatus = ClaimStatus()
    devices: Devices = Devices()

    device_maintenance: bool = False
    """Whether the plugin reads DeviceMaintenances, and taints the devices of its drivers that are
    in maintenance. It taints them only if the cluster does not serve DeviceTaintRules. The chart
    sets this to its value ``maintenance.enabled``."""

    pod_resources_socket: AbsolutePath | None = None
    """The socket of the kubelet's podresources API. The default is
    ``<kubeletRoot>/pod-resources/kubelet.sock``."""

    kubelet_state_file: AbsolutePath | None = None
    """The kubelet's file ``dra_manager_state``. A claim in this file is never stale. Mount its
    directory, because the kubelet replaces the file at each change."""

    logging: Logging = Logging()
    drivers: tuple[DriverEntry, ...] = ()
    """The drivers that run in the node plugin."""

    backends: Backends = Backends()
    device_plugins: DevicePlugins = DevicePlugins()

    @model_validator(mode="after")
    def _hosts_something(self) -> Self:
        if not (self.drivers or self.backends.enabled or self.device_plugins.enabled):
            raise ValueError(
                "no driver is configured: list drivers, or set backends.enabled or "
                "devicePlugins.enabled"
            )
        return self

    @model_validator(mode="after")
    def _within_limits(self) -> Self:
        backends = len(self.backends.allowed)
        if backends > MAX_BACKENDS:
            raise ValueError(
                f"backends.allowed has {backends} backends, and a node plugin serves at most "
                f"{MAX_BACKENDS}; remove entries that no node needs"
            )
        plugins = self.device_plugins.plugins.values()
        resources = sum(len(entry.resources) for entry in plugins)
        if resources > MAX_RESOURCES:
            raise ValueError(
                f"devicePlugins.plugins has {resources} resources, and a node plugin serves at "
                f"most {MAX_RESOURCES}; remove resources that no node has"
            )
        return self

    @model_validator(mode="after")
    def _room_for_sockets(self) -> Self:
        limit = layout.MAX_SOCKET_PATH_BYTES
        for setting, directory, entries in (
            ("backends", self.backends_directory, self.backends.allowed),
            ("devicePlugins", self.device_plugins_directory, self.device_plugins.plugins),
        ):
            for name in entries:
                if len(os.fsencode(directory / name)) + 1 + SOCKET_NAME_BYTES > limit:
                    raise ValueError(
                        f"{setting}.directory: {directory / name} leaves fewer than "
                        f"{SOCKET_NAME_BYTES} of the {limit} bytes of a socket's path "
                        "for its name; choose a shorter directory, or a shorter entry name"
                    )
        return self

    @property
    def backends_directory(self) -> Path:
        """The parent directory of the backend directories."""
        return self.backends.directory or layout.backends_directory(self.kubelet_root)

    @property
    def device_plugins_directory(self) -> Path:
        """The parent directory of the device plugin directories."""
        default = layout.device_plugins_directory(self.kubelet_root)
        return self.device_plugins.directory or default

    @property
    def drivers_directory(self) -> Path:
        """The parent directory of all driver data directories."""
        return layout.drivers_directory(self.kubelet_root)

    @property
    def podresources(self) -> Path:
        """The socket of the kubelet's podresources API."""
        return self.pod_resources_socket or self.kubelet_root / "pod-resources" / "kubelet.sock"


def load_config(path: Path, **overrides: Any) -> NodePluginConfig:
    """
    Read a configuration file. Overrides take precedence unless they are None.

    Raises :class:`ConfigError`.
    """
    values = read_file(path)
    values.update({key: value for key, value in overrides.items() if value is not None})
    try:
        return NodePluginConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error, file=str(path))) from error
