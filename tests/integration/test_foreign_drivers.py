"""
The node plugin as a separate process, with backends and device plugins. They start, end, misbehave,
and share the plugin with a Python driver.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from drakit.layout import driver_directory
from drakit_proto.backend.v1 import backend_pb2 as pb
from tests.fakes.backend import FakeBackend, device
from tests.fakes.deviceplugin import FakeDevicePlugin
from tests.fakes.kubelet import FakeKubelet, reference
from tests.fakes.podresources import FakePodResources
from tests.integration.rig import NODE, SLICES, Rig, result, stop

GPU, MODEM = "gpu.example.com", "modem.example.com"
PLUGINS = "deviceplugin.drakit.dev"
THING = "vendor.example/thing"
POOL = f"{NODE}/thing.vendor.example"
BACKENDS = ("gpu", "shelf", "bad", "tpu")
"""The entries of backends; each has the driver ``<name>.example.com``."""


class ForeignRig(Rig):
    """A rig whose plugin also takes backends and device plugins."""

    def __init__(self, root: Path, api_server) -> None:
        super().__init__(root, api_server)
        own = {"owner": {"uid": os.getuid()}}
        self.config["backends"] = {
            "enabled": True,
            "allowed": {
                name: {**own, "driver": f"{name}.example.com", "env": ["GPU"]} for name in BACKENDS
            },
        }
        self.config["devicePlugins"] = {
            "enabled": True,
            "plugins": {"thing": {**own, "resources": [THING], "env": ["THINGS"]}},
        }
        self.config["devices"] = {"endpointStopGracePeriod": "1m", "startGracePeriod": "1s"}
        self.folders = [root]
        """Folders that are removed at the end."""
        self.backends = root / "plugins/drakit.dev/backends"
        self.device_plugins = root / "plugins/drakit.dev/device-plugins/thing"
        for folder in (*(self.backends / name for name in BACKENDS), self.device_plugins):
            folder.mkdir(parents=True)

    def devices_of(self, driver: str) -> list[dict]:
        return [
            device
            for body in self.api_server.objects(SLICES)
            if body["spec"]["driver"] == driver
            for device in body["spec"].get("devices", [])
        ]

    def published_by(self, driver: str) -> list[str]:
        return sorted(device["name"] for device in self.devices_of(driver))

    def tainted(self, driver: str) -> bool:
        return any(device.get("taints") for device in self.devices_of(driver))

    def allocate_of(self, uid: str, *results: tuple[str, str, str]) -> None:
        """Allocate devices: driver, pool and name of each."""
        self.store_claim(uid, *(result(n, driver=d, pool=p) for d, p, n in results))

    def registrations(self) -> dict[str, Path]:
        """The registration sockets, by driver."""
        found = {}
        for path in (self.root / "plugins_registry").iterdir():
            for driver in (GPU, MODEM, PLUGINS, "shelf.example.com"):
                if path.name.startswith(f"{driver}-"):
                    found[driver] = path
        return found

    def spec_of(self, driver: str, uid: str) -> dict:
        return json.loads((self.cdi / f"{driver}-claim_{uid}.json").read_text())


@pytest.fixture
async def rig(api_server):
    folder = Path(tempfile.mkdtemp(prefix="drakit-", dir="/tmp"))
    async with FakePodResources(folder / "pod-resources" / "kubelet.sock"):
        rig = ForeignRig(folder, api_server)
        yield rig
    for each in rig.folders:
        shutil.rmtree(each)


async def registered(kubelet: FakeKubelet, rig: ForeignRig, driver: str) -> Path:
    await rig.until(lambda: driver in rig.registrations())
    path = rig.registrations()[driver]
    info = await kubelet.get_info(path)
    await kubelet.notify(path)
    return Path(info.endpoint)


async def test_a_partition_of_a_backends_device_that_is_held_is_refused(rig):
    rig.allocate_of("uid-a", (GPU, NODE, "gpu-0"))
    rig.allocate_of("uid-b", (GPU, NODE, "half-0"))
    devices = [
        device(name, consumes={"card": pb.CounterAmounts(counters={"memory": memory})})
        for name, memory in (("gpu-0", "40Gi"), ("half-0", "20Gi"))
    ]
    card = pb.CounterSet(name="card", counters={"memory": "40Gi"})
    backend = FakeBackend(rig.backends / "gpu/gpu.sock", driver=GPU)
    backend.listed = pb.WatchDevicesResponse(devices=devices, counter_sets=[card])
    async with FakeKubelet(rig.root) as kubelet, backend, rig.plugin() as process:
        await rig.until(lambda: rig.published_by(GPU) == ["gpu-0", "half-0"])
        dra = await registered(kubelet, rig, GPU)
        first, second = reference("uid-a"), reference("uid-b")
        assert (await kubelet.prepare(dra, first))["uid-a"].error == ""
        error = (await kubelet.prepare(dra, second))["uid-b"].error
        assert (
            "device half-0 cannot be used together with device gpu-0 of claim lab/claim-uid-a"
            in error
        )
        assert len(backend.called("prepare")) == 1
        assert await kubelet.unprepare(dra, first) == {"uid-a": ""}
        assert (await kubelet.prepare(dra, second))["uid-b"].error == ""
        assert (await stop(process))[0] == 0


async def test_a_backend_is_a_driver_from_its_first_sight_on_and_after_a_restart_without_it(rig):
    rig.allocate_of("uid-a", (GPU, NODE, "gpu-0"))
    claim = reference("uid-a")
    async with FakeKubelet(rig.root) as kubelet:
        async with FakeBackend(rig.backends / "gpu/gpu.sock", driver=GPU), rig.plugin() as process:
            await rig.until(lambda: rig.published_by(GPU) == ["gpu-0"])
            dra = await registered(kubelet, rig, GPU)
            assert (await kubelet.prepare(dra, claim))["uid-a"].error == ""
            assert rig.spec_of(GPU, "uid-a")
            code, errors = await stop(process)
            assert code == 0, errors
        # Without its backend: the claim can be unprepared, and its devices are tainted.
        async with rig.plugin() as process:
            dra = await registered(kubelet, rig, GPU)
            await rig.until(lambda: rig.tainted(GPU))
            assert await kubelet.unprepare(dra, claim) == {"uid-a": ""}
            assert not list(rig.cdi.glob(f"{GPU}*"))
            async with FakeBackend(rig.backends / "gpu/gpu.sock", driver=GPU) as backend:
                await rig.until(lambda: rig.published_by(GPU) == ["gpu-0"] and not rig.tainted(GPU))
                await rig.until(lambda: backend.called("unprepare"))
            code, errors = await stop(process)
            assert code == 0, errors


async def test_a_device_plugin_registers_again_after_each_start_and_its_claims_stay(rig):
    rig.allocate_of("uid-a", (PLUGINS, POOL, "thing-0"), (PLUGINS, POOL, "thing-1"))
    claim = reference("uid-a")
    async with FakeKubelet(rig.root) as kubelet:
        async with rig.plugin() as process:
            dra = await registered(kubelet, rig, PLUGINS)
            await rig.until((rig.device_plugins / "kubelet.sock").exists)
            async with FakeDevicePlugin(rig.device_plugins) as plugin:
                await rig.until(lambda: rig.published_by(PLUGINS) == ["thing-0", "thing-1"])
                for _ in range(2):
                    answer = (await kubelet.prepare(dra, claim))["uid-a"]
                    assert (answer.error, len(answer.devices)) == ("", 2)
                assert plugin.allocated == [["thing-0", "thing-1"]], "once for the whole request"
                spec = rig.spec_of(PLUGINS, "uid-a")
                assert spec["devices"][0]["containerEdits"]["env"] == ["THINGS=thing-0,thing-1"]
                await stop(process)
        async with rig.plugin() as process:
            dra = await registered(kubelet, rig, PLUGINS)
            await rig.until((rig.device_plugins / "kubelet.sock").exists)
            async with FakeDevicePlugin(rig.device_plugins) as plugin:
                await rig.until(
                    lambda: len(rig.published_by(PLUGINS)) == 2 and not rig.tainted(PLUGINS)
                )
                assert (await kubelet.prepare(dra, claim))["uid-a"].error == ""
                assert plugin.allocated == [], "its answer is kept"
                await stop(process)
        (rig.root / "boot_id").write_text("boot-2\n")
        async with rig.plugin() as process:
            dra = await registered(kubelet, rig, PLUGINS)
            await rig.until((rig.device_plugins / "kubelet.sock").exists)
            async with FakeDevicePlugin(rig.device_plugins) as plugin:
                await rig.until(lambda: not rig.tainted(PLUGINS))
                async with asyncio.timeout(10):
                    while (await kubelet.prepare(dra, claim))["uid-a"].error:
                        await asyncio.sleep(0.05)
                assert plugin.allocated == [["thing-0", "thing-1"]], "a boot forgets it"
                assert await kubelet.unprepare(dra, claim) == {"uid-a": ""}
                code, errors = await stop(process)
    assert code == 0, errors


async def test_a_backend_with_malformed_messages_or_a_name_in_use_affects_no_other_driver(rig):
    (rig.shelf / "atlas").touch()
    rig.allocate("uid-a", "atlas")
    async with (
        FakeKubelet(rig.root) as kubelet,
        FakeBackend(rig.backends / "gpu/gpu.sock", driver=GPU) as good,
        FakeBackend(rig.backends / "shelf/shelf.sock", driver="shelf.example.com"),
        FakeBackend(rig.backends / "gpu/twin.sock", driver=GPU) as twin,
        FakeBackend(rig.backends / "bad/bad.sock", driver="bad.example.com") as bad,
        rig.plugin() as process,
    ):
        bad.listed = b"\xff" * 100
        twin.listed = pb.WatchDevicesResponse(devices=[device("of-the-twin")])
        await rig.until(lambda: rig.published_by(GPU) and rig.published_by("shelf.example.com"))
        dra = await registered(kubelet, rig, "shelf.example.com")
        assert (await kubelet.prepare(dra, reference("uid-a")))["uid-a"].error == ""
        one, other = (good, twin) if rig.published_by(GPU) == ["gpu-0"] else (twin, good)
        before = rig.published_by(GPU)
        await one.stop()
        await rig.until(lambda: rig.published_by(GPU) not in ([], before))
        assert other.called("WatchDevices")
        notes = [
            body["note"]
            for body in rig.api_server.objects("/apis/events.k8s.io/v1/events")
            if body["reason"] == "BackendRefused"
        ]
        assert any("shelf.example.com" in note for note in notes), notes
        assert not any(GPU in note for note in notes), "two for a short time are an update"

        def stopped_notes():
            return {
                body["note"]
                for body in rig.api_server.objects("/apis/events.k8s.io/v1/events")
                if body["reason"] == "EndpointStopped" and "bad.example.com" in body["note"]
            }

        await rig.until(stopped_notes)
        (stopped,) = stopped_notes()
        assert stopped.startswith("driver bad.example.com is stopped: ")
        assert rig.published_by("bad.example.com") == []
        code, errors = await stop(process)
    assert code == 0, errors


async def test_the_driver_of_a_removed_backend_is_forgotten_and_may_return(rig):
    rig.config["devices"]["endpointStopGracePeriod"] = "1s"
    rig.allocate_of("uid-a", (GPU, NODE, "gpu-0"))
    claim, path = reference("uid-a"), rig.backends / "gpu/gpu.sock"
    record = driver_directory(rig.root, GPU) / "backend.json"
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        async with FakeBackend(path, driver=GPU):
            await rig.until(lambda: rig.published_by(GPU) and record.exists())
            dra = await registered(kubelet, rig, GPU)
            assert (await kubelet.prepare(dra, claim))["uid-a"].error == ""
        # With a claim left it stays, though its devices go.
        await rig.until(lambda: not rig.published_by(GPU))
        await asyncio.sleep(1.5)  # more than from one look to the next
        assert record.exists()
        async with FakeBackend(path, driver=GPU):
            await rig.until(lambda: rig.published_by(GPU) == ["gpu-0"])
            assert await kubelet.unprepare(dra, claim) == {"uid-a": ""}
        await rig.until(lambda: not record.exists() and GPU not in rig.registrations())
        async with FakeBackend(path, driver=GPU):
            await rig.until(lambda: rig.published_by(GPU) == ["gpu-0"] and record.exists())
        code, errors = await stop(process)
    assert code == 0, errors


async def test_a_driver_that_the_list_does_not_name_any_more_is_served_without_its_backend(rig):
    rig.allocate_of("uid-a", (GPU, NODE, "gpu-0"))
    claim = reference("uid-a")
    async with (
        FakeKubelet(rig.root) as kubelet,
        FakeBackend(rig.backends / "gpu/gpu.sock", driver=GPU),
    ):
        async with rig.plugin() as process:
            await rig.until(lambda: rig.published_by(GPU) == ["gpu-0"])
            dra = await registered(kubelet, rig, GPU)
            assert (await kubelet.prepare(dra, claim))["uid-a"].error == ""
            await stop(process)
        rig.config["backends"]["allowed"] = {}
        async with rig.plugin() as process:
            dra = await registered(kubelet, rig, GPU)
            await rig.until(lambda: rig.tainted(GPU))
            assert await kubelet.unprepare(dra, claim) == {"uid-a": ""}, "the pod can go"
            code, errors = await stop(process)
    assert code == 0, errors


async def test_a_driver_whose_record_is_damaged_is_served_without_its_backend(rig):
    record = driver_directory(rig.root, GPU) / "backend.json"
    async with FakeKubelet(rig.root) as kubelet:
        async with FakeBackend(rig.backends / "gpu/gpu.sock", driver=GPU), rig.plugin() as process:
            await rig.until(lambda: rig.published_by(GPU) and record.exists())
            await stop(process)
        record.write_text("{")
        async with rig.plugin() as process:
            await registered(kubelet, rig, GPU)
            code, errors = await stop(process)
    assert code == 0, errors
    assert "record of a backend cannot be read" in errors


# ------------------------------------------------------------ device numbers


class Ports(FakeBackend):
    """A backend that returns the device nodes of plugged adapters, with their real numbers."""

    def __init__(self, rig: ForeignRig, driver: str, *names: str) -> None:
        entry = driver.partition(".")[0]
        super().__init__(rig.backends / entry / "ports.sock", driver=driver)
        self.path.parent.mkdir(exist_ok=True)
        # An entry allows device nodes in /dev alone.
        self.folder = Path(tempfile.mkdtemp(prefix="drakit-", dir="/dev"))
        rig.folders.append(self.folder)
        rig.config["backends"]["allowed"][entry] = {
            "owner": {"uid": os.getuid()},
            "driver": driver,
            "devices": [f"{self.folder}/*"],
        }
        self.listed = pb.WatchDevicesResponse(devices=[device(name) for name in names])
        self.prepare = self.edits

    def plug(self, name: str, minor: int) -> None:
        os.mknod(self.folder / name, stat.S_IFCHR | 0o600, os.makedev(188, minor))

    async def edits(self, request: Any) -> pb.PrepareClaimsResponse:
        return pb.PrepareClaimsResponse(
            claims=[
                pb.PreparedClaim(uid=c.uid, edits=[self.edit(d.name) for d in c.devices])
                for c in request.claims
            ]
        )

    def edit(self, name: str) -> pb.Edits:
        path = self.folder / name
        number = path.stat().st_rdev
        node = pb.DeviceNode(
            path=f"/dev/{name}",
            host_path=str(path),
            type="c",
            major=os.major(number),
            minor=os.minor(number),
            identity=f"{self.driver}/{name}",
        )
        return pb.Edits(device_nodes=[node])


async def until_error(kubelet: FakeKubelet, dra: Path, claim, error: str) -> None:
    """Call as the kubelet does, while the drivers of a plugin that was just started connect."""
    async with asyncio.timeout(20):
        while True:
            answer = (await kubelet.prepare(dra, claim))[claim.uid].error
            if (error and error in answer) or answer == error:
                return
            await asyncio.sleep(0.1)


@pytest.mark.skipif(os.geteuid() != 0, reason="mknod needs root")
async def test_different_devices_of_two_drivers_with_one_real_number(rig):
    rig.allocate_of("uid-a", (GPU, NODE, "port-a"))
    rig.allocate_of("uid-b", (MODEM, NODE, "modem-b"))
    rig.allocate_of("uid-c", (MODEM, NODE, "modem-c"))
    serial = Ports(rig, GPU, "port-a")
    modem = Ports(rig, MODEM, "modem-b", "modem-c")
    serial.plug("port-a", 0)
    modem.plug("modem-b", 0)  # the adapter of port-a was unplugged while its pod runs
    modem.plug("modem-c", 1)
    a, b, c = map(reference, ("uid-a", "uid-b", "uid-c"))
    async with FakeKubelet(rig.root) as kubelet, serial, modem:
        async with rig.plugin() as process:
            await rig.until(lambda: rig.published_by(GPU) and rig.published_by(MODEM))
            one, other = [await registered(kubelet, rig, name) for name in (GPU, MODEM)]
            assert (await kubelet.prepare(one, a))["uid-a"].error == ""
            answers = await kubelet.prepare(other, b, c)
            assert answers["uid-b"].error == (
                "claim lab/claim-uid-b, request main: device modem-b has device node c 188:0, "
                "which is still held for other hardware, device port-a of claim "
                "lab/claim-uid-a; this pod starts automatically once the pod that uses "
                "lab/claim-uid-a is gone"
            )
            assert answers["uid-c"].error == ""
            undone = [claim.uid for r in modem.called("unprepare") for claim in r.claims]
            assert undone == ["uid-b"]
            assert (await stop(process))[0] == 0
        async with rig.plugin() as process:
            one, other = [await registered(kubelet, rig, name) for name in (GPU, MODEM)]
            await until_error(kubelet, other, b, "device node c 188:0, which is still held")
            assert await kubelet.unprepare(one, a) == {"uid-a": ""}
            await until_error(kubelet, other, b, "")
            assert (await stop(process))[0] == 0
