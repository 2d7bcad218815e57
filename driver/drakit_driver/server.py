"""
Serves one Python driver as a backend. Implements all methods of the contract in
:mod:`drakit_proto.backend.v1`.

The driver runs as it would in the node plugin (:mod:`drakit_driver.runtime`): in a thread, with
validation, health polling, and restarts after a failure. This module forwards the driver's reports
to each connected node plugin (there are two during a rolling update), and orders the calls for
claims. When the driver stops, all streams end with the reason.

gRPC cancels a handler as soon as its client stops waiting, but the driver call continues
(:class:`.CallQueue`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from drakit.device import AllocatedClaim, Device, Health, Inventory
from drakit.driver import DriverError
from drakit.settings import SettingsError
from drakit_daemon import tasks
from drakit_daemon.logs import new_request_id, request_scope
from drakit_driver.messages import (
    add_malformed,
    add_reports,
    claims_of,
    device_health_message,
    held_of,
    policies_of,
    prepared_message,
    unprepared_message,
)
from drakit_driver.probes import MAX_STREAMS, DriverProbes, Monitor, Probed
from drakit_driver.runtime.backend import REQUEST_ID, message_of
from drakit_driver.runtime.contract import (
    CALL_SECONDS,
    DeviceKey,
    EndpointContext,
    HealthReport,
    HostedEndpoint,
)
from drakit_driver.runtime.failures import EndpointStoppedError, text_of
from drakit_driver.runtime.latest_value import LatestValue
from drakit_driver.runtime.loading import LoadedDriver, PythonEndpoint
from drakit_driver.runtime.order import CallQueue
from drakit_driver.runtime.policies import PolicyFeed
from drakit_driver.runtime.snapshot import key_of
from drakit_driver.sockets import ServerSocket
from drakit_formats.resource.inventory import device_problems, set_problems
from drakit_proto.backend.v1 import backend_pb2 as pb
from drakit_proto.backend.v1 import backend_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 20.0
"""Maximum time for calls in flight to end when the server stops. A pod's default termination grace
period is 30 s."""

STREAMS_SECONDS = 1.0
"""Maximum time for streams to end after they have been notified of the stop."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Maximum size of a message, according to the contract."""

MAX_CALLS = 256
"""Maximum number of calls in flight, including waiting calls. A node has at most a few hundred
pods."""

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Leave it to the node plugin to reject larger messages: its error explains the problem, and the
    # server's own error does not.
    ("grpc.max_send_message_length", -1),
)

AnyContext = grpc.aio.ServicerContext[Any, Any]
ResultT = TypeVar("ResultT")


class ServerNode:
    """The node, as described by the node plugin. Implements :class:`drakit.driver.Node`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.labels: Mapping[str, str] | None = None
        """The Node's labels. None until a node plugin has sent them."""

    @property
    def name(self) -> str:
        """The Node's ``metadata.name``."""
        return self._name


# ---------------------------------------------------------------- driver reports


