"""
All device plugins of a node, as a driver that can be hosted.

Each resource has a :class:`.DevicePlugin` and a pool of its own; the listener knows it by the
resource's name. Each entry of the configuration has a directory, in which only its resources may
register. This module decides which resources may register and when they may be used, and routes the
devices of a claim to their resources.

It must not know claims beyond their devices, slices, or how the kubelet is called.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from drakit.device import AllocatedClaim, Edits
from drakit.driver import NoParameters
from drakit_daemon import tasks
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.caller import Caller
from drakit_nodeplugin.endpoints.contract import DriverTraits, EndpointContext
from drakit_nodeplugin.endpoints.deviceplugin import kubelet_resources
from drakit_nodeplugin.endpoints.deviceplugin.device_list import DeviceRoom, pool_of
from drakit_nodeplugin.endpoints.deviceplugin.kubelet_resources import Bar, KubeletResources
from drakit_nodeplugin.endpoints.deviceplugin.plugin_client import PluginClient
from drakit_nodeplugin.endpoints.deviceplugin.plugin_connection import DevicePlugin
from drakit_nodeplugin.endpoints.deviceplugin.plugin_registration import (
    RefusedError,
    Registration,
    RegistrationService,
    RegistrationSockets,
)
from drakit_nodeplugin.endpoints.failures import (
    DeviceFailedError,
    Diagnostics,
    EndpointStoppedError,
)
from drakit_nodeplugin.endpoints.host_paths import HostDeviceNodes
from drakit_nodeplugin.endpoints.parameters import with_parameters
from drakit_nodeplugin.endpoints.wire import shown
from drakit_nodeplugin.state.podresources import KubeletAnswer

if TYPE_CHECKING:
    from drakit_nodeplugin.allowed import AllowedPlugin

__all__ = ("DevicePlugins", "DevicePluginsSource", "PluginUnavailableError")

logger = logging.getLogger(__name__)

TRAITS = DriverTraits(
    # There is nothing to undo. But Allocate may change a device (reset it, load a program), and
    # must not be called for a device that another claim still has: only the intent ensures that.
    side_effects=True,
    health=True,
    parameters_type=NoParameters,
)


class PluginUnavailableError(EndpointStoppedError):
    """The device plugin of a resource is unavailable."""

    def __init__(self, *, driver: str, resource: str, reason: str) -> None:
        super().__init__(driver=driver, reason=reason)
        self.args = (
            f"the device plugin of {resource} is unavailable: {reason}; check its pod on this "
            f"node; once it has registered with the node plugin, the kubelet retries this pod",
        )


class DevicePluginsSource:
    """All device plugins together: a :class:`.DriverSource`."""

    traits = TRAITS
    foreign = True

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        where: str,
        kubelet_resources: Callable[[], Awaitable[KubeletAnswer]],
        plugins: Mapping[str, AllowedPlugin],
        devices: HostDeviceNodes | None = None,
    ) -> None:
        """
        `directory` contains a directory for each entry of `plugins`. A device plugin sees its own
        as ``/var/lib/kubelet/device-plugins``. `kubelet_resources` returns the resources of the
        kubelet's own device manager; it may raise, and until there is an answer, no device plugin
        is used. `devices` reads the host's device nodes; by default, where the chart mounts them.
        """
        self.name = name
        self.where = where
        self.expected: Collection[str] = ()
        self.directory = directory
        self.kubelet_resources = kubelet_resources
        self.devices = devices or HostDeviceNodes.found()
        self.plugins = plugins

    def endpoint(self, context: EndpointContext) -> DevicePlugins:
        """Make the endpoint; called once, in the daemon's loop."""
        return DevicePlugins(self, context)


