"""Device health, from the driver to the slices and to the kubelet, through the whole process."""

from __future__ import annotations

import json

import pytest

from tests.fakes.kubelet import FakeKubelet, reference
from tests.integration.rig import NODE, SLICES, stop

SIMULATED = "simulated.drakit.dev"
GONE = ("drakit.dev/gone", "NoSchedule")
HEALTH = {"recoveryPeriod": "300ms", "evictionDelay": "300ms", "timeout": "3s"}


@pytest.fixture
def nics(rig):
    """A node with two interfaces that the test controls."""
    control = rig.root / "control.json"
    nic = {"count": 2, "vlans": [100]}
    config = {
        "nic": nic,
        "gpu": {"count": 0},
        "cpu": {"count": 0},
        "controlFile": str(control),
    }
    rig.config["drivers"] = [{"driver": "simulated", "config": config}]
    rig.config["devices"] = {"health": HEALTH}

    def command(**commands: object) -> None:
        new = control.with_suffix(".new")
        new.write_text(json.dumps(commands))
        new.replace(control)

    rig.command = command
    return rig


def taints(rig) -> dict[str, list[tuple[str, str, str]]]:
    """Key, effect and time of the taints, by device."""
    return {
        device["name"]: [(t["key"], t["effect"], t["timeAdded"]) for t in device.get("taints", ())]
        for body in rig.api_server.objects(SLICES)
        for device in body["spec"].get("devices", ())
    }


def effects(rig, device: str) -> list[tuple[str, str]]:
    return [(key, effect) for key, effect, _ in taints(rig).get(device, ())]


async def test_a_device_that_breaks_and_is_repaired(nics):
    broken = {"status": "unhealthy", "message": "the cable is cut", "broken": True}
    async with FakeKubelet(nics.root) as kubelet, nics.plugin():
        await nics.until(kubelet.sockets)
        (path,) = kubelet.sockets()
        await kubelet.register()
        async with await kubelet.follow_health(path) as told:
            assert told.version == "v1"
            await told.until(lambda: told.status("nic-0", pool=NODE) == "Healthy")
            await nics.until(lambda: set(taints(nics)) == {"nic-0", "nic-1"})

            nics.command(health={"nic-0": broken})
            await told.until(lambda: told.status("nic-0", pool=NODE) == "Unhealthy")
            assert told.message("nic-0", pool=NODE) == "the cable is cut"
            await nics.until(lambda: effects(nics, "nic-0")[:1])
            since = taints(nics)["nic-0"][0]
            assert since[:2] == ("drakit.dev/unhealthy", "NoSchedule")
            await nics.until(lambda: len(effects(nics, "nic-0")) == 2)
            assert effects(nics, "nic-0")[1] == ("drakit.dev/unhealthy", "NoExecute")
            assert taints(nics)["nic-0"][0] == since
            assert told.status("nic-1", pool=NODE) == "Healthy"
            assert effects(nics, "nic-1") == []

            nics.command()
            await told.until(lambda: told.status("nic-0", pool=NODE) == "Healthy")
            await nics.until(lambda: effects(nics, "nic-0") == [])


async def test_a_held_device_that_vanishes_outlives_a_restart_and_goes_with_its_claim(nics):
    nics.allocate("uid-a", "nic-0", driver=SIMULATED)
    nics.allocate("uid-b", "nic-0", driver=SIMULATED)
    async with nics.serving() as (kubelet, dra, process):
        await nics.until(lambda: set(taints(nics)) == {"nic-0", "nic-1"})
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
    writes = nics.slice_writes()

    async with FakeKubelet(nics.root) as kubelet, nics.plugin() as process:
        await nics.until(lambda: kubelet.sockets() not in ([], [stale]))
        dra = await kubelet.register()
        (path,) = set(kubelet.sockets()) - {stale}
        async with await kubelet.follow_health(path) as told:
            await told.until(lambda: told.status("nic-0", pool=NODE) == "Unhealthy")
        assert (taints(nics), nics.slice_writes()) == (since, writes)

        nics.command(missing=["nic-1"])
        await nics.until(lambda: effects(nics, "nic-0") == [])
        assert taints(nics).keys() == {"nic-0"}
        nics.command(missing=["nic-0"])
        await nics.until(lambda: effects(nics, "nic-0") == [GONE])
        assert taints(nics).keys() == {"nic-0", "nic-1"}

        assert await kubelet.unprepare(dra, reference("uid-a")) == {"uid-a": ""}
        await nics.until(lambda: taints(nics).keys() == {"nic-1"})
        await stop(process)
