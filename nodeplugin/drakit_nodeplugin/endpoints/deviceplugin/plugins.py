"""
All device plugins on a node, as a driver that can be hosted.

Each resource has a separate :class:`.DevicePlugin` and pool, and its name identifies it to the
listener. Each entry in the configuration has a directory, in which only the entry's resources can
register. This module decides which resources may register and when they may be used, and routes the
devices of a claim to their resources.

The kubelet's own device manager must not serve the same resource. Otherwise, a device could be
allocated twice. A resource that the kubelet served is free only once it has been missing from
several complete responses over two minutes. Any other resource must be missing from two complete
responses, because a kubelet that has just started adds its pods one by one. A missing or incomplete
response proves nothing.

Knows only the devices of claims. Does not depend on slices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from drakit.device import AllocatedClaim, Edits, PreparedDevice
from drakit.driver import NoParameters
from drakit_daemon import tasks
from drakit_daemon.backoff import Backoff
from drakit_driver.runtime.contract import DriverTraits
from drakit_driver.runtime.endpoint import Caller
from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError
from drakit_driver.runtime.parameters import with_parameters
from drakit_nodeplugin.endpoints.allowlist import Rights
from drakit_nodeplugin.endpoints.deviceplugin.messages import DeviceRoom, pool_of
from drakit_nodeplugin.endpoints.deviceplugin.plugin_connection import DevicePlugin, PluginClient
from drakit_nodeplugin.endpoints.deviceplugin.plugin_registration import (
    RefusedError,
    Registration,
    RegistrationService,
    RegistrationSockets,
)
from drakit_nodeplugin.endpoints.host_paths import HostDeviceNodes
from drakit_nodeplugin.endpoints.sources import Diagnostics, HostContext
from drakit_nodeplugin.endpoints.wire import shown
from drakit_nodeplugin.reasons import NodeReason
from drakit_nodeplugin.state.podresources import DeviceManagerResources

if TYPE_CHECKING:
    from drakit_nodeplugin.allowed import AllowedPlugin

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- the kubelet's resources

RESPONSE_SECONDS = 2.0
"""Time limit for a response from the kubelet. A plugin that registers waits for it."""

SETTLE_SECONDS = 2.0
"""Minimum time between two complete responses before a resource that is missing from both is
free."""

CLEAR_SECONDS = 120.0
"""How long a resource that the kubelet served must be missing before it is free. The value equals
the grace period of stale claims. After a restart, the kubelet's device manager does not serve any
resource until the plugin has registered again."""

PERIOD_SECONDS = 30.0
"""Delay between two polls while no device plugin is waiting for the result. After twice this time
without a response, earlier responses are no longer valid. Therefore, `CLEAR_SECONDS` always covers
several responses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """The reason why the devices of a resource must not be used."""

    text: str
    """The reason as a sentence."""

    reason: NodeReason | None
    """The reason for the Event. None while the wait is still short."""

    of_kubelet: bool = False
    """Whether the kubelet currently serves the resource."""


