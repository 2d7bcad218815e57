"""
Registration: a ``kubelet.sock`` in each directory, and the service behind it.

Each device plugin has a separate directory, so that the socket identifies the plugin that
registers. The sockets are served while this instance is active. As the kubelet does at its start,
the node plugin first removes all sockets from a directory, so that plugins notice and register
again. It binds a socket under a different name, and then links it to its final path, so the socket
is already listening when it appears. gRPC removes only the file that it has bound, and never a
socket that another process has since created at the same path. A rename would not work, because
many plugins watch the directory for created files, and a rename does not create a file.

A device plugin can change its directory at any time. Therefore, the node plugin keeps the directory
open while it serves the socket, and never follows a symbolic link in it.

Rejections use the kubelet's messages where possible. :mod:`.plugins` decides which resources are
accepted, and the plugin of a resource decides when it connects.

Does not depend on connections, devices or the kubelet's own sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import stat
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from drakit.layout import restricted_socket
from drakit_daemon.backoff import Backoff
from drakit_daemon.rate_limiter import RateLimiter
from drakit_nodeplugin.endpoints.deviceplugin.messages import resource_name_problem
from drakit_nodeplugin.endpoints.host_paths import open_directory, path_of
from drakit_nodeplugin.endpoints.sources import Diagnostics
from drakit_nodeplugin.endpoints.wire import quoted
from drakit_nodeplugin.reasons import NodeReason
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

REGISTRATION_SOCKET = "kubelet.sock"
VERSION = "v1beta1"
MAX_PER_SECOND = 10.0
MAX_BURST = 256.0
"""Maximum burst of registrations, enough for a plugin that registers all of its resources after a
restart. Further registrations wait for one second, and are then refused."""

MAX_FILE_NAME = 255
"""Maximum length of a file name on Linux."""

POLL_SECONDS = 1.0
"""How often to check that the sockets are in place."""

MAX_RETRY_SECONDS = 60.0
"""Maximum delay between two attempts to serve the socket."""

STOP_SECONDS = 1.0
"""Grace period for registrations in flight when serving stops."""

MAX_CALLS = int(MAX_BURST)
"""Maximum number of concurrent registrations in one directory. A burst may arrive at once."""

MAX_REQUEST_BYTES = 16 * 1024
"""Maximum size of a registration request, which has three short strings and three flags."""

MAX_ENTRIES = 10_000
"""Maximum number of directory entries to read. The device plugin owns the directory and can create
any number of files in it."""


@dataclass(kw_only=True, slots=True, eq=False)
class Registration:
    """A device plugin's registration."""

    resource: str
    socket: Path
    pre_start_required: bool = False
    tried: bool = False
    """Whether the node plugin has tried to connect for this registration."""
    used: bool = False
    """Whether the node plugin has connected for this registration."""


class RefusedError(Exception):
    """A refused registration. The message is a sentence for the plugin's log."""

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
    """Serves the Registration calls of device plugins."""

    def __init__(
        self,
        directory: Path,
        *,
        accept: Callable[[Registration], Awaitable[None]],
        diagnostics: Diagnostics,
    ) -> None:
        """Create the service. `accept` is called with each valid registration, and raises
        :class:`RefusedError` to refuse it. It must not wait for a connection."""
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
        """Return the reason why a plugin's socket cannot have this name, or None."""
        if endpoint in ("", ".", "..") or "/" in endpoint or not endpoint.isprintable():
            return "must be the name of a socket in the directory of kubelet.sock, without '/'"
        if endpoint == REGISTRATION_SOCKET:
            return "is the registration socket, not the plugin's own"
        if len(os.fsencode(endpoint)) > MAX_FILE_NAME:
            return f"exceeds {MAX_FILE_NAME} bytes, the maximum length of a file name"
        return None


class RegistrationSockets:
    """Serves the registration sockets in all directories."""

    def __init__(self, services: Mapping[Path, RegistrationService]) -> None:
        """
        :param services: the service for each directory.
        """
        self._sockets = [_Socket(directory, service) for directory, service in services.items()]

    @property
    def problem(self) -> str | None:
        """The reason why a socket cannot be served, as a sentence, or None."""
        return next((each.problem for each in self._sockets if each.problem is not None), None)

    @property
    def served(self) -> bool:
        """Whether every socket is served."""
        return all(each.served for each in self._sockets)

    async def run(self) -> None:
        """Serve until canceled."""
        loop = asyncio.get_running_loop()
        while True:
            with suppress(RuntimeError):  # no thread can be started at the moment
                # Use one round trip to a thread for all directories.
                losses = await asyncio.to_thread(lambda: [each.loss() for each in self._sockets])
                for socket, loss in zip(self._sockets, losses, strict=True):
                    if loss is not None and loop.time() >= socket.due_at:
                        await socket.serve(loss)
            await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        """Stop serving. Only the sockets of this process are removed."""
        await asyncio.gather(*(socket.stop() for socket in self._sockets))