class Reports:
    """The driver's latest reports, for any number of streams. Implements
    :class:`.EndpointListener`."""

    def __init__(self) -> None:
        self.message: pb.WatchDevicesResponse | None = None
        """The message with the devices. None while the driver is stopped."""
        self.stop_reason = ""
        self.stops = 0
        """How many times the driver has stopped."""
        self._messages: dict[int, tuple[Device, pb.Device]] = {}
        """The current devices and their messages, keyed by object ID. Unchanged devices keep their
        message."""
        self._health: dict[DeviceKey, Health] = {}
        self._watchers: set[LatestValue[Any]] = set()
        self.ended = False
        self.news = asyncio.Event()
        """Set, and replaced by a new event, when `message`, `stop_reason`, `stops` or `ended`
        changes."""

    def replaced(self, endpoint: str, inventory: Inventory) -> None:
        """Implement :meth:`.EndpointListener.replaced`."""
        before, self._messages = self._messages, {}
        message = pb.WatchDevicesResponse()
        message.devices.extend(self._messages_of(inventory.devices, before, message))
        for counter_set in inventory.counter_sets:
            if problems := set_problems(counter_set):
                _log_malformed(add_malformed(message, counter_set, problems))
            else:
                message.counter_sets.append(message_of(counter_set, pb.CounterSet))
        if inventory.fallback is not None:
            message.fallback.CopyFrom(
                pb.Fallback(devices=self._messages_of(inventory.fallback, before, message))
            )
        add_reports(message, inventory)
        self.message = message
        listed = {
            DeviceKey(*key)
            for each in (*inventory.devices, *(inventory.fallback or ()))
            if (key := key_of(each)) is not None
        }
        self._health = {key: each for key, each in self._health.items() if key in listed}
        self._notify()

    def _messages_of(
        self,
        devices: Collection[Device],
        before: Mapping[int, tuple[Device, pb.Device]],
        inventory: pb.WatchDevicesResponse,
    ) -> list[pb.Device]:
        """Return the messages of devices. Malformed devices are added to `inventory` as
        rejected."""
        messages: list[pb.Device] = []
        for device in devices:
            known = before.get(id(device))
            # Validate before the conversion, which would turn some wrong values into valid ones,
            # such as true into 1.
            if known is None and (problems := device_problems(device)):
                _log_malformed(add_malformed(inventory, device, problems))
                continue
            message = message_of(device, pb.Device) if known is None else known[1]
            self._messages[id(device)] = (device, message)
            messages.append(message)
        return messages

    def reported(self, endpoint: str, report: HealthReport) -> None:
        """Implement :meth:`.EndpointListener.reported`."""
        self._health.update(report.devices)
        for watcher in self._watchers:
            for each in report.devices.items():
                watcher.report(*each)

    def stopped(self, endpoint: str, reason: str) -> None:
        """Implement :meth:`.EndpointListener.stopped`."""
        self.message, self.stop_reason = None, reason
        self.stops += 1
        self._notify()

    def end(self) -> None:
        """End all streams, because the process is stopping."""
        self.ended = True
        self._notify()
        for watcher in self._watchers:
            watcher.wake()

    def _notify(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()

    @contextmanager
    def watch_health(self) -> Generator[LatestValue[Any]]:
        """Watch device health: first the health of all devices, and then each change."""
        watcher = LatestValue[Any](pace_seconds=0)
        for each in self._health.items():
            watcher.report(*each)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)


def _log_malformed(rejected: pb.RejectedDevice) -> None:
    facts = {"device": rejected.device, "error": rejected.message}
    logger.error("device is rejected", extra=facts)


# ---------------------------------------------------------------- the contract


