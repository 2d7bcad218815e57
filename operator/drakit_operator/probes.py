"""
/healthz, /readyz and /metrics on one port.

Healthy means: do not restart me. A replica that waits is as healthy and as ready as the one that
leads. What the answers are is decided by the functions that are handed in.

It must not know Kopf, leases, queues or sessions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

__all__ = ("serve_probes",)

Check = Callable[[], str | None]
"""Says what is wrong; None if nothing is."""


@asynccontextmanager
async def serve_probes(
    *, host: str | None, port: int, healthy: Check, ready: Check, metrics: Callable[[], bytes]
) -> AsyncGenerator[int]:
    """Serve while within; gives the port, which may have been asked for as 0."""

    def answer(check: Check) -> web.Response:
        wrong = check()
        return web.Response(text=f"{wrong or 'ok'}\n", status=503 if wrong else 200)

    async def healthz(_: web.Request) -> web.Response:
        return answer(healthy)

    async def readyz(_: web.Request) -> web.Response:
        return answer(ready)

    async def numbers(_: web.Request) -> web.Response:
        return web.Response(
            body=metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    app = web.Application()
    app.add_routes(
        [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", numbers)]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
