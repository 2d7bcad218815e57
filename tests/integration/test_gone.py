"""A device that vanishes while a claim holds it, through the whole process and its restarts."""

from __future__ import annotations

import asyncio
from typing import Any

from drakit_nodeplugin.host.driver_devices import UNPREPARING_SECONDS
from tests.fakes.kubelet import FakeKubelet, reference
from tests.integration.test_health import effects, nics, taints  # noqa: F401
from tests.integration.test_node_plugin import CLAIMS, NODE, SLICES, rig, stop  # noqa: F401

GONE = ("drakit.dev/gone", "NoSchedule")
DRIVER = "simulated.drakit.dev"


def allocate(rig: Any, uid: str, device: str) -> None:  # noqa: F811
    result = {"driver": DRIVER, "pool": NODE, "request": "main", "device": device}
    allocation = {"devices": {"results": [result]}}
    body = {"metadata": {"uid": uid}, "status": {"allocation": allocation}}
    rig.api_server.store(f"{CLAIMS}/claim-{uid}", body)


async def test_a_held_device_that_vanishes_outlives_a_restart_and_goes_with_its_claim(nics):  # noqa: F811
    allocate(nics, "uid-a", "nic-0")
    allocate(nics, "uid-b", "nic-0")
    async with FakeKubelet(nics.root) as kubelet, nics.plugin() as process:
        await nics.until(lambda: kubelet.sockets() and set(taints(nics)) == {"nic-0", "nic-1"})
        dra = await kubelet.register()
        assert (await kubelet.prepare(dra, reference("uid-a")))["uid-a"].error == ""
        (path,) = kubelet.sockets()
        async with await kubelet.follow_health(path) as told:
            nics.command(missing=["nic-*"])
            await nics.until(lambda: taints(nics).keys() == {"nic-0"})
            await nics.until(lambda: effects(nics, "nic-0") == [GONE])
            await told.until(lambda: told.status("nic-0", pool=NODE) == "Unhealthy")
            assert "the device is gone" in told.message("nic-0", pool=NODE)
        since = taints(nics)
        refused = await kubelet.prepare(dra, reference("uid-b"))
        assert "device nic-0 is gone" in refused["uid-b"].error
        process.kill()
        await process.communicate()
        (stale,) = kubelet.sockets()
    writes = slice_writes(nics)

    async with FakeKubelet(nics.root) as kubelet, nics.plugin() as process:
        await nics.until(lambda: kubelet.sockets() not in ([], [stale]))
        dra = await kubelet.register()
        (path,) = set(kubelet.sockets()) - {stale}
        async with await kubelet.follow_health(path) as told:
            await told.until(lambda: told.status("nic-0", pool=NODE) == "Unhealthy")
        assert (taints(nics), slice_writes(nics)) == (since, writes)

        nics.command(missing=["nic-1"])
        await nics.until(lambda: effects(nics, "nic-0") == [])
        assert taints(nics).keys() == {"nic-0"}
        nics.command(missing=["nic-0"])
        await nics.until(lambda: effects(nics, "nic-0") == [GONE])
        assert taints(nics).keys() == {"nic-0", "nic-1"}

        assert await kubelet.unprepare(dra, reference("uid-a")) == {"uid-a": ""}
        await nics.until(lambda: taints(nics).keys() == {"nic-1"})
        await stop(process)


async def test_a_held_device_that_is_absent_after_a_reboot_is_published_as_it_was(nics):  # noqa: F811
    """The slices are wiped, so only the checkpoint has its attributes, which all classes read."""
    allocate(nics, "uid-a", "nic-0")
    async with FakeKubelet(nics.root) as kubelet, nics.plugin() as process:
        await nics.until(lambda: kubelet.sockets() and taints(nics).keys() == {"nic-0", "nic-1"})
        before = body_of(nics, "nic-0")
        dra = await kubelet.register()
        assert (await kubelet.prepare(dra, reference("uid-a")))["uid-a"].error == ""
        await asyncio.sleep(UNPREPARING_SECONDS + 1.5)
        await stop(process)
    for body in nics.api_server.objects(SLICES):
        nics.api_server.remove(f"{SLICES}/{body['metadata']['name']}")
    (nics.root / "boot_id").write_text("another boot")
    nics.command(missing=["nic-0"])
    async with FakeKubelet(nics.root) as kubelet, nics.plugin() as process:
        await nics.until(kubelet.sockets)
        await kubelet.register()
        await nics.until(lambda: taints(nics).keys() == {"nic-0", "nic-1"})
        assert effects(nics, "nic-0") == [GONE]
        after = body_of(nics, "nic-0")
        assert after.pop("taints")
        assert after == before
        await stop(process)


def body_of(rig: Any, name: str) -> dict[str, Any]:  # noqa: F811
    devices = [d for body in rig.api_server.objects(SLICES) for d in body["spec"]["devices"]]
    (found,) = [each for each in devices if each["name"] == name]
    return found


async def test_the_process_survives_that_devices_of_a_fallback_vanish(nics):  # noqa: F811
    """NUMA nodes are the devices, and single CPUs their fallback."""
    config = nics.config["drivers"][0]["config"]
    nics.config["drivers"][0]["config"] = config | {"nic": {"count": 1}, "cpu": {"count": 4}}
    async with FakeKubelet(nics.root) as kubelet, nics.plugin() as process:
        await nics.until(kubelet.sockets)
        await kubelet.register()
        await nics.until(lambda: taints(nics).keys() == {"nic-0", "cpu-numa-0", "cpu-numa-1"})
        nics.command(missing=["cpu-*"])
        await nics.until(lambda: taints(nics).keys() == {"nic-0"})
        await stop(process)


def slice_writes(rig: Any) -> int:  # noqa: F811
    return sum("resourceslices" in path for _, path in rig.api_server.writes())