class DriverService(pb_grpc.BackendServicer):
    """Implements the methods of the contract for one driver."""

    def __init__(
        self,
        driver: LoadedDriver,
        endpoint: PythonEndpoint,
        reports: Reports,
        node: ServerNode,
        feed: PolicyFeed | None,
    ) -> None:
        self.calls = CallQueue(limit_seconds=CALL_SECONDS)
        self._driver = driver
        self._endpoint = endpoint
        self._reports = reports
        self._node = node
        self._feed = feed
        self._applying = asyncio.Lock()
        self._version = version("drakit")

    async def GetInfo(self, request: pb.GetInfoRequest, context: AnyContext) -> pb.GetInfoResponse:
        """Return the driver's name and requirements, and store the labels of the node."""
        if request.HasField("node_labels"):
            self._node.labels = dict(request.node_labels.labels)
        info = pb.GetInfoResponse(
            driver_name=self._driver.name,
            version=self._version,
            claim_data=self._driver.traits.claim_data,
            metadata_files=self._driver.traits.metadata_files,
        )
        if (policies := self._driver.traits.policies) is not None:
            resource = policies.resource
            info.policies.CopyFrom(
                pb.PolicyResource(
                    group=resource.group, version=resource.version, plural=resource.plural
                )
            )
        return info

    async def WatchDevices(
        self, request: pb.WatchDevicesRequest, context: AnyContext
    ) -> AsyncGenerator[pb.WatchDevicesResponse]:
        """Send the devices, now and at each change, until the driver stops."""
        reports, stops, sent = self._reports, self._reports.stops, None
        while not reports.ended:
            news = reports.news  # read this first, so that no later change is missed
            if reports.stops != stops:
                await context.abort(grpc.StatusCode.ABORTED, reports.stop_reason)
            if reports.message is None or reports.message is sent:
                await news.wait()
            else:
                sent = reports.message
                yield sent

    async def WatchHealth(
        self, request: pb.WatchHealthRequest, context: AnyContext
    ) -> AsyncGenerator[pb.WatchHealthResponse]:
        """If the driver is polled for health, send the health of all devices first, and then each
        change."""
        if not self._driver.traits.polls_health:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the driver has no method health")
        with self._reports.watch_health() as watcher:
            while not self._reports.ended:
                _, changed = await watcher.next()
                if changed:
                    yield pb.WatchHealthResponse(
                        devices=[device_health_message(*each) for each in changed.items()]
                    )

    # ------------------------------------------------------------ policies

    async def ApplyPolicies(
        self, request: pb.ApplyPoliciesRequest, context: AnyContext
    ) -> pb.ApplyPoliciesResponse:
        """Pass all policies to the driver, and wait until it has applied them."""
        feed = await self._feed_of(context)
        traits = self._driver.traits.policies
        assert traits is not None
        assert traits.type is not None
        kind = traits.type
        async with self._applying:
            policies, invalid = await asyncio.to_thread(policies_of, request.policies, kind)
            if invalid:
                return pb.ApplyPoliciesResponse(invalid=invalid)
            feed.offer(policies)
            return pb.ApplyPoliciesResponse(error=await feed.result(policies) or "")

    async def UpdateHeldDevices(
        self, request: pb.UpdateHeldDevicesRequest, context: AnyContext
    ) -> pb.UpdateHeldDevicesResponse:
        """Store the devices that claims hold, so that the driver can read them."""
        feed = await self._feed_of(context)
        feed.stored(held_of(request.claims))
        return pb.UpdateHeldDevicesResponse()

    async def _feed_of(self, context: AnyContext) -> PolicyFeed:
        if self._feed is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the driver has no policies")
        assert self._feed is not None
        return self._feed

    # ------------------------------------------------------------ claims

    async def PrepareClaims(
        self, request: pb.PrepareClaimsRequest, context: AnyContext
    ) -> pb.PrepareClaimsResponse:
        """Prepare claims. Each claim has a separate result."""
        answers = await self._answers(request.claims, context, self._endpoint.prepare)
        return pb.PrepareClaimsResponse(claims=[prepared_message(*each) for each in answers])

    async def UnprepareClaims(
        self, request: pb.UnprepareClaimsRequest, context: AnyContext
    ) -> pb.UnprepareClaimsResponse:
        """Unprepare claims, and reset their devices if the driver supports that."""
        if not self._driver.traits.side_effects:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the driver has no side effects")
        answers = await self._answers(request.claims, context, self._endpoint.unprepare)
        return pb.UnprepareClaimsResponse(claims=[unprepared_message(*each) for each in answers])

    async def CheckClaims(
        self, request: pb.CheckClaimsRequest, context: AnyContext
    ) -> pb.CheckClaimsResponse:
        """Check prepared claims."""
        if not self._driver.traits.checks:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the driver has no method check")
        answers = await self._answers(request.claims, context, self._endpoint.check)
        return pb.CheckClaimsResponse(
            claims=[pb.CheckedClaim(uid=uid, prepared=each is True) for uid, each in answers]
        )

    async def _answers(
        self,
        claims: Sequence[pb.Claim],
        context: AnyContext,
        method: Callable[[Sequence[AllocatedClaim]], Awaitable[Mapping[str, ResultT]]],
    ) -> list[tuple[str, ResultT]]:
        """Call the driver. If the driver is stopped, the call fails."""
        batch = claims_of(claims)
        if not batch:
            return []
        with request_scope(_request_id(context)):
            answers = await self.calls.call(batch, lambda: method(batch))
        for answer in answers.values():
            if isinstance(answer, EndpointStoppedError):
                await context.abort(grpc.StatusCode.UNAVAILABLE, answer.reason)
        return [*answers.items()]


def _request_id(context: AnyContext) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID and isinstance(value, str) and value.isprintable():
            return value[:64]
    return new_request_id()


# ---------------------------------------------------------------- the process


async def start_driver(driver: LoadedDriver, endpoint: HostedEndpoint) -> None:
    """Start a driver's endpoint. Raises :class:`SettingsError` if the driver rejects its
    configuration."""
    try:
        await endpoint.start()
    except DriverError as error:
        raise SettingsError(f"{driver.where}: {text_of(error)}") from error


