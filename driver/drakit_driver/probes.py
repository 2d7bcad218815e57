"""
Probes and metrics of a driver's own process, served on one port. The readiness probe succeeds while
a node plugin or the kubelet has the driver's devices.

:class:`Monitor` wraps a gRPC service. It counts calls and streams, limits the number of streams,
and tracks connections. The metrics have the same names as in the Go module. The module does not use
prometheus-client, which would use additional memory in every driver.

Does not depend on the service.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar, cast

import grpc
import grpc.aio

from drakit.settings import SettingsError
from drakit_daemon.httpserver import HttpServer, Response
from drakit_daemon.logs import ProblemLog
from drakit_daemon.probes import CONTENT_TYPE, Probe
from drakit_driver.runtime.contract import CALL_SECONDS

logger = logging.getLogger(__name__)

MAX_STREAMS = 4
"""Maximum number of streams per method: one each for two node plugins and their successors."""

CONNECT_SECONDS = 10.0
"""How long a connection must be missing before this is logged. A node plugin looks for drivers once
a second."""

POLL_SECONDS = 1.0

BUCKETS = (0.01, 0.1, 1.0, 10.0, 60.0, 300.0)
"""Upper bounds of the call duration histogram, in seconds."""

ServiceT = TypeVar("ServiceT")
_Context = grpc.aio.ServicerContext[Any, Any]
_Method = Callable[[Any, _Context], Any]


class Monitor:
    """Counts the calls and streams of one or more services."""

    def __init__(self, *, max_streams: int = MAX_STREAMS) -> None:
        """Create a monitor. `max_streams` is the maximum number of open streams per method."""
        self._max_streams = max_streams
        self.called: set[str] = set()
        """The methods that clients have called since the last stream ended."""

        self.streams: Counter[str] = Counter()
        """The number of open streams per method."""

        self.listening: Counter[str] = Counter()
        """The number of open streams per method that have sent a message."""

        self._results: Counter[tuple[str, str]] = Counter()
        self._seconds: dict[str, list[float]] = {}
        self._buckets: dict[str, list[int]] = {}

    def watch(self, service: ServiceT) -> ServiceT:
        """Wrap a gRPC service so that its methods are monitored."""
        return cast("ServiceT", _Monitored(service, self))

    async def call(self, name: str, method: _Method, request: Any, context: _Context) -> Any:
        """Make a call, and count it."""
        clock = asyncio.get_running_loop().time
        began, result = clock(), "error"
        self.called.add(name)
        try:
            response = await method(request, context)
            result = "error" if _has_error(response) else "success"
            return response
        finally:
            # Skip unimplemented methods: the node plugin calls a method to determine whether the
            # driver implements it.
            if context.code() not in _UNIMPLEMENTED:
                self._observe(name, result, clock() - began)

    def _observe(self, method: str, result: str, seconds: float) -> None:
        self._results[method, result] += 1
        buckets = self._buckets.setdefault(method, [0] * (len(BUCKETS) + 1))
        buckets[bisect_left(BUCKETS, seconds)] += 1
        self._seconds.setdefault(method, [0.0])[0] += seconds

    async def stream(
        self, name: str, method: _Method, request: Any, context: _Context
    ) -> AsyncGenerator[Any]:
        """Run a stream, and count it. If too many streams are open, reject it."""
        if self.streams[name] >= self._max_streams:
            text = f"the driver already has {self._max_streams} streams of {name}"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self.streams[name] += 1
        sent = 0
        try:
            async with aclosing(method(request, context)) as messages:
                async for message in messages:
                    yield message
                    self.listening[name] += 1 - sent
                    sent = 1
        finally:
            self.streams[name] -= 1
            self.listening[name] -= sent
            if not self.streams.total():
                self.called.clear()

    def metrics(self) -> str:
        """Return the metrics in the Prometheus text format."""
        lines = _family(
            "drakit_driver_calls_total",
            "counter",
            "Calls by method and result. A call with a claim that fails is an error.",
            {
                f'{{method="{method}",result="{result}"}}': count
                for (method, result), count in sorted(self._results.items())
            },
        )
        histogram: dict[str, float] = {}
        for method, buckets in sorted(self._buckets.items()):
            count = 0
            for bound, each in zip((*map(str, BUCKETS), "+Inf"), buckets, strict=True):
                count += each
                histogram[f'_bucket{{method="{method}",le="{bound}"}}'] = count
            histogram[f'_sum{{method="{method}"}}'] = self._seconds[method][0]
            histogram[f'_count{{method="{method}"}}'] = count
        lines += _family(
            "drakit_driver_call_seconds",
            "histogram",
            "Duration of calls, with their wait for earlier calls.",
            histogram,
        )
        lines += _family(
            "drakit_driver_connected",
            "gauge",
            "Whether a node plugin, or the kubelet, watches the devices.",
            {"": int(self.streams.total() > 0)},
        )
        return "".join(f"{line}\n" for line in lines)


class _Monitored:
    def __init__(self, service: object, monitor: Monitor) -> None:
        self._service = service
        self._monitor = monitor

    def __getattr__(self, name: str) -> _Method:
        method = cast("_Method", getattr(self._service, name))

        async def call(request: Any, context: _Context) -> Any:
            return await self._monitor.call(name, method, request, context)

        async def stream(request: Any, context: _Context) -> AsyncGenerator[Any]:
            async with aclosing(self._monitor.stream(name, method, request, context)) as messages:
                async for message in messages:
                    yield message

        return stream if inspect.isasyncgenfunction(method) else call


_UNIMPLEMENTED = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNIMPLEMENTED.value[0])


def _has_error(response: Any) -> bool:
    """Return whether a response has an error, or contains a claim that failed for a reason other
    than a pending release."""
    failed = (
        getattr(each, "error", "") and not getattr(each, "pending", False)
        for each in getattr(response, "claims", ())
    )
    return bool(getattr(response, "error", "")) or any(failed)


def _family(name: str, kind: str, text: str, samples: Mapping[str, float]) -> list[str]:
    head = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    return head + [f"{name}{label} {value:g}" for label, value in samples.items()]


# ---------------------------------------------------------------- the port


class Probed(Protocol):
    """The state of a driver's server that its probes report."""

    monitor: Monitor

    @property
    def blocked(self) -> str | None:
        """The call that blocks the driver's event loop."""
        ...

    def unconnected(self) -> str | None:
        """Return the reason why no client is connected, or None if one is."""
        ...

    def unready(self) -> str | None:
        """Return the reason why pods cannot get the devices, or None."""
        ...


