"""The node plugin as a separate process, with an API server in memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from drakit.layout import driver_directory
from tests.fakes.kubelet import FakeKubelet
from tests.fakes.podresources import OWN_POD_ENVIRONMENT

DRIVER = "shelf.example.com"
NODE = "node-1"
ROOT = Path(__file__).parents[2]
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims"


def result(device: str, *, driver: str = DRIVER, pool: str = NODE, **fields: Any) -> dict[str, Any]:
    """One result of an allocation, as the scheduler writes it."""
    return {"driver": driver, "pool": pool, "request": "main", "device": device} | fields


class Rig:
    """A node's directories, and the plugin's process on them."""

    def __init__(self, root: Path, api_server) -> None:
        self.root, self.api_server = root, api_server
        self.shelf, self.cdi = root / "shelf", root / "cdi"
        self.config: dict = {
            "listen": {"probes": "127.0.0.1:0", "metrics": "127.0.0.1:0"},
            "bootIDFile": str(root / "boot_id"),
            "drivers": [
                {"driver": "tests.fakes.shelf:Shelf", "config": {"directory": str(self.shelf)}}
            ],
        }
        (root / "boot_id").write_text("boot-1\n")
        (root / "plugins_registry").mkdir()
        self.shelf.mkdir()
        api_server.store(f"/api/v1/nodes/{NODE}", {"metadata": {"uid": "node-uid"}})

    @contextlib.asynccontextmanager
    async def plugin(
        self, pod_uid: str = "", **settings
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        config = self.root / f"plugin{pod_uid}.yaml"
        config.write_text(yaml.safe_dump(self.config | settings))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-m", "drakit_nodeplugin", "--config", str(config)),
            *("--kubeconfig", str(self.api_server.write_kubeconfig(self.root))),
            *("--node-name", NODE, "--kubelet-root", str(self.root), "--cdi-dir", str(self.cdi)),
            env={
                **os.environ,
                **OWN_POD_ENVIRONMENT,
                "PYTHONPATH": str(ROOT),
                "PYTHONSAFEPATH": "1",
                "POD_UID": pod_uid,
            },
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[tuple[FakeKubelet, Path, asyncio.subprocess.Process]]:
        """Run the plugin, and register its driver; yield the kubelet, the DRA socket and the
        process."""
        async with FakeKubelet(self.root) as kubelet, self.plugin() as process:
            await self.until(kubelet.sockets)
            yield kubelet, await kubelet.register(), process

    async def until(self, look) -> None:
        async with asyncio.timeout(10):
            while not look():
                await asyncio.sleep(0.02)

    def allocate(
        self,
        uid: str,
        *devices: str,
        driver: str = DRIVER,
        config: Sequence[Mapping[str, Any]] = (),
        **fields: Any,
    ) -> None:
        """Store a claim that has these devices, each with the same fields."""
        results = [result(device, driver=driver, **fields) for device in devices]
        self.store_claim(uid, *results, config=config)

    def store_claim(
        self, uid: str, *results: Mapping[str, Any], config: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        allocation = {"devices": {"results": [*results], "config": [*config]}}
        body = {"metadata": {"uid": uid}, "status": {"allocation": allocation}}
        self.api_server.store(f"{CLAIMS}/claim-{uid}", body)

    def published(self) -> list[str]:
        return [
            d["name"] for body in self.api_server.objects(SLICES) for d in body["spec"]["devices"]
        ]

    def writes(self) -> int:
        """Writes of the API server, without those of reports, which come later."""
        paths = [path for _, path in self.api_server.writes()]
        return len([path for path in paths if "nodedevicereports" not in path])

    def slice_writes(self) -> int:
        return sum("resourceslices" in path for _, path in self.api_server.writes())

    def files(self) -> set[str]:
        return {path.name for path in self.cdi.glob("*")}

    def left(self) -> set[str]:
        data = driver_directory(self.root, DRIVER)
        return {p.name for d in (data, self.root / "plugins_registry") for p in d.glob("*")}


async def stop(process) -> tuple[int, str]:
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        _, errors = await process.communicate()
    return process.returncode, errors.decode()
