"""The node plugin as a separate process, with a fake kubelet and an API server in memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from drakit.layout import driver_directory
from tests.fakes.kubelet import FakeKubelet, reference
from tests.fakes.podresources import OWN_POD_ENVIRONMENT

DRIVER = "shelf.example.com"
NODE = "node-1"
ROOT = Path(__file__).parents[2]
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims"


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
                "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
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

    async def until(self, look) -> None:
        async with asyncio.timeout(10):
            while not look():
                await asyncio.sleep(0.02)

    def allocate(self, uid: str, *devices: str) -> None:
        results = [
            {"driver": DRIVER, "pool": NODE, "request": "main", "device": device}
            for device in devices
        ]
        self.api_server.store(
            f"{CLAIMS}/claim-{uid}",
            {
                "metadata": {"uid": uid},
                "status": {"allocation": {"devices": {"results": results}}},
            },
        )

    def published(self) -> list[str]:
        return [
            d["name"] for body in self.api_server.objects(SLICES) for d in body["spec"]["devices"]
        ]

    def writes(self) -> int:
        """Writes of the API server, without those of reports, which come later."""
        paths = [path for _, path in self.api_server.writes()]
        return len([path for path in paths if "nodedevicereports" not in path])

    def files(self) -> set[str]:
        return {path.name for path in self.cdi.glob("*")}

    def left(self) -> set[str]:
        data = driver_directory(self.root, DRIVER)
        return {p.name for d in (data, self.root / "plugins_registry") for p in d.glob("*")}


@pytest.fixture
def rig(api_server):
    # Unix socket paths have at most 107 bytes: pytest's own directories are too deep.
    folder = Path(tempfile.mkdtemp(prefix="drakit-", dir="/tmp"))
    (folder / "shelf").parent.mkdir(exist_ok=True)
    yield Rig(folder, api_server)
    shutil.rmtree(folder)


async def stop(process) -> tuple[int, str]:
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        _, errors = await process.communicate()
    return process.returncode, errors.decode()


async def test_the_way_of_a_claim(rig):
    (rig.shelf / "atlas").touch()
    rig.allocate("uid-a", "atlas")
    claim = reference("uid-a")
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: kubelet.sockets() and rig.published() == ["atlas"])
        dra = await kubelet.register()
        for version in ("v1", "v1beta1"):
            answer = (await kubelet.prepare(dra, claim, version=version))["uid-a"]
            assert (answer.error, answer.devices[0].device_name) == ("", "atlas")
        (file,) = rig.files()
        spec = json.loads((rig.cdi / file).read_text())
        assert spec["devices"][0]["containerEdits"]["env"] == ["BOOK=atlas"]

        (rig.cdi / file).unlink()
        await rig.until(lambda: rig.files() == {file})

        assert await kubelet.unprepare(dra, claim) == {"uid-a": ""}
        assert rig.files() == set()
        code, errors = await stop(process)
    assert code == 0, errors
    assert rig.left() == {"checkpoint.db"}
    assert rig.published() == ["atlas"], "a stop leaves the slices to the next start"


async def test_hostdev_without_policies_starts_registers_and_publishes_nothing(rig):
    """Run the plugin with the configuration of a plain install of the chart."""
    rig.config["drivers"] = [{"driver": "hostdev", "config": {"policies": {}}}]
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(kubelet.sockets)
        await kubelet.register()
        code, errors = await stop(process)
    assert code == 0, errors
    assert rig.published() == []


async def test_a_restart_writes_no_slice_and_knows_what_was_prepared(rig):
    (rig.shelf / "atlas").touch()
    rig.allocate("uid-a", "atlas")
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: kubelet.sockets() and rig.published())
        await kubelet.prepare(await kubelet.register(), reference("uid-a"))
        process.kill()
        await process.communicate()
        (stale,) = kubelet.sockets()
    (file,) = rig.files()
    (rig.cdi / file).unlink()
    writes = rig.writes()

    rig.api_server.fail("GET", CLAIMS, disconnect=True, times=1000)
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: rig.files() == {file})
        # One listing: between two, the stale socket may vanish before the new one appears.
        await rig.until(lambda: kubelet.sockets() not in ([], [stale]))
        dra = await kubelet.register()
        assert (await kubelet.prepare(dra, reference("uid-a")))["uid-a"].error == ""
        assert await kubelet.unprepare(dra, reference("uid-a")) == {"uid-a": ""}
        await stop(process)
    assert rig.writes() == writes
    assert rig.left() == {"checkpoint.db"}


async def test_a_stop_lets_a_call_in_flight_end(rig):
    (rig.shelf / "slow-atlas").touch()
    rig.allocate("uid-a", "slow-atlas")
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: kubelet.sockets() and rig.published())
        dra = await kubelet.register()
        call = asyncio.create_task(kubelet.prepare(dra, reference("uid-a")))
        await rig.until(lambda: ("GET", f"{CLAIMS}/claim-uid-a") in rig.api_server.requests)
        code, _ = await stop(process)
        assert (await call)["uid-a"].error == ""
    assert code == 0
    assert len(rig.files()) == 1


async def test_a_damaged_checkpoint_is_quarantined_and_reported(rig):
    data = driver_directory(rig.root, DRIVER)
    data.mkdir(parents=True)
    (data / "checkpoint.db").write_text("not a database, but long enough to be taken for one" * 99)
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(lambda: any("events" in path for _, path in rig.api_server.writes()))
        assert kubelet.sockets()
        code, _ = await stop(process)
    assert code == 0
    assert any(name.startswith("checkpoint.db.damaged-") for name in rig.left())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param({"kubletRoot": "/x"}, "kubletRoot: is not a known key", id="unknown-key"),
        pytest.param(
            {"bootIDFile": "/no/such/file"},
            "bootIDFile: /no/such/file cannot be read: No such file",
            id="no-boot-id",
        ),
        pytest.param(
            {
                "drivers": [
                    {"driver": "tests.fakes.shelf:Shelf", "config": {"directory": "/no/such"}}
                ]
            },
            "drivers[0].config: directory: /no/such is not a directory",
            id="driver-refuses",
        ),
        pytest.param(
            {
                "drivers": [
                    {
                        "driver": "hostdev",
                        "config": {
                            "policies": {
                                "x": {"match": [{"subsystem": "misc", "paths": ["/dev/[a"]}]}
                            }
                        },
                    }
                ]
            },
            "drivers[0].config.policies.x.match[0].paths[0]",
            id="bad-glob",
        ),
        pytest.param(
            {"listen": {"probes": "127.0.0.1:99999"}},
            "listen.probes: '127.0.0.1:99999' is not host:port",
            id="listen",
        ),
        pytest.param(
            {"listen": {"metrics": "192.0.2.1:8080"}},
            "listen.metrics: 192.0.2.1:8080 cannot be used",
            id="listen-elsewhere",
        ),
    ],
)
async def test_a_mistake_in_the_configuration_is_refused_with_file_key_and_reason(
    rig, change, sentence
):
    rig.config |= change
    async with rig.plugin() as process:
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert f"{rig.root}/plugin.yaml: " in errors.decode()
    assert sentence in errors.decode()
    assert rig.left() <= {"checkpoint.db"}


async def test_a_claim_that_fails_gets_an_event_and_another_one_when_it_recovers(rig):
    events = "/apis/events.k8s.io/v1/namespaces/lab/events"
    (rig.shelf / "atlas").touch()
    rig.allocate("uid-a", "atlas")
    rig.allocate("uid-b", "atlas")
    async with FakeKubelet(rig.root) as kubelet, rig.plugin() as process:
        await rig.until(kubelet.sockets)
        dra = await kubelet.register()
        await kubelet.prepare(dra, reference("uid-a"))
        refused = (await kubelet.prepare(dra, reference("uid-b")))["uid-b"].error
        await rig.until(lambda: rig.api_server.objects(events))
        (event,) = rig.api_server.objects(events)
        assert (event["type"], event["reason"], event["note"]) == (
            "Warning",
            "PrepareFailed",
            refused,
        )
        assert event["regarding"]["kind"] == "ResourceClaim"
        assert event["regarding"]["uid"] == "uid-b"

        await kubelet.unprepare(dra, reference("uid-a"))
        await kubelet.prepare(dra, reference("uid-b"))
        await rig.until(lambda: len(rig.api_server.objects(events)) == 2)
        assert {e["reason"] for e in rig.api_server.objects(events)} == {
            "PrepareFailed",
            "Prepared",
        }
        await stop(process)
