"""
HTTP for probes and metrics: ``/healthz``, ``/readyz``, ``/metrics``.

The standard library's server, in threads of its own: a web framework would cost a fifth of what
the plugin may use of a node's memory beyond its imports. Questions are asked in the daemon's loop,
so that a loop that hangs fails its probe.

It must not know what is asked for.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, cast

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from drakit.settings import parse_address

__all__ = ("HttpServer", "Probed")

ANSWER_SECONDS = 10.0
"""How long the daemon's loop may take to answer; a kubelet's probe gives up before."""

CLIENT_SECONDS = 5.0
"""How long a client may take to send its request."""

POLL_SECONDS = 0.5
"""How long a stop waits at most, for the server to see that it should: more often costs a tenth of
a percent of a processor."""

MAX_REQUESTS = 16
"""At once; each is a thread. A kubelet and a Prometheus make two or three."""

_Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type, body."""

_TEXT = "text/plain; charset=utf-8"


class Probed(Protocol):
    """Something whose life and readiness are asked for."""

    name: str

    async def dead(self) -> str | None:
        """Say why it must be restarted; None if it lives."""
        ...

    def unready(self) -> str | None:
        """Say why it is not ready; None if it is."""
        ...

    async def measure(self) -> None:
        """Bring its gauges up to date."""
        ...


class HttpServer:
    """Serves the three routes, until it is stopped."""

    def __init__(self, *, listen: str, probed: Sequence[Probed], registry: CollectorRegistry):
        self._listen = listen
        self._probed = probed
        self._registry = registry
        self._server: _Server | None = None

    async def start(self) -> None:
        """Listen; raises OSError if the address is taken."""
        loop = asyncio.get_running_loop()

        def ask(question: Callable[[str], Coroutine[Any, Any, _Answer]], accept: str) -> _Answer:
            answer = asyncio.run_coroutine_threadsafe(question(accept), loop)
            try:
                return answer.result(ANSWER_SECONDS)
            finally:
                answer.cancel()

        routes = {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}
        host, port = parse_address(self._listen)
        self._server = await asyncio.to_thread(_Server, (host or "", port), routes, ask)
        threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": POLL_SECONDS},
            name="http",
            daemon=True,
        ).start()

    @property
    def port(self) -> int:
        """Where it listens, also if it was told to take any port."""
        assert self._server is not None
        return self._server.server_address[1]

    async def stop(self) -> None:
        """Stop listening; requests under way are cut."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.shutdown)
            server.server_close()

    async def _healthz(self, accept: str) -> _Answer:
        return _verdict([(probed.name, await probed.dead()) for probed in self._probed])

    async def _readyz(self, accept: str) -> _Answer:
        return _verdict([(probed.name, probed.unready()) for probed in self._probed])

    async def _metrics(self, accept: str) -> _Answer:
        for probed in self._probed:
            await probed.measure()
        encode, content_type = choose_encoder(accept)
        return HTTPStatus.OK, content_type, encode(self._registry)


def _verdict(said: Sequence[tuple[str, str | None]]) -> _Answer:
    reasons = [f"{name}: {why}\n" for name, why in said if why is not None]
    if reasons:
        return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, "".join(reasons).encode()
    return HTTPStatus.OK, _TEXT, b"ok\n"


_Question = Callable[[str], Coroutine[Any, Any, _Answer]]
_Ask = Callable[[_Question, str], _Answer]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_REQUESTS

    def __init__(
        self, address: tuple[str, int], routes: Mapping[str, _Question], ask: _Ask
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.routes = routes
        self.ask = ask
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is nobody's trouble."""


class _Handler(BaseHTTPRequestHandler):
    server_version = "drakit"
    sys_version = ""
    timeout = CLIENT_SECONDS

    def do_GET(self) -> None:
        server = cast("_Server", self.server)
        question = server.routes.get(self.path.partition("?")[0])
        if question is None:
            self._send((HTTPStatus.NOT_FOUND, _TEXT, b"not found\n"))
            return
        try:
            answer = server.ask(question, self.headers.get("Accept", ""))
        except TimeoutError:
            text = b"the daemon gives no answer\n"
            answer = HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, text
        self._send(answer)

    def _send(self, answer: _Answer) -> None:
        status, content_type, body = answer
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds, for ever."""
