"""Device health, from the driver to the slices and to the kubelet, through the whole process."""

from __future__ import annotations

import json

import pytest

from tests.fakes.kubelet import FakeKubelet
from tests.integration.test_node_plugin import NODE, SLICES, rig  # noqa: F401

HEALTH = {"recoveryPeriod": "300ms", "evictionDelay": "300ms", "timeout": "3s"}


@pytest.fixture
def nics(rig):  # noqa: F811
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


def taints(rig) -> dict[str, list[tuple[str, str, str]]]:  # noqa: F811
    """Key, effect and time of the taints, by device."""
    return {
        device["name"]: [(t["key"], t["effect"], t["timeAdded"]) for t in device.get("taints", ())]
        for body in rig.api_server.objects(SLICES)
        for device in body["spec"].get("devices", ())
    }


def effects(rig, device: str) -> list[tuple[str, str]]:  # noqa: F811
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


async def test_a_driver_that_stops_is_not_known_to_the_kubelet(nics):
    async with FakeKubelet(nics.root) as kubelet, nics.plugin():
        await nics.until(kubelet.sockets)
        (path,) = kubelet.sockets()
        await kubelet.register()
        async with await kubelet.follow_health(path, version="v1alpha1") as told:
            await told.until(lambda: told.status("nic-0", pool=NODE) == "Healthy")
            nics.command(stop="the rack is being moved")
            await told.until(lambda: told.status("nic-0", pool=NODE) == "Unknown")
            assert "the rack is being moved" in told.message("nic-0", pool=NODE)
            await nics.until(
                lambda: effects(nics, "nic-0") == [("drakit.dev/stopped", "NoSchedule")]
            )


async def test_a_driver_without_health_keeps_the_kubelets_stream_silent(rig):  # noqa: F811
    (rig.shelf / "atlas").touch()
    async with FakeKubelet(rig.root) as kubelet, rig.plugin():
        await rig.until(kubelet.sockets)
        (path,) = kubelet.sockets()
        assert not [v for v in (await kubelet.get_info(path)).supported_versions if "Health" in v]
        await kubelet.register()
        async with await kubelet.follow_health(path, version="v1alpha1") as told:
            await told.call.wait_for_connection()
            await rig.until(lambda: rig.published() == ["atlas"])
            assert (told.messages, told.ended) == ([], False)