class DriverProbes:
    """Serves ``/livez``, ``/readyz`` and ``/metrics``, and logs a missing connection."""

    def __init__(self, probed: Probed) -> None:
        self._probed = probed
        self._blocked_since: float | None = None
        self._server: HttpServer | None = None

    async def start(self, port: int) -> None:
        """Listen on a port, on all addresses. Raises :class:`SettingsError`."""
        routes = {
            "/livez": Probe("/livez", self._not_alive, failed=b"unhealthy\n").respond,
            "/readyz": Probe("/readyz", self._not_ready, failed=b"not ready\n").respond,
            "/metrics": self._metrics,
        }
        server = HttpServer(listen=f":{port}", routes=routes)
        try:
            await server.start()
        except OSError as error:
            raise SettingsError(
                f"--probe-port: {port} cannot be used: {error.strerror or error}; choose another "
                f"port"
            ) from error
        self._server = server
        logger.info("probes and metrics served", extra={"port": self.port})

    @property
    def port(self) -> int:
        """The port in use."""
        assert self._server is not None
        return self._server.port

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            await self._server.stop()

    async def _not_ready(self) -> list[str]:
        return [*filter(None, [self._probed.unready()])]

    async def _not_alive(self) -> list[str]:
        """Return the problems that only a restart can solve. A call that blocks the loop is not
        reported before the time limit for calls has passed."""
        now = asyncio.get_running_loop().time()
        blocked = self._probed.blocked
        if blocked is None:
            self._blocked_since = None
            return []
        self._blocked_since = now if self._blocked_since is None else self._blocked_since
        return [blocked] if now - self._blocked_since >= CALL_SECONDS else []

    async def _metrics(self) -> Response:
        body = self._probed.monitor.metrics().encode()
        return Response(body=body, content_type=CONTENT_TYPE)

    async def log_connection(self) -> None:
        """Until canceled, log a message whenever no client has been connected for some time."""
        log = ProblemLog(
            logger, "driver is not connected", recovered="driver is connected", fact="reason"
        )
        clock = asyncio.get_running_loop().time
        since = clock()
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if (problem := self._probed.unconnected()) is None:
                since = clock()
                log.report(None)
            elif clock() - since >= CONNECT_SECONDS:
                log.report(problem)
