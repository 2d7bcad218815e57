"""
The kubelet-facing servers of one driver: registration, gRPC and their probe.

Start order: the DRA socket must listen before the registration socket appears, because the kubelet
calls the driver immediately. The servers run in every instance of a driver. Calls wait while
another instance is active.

Stop order: first, calls in flight get their responses. Next, the server removes the registration
socket. It does not do so earlier, because the kubelet closes its connection within a second after
that. Last, it removes the DRA socket.

While the servers run, they recreate lost sockets. A kubelet that restarts registers the driver
again. A kubelet that rejected the driver retries only after the registration socket was recreated.

:mod:`.sockets` handles the files, and :mod:`.dra` and :mod:`.health` implement the other services.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc.aio

from drakit.layout import restricted_socket
from drakit_daemon.backoff import Backoff
from drakit_nodeplugin.changes import FilePoller
from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.kubelet.dra import SUPPORTED_VERSIONS, ClaimCalls, add_dra_services
from drakit_nodeplugin.kubelet.health import HealthService
from drakit_nodeplugin.kubelet.sockets import (
    SocketError,
    SocketPaths,
    create_directories,
    remove_sockets,
    remove_stale_sockets,
)
from drakit_proto.kubelet.dra.v1 import dra_pb2, dra_pb2_grpc
from drakit_proto.kubelet.pluginregistration.v1 import registration_pb2, registration_pb2_grpc

logger = logging.getLogger(__name__)

RESPONSE_SECONDS = 40.0
"""Time limit for the response to a call. The work may continue after that. The kubelet's own
timeout is 45 s."""

HEALTH_TIMEOUT_SECONDS = 30.0
"""How long the kubelet considers a device's health valid."""

RETRY_SECONDS = (1.0, 60.0)
"""Initial and maximum delay between two attempts to register or to recreate a socket. The delay
doubles."""

PROBE_SECONDS = 1.0
"""Time limit for each call that a probe makes. The kubelet's timeout for GetInfo is the same."""

_CUT_SECONDS = 1.0
"""Grace period for calls when their server stops. By then, the work of a call has ended, or
continues without the call."""

