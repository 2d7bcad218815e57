"""
Serves a driver to the kubelet as a device plugin, for clusters or nodes without DRA.

The driver class is the same as for DRA. The device plugin API (``v1beta1``) has fewer features than
DRA. The list below describes how each part of the contract in :mod:`drakit.driver` maps to it. A
driver that needs other features is rejected at startup. A device that needs other features is not
listed, and the reason is logged.

Resources
    ``--resource lamps.example.com/lamp`` lists all devices as one resource. For several kinds of
    devices, append an attribute and its value, once for each kind:
    ``--resource gpu.example.com/mig-1g:profile=1g.10gb``. The first option that matches a device
    applies. A device that does not match any of them is not listed.

IDs
    The ID of a device is its name, preceded by its pool if it has one: ``gpus/gpu-0``. The ID of a
    share ends in the share number: ``gpu-0::3``. The order of devices is the driver's order. The
    plugin asks the kubelet to prefer devices that come first and, if a container requests several
    shares, shares of different devices.

Shares
    A device with `Device.allow_multiple_allocations` becomes several devices. Each of them consumes
    the default amount of each capacity, like a claim that requests no amount: a capacity of 3000
    with a default of 100 results in 30 shares. ``--shares`` limits this number. It is required for
    a device without capacity, which any number of claims can share.

Health
    A device is unhealthy if the driver reports it as unhealthy, or taints it with ``NoSchedule`` or
    ``NoExecute``, because pods cannot tolerate the taints of a device plugin's devices. Unknown
    health has no effect. The kubelet does not evict pods, even if `Device.evict_if_gone` is set. If
    the driver stops, all devices are unhealthy until it has listed them again. The driver is
    restarted with a backoff from 1 s to 1 min.

Topology
    `Topology.numa_node` is the NUMA node for the kubelet's Topology Manager. Other attributes have
    no effect.

Edits
    Containers get the environment variables, device nodes, mounts and CDI devices in the edits.
    Device plugins cannot pass hooks, network devices, supplementary groups, resctrl settings, or
    the mode and owner of a device node; such edits fail. Of a mount's options, the kubelet passes
    only ``ro`` and ``rw``: it drops ``nosuid`` and ``nodev``, and all other options are rejected
    unless the kubelet implies them. If two devices of a container set the same variable or
    container path, the last one applies. The other fields of a `PreparedDevice` have no effect.

Prepare
    There are no claims. `prepare` gets a `ClaimReference` with the namespace ``device-plugin``, the
    ID as name, and a UID derived from the driver name and the ID. Therefore, a device has the same
    "claim" every time, and state that the driver stores by UID is replaced instead of accumulating.
    The request name is the resource name without its domain: ``lamp``. Parameters have their
    defaults, `AllocatedDevice.configs` is empty, and there is no admin access. If `prepare` fails
    or takes longer than 60 s, the pod fails with the error. The kubelet does not retry the call,
    but the pod's controller creates another pod. The kubelet admits no other pod during the call.

Unprepare
    The kubelet does not notify a device plugin when a pod ends. Therefore, a driver with side
    effects (`Driver.side_effects`) is rejected, unless ``--unprepare-late`` is set. With this
    option, `unprepare` and `reset` run immediately before the next `prepare` of the device. The
    kubelet allocates a device again only after its containers have ended, so they are not
    disturbed, and the next pod gets the device in the state that the driver guarantees. Until then,
    the device remains as the last pod left it: powered on, configured, or with the data of that
    pod. If that is not acceptable, use DRA. With ``--unprepare-late``, `prepare` also runs before
    each start of a container, because the kubelet does not allocate devices again after a reboot.
    The container keeps the edits of the first call.

Refused
    Policies, `Driver.claim_data`, and parameters without a default. Partitions, because the kubelet
    would allocate devices that overlap. Devices with other fields on which the scheduler must
    decide, such as binding conditions. If a driver lists such a device, `Inventory.fallback`
    replaces all devices.

Does not depend on the API server or the claims engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from drakit.device import AllocatedClaim, Edits, Health, Inventory
from drakit.settings import SettingsError
from drakit_daemon import tasks
from drakit_daemon.backoff import Backoff
from drakit_daemon.sockets import is_socket, refuses_connections
from drakit_driver.plugin_devices import (
    DevicePluginOptions,
    PluginDevice,
    PluginDevices,
    check_supported,
    edits_problem,
    plugin_devices,
    preferred,
    response_of,
    socket_path,
)
from drakit_driver.probes import MAX_STREAMS, Monitor
from drakit_driver.runtime.contract import (
    CALL_SECONDS,
    CallError,
    CallOperation,
    DeviceKey,
    EndpointContext,
    HealthReport,
    HostedEndpoint,
)
from drakit_driver.runtime.failures import DeviceFailedError, EndpointStoppedError
from drakit_driver.runtime.loading import LoadedDriver
from drakit_driver.runtime.order import CallQueue
from drakit_driver.server import DRAIN_SECONDS, MAX_CALLS, start_driver
from drakit_driver.sockets import ServerSocket, socket_identity
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

KUBELET_SOCKET = "kubelet.sock"
VERSION = "v1beta1"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"

ALLOCATE_SECONDS = 60.0
"""Time limit for Allocate. The kubelet does not set a deadline, but admits no other pod during the
call."""

LIST_SECONDS = 0.2
"""Minimum time between two device lists, so that changes in quick succession result in one list."""

POLL_SECONDS = 1.0
"""How often to check that the sockets still exist and are the same."""

WATCH_SECONDS = 5.0
"""How long the plugin waits for the kubelet to list the devices before it registers again."""

REGISTER_SECONDS = 15.0
"""Time limit for a registration. The kubelet connects to the device plugin first, within 10 s."""

RETRY_SECONDS = (1.0, 30.0)
"""Initial and maximum delay between two registration attempts. The delay doubles after each
failure."""

STOP_SECONDS = 1.0
"""Grace period for calls in flight when the server stops."""

# ---------------------------------------------------------------- state


class DeviceState:
    """The devices that the driver last listed, and their health. Implements
    :class:`.EndpointListener`."""

    def __init__(self, driver: str, options: DevicePluginOptions) -> None:
        self.listed = asyncio.Event()
        """Set when the driver has listed its devices for the first time."""

        self.change = asyncio.Event()
        """Set at the next change to any device, and then replaced by a new event."""

        self._driver = driver
        self._options = options
        self._devices = PluginDevices()
        self.stop_reason: str | None = None
        """The reason why the driver is stopped. None while it is running."""

        self._unhealthy: dict[DeviceKey, str] = {}

    def devices(self, resource: str) -> Mapping[str, PluginDevice]:
        """Return the devices of a resource, keyed by ID."""
        return self._devices.by_resource.get(resource, {})

    def message(self, resource: str) -> pb.ListAndWatchResponse:
        """Return the ListAndWatch response with the devices of a resource."""
        devices = self.devices(resource).values()
        return pb.ListAndWatchResponse(devices=[self._message_of(each) for each in devices])

    def _message_of(self, each: PluginDevice) -> pb.Device:
        health = HEALTHY if self._problem_of(each) is None else UNHEALTHY
        numa_node = each.device.topology.numa_node
        if numa_node is None:
            return pb.Device(ID=each.id, health=health)
        topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=numa_node)])
        return pb.Device(ID=each.id, health=health, topology=topology)

    def _problem_of(self, each: PluginDevice) -> str | None:
        tainted = any(taint.effect in ("NoSchedule", "NoExecute") for taint in each.device.taints)
        return self.stop_reason or self._unhealthy.get(each.key) or ("tainted" if tainted else None)

    def _notify(self) -> None:
        self.change.set()
        self.change = asyncio.Event()

    # ------------------------------------------------------------ driver reports

    def replaced(self, endpoint: str, inventory: Inventory) -> None:
        """Implement :meth:`.EndpointListener.replaced`."""
        before = self._devices.problems
        self._devices = plugin_devices(inventory, driver=self._driver, options=self._options)
        for problem in self._devices.problems:
            if problem not in before:
                facts = {"driver": self._driver, "error": problem}
                logger.error("device is not listed", extra=facts)
        if self.stop_reason is not None:
            logger.info("driver is available again", extra={"driver": self._driver})
        self.stop_reason = None
        listed = {
            each.key: each.device.health
            for devices in self._devices.by_resource.values()
            for each in devices.values()
        }
        self._unhealthy = {key: why for key, why in self._unhealthy.items() if key in listed}
        self._report({key: health for key, health in listed.items() if health is not None})
        self.listed.set()
        self._notify()

    def reported(self, endpoint: str, report: HealthReport) -> None:
        """Implement :meth:`.EndpointListener.reported`."""
        self._report(report.devices)
        self._notify()

    def stopped(self, endpoint: str, reason: str) -> None:
        """Implement :meth:`.EndpointListener.stopped`."""
        self.stop_reason = reason or "stopped"
        self._notify()

    def _report(self, devices: Mapping[DeviceKey, Health]) -> None:
        for key, health in devices.items():
            facts = {"driver": self._driver, "device": key.name}
            if health.status == "unhealthy":
                message = health.message or "it gave no reason"
                if self._unhealthy.get(key) != message:
                    logger.warning("device is unhealthy", extra={**facts, "error": message})
                self._unhealthy[key] = message
            elif health.status == "healthy" and self._unhealthy.pop(key, None) is not None:
                logger.info("device is healthy again", extra=facts)


# ---------------------------------------------------------------- service


class DevicePluginService(pb_grpc.DevicePluginServicer):
    """Serves the kubelet's calls for one resource."""

    def __init__(self, resource: str, *, state: DeviceState, calls: ContainerCalls) -> None:
        self.streams = 0
        """The number of open ListAndWatch streams."""

        self._resource = resource
        self._state = state
        self._calls = calls

    @property
    def options(self) -> pb.DevicePluginOptions:
        """The optional calls that the kubelet must make."""
        return pb.DevicePluginOptions(
            pre_start_required=self._calls.side_effects,
            get_preferred_allocation_available=True,
        )

    async def GetDevicePluginOptions(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DevicePluginOptions:
        return self.options

    async def ListAndWatch(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        self.streams += 1
        try:
            sent: pb.ListAndWatchResponse | None = None
            while True:
                change = self._state.change
                message = self._state.message(self._resource)
                if message != sent:
                    yield message
                    sent = message
                    await asyncio.sleep(LIST_SECONDS)
                await change.wait()
        finally:
            self.streams -= 1

    async def GetPreferredAllocation(
        self,
        request: pb.PreferredAllocationRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.PreferredAllocationResponse:
        devices = self._state.devices(self._resource)
        return pb.PreferredAllocationResponse(
            container_responses=[
                pb.ContainerPreferredAllocationResponse(
                    deviceIDs=preferred(
                        devices,
                        available=each.available_deviceIDs,
                        required=list(each.must_include_deviceIDs),
                        size=each.allocation_size,
                    )
                )
                for each in request.container_requests
            ]
        )

    async def Allocate(
        self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AllocateResponse:
        answers: list[pb.ContainerAllocateResponse] = []
        try:
            async with asyncio.timeout(ALLOCATE_SECONDS):
                for each in request.container_requests:
                    devices = self._find(each.devices_ids)
                    edits = await self._calls.prepare(devices, is_new=True)
                    answers.append(response_of(edits))
        except TimeoutError:
            text = f"{self._name} did not prepare the devices within {ALLOCATE_SECONDS:.0f} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        except DeviceFailedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.AllocateResponse(container_responses=answers)

    async def PreStartContainer(
        self, request: pb.PreStartContainerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.PreStartContainerResponse:
        try:
            await self._calls.prepare(self._find(request.devices_ids), is_new=False)
        except DeviceFailedError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.PreStartContainerResponse()

    def _find(self, ids: Iterable[str]) -> list[PluginDevice]:
        known = self._state.devices(self._resource)
        found: list[PluginDevice] = []
        for each in ids:
            if each not in known:
                raise DeviceFailedError(
                    f"{self._name} no longer lists device {each!r}; create the pod again to get "
                    f"another device"
                )
            found.append(known[each])
        return found

    @property
    def _name(self) -> str:
        return f"the device plugin of {self._resource}"


class ContainerCalls:
    """Calls the driver for the devices of containers."""

    def __init__(self, endpoint: HostedEndpoint, driver: str) -> None:
        self.queue = CallQueue(limit_seconds=CALL_SECONDS)
        self._endpoint = endpoint
        self._driver = driver

    @property
    def side_effects(self) -> bool:
        """Whether the driver has side effects to undo."""
        return self._endpoint.traits.side_effects

    async def prepare(self, devices: Sequence[PluginDevice], *, is_new: bool) -> list[Edits]:
        """
        Prepare the devices of a container, and return their edits. If `is_new` is set, first undo
        the effects of the previous container.

        Raises :class:`DeviceFailedError` and TimeoutError. The next call for a device waits until
        this one has ended, even if this caller stops waiting.
        """
        claims = [AllocatedClaim(claim=each.claim, devices=(each.allocated,)) for each in devices]

        async def call() -> Mapping[str, Any]:
            async with asyncio.timeout(ALLOCATE_SECONDS):
                if is_new and self.side_effects:
                    await self._call("unprepare", claims)
                return await self._call("prepare", claims)

        results = await self.queue.call(claims, call)
        edits: list[Edits] = [results[claim.claim.uid][0].edits for claim in claims]
        for each, edit in zip(devices, edits, strict=True):
            if problem := edits_problem(edit):
                raise DeviceFailedError(
                    f"driver {self._driver} returned edits for device {each.id} that a device "
                    f"plugin cannot pass: {problem}"
                )
        return edits

    async def _call(
        self, operation: CallOperation, claims: Sequence[AllocatedClaim]
    ) -> Mapping[str, Any]:
        """Call the driver for all claims."""
        call = getattr(self._endpoint, operation)
        batches = (
            [claims]
            if operation in self._endpoint.traits.batches
            else [[claim] for claim in claims]
        )
        results: dict[str, Any] = {}
        for batch in batches:
            answers: Mapping[str, Any | CallError] = await call(batch)
            for claim in batch:
                answer = answers[claim.claim.uid]
                if isinstance(answer, EndpointStoppedError):
                    raise DeviceFailedError(
                        f"driver {self._driver} is unavailable: {answer.reason}; create the pod "
                        f"again when the driver is available"
                    )
                if isinstance(answer, DeviceFailedError):
                    raise DeviceFailedError(f"device {claim.claim.name}: {answer}")
                results[claim.claim.uid] = answer
        return results


# ---------------------------------------------------------------- registration


class ResourceServer:
    """
    Serves one resource on a socket in the kubelet's directory, and keeps it registered.

    A kubelet that starts removes all sockets from the directory, and forgets its device plugins.
    Therefore, the resource is registered again if either socket was replaced, or if the kubelet
    does not list the devices. If another process, such as the next pod during an update, has
    replaced this server's socket, that process serves the resource, and this server waits until
    that process ends.
    """

    def __init__(
        self, resource: str, path: Path, service: DevicePluginService, monitor: Monitor
    ) -> None:
        self._monitor = monitor
        self._resource = resource
        self._path = path
        self._service = service
        self._kubelet = path.with_name(KUBELET_SOCKET)
        self._server: grpc.aio.Server | None = None
        self._socket: ServerSocket | None = None
        self._registered: tuple[int, ...] | None = None
        """The identity of the kubelet's socket at the last registration."""

        self._refused: tuple[int, ...] | None = None
        """The identity of the kubelet's socket at the last failed registration. If the kubelet's
        socket is now a different one, registration is retried immediately."""

        self._due_at = 0.0
        """The time of the next registration attempt (loop clock)."""

        self._backoff = Backoff(*RETRY_SECONDS, jitter=0)
        self._problem: str | None = None

    def unconnected(self) -> str | None:
        """Return the reason why the kubelet does not have the devices, or None if it does."""
        if self._service.streams:
            return None
        return self._problem or f"the kubelet has not listed the devices of {self._resource} yet"

    async def run(self) -> None:
        """Serve until canceled."""
        try:
            while True:
                try:
                    problem = await self._check()
                except (OSError, RuntimeError, SettingsError) as error:
                    problem = f"{self._path} cannot be served: {error}"
                if problem is not None and problem != self._problem:
                    facts = {"resource": self._resource, "error": problem}
                    logger.error("device plugin is not registered", extra=facts)
                self._problem = problem
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await self._stop()

    async def _check(self) -> str | None:
        """Serve the resource, and register it if that is due. If either is currently impossible,
        return the reason."""
        if self._socket is not None and not await asyncio.to_thread(self._socket.is_in_place):
            if await asyncio.to_thread(_is_served, self._path):
                return f"another process serves {self._path}"
            await self._stop()
        if self._server is None:
            await self._start()
        kubelet = await asyncio.to_thread(socket_identity, self._kubelet)
        if kubelet is None:
            self._registered = None
            return f"there is no {self._kubelet}, so the kubelet is not running"
        clock = asyncio.get_running_loop().time
        if self._registered == kubelet and (self._service.streams or clock() < self._due_at):
            return None
        if self._refused == kubelet and clock() < self._due_at:
            return self._problem
        try:
            await self._register()
        except grpc.aio.AioRpcError as error:
            self._registered, self._refused = None, kubelet
            self._due_at = clock() + self._backoff.next_seconds()
            return f"the kubelet refused it: {error.details()}"
        self._registered, self._refused = kubelet, None
        self._due_at = clock() + WATCH_SECONDS
        self._backoff.succeeded()
        logger.info("device plugin is registered", extra={"resource": self._resource})
        return None

    async def _start(self) -> None:
        self._socket = ServerSocket(self._path)
        self._server = grpc.aio.server(maximum_concurrent_rpcs=MAX_CALLS)
        service = self._monitor.watch(self._service)
        pb_grpc.add_DevicePluginServicer_to_server(service, self._server)
        try:
            self._server.add_insecure_port(f"unix:{self._socket.hidden}")
            await self._server.start()
            await asyncio.to_thread(self._socket.publish)
        except BaseException:
            await self._stop()
            raise
        self._registered = None

    async def _register(self) -> None:
        request = pb.RegisterRequest(
            version=VERSION,
            endpoint=self._path.name,
            resource_name=self._resource,
            options=self._service.options,
        )
        # By default, the Python client sends the escaped path as the authority, which Go servers
        # reject.
        options = [("grpc.default_authority", "localhost")]
        async with grpc.aio.insecure_channel(f"unix:{self._kubelet}", options=options) as channel:
            stub = pb_grpc.RegistrationStub(channel)
            await stub.Register(request, timeout=REGISTER_SECONDS)

    async def _stop(self) -> None:
        server, self._server = self._server, None
        own, self._socket = self._socket, None
        if own is not None:
            await asyncio.to_thread(own.remove)
        if server is not None:
            await server.stop(STOP_SECONDS)


def _is_served(path: Path) -> bool:
    return is_socket(path) and not refuses_connections(path)


# ---------------------------------------------------------------- the process


class DevicePluginServer:
    """One driver, served as a device plugin. Implements :class:`.Server`."""

    def __init__(self, driver: LoadedDriver, *, node: str, options: DevicePluginOptions) -> None:
        """Create the server. Call this in the event loop of the server. Raises
        :class:`SettingsError` if the driver needs a feature that a device plugin does not
        support."""
        check_supported(driver.name, driver.traits, options)
        self._driver = driver
        self._resources = [each.name for each in options.resources]
        self._directory = options.directory
        self._state = DeviceState(driver.name, options)
        self._endpoint = driver.endpoint(EndpointContext(listener=self._state, node=node))
        self._calls = ContainerCalls(self._endpoint, driver.name)
        self._servers: list[ResourceServer] = []
        self.monitor = Monitor(max_streams=MAX_STREAMS * len(self._resources))

    @property
    def blocked(self) -> str | None:
        """Implement :attr:`.Probed.blocked`."""
        return self._endpoint.blocked

    def unconnected(self) -> str | None:
        """Implement :meth:`.Probed.unconnected`."""
        if len(self._servers) < len(self._resources):
            return "the driver has not listed its devices yet"
        return next(filter(None, (each.unconnected() for each in self._servers)), None)

    def unready(self) -> str | None:
        """Implement :meth:`.Probed.unready`."""
        stopped = self._state.stop_reason
        return f"the driver is unavailable: {stopped}" if stopped else self.unconnected()

    async def start(self) -> None:
        """Start the driver. Raises :class:`SettingsError` if the driver rejects its
        configuration."""
        await start_driver(self._driver, self._endpoint)

    async def run(self) -> None:
        """Restart the driver whenever it stops, and keep it registered, until canceled."""
        parts = {name: partial(self._serve, name) for name in self._resources}
        await tasks.run({"driver": self._endpoint.run, **parts})

    async def _serve(self, resource: str) -> None:
        path = socket_path(self._directory, resource)
        assert path is not None, "it was checked"
        # Wait for the first list, because the resource must not be registered without devices.
        await self._state.listed.wait()
        service = DevicePluginService(resource, state=self._state, calls=self._calls)
        server = ResourceServer(resource, path, service, self.monitor)
        self._servers.append(server)
        await server.run()

    async def drain(self) -> None:
        """Wait until calls in flight have ended, while :meth:`run` continues."""
        logger.info("driver is stopping", extra={"driver": self._driver.name})
        await self._calls.queue.drain(timeout_seconds=DRAIN_SECONDS)

    async def stop(self) -> None:
        """Stop the driver. Does not raise."""
        await self._endpoint.close()
