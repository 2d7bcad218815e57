"""Device numbers of hosted drivers: two tenants never get one device."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from drakit_proto.backend.v1 import backend_pb2 as pb
from drakit_proto.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2
from tests.fakes.backend import FakeBackend, device
from tests.fakes.deviceplugin import FakeDevicePlugin
from tests.fakes.kubelet import FakeKubelet, reference
from tests.fakes.podresources import FakePodResources
from tests.integration.test_foreign_drivers import (
    GPU,
    PLUGINS,
    POOL,
    ForeignRig,
    registered,
)
from tests.integration.test_node_plugin import NODE, stop

SERIAL, MODEM = GPU, "modem.example.com"
EVENTS = "/apis/events.k8s.io/v1/namespaces/lab/events"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mknod needs root")


class NumberRig(ForeignRig):
    """A rig that also knows the second backend, and hosts no Python driver."""

    def __init__(self, root: Path, api_server) -> None:
        super().__init__(root, api_server)
        self.config["drivers"] = []
        self.config["devicePlugins"]["plugins"]["thing"]["devices"] = ["/dev/null"]
        self.folders: list[Path] = []
        """Folders in ``/dev``, which are removed at the end."""

    def registrations(self) -> dict[str, Path]:
        found = super().registrations()
        for path in (self.root / "plugins_registry").glob(f"{MODEM}-*"):
            found[MODEM] = path
        return found

    def slice_writes(self) -> int:
        return len([path for _, path in self.api_server.writes() if "resourceslices" in path])


@pytest.fixture
async def rig(api_server):
    folder = Path(tempfile.mkdtemp(prefix="drakit-", dir="/tmp"))
    async with FakePodResources(folder / "pod-resources" / "kubelet.sock"):
        rig = NumberRig(folder, api_server)
        yield rig
    for each in (folder, *rig.folders):
        shutil.rmtree(each)


class Ports(FakeBackend):
    """A backend that returns the device nodes of plugged adapters, with their real numbers."""

    def __init__(self, rig: NumberRig, driver: str, *names: str) -> None:
        entry = driver.partition(".")[0]
        super().__init__(rig.backends / entry / "ports.sock", driver=driver)
        self.path.parent.mkdir(exist_ok=True)
        # An entry allows only device nodes in /dev.
        self.folder = Path(tempfile.mkdtemp(prefix="drakit-", dir="/dev"))
        rig.folders.append(self.folder)
        rig.config["backends"]["allowed"][entry] = {
            "owner": {"uid": os.getuid()},
            "driver": driver,
            "devices": [f"{self.folder}/*"],
        }
        self.names = names
        self.listed = pb.WatchDevicesResponse(devices=[device(name) for name in names])
        self.prepare = self.edits

    def plug(self, name: str, minor: int) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(188, minor))

    def mark(self, *marked: str) -> None:
        self.send_devices(*(device(name, prepare_again=name in marked) for name in self.names))

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


def minors(rig: ForeignRig, driver: str, uid: str) -> list[int]:
    (entry,) = rig.spec_of(driver, uid)["devices"]
    return [node["minor"] for node in entry["containerEdits"]["deviceNodes"]]


async def until_error(kubelet: FakeKubelet, dra: Path, claim, error: str) -> None:
    """Call as the kubelet does, while the drivers of a plugin that was just started connect."""
    async with asyncio.timeout(20):
        while True:
            answer = (await kubelet.prepare(dra, claim))[claim.uid].error
            if (error and error in answer) or answer == error:
                return
            await asyncio.sleep(0.1)


@needs_root
async def test_different_devices_of_two_drivers_with_one_real_number(rig):
    rig.allocate_of("uid-a", (SERIAL, NODE, "port-a"))
    rig.allocate_of("uid-b", (MODEM, NODE, "modem-b"))
    rig.allocate_of("uid-c", (MODEM, NODE, "modem-c"))
    serial = Ports(rig, SERIAL, "port-a", "port-b")
    modem = Ports(rig, MODEM, "modem-b", "modem-c")
    serial.plug("port-a", 0)
    modem.plug("modem-b", 0)  # the adapter of port-a was unplugged while its pod runs
    modem.plug("modem-c", 1)
    a, b, c = map(reference, ("uid-a", "uid-b", "uid-c"))
    async with FakeKubelet(rig.root) as kubelet, serial, modem:
        async with rig.plugin() as process:
            await rig.until(lambda: rig.published_by(SERIAL) and rig.published_by(MODEM))
            one, other = [await registered(kubelet, rig, name) for name in (SERIAL, MODEM)]
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
            one, other = [await registered(kubelet, rig, name) for name in (SERIAL, MODEM)]
            await until_error(kubelet, other, b, "device node c 188:0, which is still held")
            assert await kubelet.unprepare(one, a) == {"uid-a": ""}
            await until_error(kubelet, other, b, "")
            assert (await stop(process))[0] == 0


@needs_root
async def test_two_held_devices_that_swap_their_numbers(rig):
    rig.allocate_of("uid-a", (SERIAL, NODE, "port-a"))
    rig.allocate_of("uid-b", (SERIAL, NODE, "port-b"))
    serial = Ports(rig, SERIAL, "port-a", "port-b")
    for minor, name in enumerate(serial.names):
        serial.plug(name, minor)
    async with FakeKubelet(rig.root) as kubelet, serial, rig.plugin() as process:
        await rig.until(lambda: len(rig.published_by(SERIAL)) == 2)
        dra = await registered(kubelet, rig, SERIAL)
        claims = [reference(uid) for uid in ("uid-a", "uid-b")]
        answers = await kubelet.prepare(dra, *claims)
        assert {answer.error for answer in answers.values()} == {""}
        assert (minors(rig, SERIAL, "uid-a"), minors(rig, SERIAL, "uid-b")) == ([0], [1])

        writes = rig.slice_writes()
        serial.plug("port-a", 1)
        serial.plug("port-b", 0)
        serial.mark("port-a", "port-b")
        async with asyncio.timeout(2):
            while (minors(rig, SERIAL, "uid-a"), minors(rig, SERIAL, "uid-b")) != ([1], [0]):
                await asyncio.sleep(0.05)
        serial.mark()
        assert serial.called("unprepare") == []
        notes: dict[str, str] = {}

        def reported() -> bool:
            for body in rig.api_server.objects(EVENTS):
                if body["reason"] == "DeviceRenumbered":
                    notes[body["regarding"]["name"]] = body["note"]
            return len(notes) == 2

        await rig.until(reported)
        assert rig.slice_writes() == writes
        assert notes["claim-uid-a"] == (
            f"claim lab/claim-uid-a: on node {NODE}, the device number of port-a changed from "
            "c 188:0 to c 188:1; running containers keep the old number, and cannot open "
            "the new one until they restart; restart them, or delete the pods that use the claim"
        )
        assert (await stop(process))[0] == 0


async def test_a_claim_of_two_copies_of_an_unmodified_plugins_device(rig):
    """As with a generic plugin for /dev/fuse and ``count: 10``: ten IDs, and one device node."""

    def answer(ids: list[str]) -> deviceplugin_pb2.ContainerAllocateResponse:
        spec = deviceplugin_pb2.DeviceSpec(
            container_path="/dev/fuse", host_path="/dev/null", permissions="mrw"
        )
        return deviceplugin_pb2.ContainerAllocateResponse(devices=[spec] * len(ids))

    copies = [f"thing-{number}" for number in range(10)]
    rig.allocate_of("uid-a", (PLUGINS, POOL, "thing-0"), (PLUGINS, POOL, "thing-1"))
    rig.allocate_of("uid-b", (PLUGINS, POOL, "thing-2"))
    plugin = FakeDevicePlugin(rig.device_plugins, devices=copies)
    plugin.answer = answer
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        dra = await registered(kubelet, rig, PLUGINS)
        await rig.until((rig.device_plugins / "kubelet.sock").exists)
        async with plugin:
            await rig.until(lambda: len(rig.published_by(PLUGINS)) == 10)
            answers = await kubelet.prepare(dra, reference("uid-a"), reference("uid-b"))
            assert {uid: (a.error, len(a.devices)) for uid, a in answers.items()} == {
                "uid-a": ("", 2),
                "uid-b": ("", 1),
            }
            for uid in ("uid-a", "uid-b"):
                first = rig.spec_of(PLUGINS, uid)["devices"][0]["containerEdits"]
                assert [node["path"] for node in first["deviceNodes"]] == ["/dev/fuse"]
            assert (await stop(process))[0] == 0