class DevicePlugins(Caller):
    """A :class:`~drakit_nodeplugin.endpoints.endpoint.HostedEndpoint` of many resources."""

    blocked: str | None = None
    """It has no event loop of its own."""

    def __init__(self, source: DevicePluginsSource, context: EndpointContext) -> None:
        driver = source.name
        super().__init__(driver, traits=TRAITS, node=context.node)
        self._context = context
        self._devices = source.devices
        self._directory = source.directory
        self._resources = {entry: each.resources for entry, each in source.plugins.items()}
        self._entries = {
            resource: entry for entry, names in self._resources.items() for resource in names
        }
        self._rights = {
            entry: Rights(
                where=f"devicePlugins.plugins.{entry}",
                allowed=each,
                find_node=source.devices.node,
            )
            for entry, each in source.plugins.items()
        }
        self._plugins: dict[str, DevicePlugin] = {}
        """Plugins by resource."""
        self._tasks: asyncio.TaskGroup | None = None
        self._diagnostics = Diagnostics(context.report)
        self._room = DeviceRoom()
        self._kubelet = KubeletResources(source.kubelet_resources)
        self._poll_kubelet = asyncio.Event()
        """Set when a resource is new, or must not be used yet."""
        self._calls = ClaimRouter(driver)
        self._by_pool = self._calls.plugins
        self._sockets = RegistrationSockets(
            {
                source.directory / entry: RegistrationService(
                    source.directory / entry,
                    accept=partial(self._accept, entry),
                    diagnostics=self._diagnostics,
                )
                for entry in source.plugins
            }
        )

    # ------------------------------------------------------------ life cycle

    async def start(self) -> None:
        """Return at once: there is nothing to connect to before a plugin has registered."""

    async def run(self) -> None:
        """Let plugins register and keep them connected, until canceled."""
        async with asyncio.TaskGroup() as group:
            self._tasks = group
            parts = {
                "registration of device plugins": self._sockets.run,
                "the kubelet's resources": self._follow_kubelet,
            }
            for name, part in parts.items():
                group.create_task(tasks.until_stopped(name, part))

    async def close(self) -> None:
        """End it; prepared claims stay prepared."""
        self._tasks = None
        await self._sockets.stop()
        await asyncio.gather(*(plugin.close() for plugin in self._plugins.values()))

    async def ended(self) -> None:
        """See :meth:`.HostedEndpoint.ended`."""

    def unavailable(self) -> EndpointStoppedError | None:
        """Return why no device at all can be prepared now; None if one can."""
        if not self._plugins:
            reason = self._sockets.problem or "no device plugin has registered yet"
            return EndpointStoppedError(driver=self._driver, reason=reason)
        reasons = {resource: plugin.unavailable for resource, plugin in self._plugins.items()}
        if None in reasons.values():
            return None
        resource, reason = next(iter(reasons.items()))
        text = (
            f"no device plugin is available; the device plugin of {resource} is unavailable: "
            f"{reason}"
        )
        return EndpointStoppedError(driver=self._driver, reason=text)

    def _connection(self) -> ClaimRouter:
        return self._calls

    # ------------------------------------------------------------ registration

    async def _accept(self, entry: str, registration: Registration) -> None:
        """Accept a registration in the directory of an entry; raises :class:`RefusedError`."""
        resource = registration.resource
        if resource not in self._resources[entry]:
            raise RefusedError(
                f"the device plugin of {resource} is refused: {self._foreign(resource, entry)}",
                code=grpc.StatusCode.PERMISSION_DENIED,
            )
        bar = await self._kubelet.check(resource)
        plugin = self._plugins.get(resource)
        if bar is not None and bar.of_kubelet:
            self._poll_kubelet.set()
            if plugin is not None:
                # This registration is used once the kubelet does not serve the resource any more.
                plugin.bar(bar.text)
                plugin.register(registration)
            raise RefusedError(
                bar.text,
                code=grpc.StatusCode.FAILED_PRECONDITION,
                reason="ResourceServedByKubelet",
            )
        if plugin is None:
            plugin = self._add(resource)
        # A connected plugin was cleared before, and stays in use while the kubelet does not answer.
        if bar is not None and plugin.unavailable is not None:
            # It is accepted and need not register again, but is unused until it is cleared.
            self._bar(plugin, bar)
            self._poll_kubelet.set()
        else:
            plugin.unbar()
        plugin.register(registration)

    def _foreign(self, resource: str, entry: str) -> str:
        """Return why a resource cannot register in the directory of an entry."""
        text = f"devicePlugins.plugins.{entry} does not list this resource"
        if (own := self._entries.get(resource)) is None:
            return f"{text}; add it to resources, or remove the program"
        return f"{text}; its directory is {shown(self._directory / own)}"

    def _add(self, resource: str) -> DevicePlugin:
        plugin = DevicePlugin(
            resource,
            listener=self._context.listener,
            room=self._room,
            new_client=partial(
                PluginClient,
                diagnostics=self._diagnostics,
                room=self._room,
                devices=self._devices,
                rights=self._rights[self._entries[resource]],
            ),
        )
        self._plugins[resource] = self._by_pool[pool_of(resource)] = plugin
        self._poll_kubelet.set()
        if self._tasks is not None:
            name = f"device plugin of {resource}"
            self._tasks.create_task(tasks.until_stopped(name, plugin.run), name=name)
        return plugin

    async def _follow_kubelet(self) -> None:
        while True:
            await self._kubelet.ask()
            for plugin in list(self._plugins.values()):
                bar = self._kubelet.bar(plugin.resource)
                if bar is None:
                    plugin.unbar()
                elif bar.of_kubelet or plugin.barred is not None:
                    self._bar(plugin, bar)
            self._poll_kubelet.clear()
            idle = self._kubelet.idle and not self._plugins
            with suppress(TimeoutError):
                async with asyncio.timeout(None if idle else self._kubelet.pause_seconds()):
                    await self._poll_kubelet.wait()
                await asyncio.sleep(kubelet_resources.SETTLE_SECONDS)

    def _bar(self, plugin: DevicePlugin, bar: Bar) -> None:
        if bar.text == plugin.barred:
            return
        if bar.reason is not None:
            self._diagnostics.report(bar.reason, bar.text)
        plugin.bar(bar.text)