_MAX_CALLS = 1024
"""Maximum number of concurrent calls on a socket. The kubelet makes a few calls for each pod that
starts or stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistrationStatus:
    """The registration state, as last reported by the kubelet."""

    state: Literal["never asked", "registered", "rejected"] = "never asked"
    reason: str | None = None
    """The reason that the kubelet gave for a rejection."""

    def readiness_problem(self) -> str | None:
        """Return the reason why the kubelet does not call the driver, or None if it is
        registered."""
        match self.state:
            case "registered":
                return None
            case "rejected":
                return f"the kubelet rejected the registration: {self.reason}"
            case "never asked":
                return "the kubelet has not registered the driver yet"


class Registration(registration_pb2_grpc.RegistrationServicer):
    """The registration service of one driver."""

    def __init__(self, driver: str, *, dra_socket: Path, versions: Sequence[str]) -> None:
        self.status = RegistrationStatus()
        """The state according to the kubelet's last response."""
        self.registered = asyncio.Event()
        """Set at the first successful registration, and never cleared."""
        self._driver = driver
        # There is only one kubelet, so the backoff needs no jitter.
        self._backoff = Backoff(*RETRY_SECONDS, jitter=0)
        self._retry_at: float | None = None
        self._info = registration_pb2.PluginInfo(
            type="DRAPlugin", name=driver, endpoint=str(dra_socket), supported_versions=versions
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        registration_pb2_grpc.add_RegistrationServicer_to_server(self, server)

    def retry_due(self, now: float) -> bool:
        """Return whether the socket must be recreated now, so that the kubelet retries.
        Thread-safe. `now` is the loop time."""
        retry_at = self._retry_at
        return retry_at is not None and now >= retry_at

    def recreated(self, *, lost: bool) -> None:
        """Record that the socket was recreated. A lost socket ends the registration. After a
        rejection, the reason remains until the kubelet responds again."""
        self._retry_at = None
        if lost:
            self.status = RegistrationStatus()

    async def GetInfo(
        self,
        request: registration_pb2.InfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> registration_pb2.PluginInfo:
        return self._info

    async def NotifyRegistrationStatus(
        self,
        request: registration_pb2.RegistrationStatus,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> registration_pb2.RegistrationStatusResponse:
        if request.plugin_registered:
            self.status = RegistrationStatus(state="registered")
            self.registered.set()
            self._backoff.succeeded()
            self._retry_at = None
            logger.info("the kubelet registered the driver", extra={"driver": self._driver})
        else:
            reason = request.error or "it gave no reason"
            self.status = RegistrationStatus(state="rejected", reason=reason)
            retry_seconds = self._backoff.next_seconds()
            self._retry_at = asyncio.get_running_loop().time() + retry_seconds
            logger.error(
                "the kubelet rejected the driver; its registration socket will be recreated",
                extra={"driver": self._driver, "error": reason, "retry_seconds": retry_seconds},
            )
        return registration_pb2.RegistrationStatusResponse()


class SocketGuard:
    """
    Detects when the path of a socket no longer leads to this process.

    The server itself does not notice this: it keeps listening on a socket that no client can reach.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None

    def remember(self) -> None:
        """Record the current file as this process's socket, and restrict its permissions to
        root."""
        with restricted_socket(self.path, 0o600) as opened:
            found = os.fstat(opened)
        self._identity = found.st_dev, found.st_ino

    def lost(self) -> str | None:
        """Return the problem with this process's socket, or None."""
        found = self._identity_now()
        if found is None:
            return "it was removed"
        return None if found == self._identity else "another file is in its place"

    def _identity_now(self) -> tuple[int, int] | None:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino


class _SocketServer:
    """A gRPC server on a unix socket that can be recreated."""

    def __init__(self, path: Path, add_services: Callable[[grpc.aio.Server], None]) -> None:
        self.guard = SocketGuard(path)
        self._path = path
        self._add_services = add_services
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Start listening. Raises :class:`SocketError`."""
        server = grpc.aio.server(maximum_concurrent_rpcs=_MAX_CALLS)
        self._add_services(server)
        self._server = server
        try:
            server.add_insecure_port(f"unix:{self._path}")
            await asyncio.to_thread(self.guard.remember)
        except (RuntimeError, OSError) as error:
            await self.stop(grace_seconds=0)
            raise SocketError(f"socket {self._path} cannot be created: {error}") from error
        await server.start()

    async def stop(self, *, grace_seconds: float) -> None:
        """Stop accepting calls, let calls in flight end, and remove the socket."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_seconds)

    async def recreate(self) -> None:
        """
        Listen on a new socket at the same path.

        Stops the old server first, because a stopping server removes any file at its path.
        """
        await self.stop(grace_seconds=_CUT_SECONDS)
        await self.start()


class DriverServer:
    """Serves the kubelet for one driver: `start`, then `run` until canceled, then `stop`."""

    def __init__(
        self,
        paths: SocketPaths,
        *,
        reports_health: bool = False,
        health_timeout_seconds: float = HEALTH_TIMEOUT_SECONDS,
        response_seconds: float = RESPONSE_SECONDS,
    ) -> None:
        """Create the servers. The driver advertises a health service only if `reports_health` is
        set."""
        self.name = driver_name = paths.driver
        self.paths = paths
        self._retry = Backoff(*RETRY_SECONDS, jitter=0)
        self._calls = ClaimCalls(driver_name, response_seconds=response_seconds)
        self._health = HealthService(
            driver=driver_name,
            reports_health=reports_health,
            timeout_seconds=health_timeout_seconds,
        )
        self.registration = Registration(
            driver_name,
            dra_socket=self.paths.dra,
            versions=(*SUPPORTED_VERSIONS, *self._health.versions),
        )
        self._is_superseded = False
        """Whether a newer instance, which does not respond, has registered after this one."""

        self._dra_server = _SocketServer(self.paths.dra, self._add_services)
        self._registration_server = _SocketServer(self.paths.registration, self.registration.add_to)

    async def start(self) -> None:
        """Start serving. If this raises :class:`SocketError`, call `stop` to clean up."""
        await asyncio.to_thread(create_directories, self.paths)
        await self._dra_server.start()
        await self._registration_server.start()
        logger.info(
            "driver serves the kubelet",
            extra={"driver": self.name, "path": str(self.paths.registration)},
        )

    async def run(self, poller: FilePoller) -> None:
        """Recreate lost sockets until canceled."""
        clock = asyncio.get_running_loop().time
        while True:
            await poller.until(lambda: self._needs_care(clock()))
            try:
                await self._recreate_sockets()
                self._retry.succeeded()
            except (SocketError, OSError) as error:
                retry_seconds = self._retry.next_seconds()
                logger.error(
                    "socket cannot be recreated",
                    extra={
                        "driver": self.name,
                        "error": str(error),
                        "retry_seconds": retry_seconds,
                    },
                )
                await asyncio.sleep(retry_seconds)

    def serve(self, queue: ClaimQueue | None, health: DeviceManager | None = None) -> None:
        """Pass calls to the queue of the active instance, and report health. Without a queue, new
        calls wait."""
        self._is_superseded = False
        self._calls.serve(queue)
        self._health.serve(health)

    async def forget_ended(self) -> None:
        """Remove the sockets of instances that have ended, so that the kubelet does not call
        them."""
        with suppress(OSError):  # the next start removes the remaining sockets
            await asyncio.to_thread(remove_stale_sockets, self.paths)

    def register_again(self) -> None:
        """Make `run` recreate the registration socket, because the kubelet calls the instance that
        registered last. `run` waits until no calls are in flight, because the kubelet would cancel
        them."""
        self._is_superseded = True

    def refuse(self) -> None:
        """Reject all waiting and new calls, so that the kubelet retries them."""
        self._calls.refuse()

    async def stop(self) -> None:
        """
        Refuse new calls, send pending responses, deregister, and stop serving. Can be called at any
        time, and does not raise.
        """
        self._calls.refuse()
        # The results of calls in flight are known by now, but may not have been sent yet.
        await self._step(self._calls.drain(timeout_seconds=_CUT_SECONDS))
        await self._step(self._registration_server.stop(grace_seconds=_CUT_SECONDS))
        self._health.end()
        await self._step(self._dra_server.stop(grace_seconds=_CUT_SECONDS))
        await self._step(asyncio.to_thread(remove_sockets, self.paths))

    async def _step(self, step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        except Exception:
            logger.exception("a shutdown step failed", extra={"driver": self.name})

    async def probe(self) -> str | None:
        """
        Call this process's own sockets as the kubelet does. Return the problem, or None.

        A prepare without claims must return no claims. It tests all of these servers, but does not
        involve the engine.
        """
        registration, dra = self.paths.sockets
        try:
            async with local_channel(registration) as channel:
                info = await registration_pb2_grpc.RegistrationStub(channel).GetInfo(
                    registration_pb2.InfoRequest(), timeout=PROBE_SECONDS
                )
        except grpc.aio.AioRpcError as error:
            return f"the registration socket {registration} does not respond: {_in_words(error)}"
        if info.name != self.name:
            return f"the registration socket {registration} responds for driver {info.name!r}"
        try:
            async with local_channel(dra) as channel:
                answer = await dra_pb2_grpc.DRAPluginStub(channel).NodePrepareResources(
                    dra_pb2.NodePrepareResourcesRequest(), timeout=PROBE_SECONDS
                )
        except grpc.aio.AioRpcError as error:
            return f"the DRA socket {dra} does not respond: {_in_words(error)}"
        if answer.claims:
            return f"the DRA socket {dra} returns claims that the probe did not request"
        return None

    def _add_services(self, server: grpc.aio.Server) -> None:
        add_dra_services(server, self._calls)
        self._health.add_to(server)

    def _needs_care(self, now: float) -> bool:
        """Return whether a socket needs to be recreated. Blocks."""
        servers = (self._dra_server, self._registration_server)
        return self._register_due(now) or any(server.guard.lost() is not None for server in servers)

    def _register_due(self, now: float) -> bool:
        """Return whether the kubelet must register the driver again. Thread-safe."""
        again = self._is_superseded and not self._calls.in_flight
        return again or self.registration.retry_due(now)

    async def _recreate_sockets(self) -> None:
        if await self._lost(self._dra_server):
            # The kubelet reconnects to the new socket automatically.
            await self._dra_server.recreate()
        lost = await self._lost(self._registration_server)
        if lost or self._register_due(asyncio.get_running_loop().time()):
            self._is_superseded = False
            await self._registration_server.recreate()
            self.registration.recreated(lost=lost)

    async def _lost(self, server: _SocketServer) -> bool:
        how = await asyncio.to_thread(server.guard.lost)
        if how is not None:
            logger.warning(
                "socket is lost, recreating it",
                extra={"driver": self.name, "path": str(server.guard.path), "error": how},
            )
        return how is not None


def local_channel(path: Path) -> grpc.aio.Channel:
    """Connect to a unix socket, with the authority "localhost" that the kubelet uses. By default,
    Python's client sends the escaped path, which some servers reject."""
    return grpc.aio.insecure_channel(
        f"unix:{path}", options=[("grpc.default_authority", "localhost")]
    )


def _in_words(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name.lower().replace('_', ' ')} ({error.details()})"