class KubeletResources:
    """Polls the kubelet, and remembers which resources it serves."""

    def __init__(self, read: Callable[[], Awaitable[DeviceManagerResources]]) -> None:
        self._read = read
        self._named: Mapping[str, bool] = {}
        """The resources in the last response."""
        self._unknown: str | None = None
        """The reason why the last response is missing or incomplete. None if the response is
        complete."""
        self._complete_since: float | None = None
        """The time since which all responses have been complete (loop clock)."""
        self._complete_at = 0.0
        """The time of the last complete response (loop clock)."""
        self._had: dict[str, float | None] = {}
        """The resources that a device plugin wanted to register while the kubelet served them. Each
        value is the loop time since which the resource has been missing, or None if it is not
        missing."""
        self._retry = Backoff(first_seconds=SETTLE_SECONDS, limit_seconds=PERIOD_SECONDS, jitter=0)

    async def check(self, resource: str) -> Bar | None:
        """Poll now, and return the reason why a resource must not be used, or None if it is
        free."""
        await self.ask()
        return self.bar(resource)

    def bar(self, resource: str) -> Bar | None:
        """Return the reason why a resource must not be used according to the last response, or None
        if it is free."""
        if (served := self._named.get(resource)) is not None:
            self._had[resource] = None
            text = _of_kubelet(resource, served=served)
            return Bar(text=text, reason="ResourceServedByKubelet", of_kubelet=True)
        if resource in self._had:
            return Bar(
                text=f"the kubelet's own device manager served {resource} on this node; the node "
                f"plugin uses the device plugin when the resource has been absent from the "
                f"kubelet's list for {CLEAR_SECONDS:g} s",
                reason="ResourceServedByKubelet",
            )
        if self._unknown is not None:
            return Bar(
                text=f"the node plugin cannot determine whether the kubelet has allocated devices "
                f"of {resource} to pods, so a device could be allocated twice: {self._unknown}",
                reason="KubeletResourcesUnknown",
            )
        if not self.settled:
            return Bar(
                text=f"the node plugin is checking whether the kubelet has allocated devices of "
                f"{resource} to pods",
                reason=None,
            )
        return None

    @property
    def settled(self) -> bool:
        """Whether the responses have been complete for long enough."""
        since = self._complete_since
        return since is not None and self._complete_at - since >= SETTLE_SECONDS

    @property
    def idle(self) -> bool:
        """Whether polling can stop until a device plugin registers."""
        return self.settled and not self._had

    def pause_seconds(self) -> float:
        """Return the time until the next poll."""
        if self._unknown is not None:
            return self._retry.next_seconds()
        self._retry.succeeded()
        return PERIOD_SECONDS if self.settled else SETTLE_SECONDS

    async def ask(self) -> None:
        """Poll the kubelet."""
        # Concurrent callers share one call of the client.
        try:
            async with asyncio.timeout(RESPONSE_SECONDS):
                answer = await self._read()
        except TimeoutError:
            self._note({}, f"the kubelet did not respond within {RESPONSE_SECONDS:g} s")
        except Exception as error:  # the client is passed in, so it can raise anything
            self._note({}, str(error) or "the call to the kubelet failed")
        else:
            self._note(answer.resources, answer.unknown)

    def _note(self, named: Mapping[str, bool], unknown: str | None) -> None:
        now = asyncio.get_running_loop().time()
        self._named, self._unknown = named, unknown
        if unknown is not None or now - self._complete_at > 2 * PERIOD_SECONDS:
            self._complete_since = None
            self._had = dict.fromkeys(self._had)
        if unknown is not None:
            return
        self._complete_at = now
        if self._complete_since is None:
            self._complete_since = now
        for resource, since in list(self._had.items()):
            if resource in named:
                self._had[resource] = None
            elif since is None:
                self._had[resource] = now
            elif now - since >= CLEAR_SECONDS:
                del self._had[resource]


def _of_kubelet(resource: str, *, served: bool) -> str:
    if not served:
        return (
            f"pods on this node still hold devices of {resource} that the kubelet has allocated, "
            f"so a device could be allocated twice; delete these pods"
        )
    return (
        f"the kubelet's own device manager serves {resource} on this node, and only one "
        f"component may serve it; remove the device plugin that registers with the kubelet, or the "
        f"one that registers with the node plugin"
    )


# ---------------------------------------------------------------- device plugins

TRAITS = DriverTraits(
    # There is nothing to undo, but Allocate may change a device (reset it, load a program), and
    # must not be called for a device that another claim still holds. Only storing the intent
    # ensures that.
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
    """The device plugins on a node, as one source of devices. Implements :class:`.DriverSource`."""

    foreign = True

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        where: str,
        metadata_files: bool = False,
        kubelet_resources: Callable[[], Awaitable[DeviceManagerResources]],
        plugins: Mapping[str, AllowedPlugin],
        devices: HostDeviceNodes | None = None,
    ) -> None:
        """
        Create the source. `directory` contains a directory for each entry of `plugins`. A device
        plugin mounts its own directory as ``/var/lib/kubelet/device-plugins``. `kubelet_resources`
        returns the resources of the kubelet's own device manager. It may raise, and no device
        plugin is used until it has succeeded. `devices` reads the host's device nodes, by default
        where the chart mounts them.
        """
        self.name = name
        self.where = where
        self.traits = replace(TRAITS, metadata_files=metadata_files)
        self.expected: Collection[str] = ()
        self.directory = directory
        self.kubelet_resources = kubelet_resources
        self.devices = devices or HostDeviceNodes.found()
        self.plugins = plugins

    def endpoint(self, context: HostContext) -> DevicePlugins:
        """Create the endpoint, in the daemon's loop. Called each time the driver becomes active."""
        return DevicePlugins(self, context)


