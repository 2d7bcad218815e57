"""
The front door of one driver, put together: its sockets, in their order, for as long as it lives.

Start: DRA socket listens, then the registration socket appears, for the kubelet calls at once.
Stop: the registration socket goes first (no new pods), calls and work in flight drain, then the
DRA socket goes, then the lock. In between, a socket that got lost is made anew.

It must not know what is done for claims.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc.aio

from drakit_nodeplugin.claims.queue import ClaimQueue
from drakit_nodeplugin.file_poller import FilePoller
from drakit_nodeplugin.kubelet.dra import SUPPORTED_VERSIONS, ClaimCalls, add_dra_services
from drakit_nodeplugin.kubelet.health import HealthSource
from drakit_nodeplugin.kubelet.healthservice import health_service
from drakit_nodeplugin.kubelet.ownership import Ownership
from drakit_nodeplugin.kubelet.probe import probe_sockets
from drakit_nodeplugin.kubelet.registration import Registration, RegistrationStatus
from drakit_nodeplugin.kubelet.sockets import SocketError, SocketGuard

__all__ = ("DriverServer",)

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 40.0
"""After that a call is answered, whatever its work does: the kubelet hangs up at 45 s."""

DRAIN_SECONDS = 40.0
"""How long a stop waits for calls and work in flight."""

HEALTH_TIMEOUT_SECONDS = 30.0
"""How long the kubelet believes in a device's health that it is told."""

FIRST_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
"""Between two attempts to be registered, or to make a socket anew; doubling."""

_CUT_SECONDS = 1.0
"""What calls get to end when only their server is replaced: their work goes on in any case."""

_MAX_CALLS = 1024
"""Calls at once on one socket; the kubelet makes a few per pod that starts or stops."""


class _SocketServer:
    """A gRPC server on a unix socket that can be made anew."""

    def __init__(self, path: Path, add_services: Callable[[grpc.aio.Server], None]) -> None:
        self.guard = SocketGuard(path)
        self._path = path
        self._add_services = add_services
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen. Raises :class:`SocketError`."""
        server = grpc.aio.server(maximum_concurrent_rpcs=_MAX_CALLS)
        self._add_services(server)
        self._server = server
        try:
            server.add_insecure_port(f"unix:{self._path}")
            await asyncio.to_thread(self.guard.remember)
        except (RuntimeError, OSError) as error:
            await self.stop(grace_seconds=0)
            raise SocketError(f"socket {self._path} cannot be made: {error}") from error
        await server.start()

    async def stop(self, *, grace_seconds: float) -> None:
        """Take no more calls, let those under way end, remove the socket."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_seconds)

    async def make_anew(self) -> None:
        """
        Listen on a new socket of the same path.

        The old server must have stopped before: in stopping, it removes whatever is at the path.
        """
        await self.stop(grace_seconds=_CUT_SECONDS)
        await self.start()


class DriverServer:
    """Serves the kubelet for one driver: `start`, then `run` until cancelled, then `stop`."""

    def __init__(
        self,
        ownership: Ownership,
        queue: ClaimQueue,
        *,
        health: HealthSource | None = None,
        health_timeout_seconds: float = HEALTH_TIMEOUT_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
        drain_seconds: float = DRAIN_SECONDS,
        first_retry_seconds: float = FIRST_RETRY_SECONDS,
        max_retry_seconds: float = MAX_RETRY_SECONDS,
    ) -> None:
        """
        The ownership is acquired by `start`, and released by whoever made it, after `stop`.

        Without a source of health the kubelet is told that there is none.
        """
        self.name = driver_name = ownership.driver
        self.paths = ownership.paths
        self._drain_seconds = drain_seconds
        self._first_retry_seconds = first_retry_seconds
        self._max_retry_seconds = max_retry_seconds
        self._ownership = ownership
        self._queue = queue
        self._calls = ClaimCalls(driver_name, queue, answer_seconds=answer_seconds)
        self._health = health_service(
            health, driver=driver_name, timeout_seconds=health_timeout_seconds
        )
        self._registration = Registration(
            driver_name,
            dra_socket=self.paths.dra,
            versions=(*SUPPORTED_VERSIONS, *self._health.versions),
            first_retry_seconds=first_retry_seconds,
            max_retry_seconds=max_retry_seconds,
        )
        self._dra_server = _SocketServer(self.paths.dra, self._add_services)
        self._registration_server = _SocketServer(
            self.paths.registration, self._registration.add_to
        )

    @property
    def status(self) -> RegistrationStatus:
        """What the kubelet said to the registration."""
        return self._registration.status

    async def start(self) -> None:
        """Serve. After a failure, which raises :class:`SocketError`, `stop` cleans up."""
        await asyncio.to_thread(self._ownership.acquire)
        await self._dra_server.start()
        await self._registration_server.start()
        logger.info(
            "driver serves the kubelet",
            extra={"driver": self.name, "path": str(self.paths.registration)},
        )

    async def run(self, looks: FilePoller) -> None:
        """Look after the sockets until cancelled."""
        clock = asyncio.get_running_loop().time
        retry_seconds = self._first_retry_seconds
        while True:
            await looks.until(lambda: self._needs_care(clock()))
            try:
                await self._look_after_sockets()
                retry_seconds = self._first_retry_seconds
            except (SocketError, OSError) as error:
                logger.error(
                    "socket cannot be made anew",
                    extra={
                        "driver": self.name,
                        "error": str(error),
                        "retry_seconds": retry_seconds,
                    },
                )
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(retry_seconds * 2, self._max_retry_seconds)

    async def stop(self) -> None:
        """
        Leave the kubelet in good order. May be called at any time, and raises nothing.

        The driver may still be at work then; other instances see this one as alive until the
        ownership is released, which removes what is left of the sockets.
        """
        until = asyncio.get_running_loop().time() + self._drain_seconds
        await self._step(self._registration_server.stop(grace_seconds=_CUT_SECONDS))
        self._health.end()
        await self._step(self._dra_server.stop(grace_seconds=self._drain_seconds))
        # Work whose call the kubelet gave up is in no call's grace.
        left_seconds = until - asyncio.get_running_loop().time()
        await self._step(self._queue.drain(timeout_seconds=left_seconds))

    async def _step(self, step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        except Exception:
            logger.exception("a step of the stop failed", extra={"driver": self.name})

    async def probe(self) -> str | None:
        """Say what the kubelet could not do at our sockets; None if they answer."""
        return await probe_sockets(
            self.name, registration=self.paths.registration, dra=self.paths.dra
        )

    def _add_services(self, server: grpc.aio.Server) -> None:
        add_dra_services(server, self._calls)
        self._health.add_to(server)

    def _needs_care(self, now: float) -> bool:
        """Tell whether there is something to do for a socket. Blocks."""
        servers = (self._dra_server, self._registration_server)
        return self._registration.retry_due(now) or any(
            server.guard.lost() is not None for server in servers
        )

    async def _look_after_sockets(self) -> None:
        if await self._lost(self._dra_server):
            # The kubelet's connection finds the new socket by itself.
            await self._dra_server.make_anew()
        if await self._lost(self._registration_server):
            await self._registration_server.make_anew()
            self._registration.made_anew(lost=True)
        elif self._registration.retry_due(asyncio.get_running_loop().time()):
            await self._registration_server.make_anew()
            self._registration.made_anew(lost=False)

    async def _lost(self, server: _SocketServer) -> bool:
        how = await asyncio.to_thread(server.guard.lost)
        if how is not None:
            logger.warning(
                "socket is lost and is made anew",
                extra={"driver": self.name, "path": str(server.guard.path), "error": how},
            )
        return how is not None
