"""Replicas of the operator in this process, and what tests ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import aiohttp

from drakit_explain.cel.library import Library
from drakit_operator.app import App
from drakit_operator.config import Config
from tests.fakes.tasks import until as wait_until

LEASE = "/apis/coordination.k8s.io/v1/namespaces/sys/leases/drakit-operator"


SHORT_LEASE = {"leaseDuration": 2, "renewDeadline": 1, "retryPeriod": 0.2}
"""For tests in which a Lease expires. Any other test must not lose its own on a busy machine."""


def config(**changes) -> Config:
    settings = {
        "listen": {"probes": "127.0.0.1:0", "metrics": "127.0.0.1:0"},
        "election": {"retryPeriod": 0.2},
        "events": {"debounce": 0.3},
        "deviceMaintenance": True,
    }
    return Config.model_validate(settings | changes)


@asynccontextmanager
async def replica(cluster, folder, name, *, selectors=None, **changes) -> AsyncIterator[App]:
    app = App(
        selectors=selectors or Library(),
        config=config(**changes),
        kubeconfig=cluster.write_kubeconfig(folder),
        name=name,
        namespace="sys",
    )
    running = asyncio.create_task(app.run())
    try:
        yield app
    finally:
        app.stop.set()
        await asyncio.wait_for(running, 20)


until = partial(wait_until, seconds=20)


async def probe(app: App, path: str) -> tuple[int, str]:
    server = app.servers.metrics if path == "/metrics" else app.servers.probes
    async with (
        aiohttp.ClientSession() as client,
        client.get(f"http://127.0.0.1:{server.port}{path}") as answer,
    ):
        return answer.status, await answer.text()


def holder(cluster) -> str:
    lease = cluster.object(LEASE)
    return lease["spec"].get("holderIdentity", "").split("_")[0] if lease else ""
