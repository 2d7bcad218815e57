"""
Serves a daemon's probes and metrics with two HTTP servers, so that a flood on one does not affect
the other.

The probes port serves ``/healthz`` and ``/readyz``, the metrics port ``/metrics``. Anyone on the
pod network can read the result of a probe, so it contains only a status. The reasons are logged.

:mod:`.httpserver` handles connections and their limits. Does not depend on the metrics.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Protocol

from drakit.settings import Listen
from drakit_daemon.httpserver import HttpServer, Response
from drakit_daemon.logs import ProblemLog

logger: logging.Logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of the Prometheus text format."""

CHECK_SECONDS = 1.5
"""The time limit for a check. It is shorter than the deadline of the probe's request."""

SCRAPE_SECONDS = 5.0
"""How long the response to a slow scrape is reused. Scrapes are 15 s or more apart, but anyone can
send a hundred per second."""

REPORT_SECONDS = 5.0
"""Minimum pause between two log lines about one probe, in case its result flaps."""


class Probed(Protocol):
    """Provides a daemon's state for its probes and metrics."""

    async def liveness_problems(self) -> Sequence[str]:
        """Return the reasons to restart the process. Empty if it is healthy."""
        ...

    async def readiness_problems(self) -> Sequence[str]:
        """Return the reasons why the daemon cannot do its work. Empty if it is ready."""
        ...

    async def measure(self) -> None:
        """Update the gauges that other code does not keep up to date."""
        ...


class StatusServers:
    """Serves a daemon's probes and metrics, each at its own address, from `start` to `stop`."""

    def __init__(self, *, listen: Listen, probed: Probed, metrics: Callable[[], bytes]) -> None:
        """`metrics` returns the metrics in Prometheus' text format."""
        healthz = Probe("/healthz", probed.liveness_problems, failed=b"unhealthy\n")
        readyz = Probe("/readyz", probed.readiness_problems, failed=b"not ready\n")

        async def measured() -> Response:
            async with asyncio.timeout(CHECK_SECONDS):
                await probed.measure()
            return Response(body=metrics(), content_type=CONTENT_TYPE)

        self.probes: HttpServer = HttpServer(
            listen=listen.probes, routes={probe.path: probe.respond for probe in (healthz, readyz)}
        )
        self.metrics: HttpServer = HttpServer(
            listen=listen.metrics,
            routes={"/metrics": measured},
            shared_limit_seconds=SCRAPE_SECONDS,
        )

    async def start(self) -> None:
        """Start to listen. If an address cannot be used, the message of the OSError names it and
        the setting."""
        for name, server in (("probes", self.probes), ("metrics", self.metrics)):
            try:
                await server.start()
            except OSError as error:
                await self.stop()
                raise OSError(
                    f"listen.{name}: {server.listen} cannot be used: {error.strerror or error}; "
                    f"choose another address"
                ) from error
        # With port 0, the kernel chooses a free port, and only the log shows its number.
        logger.info(
            "probes and metrics served",
            extra={"probes_port": self.probes.port, "metrics_port": self.metrics.port},
        )

    async def stop(self) -> None:
        """Stop listening."""
        await self.probes.stop()
        await self.metrics.stop()


class Probe:
    """A probe, with its check and the log of its result."""

    def __init__(
        self, path: str, check: Callable[[], Awaitable[Sequence[str]]], *, failed: bytes
    ) -> None:
        self.path = path
        self._check = check
        self._failed = failed
        self._log = ProblemLog(
            logger,
            "probe fails",
            recovered="probe succeeds again",
            fact="reason",
            facts={"probe": path},
            pause_seconds=REPORT_SECONDS,
        )

    async def respond(self) -> Response:
        """Return the result of the check."""
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                reasons = await self._check()
        except TimeoutError:
            reasons = [f"the check takes longer than {CHECK_SECONDS:g} s"]
        self._log.report("; ".join(reasons) or None)
        if reasons:
            return Response(status=HTTPStatus.SERVICE_UNAVAILABLE, body=self._failed)
        return Response(body=b"ok\n")
