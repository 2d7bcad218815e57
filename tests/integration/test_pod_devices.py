"""The metric that names the devices of pods, scraped from the node plugin's process."""

from __future__ import annotations

import re
import socket

import aiohttp
import pytest

from tests.fakes.kubelet import FakeKubelet, reference
from tests.fakes.podresources import FakePodResources
from tests.integration.test_node_plugin import DRIVER, NODE, rig, stop  # noqa: F401


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.mark.parametrize("enabled", [True, False])
async def test_a_scrape_names_the_devices_that_the_kubelet_lists_only_if_asked_to(rig, enabled):  # noqa: F811
    port = free_port()
    rig.config["listen"]["metrics"] = f"127.0.0.1:{port}"
    rig.config["metrics"] = {"podDevices": enabled}
    for name in ("atlas", "novel"):
        (rig.shelf / name).touch()
    rig.allocate("uid-a", "atlas", "novel")

    async def scrape(http: aiohttp.ClientSession, name: str) -> list[str]:
        async with http.get(f"http://127.0.0.1:{port}/metrics") as response:
            text = await response.text()
        return re.findall(rf"^{name}(?:{{.*}})? .*$", text, re.M)

    async with (
        FakePodResources(rig.root / "pod-resources" / "kubelet.sock") as pods,
        FakeKubelet(rig.root) as kubelet,
        rig.plugin() as process,
        aiohttp.ClientSession() as http,
    ):
        await rig.until(kubelet.sockets)
        dra = await kubelet.register()
        assert (await kubelet.prepare(dra, reference("uid-a")))["uid-a"].error == ""
        pods.add("claim-uid-a", "atlas", "novel", uid="uid-a", driver=DRIVER)
        pods.add("claim-uid-b", "other", uid="uid-b", driver="other.example.com")
        pod = pods.pods[0].name
        expected = [
            f'drakit_pod_devices{{device="{device}",driver="{DRIVER}",pod_name="{pod}",'
            f'pod_namespace="lab",pool="{NODE}"}} 1.0'
            for device in ("atlas", "novel")
        ]
        assert await scrape(http, "drakit_pod_devices") == (expected if enabled else [])
        steps = "drakit_claim_prepare_step_duration_seconds_count"
        counted = [line for line in await scrape(http, steps) if line.endswith(" 1.0")]
        assert re.findall(r'step="(\w+)"', "".join(counted)) == [
            *("queue", "fetch", "wait", "driver", "checkpoint")
        ]
        assert await scrape(http, "drakit_claims_stuck") == [
            f'drakit_claims_stuck{{driver="{DRIVER}"}} 0.0'
        ]
        await stop(process)