class _Socket:
    """The registration socket of one directory."""

    def __init__(self, directory: Path, service: RegistrationService) -> None:
        self.path = directory / REGISTRATION_SOCKET
        self.problem: str | None = None
        self.due_at = 0.0
        """The time at which serving the socket is retried after a failure (loop clock)."""
        self._directory = directory
        self._service = service
        self._retry = Backoff(
            first_seconds=2 * POLL_SECONDS, limit_seconds=MAX_RETRY_SECONDS, jitter=0
        )
        self._server: grpc.aio.Server | None = None
        self._descriptor: int | None = None
        """The file descriptor of the directory, which is open while the socket is served."""
        self._bound: tuple[int, int] | None = None
        """The identity of the socket that this process has bound."""
        self._cleaned = False
        """Whether the directory has been cleaned since the start."""

    @property
    def served(self) -> bool:
        """Whether the socket is served."""
        return self._server is not None

    def loss(self) -> str | None:
        """Return the reason why the socket must be served again, or None if it is in place.
        Blocks."""
        if self._descriptor is None:
            return "it is not served yet"
        if not _is_at(self._descriptor, self._directory):
            return "its directory was removed or replaced"
        found = _identity(self._descriptor)
        if found == self._bound:
            return None
        return "it was removed" if found is None else "another socket has replaced it"

    async def serve(self, loss: str) -> None:
        """Serve the socket. Failures are logged, and retried later."""
        loop = asyncio.get_running_loop()
        if self._server is not None:
            facts = {"path": str(self.path), "error": loss}
            logger.warning("socket is lost, recreating it", extra=facts)
        try:
            await self._stop_server()
            await self._start_server()
        except (OSError, RuntimeError) as error:
            retry_seconds = self._retry.next_seconds()
            self.problem = f"{self.path} cannot be served: {error}"
            facts = {"path": str(self.path), "error": str(error), "retry_seconds": retry_seconds}
            logger.error("device plugins cannot register", extra=facts)
            self.due_at = loop.time() + retry_seconds
        else:
            self._retry.succeeded()
            self.problem = None

    async def stop(self) -> None:
        """Stop serving. Only the socket of this process is removed."""
        await self._stop_server()

    async def _start_server(self) -> None:
        name = f".kubelet-{secrets.token_hex(4)}"
        self._descriptor = await asyncio.to_thread(self._prepare_directory)
        server = grpc.aio.server(
            maximum_concurrent_rpcs=MAX_CALLS,
            options=[("grpc.max_receive_message_length", MAX_REQUEST_BYTES)],
        )
        pb_grpc.add_RegistrationServicer_to_server(self._service, server)
        try:
            server.add_insecure_port(f"unix:{path_of(self._descriptor)}/{name}")
            await server.start()
            self._bound = await asyncio.to_thread(_link, self._descriptor, name)
        except BaseException:
            await server.stop(0)
            self._close()
            raise
        self._server = server
        logger.info("device plugins can register", extra={"path": str(self.path)})

    def _prepare_directory(self) -> int:
        """Create the directory if it is missing, remove old sockets, and open it."""
        # As with the kubelet's own directory, only root can register.
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o750)
        with open_directory(self._directory) as directory:
            if not self._cleaned:
                with os.scandir(directory) as entries:
                    for entry in islice(entries, MAX_ENTRIES):
                        with suppress(FileNotFoundError):  # a plugin may remove its files
                            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                                os.unlink(entry.name, dir_fd=directory)
                self._cleaned = True
            return os.dup(directory)

    async def _stop_server(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        await asyncio.to_thread(self._remove_own)
        await server.stop(STOP_SECONDS)
        self._close()

    def _remove_own(self) -> None:
        if self._descriptor is not None and _identity(self._descriptor) == self._bound:
            with suppress(OSError):
                os.unlink(REGISTRATION_SOCKET, dir_fd=self._descriptor)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _link(directory: int, name: str) -> tuple[int, int]:
    """Link a socket to its final path, and return its identity. Blocks."""
    # As with the kubelet's own directory, only root can register.
    with restricted_socket(name, 0o600, dir_fd=directory) as opened:
        found = os.fstat(opened)
        with suppress(FileNotFoundError):
            os.unlink(REGISTRATION_SOCKET, dir_fd=directory)
        os.link(path_of(opened), REGISTRATION_SOCKET, dst_dir_fd=directory)
        os.unlink(name, dir_fd=directory)
    return found.st_ino, found.st_mtime_ns


def _identity(directory: int) -> tuple[int, int] | None:
    """Return the inode and mtime of the registration socket, which show whether another socket
    has replaced it. None if there is no socket. The file system may reuse an inode immediately, so
    the inode number is not sufficient. Blocks."""
    try:
        found = os.stat(REGISTRATION_SOCKET, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _is_at(directory: int, path: Path) -> bool:
    """Return whether an open directory is still at its path. Blocks."""
    try:
        found, opened = os.lstat(path), os.fstat(directory)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)
