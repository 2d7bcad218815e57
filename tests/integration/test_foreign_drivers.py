"""
The node plugin as a separate process, with backends and device plugins. They start, end, misbehave,
and share the plugin with a Python driver.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path

import grpc.aio
import pytest

from drakit.layout import driver_directory, drivers_directory
from drakit_proto.backend.v1 import backend_pb2 as pb
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2
from tests.fakes.backend import FakeBackend, device
from tests.fakes.deviceplugin import FakeDevicePlugin
from tests.fakes.kubelet import FakeKubelet, reference
from tests.fakes.podresources import FakePodResources
from tests.integration.test_node_plugin import NODE, SLICES, Rig, stop

GPU = "gpu.example.com"
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
        self.backends = root / "plugins/drakit.dev/backends"
        self.device_plugins = root / "plugins/drakit.dev/device-plugins/thing"
        for folder in (*(self.backends / name for name in BACKENDS), self.device_plugins):
            folder.mkdir(parents=True)

    def published_by(self, driver: str) -> list[str]:
        return sorted(
            d["name"]
            for body in self.api_server.objects(SLICES)
            if body["spec"]["driver"] == driver
            for d in body["spec"].get("devices", [])
        )

    def tainted(self, driver: str) -> bool:
        return any(
            d.get("taints")
            for body in self.api_server.objects(SLICES)
            if body["spec"]["driver"] == driver
            for d in body["spec"].get("devices", [])
        )

    def allocate_of(self, uid: str, *results: tuple[str, str, str]) -> None:
        """Allocate devices: driver, pool and name of each."""
        self.api_server.store(
            f"/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims/claim-{uid}",
            {
                "metadata": {"uid": uid},
                "status": {
                    "allocation": {
                        "devices": {
                            "results": [
                                {"driver": d, "pool": p, "request": "main", "device": n}
                                for d, p, n in results
                            ]
                        }
                    }
                },
            },
        )

    def registrations(self) -> dict[str, Path]:
        """The registration sockets, by driver."""
        found = {}
        for path in (self.root / "plugins_registry").iterdir():
            for driver in (GPU, PLUGINS, "shelf.example.com"):
                if path.name.startswith(f"{driver}-"):
                    found[driver] = path
        return found

    def spec_of(self, driver: str, uid: str) -> dict:
        return json.loads((self.cdi / f"{driver}-claim_{uid}.json").read_text())


@pytest.fixture
async def rig(api_server):
    folder = Path(tempfile.mkdtemp(prefix="drakit-", dir="/tmp"))
    async with FakePodResources(folder / "pod-resources" / "kubelet.sock"):
        yield ForeignRig(folder, api_server)
    shutil.rmtree(folder)


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
        assert stopped.startswith("driver bad.example.com is unavailable: ")
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


async def test_names_of_other_directories_and_edits_that_no_entry_lists_are_refused(rig):
    rig.config["backends"]["allowed"]["gpu"]["mounts"] = {"/opt/gpu": "ro"}
    rig.config["devicePlugins"]["plugins"]["thing"]["devices"] = ["/dev/null"]
    rig.allocate_of("uid-a", (GPU, NODE, "gpu-0"))
    rig.allocate_of("uid-b", (GPU, NODE, "gpu-1"))
    rig.allocate_of("uid-c", (PLUGINS, POOL, "thing-0"))

    async def prepare(request):
        paths = {"gpu-0": "/opt/gpu/lib", "gpu-1": "/etc"}
        claims = [
            pb.PreparedClaim(
                uid=claim.uid,
                edits=[
                    pb.Edits(mounts=[pb.Mount(host_path=paths[d.name], container_path="/gpu")])
                    for d in claim.devices
                ],
            )
            for claim in request.claims
        ]
        return pb.PrepareClaimsResponse(claims=claims)

    async with (
        FakeKubelet(rig.root) as kubelet,
        FakeBackend(rig.backends / "gpu/gpu.sock", driver=GPU) as backend,
        FakeBackend(rig.backends / "tpu/gpu.sock", driver=GPU) as thief,
        rig.plugin() as process,
    ):
        backend.listed = pb.WatchDevicesResponse(devices=[device("gpu-0"), device("gpu-1")])
        backend.prepare = prepare
        await rig.until(lambda: rig.published_by(GPU) == ["gpu-0", "gpu-1"])
        dra = await registered(kubelet, rig, GPU)
        claims = [reference("uid-a"), reference("uid-b")]
        answers = await kubelet.prepare(dra, *claims)
        assert answers["uid-a"].error == ""
        (mount,) = rig.spec_of(GPU, "uid-a")["devices"][0]["containerEdits"]["mounts"]
        assert mount["hostPath"] == "/opt/gpu/lib"
        assert answers["uid-b"].error == (
            "claim lab/claim-uid-b, request main, device gpu-1: its backend asks for a mount of "
            "/etc, which is not allowed; to allow it, extend mounts in "
            "backends.allowed.gpu"
        )
        assert [path.name for path in rig.cdi.iterdir()] == [f"{GPU}-claim_uid-a.json"]

        plugins = await registered(kubelet, rig, PLUGINS)
        await rig.until((rig.device_plugins / "kubelet.sock").exists)
        other = FakeDevicePlugin(
            rig.device_plugins, resource="vendor.example/other", endpoint="other.sock"
        )
        with pytest.raises(grpc.aio.AioRpcError, match="does not list this resource"):
            async with other:
                pass
        async with FakeDevicePlugin(rig.device_plugins) as plugin:
            plugin.answer = lambda ids: deviceplugin_pb2.ContainerAllocateResponse(
                devices=[
                    deviceplugin_pb2.DeviceSpec(container_path="/dev/null", host_path="/dev/zero")
                ]
            )
            await rig.until(lambda: rig.published_by(PLUGINS) == ["thing-0", "thing-1"])
            answer = (await kubelet.prepare(plugins, reference("uid-c")))["uid-c"]
        assert "request main, device thing-0: " in answer.error
        assert "asks for device node /dev/zero, which is not allowed" in answer.error
        events = "/apis/events.k8s.io/v1/events"
        refused = {
            "BackendRefused": f"only tpu.example.com can register in the directory of "
            f"backends.allowed.tpu; the directory of {GPU} is {rig.backends / 'gpu'}",
            "RegistrationRefused": "vendor.example/other is refused: devicePlugins.plugins.thing "
            "does not list this resource",
        }
        await rig.until(
            lambda: refused.keys() <= {body["reason"] for body in rig.api_server.objects(events)}
        )
        for body in rig.api_server.objects(events):
            if text := refused.get(body["reason"]):
                assert text in body["note"]
        assert {name for name, _ in thief.calls} == {"GetInfo"}
        assert "tpu.example.com" not in [
            path.name for path in drivers_directory(rig.root).iterdir()
        ]
        assert await kubelet.unprepare(dra, *claims) == {"uid-a": "", "uid-b": ""}
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