class DevicePlugins(Caller):
    """The endpoint for the resources of all device plugins. Implements :class:`.HostedEndpoint`."""

    blocked: str | None = None
    """The call that blocks the event loop. Always None, because the endpoint does not have a
    separate event loop."""

    def __init__(self, source: DevicePluginsSource, context: HostContext) -> None:
        driver = source.name
        super().__init__(driver, traits=source.traits, node=context.node)
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
        """The plugins, keyed by resource."""
        self._tasks: asyncio.TaskGroup | None = None
        self._diagnostics = {
            entry: Diagnostics(context.report, source=entry) for entry in source.plugins
        }
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
                    diagnostics=self._diagnostics[entry],
                )
                for entry in source.plugins
            }
        )

    # ------------------------------------------------------------ life cycle

    async def start(self) -> None:
        """Return immediately, because plugins must register first."""

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
        """Close all connections. Prepared claims remain prepared."""
        self._tasks = None
        await self._sockets.stop()
        await asyncio.gather(*(plugin.close() for plugin in self._plugins.values()))

    async def ended(self) -> None:
        """Implement :meth:`.HostedEndpoint.ended`."""

    def unavailable(self) -> EndpointStoppedError | None:
        """Return the reason why no device can be prepared now, or None."""
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

    async def _connection(self, ended: object = None) -> ClaimRouter:
        return self._calls

    # ------------------------------------------------------------ registration

    async def _accept(self, entry: str, registration: Registration) -> None:
        """Accept a registration in the directory of an entry. Raises :class:`RefusedError`."""
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
                # The registration is kept, and is used once the kubelet no longer serves the
                # resource.
                plugin.bar(bar.text)
                plugin.register(registration)
            raise RefusedError(
                bar.text,
                code=grpc.StatusCode.FAILED_PRECONDITION,
                reason="ResourceServedByKubelet",
            )
        if plugin is None:
            plugin = self._add(resource)
        # A connected plugin has already been cleared, and remains in use while the kubelet does not
        # respond.
        if bar is not None and plugin.unavailable is not None:
            # Accept the registration, so that the plugin need not repeat it, but don't use it until
            # the resource is cleared.
            self._bar(plugin, bar)
            self._poll_kubelet.set()
        else:
            plugin.unbar()
        plugin.register(registration)

    def _foreign(self, resource: str, entry: str) -> str:
        """Return the reason why a resource cannot register in the directory of an entry."""
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
                diagnostics=self._diagnostics[self._entries[resource]],
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
                await asyncio.sleep(SETTLE_SECONDS)

    def _bar(self, plugin: DevicePlugin, bar: Bar) -> None:
        if bar.text == plugin.barred:
            return
        if bar.reason is not None:
            self._diagnostics[self._entries[plugin.resource]].report(bar.reason, bar.text)
        plugin.bar(bar.text)


class ClaimRouter:
    """Routes calls to the plugins of the resources, because a claim can have devices of several
    resources. Implements :class:`~drakit_driver.runtime.contract.Calls`. A prepare fails if one of
    the plugins is unavailable. An unprepare does not need the plugins."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self.plugins: dict[str, DevicePlugin] = {}
        """The plugins, keyed by pool."""

    async def prepare(
        self, batch: Sequence[AllocatedClaim]
    ) -> Mapping[str, Sequence[PreparedDevice] | DeviceFailedError]:
        """Allocate the devices of one claim. Requests are allocated concurrently."""
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
        if len(calls) == 1:  # most claims have one call, which does not need a task
            results: Sequence[Edits | BaseException] = [await calls[0]]
        else:
            results = await asyncio.gather(*calls, return_exceptions=True)
        prepared = [PreparedDevice()] * len(item.devices)
        for indexes, result in zip(requests.values(), results, strict=True):
            if isinstance(result, DeviceFailedError) and result.index is not None:
                raise DeviceFailedError(str(result), index=indexes[result.index])
            if isinstance(result, BaseException):
                raise result
            prepared[indexes[0]] = PreparedDevice(edits=result)
        return {item.claim.uid: prepared}

    def _available(self, pool: str) -> DevicePlugin:
        """Return the plugin of a pool. Raises :class:`PluginUnavailableError`."""
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
        """Return success for all claims, because the protocol has no call to end an allocation."""
        return {item.claim.uid: None for item in batch}

    async def check(self, batch: Sequence[AllocatedClaim]) -> Mapping[str, bool]:
        """Return True for all claims, because the protocol has no call to check a device."""
        return {item.claim.uid: True for item in batch}