class DriverServer:
    """One driver, served on a socket."""

    def __init__(
        self, driver: LoadedDriver, node: ServerNode, *, path: Path, peers: Collection[int] = ()
    ) -> None:
        """Create the server. Call this in the loop that serves. `peers` are the user IDs that can
        connect to the socket at `path`, in addition to root and the driver's own user."""
        self._driver = driver
        self._reports = Reports()
        self._is_stopping = False
        feed = None if driver.traits.policies is None else PolicyFeed()
        context = EndpointContext(listener=self._reports, node=node.name, policies=feed)
        self._endpoint = PythonEndpoint(driver, context)
        self._service = DriverService(driver, self._endpoint, self._reports, node, feed)
        self._socket = ServerSocket(path, peers=peers)
        self._server = grpc.aio.server(
            options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS + 2 * MAX_STREAMS
        )
        self.monitor = Monitor()
        pb_grpc.add_BackendServicer_to_server(self.monitor.watch(self._service), self._server)
        self._facts = {"driver": driver.name, "node": node.name, "socket": str(path)}

    # ------------------------------------------------------------ probes

    @property
    def blocked(self) -> str | None:
        """Implement :attr:`.Probed.blocked`."""
        return self._endpoint.blocked

    def unconnected(self) -> str | None:
        """Implement :meth:`.Probed.unconnected`. During an update, the new instance does not need a
        connection while its predecessor is serving."""
        if self.monitor.streams["WatchDevices"]:
            return None
        if "GetInfo" not in self.monitor.called:
            return (
                f"no node plugin has connected to {self._socket.path}: add an entry for its "
                f"directory, with driver {self._driver.name}, to backends.allowed in the values of "
                "drakit's release, and check that the node plugin runs on this node"
            )
        if self._socket.predecessor_serves():
            return None
        return (
            "a node plugin has requested the driver's name, but does not watch its devices: the "
            "Event BackendRefused on the Node has the reason"
        )

    def unready(self) -> str | None:
        """Implement :meth:`.Probed.unready`."""
        reports, watching = self._reports, self.monitor.streams["WatchDevices"]
        if self._is_stopping:
            return "the driver is stopping"
        if reports.message is None and reports.stop_reason:
            return f"the driver is unavailable: {reports.stop_reason}"
        if (problem := self.unconnected()) is not None:
            return problem
        if reports.message is None and (watching or self._driver.traits.policies is None):
            return "the driver has not listed its devices yet"
        if watching and not self.monitor.listening["WatchDevices"]:
            return "no node plugin has received the devices yet"
        return None

    # ------------------------------------------------------------ life cycle

    async def start(self) -> None:
        """Start the driver, and then create the socket. Raises :class:`SettingsError` if the driver
        rejects its configuration, or if the socket cannot be created."""
        await start_driver(self._driver, self._endpoint)
        try:
            self._server.add_insecure_port(f"unix:{self._socket.hidden}")
        except RuntimeError as error:
            raise SettingsError(
                f"socket {self._socket.path} cannot be created; check that its directory is "
                "writable"
            ) from error
        await self._server.start()
        # Only a few system calls, so no separate thread, which would use more memory.
        self._socket.publish()
        logger.info("driver is served", extra=self._facts)

    async def run(self) -> None:
        """Restart the driver whenever it stops, until canceled."""
        await self._endpoint.run()

    async def drain(self) -> None:
        """Prepare for a stop while :meth:`run` continues. Remove the socket first, so that the node
        plugin finds the next instance, and then wait for calls in flight, so that they end before
        the streams do."""
        logger.info("driver is stopping", extra=self._facts)
        self._is_stopping = True
        await asyncio.to_thread(self._socket.remove)
        await self._service.calls.drain(timeout_seconds=DRAIN_SECONDS)

    async def stop(self) -> None:
        """End all streams and the driver. Does not raise."""
        await asyncio.to_thread(self._socket.remove)
        self._reports.end()
        await self._server.stop(STREAMS_SECONDS)
        await self._endpoint.close()


class Server(Probed, Protocol):
    """A server for one driver, such as :class:`DriverServer`."""

    async def start(self) -> None: ...
    async def run(self) -> None: ...
    async def drain(self) -> None: ...
    async def stop(self) -> None: ...


async def serve(make: Callable[[], Server], *, probe_port: int | None = None) -> None:
    """Serve a driver until SIGTERM or SIGINT. Raises the errors of :meth:`DriverServer.start`.
    `make` is called in the loop that serves. If `probe_port` is None, no probes are served."""
    stopping = tasks.stop_signals()
    server = make()
    probes = DriverProbes(server)
    try:
        # Start the probes first, because a driver that is slow to start is still alive.
        if probe_port is not None:
            await probes.start(probe_port)
        await server.start()
        parts = {"driver": server.run, "connection": probes.log_connection}
        await tasks.run_until(stopping, parts, drain=server.drain)
    finally:
        await server.stop()
        await probes.stop()
