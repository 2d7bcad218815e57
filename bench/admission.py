"""
Measures how long the operator's webhook takes to check parameters: `python -m bench.admission`.

The webhook runs in its own process on one core, with Kopf, TLS and the schemas of the example
driver for GPUs. The load runs on the other cores. Requests start at fixed times, whether or not the
previous ones have completed, over four connections, as with API servers. A quarter of the requests
is rejected. A request's time is measured from its scheduled start until its response is read, so it
includes queuing.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import ssl
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from bench import REPOSITORY
from bench.claims import no_collection
from bench.rows import Row, percentile
from drakit.testing.apiserver import FakeApiServer
from drakit_daemon.kube import connect
from drakit_formats import crds
from drakit_operator.admission import Admission
from drakit_operator.config import Admission as Settings
from e2e.cluster.local.pki import Authority

RATE = 200
"""Requests per second."""

SECONDS = 20.0
WARM_UP_SECONDS = 2.0
P99_BUDGET_MS = 20.0
CONNECTIONS = 4
NAME = "operator.drakit-system.svc"
DRIVER = "gpu.nvidia.com"
V1 = "resource.nvidia.com/v1beta1"
GOOD = {
    "apiVersion": V1,
    "kind": "GpuConfig",
    "sharing": {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}},
}
BAD = {**GOOD, "shared": True}


def measure_admission() -> Row:
    """Return the row."""
    with tempfile.TemporaryDirectory(prefix="drakit-bench-") as folder:
        return asyncio.run(_measure(Path(folder)))


async def _measure(folder: Path) -> Row:
    authority = Authority.create(folder)
    authority.issue("tls", common_name=NAME, dns=[NAME])
    async with FakeApiServer() as server:
        server.store(f"/apis/{crds.API_VERSION}/devicedrivers/{DRIVER}", _driver())
        kubeconfig = server.write_kubeconfig(folder)
        here, there = multiprocessing.Pipe()
        webhook = multiprocessing.get_context("spawn").Process(
            target=_serve_webhook, args=(there, kubeconfig, folder), daemon=True
        )
        webhook.start()
        try:
            port = await asyncio.to_thread(here.recv)
            os.sched_setaffinity(0, os.sched_getaffinity(0) - {_webhooks_core()})
            with no_collection():
                return await _load(port, folder / "ca.crt", pid=webhook.pid or 0)
        finally:
            webhook.terminate()
            webhook.join()


def _webhooks_core() -> int:
    return max(os.sched_getaffinity(0))


def _driver() -> dict[str, Any]:
    """Return the DeviceDriver of the example's chart, without the condition of the template."""
    path = REPOSITORY / "examples/nvidia/chart/templates/devicedriver.yaml"
    lines = path.read_text().splitlines()
    return yaml.safe_load("\n".join(line for line in lines if not line.startswith("{{")))


def _serve_webhook(answer: Connection, kubeconfig: Path, certificates: Path) -> None:
    os.sched_setaffinity(0, {_webhooks_core()})

    async def warn(_: Any) -> list[str]:
        return []

    async def serve() -> None:
        webhook = Admission(
            Settings(listen="127.0.0.1:0", certificates=certificates),
            connect=lambda: connect(kubeconfig, user_agent="bench"),
            warn=warn,
            policy_type=None,
            count=lambda _: None,
        )
        running = asyncio.create_task(webhook.run())
        while not webhook.port:
            await asyncio.sleep(0.01)
        answer.send(webhook.port)
        await running

    asyncio.run(serve())


async def _load(port: int, authority: Path, *, pid: int) -> Row:
    context = ssl.create_default_context(cafile=str(authority))
    bodies = [json.dumps(_review(each)).encode() for each in (GOOD, GOOD, GOOD, BAD)]
    loop, times, wrong = asyncio.get_running_loop(), list[float](), 0
    connector = aiohttp.TCPConnector(limit=CONNECTIONS, ssl=context)

    async with aiohttp.ClientSession(connector=connector) as session:

        async def send(number: int, due: float) -> None:
            nonlocal wrong
            body = bodies[number % len(bodies)]
            url, name = f"https://127.0.0.1:{port}/", {"server_hostname": NAME}
            async with session.post(url, data=body, **name) as response:
                found = await response.json()
            wrong += found["response"]["allowed"] is (number % len(bodies) == len(bodies) - 1)
            if number >= WARM_UP_SECONDS * RATE:
                times.append(loop.time() - due)

        began, before, waited = loop.time(), 0.0, 0.0
        async with asyncio.TaskGroup() as group:
            for number in range(int((WARM_UP_SECONDS + SECONDS) * RATE)):
                due = began + number / RATE
                await asyncio.sleep(max(0.0, due - loop.time()))
                if number == WARM_UP_SECONDS * RATE:
                    before, waited = _cpu_seconds(pid), _waited_ms(pid, os.getpid())
                group.create_task(send(number, due))
        used, waited = _cpu_seconds(pid) - before, _waited_ms(pid, os.getpid()) - waited
    passed = loop.time() - began - WARM_UP_SECONDS
    return Row(
        f"admission rate={RATE}",
        {
            "p50_ms": percentile(times, 0.5) * 1000,
            "p99_ms": percentile(times, 0.99) * 1000,
            "cpu_percent": 100 * used / passed,
            "waited_ms": waited,
            "wrong": wrong,
        },
        at_most={"p99_ms": P99_BUDGET_MS, "wrong": 0},
    )


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _waited_ms(*pids: int) -> float:
    """Return how long the threads of processes were runnable while others used their core."""
    files = (path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(path.read_text().split()[1]) for path in files) / 1e6


def _review(parameters: Mapping[str, Any]) -> dict[str, Any]:
    config = [{"opaque": {"driver": DRIVER, "parameters": parameters}}]
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "one", "namespace": "lab", "uid": "u"},
        "spec": {
            "devices": {
                "requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER, "count": 1}}],
                "config": config,
            }
        },
    }
    resource = {"group": "resource.k8s.io", "version": "v1", "resource": "resourceclaims"}
    request = {"uid": "u", "resource": resource, "object": claim, "oldObject": None}
    request |= {"operation": "CREATE", "userInfo": {"username": "alice"}}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def main() -> None:
    row = measure_admission()
    print(row.line())
    missed = list(row.missed())
    for sentence in missed:
        print(f"budget missed: {sentence}")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
