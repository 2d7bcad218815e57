"""
Registration: ``kubelet.sock``, and the service behind it with which device plugins register.

The socket is served while this process is the driver's primary one. Like the kubelet at its start,
the node plugin first removes all sockets from the directory, so that plugins notice and register
again. It binds the socket under another name, and then links it to its place. So the socket listens
from the moment when it appears. gRPC removes the file that it has bound, and never the socket that
another instance has since put in its place. A rename would not do, because many plugins watch the
directory for created files, and a rename creates none.

Refusals use the kubelet's texts where it has one. :mod:`.plugins` decides which resources are
accepted, and the plugin of a resource decides when it connects.

It must not know connections, devices, or the kubelet's own sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from drakit.backoff import Backoff
from drakit.rate_limiter import RateLimiter
from drakit_nodeplugin.endpoints.deviceplugin.device_list import resource_name_problem
from drakit_nodeplugin.endpoints.failures import Diagnostics
from drakit_nodeplugin.endpoints.host_paths import MAX_PATH_BYTES
from drakit_nodeplugin.endpoints.wire import quoted
from drakit_nodeplugin.reasons import NodeReason
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2_grpc as pb_grpc

__all__ = ("RefusedError", "Registration", "RegistrationService", "RegistrationSocket")

logger = logging.getLogger(__name__)

REGISTRATION_SOCKET = "kubelet.sock"
VERSION = "v1beta1"
MAX_PER_SECOND = 50.0
MAX_BURST = 200.0
"""Registrations of all plugins at once, as after a restart. Further ones wait a second before they
are refused."""

POLL_SECONDS = 1.0
"""Time between two checks that this process is still primary, and that the socket is in its
place."""

MAX_RETRY_SECONDS = 60.0
"""The longest time between two attempts to serve the socket."""

STOP_SECONDS = 1.0
"""Grace period of registrations in flight at the end."""

MAX_CALLS = 64
"""Concurrent registrations."""


@dataclass(kw_only=True, slots=True, eq=False)
class Registration:
    """A device plugin's registration."""

    resource: str
    socket: Path
    pre_start_required: bool = False
    tried: bool = False
    """Whether the node plugin has tried to connect to it."""
    used: bool = False
    """Whether the node plugin has connected to it."""


class RefusedError(Exception):
    """A refused registration. The text is a sentence for the plugin's log."""

    def __init__(
        self,
        text: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
        reason: NodeReason = "RegistrationRefused",
    ) -> None:
        super().__init__(text)
        self.code = code
        self.reason: NodeReason = reason


