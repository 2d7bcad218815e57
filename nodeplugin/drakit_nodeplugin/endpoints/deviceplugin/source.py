"""
Device plugins as a driver that can be hosted.

It must not know how a device plugin is reached, or who hosts the driver.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from drakit.driver import NoParameters
from drakit_nodeplugin.endpoints.allowlist import allow_list
from drakit_nodeplugin.endpoints.deviceplugin.kubeletresources import KubeletAnswer
from drakit_nodeplugin.endpoints.deviceplugin.plugins import DevicePlugins
from drakit_nodeplugin.endpoints.endpoint import Surroundings
from drakit_nodeplugin.endpoints.host_paths import HostDevices
from drakit_nodeplugin.endpoints.traits import DriverTraits, Granularity

if TYPE_CHECKING:
    from drakit_nodeplugin.allowed import AllowedEndpoint

__all__ = ("DevicePluginsSource",)


TRAITS = DriverTraits(
    # There is nothing to undo. But Allocate may change a device (reset it, load a program), and
    # must not be called for one that another claim still has: only the intent makes sure of that.
    side_effects=True,
    health=True,
    prepare_granularity=Granularity.BATCH,
    unprepare_granularity=Granularity.BATCH,
    parameters_type=NoParameters,
)


class DevicePluginsSource:
    """A :class:`~drakit_nodeplugin.endpoints.source.DriverSource`: all device plugins together."""

    traits = TRAITS
    foreign = True

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        where: str,
        kubelet_resources: Callable[[], Awaitable[KubeletAnswer]],
        allowed: Mapping[str, AllowedEndpoint] | None = None,
        devices: HostDevices | None = None,
    ) -> None:
        """
        `directory` is what plugins see as ``/var/lib/kubelet/device-plugins``. `kubelet_resources`
        returns the resources of the kubelet's own device manager; it may raise, and until there is
        an answer, no device plugin is used. Without `allowed`, any resource may register. `devices`
        reads the host's device nodes; by default, where the chart mounts them.
        """
        self.name = name
        self.where = where
        self.expected: Collection[str] = ()
        self._directory = directory
        self._kubelet_resources = kubelet_resources
        self._devices = devices or HostDevices.found()
        self._allowed = allow_list("devicePlugins.allowed", allowed, devices=self._devices)

    def endpoint(self, surroundings: Surroundings) -> DevicePlugins:
        """Make what is run and called; called once, within the daemon's loop."""
        return DevicePlugins(
            self.name,
            directory=self._directory,
            traits=self.traits,
            kubelet_resources=self._kubelet_resources,
            surroundings=surroundings,
            devices=self._devices,
            allowed=self._allowed,
        )
