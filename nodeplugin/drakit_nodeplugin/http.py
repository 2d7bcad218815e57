"""
The plugin's HTTP door: liveness, readiness and metrics.

Liveness goes through the real sockets; readiness says in words what is missing. What either means
for a driver is asked of :mod:`.hosted`.

It must not know drivers, claims or slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from drakit.settings import parse_address

__all__ = ("HttpServer", "Probed")


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
    """Serves ``/healthz``, ``/readyz`` and ``/metrics``."""

    def __init__(self, *, listen: str, probed: Sequence[Probed], registry: CollectorRegistry):
        self._listen = listen
        self._probed = probed
        self._registry = registry
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)

    async def start(self) -> None:
        """Listen; raises OSError if the address is taken."""
        await self._runner.setup()
        host, port = parse_address(self._listen)
        await web.TCPSite(self._runner, host, port).start()

    async def stop(self) -> None:
        """Stop listening; requests under way are cut after a second."""
        await self._runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        reasons = [
            f"{probed.name}: {why}" for probed in self._probed if (why := await probed.dead())
        ]
        return _verdict(reasons)

    async def _readyz(self, request: web.Request) -> web.Response:
        reasons = [f"{probed.name}: {why}" for probed in self._probed if (why := probed.unready())]
        return _verdict(reasons)

    async def _metrics(self, request: web.Request) -> web.Response:
        for probed in self._probed:
            await probed.measure()
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})


def _verdict(reasons: list[str]) -> web.Response:
    if reasons:
        return web.Response(status=503, text="\n".join(reasons) + "\n")
    return web.Response(text="ok\n")
