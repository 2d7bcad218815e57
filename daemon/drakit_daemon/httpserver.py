"""
A small HTTP server for a hostile network. It serves GET requests for a few fixed paths, in the
daemon's own event loop.

Anyone on the pod network can connect, so no client may prevent another client from getting a
response:

* one deadline covers a request, from the accept to the last byte of the response
* the number of connections is limited; above the limit, a new connection replaces the oldest one
  that waits for its client
* the server accepts one connection per loop iteration, so that it reads a request that has arrived
  before a flood can replace the connection
* concurrent requests for the same path share one response

The paths do not need headers, a body or keep-alive. The server parses only the first line of a
request, which takes less code than using a library, and no memory. Does not depend on the purpose
of the paths (see :mod:`.probes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TypeAlias

from drakit.settings import parse_address

logger: logging.Logger = logging.getLogger(__name__)

REQUEST_SECONDS = 2.0
"""The time limit from the accept to the last byte of the response."""

MAX_CONNECTIONS = 32
"""Maximum number of concurrent connections. The kubelet and Prometheus need two or three."""

MAX_REQUEST_BYTES = 8192
"""Maximum size of a request's first line and headers. HTTP servers usually have this limit."""

SHARED_SECONDS = 0.25
"""How long a response is shared: a flood of requests costs at most four responses per second."""

SHARED_FACTOR = 50
"""A slow response is shared for this many times its duration, up to the server's limit, so that a
flood uses at most 2% of the time."""

_BACKLOG = 1024
"""Maximum number of connections for the kernel to queue. During a flood, a probe waits in this
queue."""

_RETRY_SECONDS = 0.5
"""How long to wait after a failed accept, for example because there are no free file
descriptors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """The response to a client."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"

    def encoded(self) -> bytes:
        """Return the bytes of the HTTP response."""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
            f"Content-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode() + self.body


Route: TypeAlias = Callable[[], Awaitable[Response]]


def _plain(status: HTTPStatus) -> Response:
    return Response(status=status, body=f"{status.phrase.lower()}\n".encode())


class _SharedResponse:
    """Computes the response for a path once for all concurrent requests."""

    def __init__(self, path: str, route: Route, *, shared_limit_seconds: float) -> None:
        self._path = path
        self._route = route
        self._shared_limit_seconds = shared_limit_seconds
        self._shared_until = 0.0
        self.task: asyncio.Task[Response] | None = None

    async def get(self) -> Response:
        now = asyncio.get_running_loop().time()
        if self.task is None or (self.task.done() and now >= self._shared_until):
            self.task = asyncio.create_task(self._compute(), name=f"response of {self._path}")
        # A client that disconnects must not cancel the response for the other clients.
        return await asyncio.shield(self.task)

    async def _compute(self) -> Response:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await self._route()
        except Exception:
            logger.exception("HTTP request failed", extra={"path": self._path})
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)
        finally:
            seconds = min(SHARED_FACTOR * (loop.time() - began), self._shared_limit_seconds)
            self._shared_until = began + max(seconds, SHARED_SECONDS)


class HttpServer:
    """Serves the given routes at one address, from `start` to `stop`."""

    def __init__(
        self, *, listen: str, routes: Mapping[str, Route], shared_limit_seconds: float = 0.0
    ) -> None:
        """:param shared_limit_seconds: how long a slow response can be shared at most."""
        self.listen: str = listen
        self._responses = {
            path: _SharedResponse(path, route, shared_limit_seconds=shared_limit_seconds)
            for path, route in routes.items()
        }
        # The open connections, oldest first. The value is whether the connection waits for its
        # client.
        self._connections: dict[asyncio.Task[None], bool] = {}
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to listen. Raises OSError if the address cannot be used."""
        self._listener = await asyncio.to_thread(open_listener, self.listen)
        self._accepting = asyncio.create_task(
            self._accept(self._listener), name=f"HTTP at {self.listen}"
        )

    @property
    def port(self) -> int:
        """The port that the server listens on, even if the kernel chose it."""
        assert self._listener is not None
        return self._listener.getsockname()[1]

    async def stop(self) -> None:
        """Stop listening, and abort requests in flight."""
        tasks = [
            task
            for task in (
                self._accepting,
                *self._connections,
                *(response.task for response in self._responses.values()),
            )
            if task is not None
        ]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=REQUEST_SECONDS)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                # Don't use sock_accept: if it is canceled, uvloop loses a connection that it has
                # accepted.
                client, _ = listener.accept()
            except BlockingIOError:
                await _readable(listener)
                continue
            except OSError as error:
                logger.warning(
                    "HTTP connection not accepted",
                    extra={"address": self.listen, "error": str(error)},
                )
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            client.setblocking(False)
            if len(self._connections) >= MAX_CONNECTIONS:
                self._drop_oldest()
            connection = asyncio.create_task(self._serve(client))
            self._connections[connection] = True
            connection.add_done_callback(partial(self._close, client))
            await asyncio.sleep(0)

    def _drop_oldest(self) -> None:
        waiting = (connection for connection, waits in self._connections.items() if waits)
        oldest = next(waiting, None) or next(iter(self._connections))
        del self._connections[oldest]
        oldest.cancel()

    def _close(self, client: socket.socket, connection: asyncio.Task[None]) -> None:
        self._connections.pop(connection, None)
        client.close()

    async def _serve(self, client: socket.socket) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        # A client that disconnects or is too slow affects only itself.
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(REQUEST_SECONDS):
                request = await _read_request(client)
                self._connections[connection] = False
                response = await self._respond(request)
                self._connections[connection] = True
                await asyncio.get_running_loop().sock_sendall(client, response.encoded())

    async def _respond(self, request: bytes | None) -> Response:
        if request is None:
            return _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        line = request.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(line) != 3 or not line[2].startswith("HTTP/1."):
            return _plain(HTTPStatus.BAD_REQUEST)
        if line[0] != "GET":
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED)
        shared = self._responses.get(line[1].partition("?")[0])
        return _plain(HTTPStatus.NOT_FOUND) if shared is None else await shared.get()


async def _readable(listener: socket.socket) -> None:
    """
    Wait for a connection.

    The loop watches the listener only during the wait. Otherwise, a connection that waits after a
    failed accept would keep the loop busy.
    """
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(listener)


async def _read_request(client: socket.socket) -> bytes | None:
    """Read a request up to the blank line after its headers. Return None if the request is too
    long."""
    loop = asyncio.get_running_loop()
    request = bytearray()
    while b"\r\n\r\n" not in request:
        if len(request) >= MAX_REQUEST_BYTES:
            return None
        part = await loop.sock_recv(client, MAX_REQUEST_BYTES - len(request))
        if not part:
            raise ConnectionResetError("the client hung up")
        request += part
    return bytes(request)


def open_listener(address: str) -> socket.socket:
    """Return a listening socket. Without a host, it listens on all IPv4 and IPv6 addresses.
    Blocks."""
    host, port = parse_address(address)
    if host is None and socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
        )
    else:
        family = socket.AF_INET6 if host is not None and ":" in host else socket.AF_INET
        listener = socket.create_server((host or "", port), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
