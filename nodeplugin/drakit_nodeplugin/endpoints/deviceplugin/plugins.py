"""
All device plugins of a node, as the one endpoint that a hosted driver has.

Each resource has an endpoint and a pool of its own, which the listener knows by the resource's
name. Here is decided who may register, and which resource a claim's device belongs to. Calls for
one device wait for each other, whatever becomes of its plugin meanwhile.

It must not know claims beyond their devices, slices, or how the kubelet is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import grpc

from drakit import tasks
from drakit.device import AllocatedDevice, ClaimReference, Edits
from drakit.resource.pools import short_pool
from drakit_nodeplugin.endpoints.allowlist import AllowList
from drakit_nodeplugin.endpoints.calls import AnyDriver, DriverCalls
from drakit_nodeplugin.endpoints.deviceplugin import kubeletresources
from drakit_nodeplugin.endpoints.deviceplugin.allocating import Allocating
from drakit_nodeplugin.endpoints.deviceplugin.connection import Registration
from drakit_nodeplugin.endpoints.deviceplugin.endpoint import DevicePluginEndpoint
from drakit_nodeplugin.endpoints.deviceplugin.kubeletresources import (
    Bar,
    KubeletAnswer,
    KubeletResources,
)
from drakit_nodeplugin.endpoints.deviceplugin.kubeletsocket import KubeletSocket
from drakit_nodeplugin.endpoints.deviceplugin.names import pool_of
from drakit_nodeplugin.endpoints.deviceplugin.registration import RefusedError, RegistrationService
from drakit_nodeplugin.endpoints.deviceplugin.remarks import Diagnostics
from drakit_nodeplugin.endpoints.deviceplugin.room import Room
from drakit_nodeplugin.endpoints.endpoint import Surroundings, WorkKey
from drakit_nodeplugin.endpoints.errors import EndpointStoppedError
from drakit_nodeplugin.endpoints.host_paths import HostDevices
from drakit_nodeplugin.endpoints.python.bridge import Bridge
from drakit_nodeplugin.endpoints.traits import DriverTraits
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2_grpc as pb_grpc

__all__ = ("DevicePlugins",)

logger = logging.getLogger(__name__)

MAX_RESOURCES = 256
"""Of a node. Who is away is known until the node plugin ends, or until there is no room left."""

FORGET_SECONDS = 3600.0
"""How long a plugin must have been away to make room for another one. Its devices are gone long
before; if they are not, nothing but a sentence depends on that it is known."""

STOPPING = "the node plugin stops"


class DevicePlugins:
    """A :class:`~drakit_nodeplugin.endpoints.endpoint.HostedEndpoint` of many resources."""

    def __init__(
        self,
        driver: str,
        *,
        directory: Path,
        traits: DriverTraits,
        kubelet_resources: Callable[[], Awaitable[KubeletAnswer]],
        surroundings: Surroundings,
        devices: HostDevices,
        allowed: AllowList | None,
    ) -> None:
        self.traits = traits
        self._driver = driver
        self._directory = directory
        self._surroundings = surroundings
        self._allowed = allowed
        self._endpoints: dict[str, DevicePluginEndpoint] = {}
        self._by_pool: dict[str, DevicePluginEndpoint] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._remarks = Diagnostics(surroundings.remark)
        self._room = Room()
        self._kubelet = KubeletResources(kubelet_resources)
        self._news = asyncio.Event()
        """A resource is new, or must not be used yet: the kubelet must be polled again."""
        loop = asyncio.get_running_loop()
        self._bridge = Bridge(driver, home=loop, there=loop)
        self._allocating = Allocating(
            driver, find=self._by_pool.get, devices=devices, remarks=self._remarks
        )
        self._calls = DriverCalls(
            driver,
            traits=traits,
            node=surroundings.node,
            caller=_Caller(self._bridge, self._allocating),
        )
        service = RegistrationService(directory, accept=self._accept, remarks=self._remarks)
        self._socket = KubeletSocket(
            directory,
            primary=surroundings.primary,
            add_services=lambda server: pb_grpc.add_RegistrationServicer_to_server(service, server),
            on_lost=self._lost,
        )

    # ------------------------------------------------------------ its life

    @property
    def blocked(self) -> str | None:
        """It has no event loop of its own."""
        return None

    async def start(self) -> None:
        """There is nothing to be connected to before a plugin has registered."""

    async def run(self) -> None:
        """Let plugins register and keep them connected, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._tasks = group
            for endpoint in self._endpoints.values():
                self._begin(endpoint)
            parts = {
                "registration of device plugins": self._socket.run,
                "the kubelet's resources": self._follow_kubelet,
            }
            for name, part in parts.items():
                group.create_task(tasks.until_stopped(name, part))

    async def close(self) -> None:
        """End it; what is prepared stays prepared."""
        self._tasks = None
        await self._socket.stop()
        self._bridge.end()
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints.values()))
        self._bridge.close(STOPPING)

    def _begin(self, endpoint: DevicePluginEndpoint) -> None:
        if self._tasks is not None:
            name = f"device plugin of {endpoint.resource}"
            task = self._tasks.create_task(tasks.until_stopped(name, endpoint.run), name=name)
            self._running[endpoint.resource] = task

    # ------------------------------------------------------------ who may register

    async def _accept(self, registration: Registration) -> None:
        """Take a registration; raises :class:`RefusedError`."""
        resource = registration.resource
        if self._allowed is not None and resource not in self._allowed.entries:
            raise RefusedError(
                f"the device plugin of {resource} is refused: {self._allowed.missing(resource)}",
                code=grpc.StatusCode.PERMISSION_DENIED,
            )
        bar = await self._kubelet.check(resource)
        if not self._surroundings.primary.is_set():
            raise RefusedError(
                f"the device plugin of {resource} is refused: another instance of the node plugin "
                f"is in charge now; register again at its kubelet.sock",
                code=grpc.StatusCode.UNAVAILABLE,
            )
        endpoint = self._endpoints.get(resource)
        if bar is not None and bar.of_kubelet:
            self._news.set()
            if endpoint is not None:
                # Once it is served no more, this registration holds, and not the one before it.
                endpoint.bar(bar.text)
                endpoint.register(registration)
            raise RefusedError(
                bar.text,
                code=grpc.StatusCode.FAILED_PRECONDITION,
                reason="ResourceServedByKubelet",
            )
        if endpoint is None:
            endpoint = self._made(resource)
        # A connected plugin was cleared before, and stays in use while the kubelet does not answer.
        if bar is not None and endpoint.connection is None:
            # It is accepted and need not register again, but is unused until it is cleared.
            self._bar(endpoint, bar)
            self._news.set()
        elif endpoint.barred is not None:
            endpoint.unbar()
        endpoint.register(registration)

    def _made(self, resource: str) -> DevicePluginEndpoint:
        if len(self._endpoints) >= MAX_RESOURCES and not self._made_room():
            raise RefusedError(
                f"a further device plugin is refused: {MAX_RESOURCES} resources have been "
                f"registered on this node, and no more are taken before some have been gone for an "
                f"hour",
                code=grpc.StatusCode.RESOURCE_EXHAUSTED,
                reason="TooManyResources",
            )
        endpoint = DevicePluginEndpoint(
            resource,
            listener=self._surroundings.listener,
            remarks=self._remarks,
            room=self._room,
            rights=None if self._allowed is None else self._allowed.entries[resource],
        )
        self._endpoints[resource] = self._by_pool[pool_of(resource)] = endpoint
        self._news.set()
        self._begin(endpoint)
        return endpoint

    def _made_room(self) -> bool:
        """Forget who has been away for longest, if that is long enough."""
        away = {
            endpoint.away_since: endpoint
            for endpoint in self._endpoints.values()
            if endpoint.away_since is not None
        }
        now = asyncio.get_running_loop().time()
        if not away or now - (since := min(away)) < FORGET_SECONDS:
            return False
        gone = away[since]
        del self._endpoints[gone.resource], self._by_pool[pool_of(gone.resource)]
        if (task := self._running.pop(gone.resource, None)) is not None:
            task.cancel()
        logger.info("device plugin is forgotten", extra={"endpoint": gone.resource})
        return True

    def _lost(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.forget("another instance of the node plugin has taken over")

    async def _follow_kubelet(self) -> None:
        while True:
            await self._kubelet.ask()
            for endpoint in list(self._endpoints.values()):
                bar = self._kubelet.bar(endpoint.resource)
                if bar is None:
                    if endpoint.barred is not None:
                        endpoint.unbar()
                elif bar.of_kubelet or endpoint.barred is not None:
                    self._bar(endpoint, bar)
            self._news.clear()
            idle = self._kubelet.idle and not self._endpoints
            with suppress(TimeoutError):
                async with asyncio.timeout(None if idle else self._kubelet.pause_seconds()):
                    await self._news.wait()
                await asyncio.sleep(kubeletresources.SETTLE_SECONDS)

    def _bar(self, endpoint: DevicePluginEndpoint, bar: Bar) -> None:
        if bar.text == endpoint.barred:
            return
        if bar.reason is not None:
            self._remarks.say(bar.reason, bar.text)
        endpoint.bar(bar.text)

    # ------------------------------------------------------------ what the engine calls

    def away(self) -> EndpointStoppedError | None:
        """Say why no device at all can be prepared now; None if one can."""
        if not self._endpoints:
            reason = self._socket.problem or "no device plugin has registered yet"
            return EndpointStoppedError(driver=self._driver, reason=reason)
        aways = {resource: endpoint.away for resource, endpoint in self._endpoints.items()}
        if None in aways.values():
            return None
        resource, reason = next(iter(aways.items()))
        text = f"no device plugin is there; that of {resource} is away: {reason}"
        return EndpointStoppedError(driver=self._driver, reason=text)

    async def prepare(
        self, claim: ClaimReference, devices: Sequence[AllocatedDevice]
    ) -> Sequence[Edits]:
        """Allocate the devices of a claim; raises DeviceFailedError, EndpointStoppedError."""
        for device in devices:
            pool = short_pool(self._surroundings.node, device.pool)
            if (away := self._allocating.away(pool)) is not None:
                raise away
        return await self._calls.prepare(claim, devices)

    async def unprepare(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> None:
        """Wait until no call of these devices runs; there is nothing else to do, whether their
        plugin is there or not."""
        await self._calls.unprepare(claim, devices)

    async def check(self, claim: ClaimReference, devices: Sequence[AllocatedDevice]) -> bool:
        """A device plugin cannot be asked."""
        return True


class _Caller:
    """How :class:`.DriverCalls` reaches the plugins: in the daemon's own loop, since what blocks is
    in other processes, and each call for a device after the one before."""

    def __init__(self, bridge: Bridge, allocating: Allocating) -> None:
        self._bridge = bridge
        self._allocating = cast("AnyDriver", allocating)

    def away(self) -> None:
        """Which plugin is away, the call itself says: an unprepare needs none."""

    def busy(self, keys: Collection[WorkKey]) -> bool:
        """True, so that each claim is a call of its own: they may be for different plugins."""
        return True

    async def call(
        self,
        function: Callable[[AnyDriver], Any],
        *,
        what: str,
        keys: Collection[WorkKey],
        timeout_seconds: float,
    ) -> Any:
        return await self._bridge.call(
            lambda: function(self._allocating),
            what=what,
            keys=keys,
            timeout_seconds=timeout_seconds,
        )