class RegistrationService(pb_grpc.RegistrationServicer):
    """Answers plugins that register."""

    def __init__(
        self,
        directory: Path,
        *,
        accept: Callable[[Registration], Awaitable[None]],
        diagnostics: Diagnostics,
    ) -> None:
        """`accept` takes a valid registration, or raises :class:`RefusedError`; it does not wait
        for a connection."""
        self._directory = directory
        self._accept = accept
        self._diagnostics = diagnostics
        self._limiter = RateLimiter(burst=MAX_BURST, per_second=MAX_PER_SECOND)

    async def Register(
        self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.Empty:
        if not self._limiter.take():
            await asyncio.sleep(1.0)
            text = "too many device plugins register at once; register again later"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        try:
            await self._accept(self._checked(request))
        except RefusedError as error:
            self._diagnostics.report(error.reason, str(error))
            await context.abort(error.code, str(error))
        logger.info("device plugin registered", extra={"endpoint": request.resource_name})
        return pb.Empty()

    def _checked(self, request: pb.RegisterRequest) -> Registration:
        resource, endpoint = request.resource_name, request.endpoint
        if problem := resource_name_problem(resource):
            raise RefusedError(
                f"the ResourceName {quoted(resource)} of a device plugin is invalid: {problem}"
            )
        plugin = f"the device plugin of {resource}"
        if request.version != VERSION:
            raise RefusedError(
                f"{plugin} is refused: requested API version {quoted(request.version)} is not "
                f"supported by the node plugin. Supported version is [{VERSION!r}]"
            )
        if problem := self._endpoint_problem(endpoint):
            raise RefusedError(f"{plugin} is refused: its endpoint {quoted(endpoint)} {problem}")
        return Registration(
            resource=resource,
            socket=self._directory / endpoint,
            pre_start_required=request.options.pre_start_required,
        )

    def _endpoint_problem(self, endpoint: str) -> str | None:
        """Return why a plugin's socket cannot have this name; None if it can."""
        if endpoint in ("", ".", "..") or "/" in endpoint or not endpoint.isprintable():
            return "must be the name of a socket in the directory of kubelet.sock, without '/'"
        if endpoint == REGISTRATION_SOCKET:
            return "is the registration socket, not the plugin's own"
        if len(os.fsencode(self._directory / endpoint)) > MAX_PATH_BYTES:
            return (
                f"is too long: with its directory, the path of a socket has at most "
                f"{MAX_PATH_BYTES} bytes"
            )
        return None


class RegistrationSocket:
    """Serves the socket while this process is the driver's primary one."""

    def __init__(
        self,
        directory: Path,
        service: RegistrationService,
        *,
        primary: asyncio.Event,
        on_lost: Callable[[], None],
    ) -> None:
        """`on_lost` is called when this process is not the primary one any more."""
        self.path = directory / REGISTRATION_SOCKET
        self._directory = directory
        self._service = service
        self._primary = primary
        self._on_lost = on_lost
        self._server: grpc.aio.Server | None = None
        self._bound: tuple[int, int] | None = None
        """Identity of the socket that this process has bound."""
        self._cleaned = False
        """Whether the directory was emptied since this process is the primary one."""
        self.problem: str | None = None
        """The reason why the socket cannot be served, as a sentence; None while it is, or need not
        be."""

    async def run(self) -> None:
        """Serve while this process is the primary one, until cancelled."""
        loop = asyncio.get_running_loop()
        retry = Backoff(first_seconds=2 * POLL_SECONDS, limit_seconds=MAX_RETRY_SECONDS, jitter=0)
        due_at = 0.0
        while True:
            if not self._primary.is_set():
                await self.stop()
                self._on_lost()
                self.problem, due_at = None, 0.0
                await self._primary.wait()
            if loop.time() >= due_at:
                try:
                    await self._check()
                except (OSError, RuntimeError) as error:
                    retry_seconds = retry.next_seconds()
                    self._log_failure(error, retry_seconds=retry_seconds)
                    due_at = loop.time() + retry_seconds
                else:
                    retry.succeeded()
                    self.problem = None
            await asyncio.sleep(POLL_SECONDS)

    def _log_failure(self, error: Exception, *, retry_seconds: float) -> None:
        self.problem = f"{self.path} cannot be served: {error}"
        facts = {"path": str(self.path), "error": str(error), "retry_seconds": retry_seconds}
        logger.error("device plugins cannot register", extra=facts)

    async def _check(self) -> None:
        """Serve the socket unless it is served and in its place."""
        if self._server is not None:
            found = await asyncio.to_thread(_identity, self.path)
            if found == self._bound:
                return
            how = "it was removed" if found is None else "another socket has replaced it"
            logger.warning(
                "socket is lost, recreating it", extra={"path": str(self.path), "error": how}
            )
            await self._stop_server()
        await self._start_server()

    async def _start_server(self) -> None:
        bound = self._directory / f".kubelet-{secrets.token_hex(4)}"
        await asyncio.to_thread(self._prepare_directory)
        server = grpc.aio.server(maximum_concurrent_rpcs=MAX_CALLS)
        pb_grpc.add_RegistrationServicer_to_server(self._service, server)
        try:
            server.add_insecure_port(f"unix:{bound}")
            await server.start()
            self._bound = await asyncio.to_thread(self._link, bound)
        except BaseException:
            await server.stop(0)
            raise
        self._server = server
        logger.info("device plugins can register", extra={"path": str(self.path)})

    def _prepare_directory(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o750)
        if self._cleaned:
            return
        for entry in os.scandir(self._directory):
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)
        self._cleaned = True

    def _link(self, bound: Path) -> tuple[int, int] | None:
        os.chmod(bound, 0o600)  # root alone may register, as with the kubelet's directory
        identity = _identity(bound)
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        os.link(bound, self.path)
        os.unlink(bound)
        return identity

    async def stop(self) -> None:
        """Stop serving; only our own socket is removed."""
        self._cleaned = False
        await self._stop_server()

    async def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        await asyncio.to_thread(self._remove_own)
        await server.stop(STOP_SECONDS)

    def _remove_own(self) -> None:
        if self._bound is not None and _identity(self.path) == self._bound:
            with suppress(OSError):
                os.unlink(self.path)


def _identity(path: Path) -> tuple[int, int] | None:
    """Distinguish a socket from others at the same path; None if there is nothing. The file system
    may reuse an inode at once, so the time of its creation counts as well. Blocks."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