class ClaimRouter:
    """The :class:`~drakit_nodeplugin.endpoints.contract.Calls` of all resources: a claim may have
    devices of several. A prepare fails if the plugin of one is unavailable; an unprepare needs no
    plugin."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self.plugins: dict[str, DevicePlugin] = {}
        """Plugins by pool."""

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[Edits] | DeviceFailedError]:
        """Allocate the devices of one claim; requests are allocated concurrently."""
        (item,) = batch
        requests: dict[tuple[str, str], list[int]] = {}
        for index, device in enumerate(item.devices):
            if device.configs:
                with_parameters(device, NoParameters, driver=self._driver, index=index)
            requests.setdefault((device.pool, device.request), []).append(index)
        plugins = [self._available(pool) for pool, _ in requests]
        calls = [
            plugin.allocate([item.devices[index] for index in indexes])
            for plugin, indexes in zip(plugins, requests.values(), strict=True)
        ]
        if len(calls) == 1:  # most claims have one call, which needs no task
            results: Sequence[Edits | BaseException] = [await calls[0]]
        else:
            results = await asyncio.gather(*calls, return_exceptions=True)
        edits = [Edits()] * len(item.devices)
        for indexes, result in zip(requests.values(), results, strict=True):
            if isinstance(result, DeviceFailedError) and result.index is not None:
                raise DeviceFailedError(str(result), index=indexes[result.index])
            if isinstance(result, BaseException):
                raise result
            edits[indexes[0]] = result
        return {item.claim.uid: edits}

    def _available(self, pool: str) -> DevicePlugin:
        """Return the plugin of a pool; raises :class:`PluginUnavailableError`."""
        plugin = self.plugins.get(pool)
        if plugin is None:
            raise PluginUnavailableError(
                driver=self._driver, resource=f"pool {pool}", reason="it has not registered yet"
            )
        if (reason := plugin.unavailable) is not None:
            raise PluginUnavailableError(
                driver=self._driver, resource=plugin.resource, reason=reason
            )
        return plugin

    async def unprepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, DeviceFailedError | None]:
        """Return success for all claims: the protocol has no call that ends an allocation."""
        return {item.claim.uid: None for item in batch}

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        """Return True for all claims: the protocol has no call to check a device."""
        return {item.claim.uid: True for item in batch}
