"""Policies and reports: the node plugin as a separate process, with an API server in memory."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from functools import partial

import pytest

from drakit.layout import driver_directory
from drakit_formats import crds
from tests.fakes.kubelet import FakeKubelet, reference
from tests.fakes.lamps import LAMPS, POLICIES
from tests.fakes.podresources import FakePodResources
from tests.fakes.tasks import until as wait_until
from tests.integration.test_node_plugin import CLAIMS, NODE, SLICES, rig, stop  # noqa: F401

REPORTS = f"/apis/{crds.API_VERSION}/nodedevicereports"
REPORT = f"{REPORTS}/{NODE}.{LAMPS}"
SECONDS = 30
"""Time limit of each wait. A report is written at most once in 10 s."""


@pytest.fixture
def lamps(rig):  # noqa: F811
    rig.config["drivers"] = [{"driver": "tests.fakes.lamps:Lamps"}]
    return rig


def policy(rig, name: str, **spec) -> None:  # noqa: F811
    path = f"{POLICIES}/{name}"
    old = rig.api_server.object(path)
    generation = 1 if old is None else old["metadata"]["generation"] + 1
    rig.api_server.store(path, {"metadata": {"generation": generation}, "spec": spec})


until = partial(wait_until, seconds=SECONDS)


async def reported(rig, condition) -> dict:  # noqa: F811
    """Wait for a report that fulfils a condition, and return its status."""
    async with asyncio.timeout(SECONDS):
        while True:
            report = rig.api_server.object(REPORT)
            if report is not None and "status" in report and condition(report["status"]):
                return report["status"]
            await asyncio.sleep(0.05)


def by_name(status: dict) -> dict[str, dict]:
    return {each["name"]: each for each in status["policies"]}


def allocate(lamps, uid: str, device: str) -> None:
    """Store a claim that has a device."""
    result = {"driver": LAMPS, "pool": NODE, "request": "main", "device": device}
    allocation = {"devices": {"results": [result]}}
    lamps.api_server.store(
        f"{CLAIMS}/claim-{uid}",
        {"metadata": {"uid": uid}, "status": {"allocation": allocation}},
    )


async def test_policies_are_applied_changed_broken_mended_and_deleted(lamps):
    policy(lamps, "hall", lamps=2)
    async with FakeKubelet(lamps.root) as kubelet, lamps.plugin() as process:
        await until(kubelet.sockets)
        await kubelet.register()
        await until(lambda: lamps.published() == ["hall-0", "hall-1"])
        status = await reported(lamps, lambda s: s["devices"]["published"] == 2)
        assert lamps.api_server.objects("/apis/events.k8s.io/v1/events") == []
        assert {each["type"]: each["status"] for each in status["conditions"]} == {
            "Registered": "True",
            "EndpointsRunning": "True",
            "ClaimsProgressing": "True",
        }
        assert status["endpoints"] == [{"name": LAMPS, "state": "Running"}]
        assert by_name(status)["hall"] == {
            "name": "hall",
            "uid": lamps.api_server.object(f"{POLICIES}/hall")["metadata"]["uid"],
            "observedGeneration": 1,
            "generation": 1,
            "matched": 2,
            "published": 2,
        }
        body = lamps.api_server.object(REPORT)
        assert body["spec"] == {"nodeName": NODE, "driver": LAMPS}
        assert body["metadata"]["ownerReferences"] == [
            {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": "node-uid"}
        ]

        policy(lamps, "hall", lamps=5)
        await until(lambda: len(lamps.published()) == 4)
        policy(lamps, "hall", lamps="many")
        policy(lamps, "porch", lamps=1)
        await until(lambda: len(lamps.published()) == 5)
        status = await reported(lamps, lambda s: "porch" in by_name(s))
        hall = by_name(status)["hall"]
        assert (hall["observedGeneration"], hall["generation"]) == (3, 2)
        assert hall["problem"].startswith("spec.lamps: Input should be a valid integer")
        assert status["rejectedDevices"] == [
            {
                "device": "/lamps/hall/4",
                "policy": "hall",
                "reason": "TooMany",
                "message": "a policy has at most 4 lamps",
            }
        ]

        policy(lamps, "hall", lamps=1)
        await until(lambda: sorted(lamps.published()) == ["hall-0", "porch-0"])
        lamps.api_server.remove(f"{POLICIES}/porch")
        await until(lambda: lamps.published() == ["hall-0"])
        await stop(process)


async def test_a_restart_without_the_api_server_keeps_devices_and_prepares_after_a_reboot(lamps):
    lamps.api_server.store(f"/api/v1/nodes/{NODE}", {"metadata": {"labels": {"floor": "1"}}})
    policy(lamps, "hall", lamps=2, nodeSelector={"floor": "1"})
    allocate(lamps, "uid-a", "hall-1")
    async with FakeKubelet(lamps.root) as kubelet, lamps.plugin() as process:
        await until(kubelet.sockets)
        dra = await kubelet.register()
        await until(lambda: lamps.published() == ["hall-0", "hall-1"])
        assert (await kubelet.prepare(dra, reference("uid-a")))["uid-a"].error == ""
        # Refused policies do not replace those in force, neither now nor on the node.
        policy(lamps, "wine", lamps=1, room="cellar")
        status = await reported(lamps, lambda s: "policiesRefused" in s)
        assert "the cellar has no lamps" in status["policiesRefused"]
        assert by_name(status)["hall"]["generation"] == 1
        assert "generation" not in by_name(status)["wine"]
        await stop(process)
    before = lamps.api_server.objects(SLICES)
    report = lamps.api_server.object(REPORT)

    # The claim itself must be read after a reboot.
    for path in (POLICIES, SLICES, "/api/v1/nodes"):
        lamps.api_server.fail(path=path, status=503, times=1_000_000)
    (lamps.root / "boot_id").write_text("boot-2\n")
    async with FakeKubelet(lamps.root) as kubelet, lamps.plugin() as process:
        await until(kubelet.sockets)
        dra = await kubelet.register()
        async with asyncio.timeout(SECONDS):
            while error := (await kubelet.prepare(dra, reference("uid-a")))["uid-a"].error:
                assert "not listed its devices yet" in error
                await asyncio.sleep(0.1)
        lamps.api_server.heal()
        policy(lamps, "porch", lamps=1, nodeSelector={"floor": "1"})
        lamps.api_server.remove(f"{POLICIES}/wine")
        await until(lambda: "porch-0" in lamps.published())
        after = lamps.api_server.objects(SLICES)
        assert [each["metadata"]["uid"] for each in after] == [
            each["metadata"]["uid"] for each in before
        ]
        assert {"hall-0", "hall-1"} <= set(lamps.published())
        await stop(process)
    assert report["metadata"]["uid"] == lamps.api_server.object(REPORT)["metadata"]["uid"]


async def test_without_the_resources_there_are_no_policies_and_no_report_until_they_are_installed(
    lamps,
):
    lamps.api_server.served["lamps.example.com"] = []
    lamps.api_server.served["drakit.dev"] = []
    async with FakeKubelet(lamps.root) as kubelet, lamps.plugin() as process:
        await until(kubelet.sockets)
        await kubelet.register()
        # A driver without policies publishes an empty pool: it is running.
        await until(lambda: lamps.api_server.objects(SLICES))
        assert lamps.published() == []
        await until(lambda: ("PATCH", REPORT) in lamps.api_server.requests)
        del lamps.api_server.served["lamps.example.com"], lamps.api_server.served["drakit.dev"]
        policy(lamps, "hall", lamps=1)
        await until(lambda: lamps.published() == ["hall-0"])
        await until(lambda: lamps.api_server.object(REPORT))
        _, errors = await stop(process)
    lines = [json.loads(line) for line in errors.splitlines()]
    messages = [line["msg"] for line in lines if line["level"] in ("WARNING", "ERROR")]
    assert messages.count("report cannot be written") == 1
    assert messages.count("cannot list or watch, retrying") <= 1


async def test_a_thousand_changes_end_in_a_bounded_number_of_writes(lamps):
    policy(lamps, "hall", lamps=1)
    async with FakeKubelet(lamps.root) as kubelet, lamps.plugin() as process:
        await until(kubelet.sockets)
        await kubelet.register()
        await until(lambda: lamps.published() == ["hall-0"])
        await reported(lamps, lambda s: s["devices"]["published"] == 1)
        began = asyncio.get_running_loop().time()
        lamps.api_server.requests.clear()
        for count in range(1000):
            policy(lamps, "hall", lamps=count % 4)
            if count % 50 == 0:
                await asyncio.sleep(0)
        policy(lamps, "hall", lamps=3)
        await until(lambda: len(lamps.published()) == 3)
        status = await reported(lamps, lambda s: s["devices"]["published"] == 3)
        assert by_name(status)["hall"]["observedGeneration"] == 1002
        seconds = asyncio.get_running_loop().time() - began
        writes = [path for _, path in lamps.api_server.writes()]
        assert len([path for path in writes if "resourceslices" in path]) <= seconds + 2
        assert len([path for path in writes if path == REPORT]) <= seconds / 10 + 1
        await stop(process)


async def test_a_damaged_copy_is_quarantined_and_replaced_by_the_servers_list(lamps):
    policy(lamps, "hall", lamps=1)
    data = driver_directory(lamps.root, LAMPS)
    copy = data / "policies.json"
    async with FakeKubelet(lamps.root), lamps.plugin() as process:
        await until(copy.exists)
        await stop(process)
    copy.write_text("{")
    async with FakeKubelet(lamps.root) as kubelet, lamps.plugin() as process:
        await until(kubelet.sockets)
        await kubelet.register()
        await until(lambda: lamps.published() == ["hall-0"])
        await until(lambda: copy.exists() and "hall" in copy.read_text())
        assert (data / "policies.json.damaged").read_text() == "{"
        await stop(process)


def lose_claims(rig) -> None:  # noqa: F811
    """Remove the entries of claims, but not their CDI files."""
    with closing(sqlite3.connect(driver_directory(rig.root, LAMPS) / "checkpoint.db")) as database:
        for table in ("claims", "bodies", "devices", "counters"):
            database.execute(f"DELETE FROM {table}")
        database.commit()


def set_schema_version(rig, version: int) -> None:  # noqa: F811
    with closing(sqlite3.connect(driver_directory(rig.root, LAMPS) / "checkpoint.db")) as database:
        database.execute(f"PRAGMA user_version = {version}")


async def test_nothing_is_listed_while_it_is_unknown_what_claims_hold(lamps):
    lamps.config["devices"] = {"startGracePeriod": "1s", "endpointStopGracePeriod": "1s"}
    policy(lamps, "hall", lamps=2)
    async with FakeKubelet(lamps.root) as kubelet, lamps.plugin() as process:
        await until(kubelet.sockets)
        await kubelet.register()
        await until(lambda: lamps.published() == ["hall-0", "hall-1"])
        await stop(process)
    before = lamps.api_server.objects(SLICES)
    set_schema_version(lamps, 99)  # as if a later drakit had written it
    policy(lamps, "hall", lamps=1)
    policy(lamps, "porch", lamps=1)

    async with FakeKubelet(lamps.root) as kubelet, lamps.plugin() as process:
        await until(kubelet.sockets)
        await kubelet.register()
        await asyncio.sleep(4)  # longer than both grace periods
        assert lamps.api_server.objects(SLICES) == before
        set_schema_version(lamps, 1)
        await until(lambda: sorted(lamps.published()) == ["hall-0", "porch-0"])
        code, errors = await stop(process)
    assert code == 0, errors
    assert "driver waits: the devices that claims hold are unknown" in errors
    assert "endpoint stopped" not in errors


@pytest.mark.timeout(90)  # three lives of the node plugin
async def test_nothing_is_listed_before_a_lost_checkpoint_is_rebuilt(lamps):
    """The policy of the held lamp is deleted during the restart."""
    lamps.config["devices"] = {"startGracePeriod": "1s", "endpointStopGracePeriod": "1s"}
    policy(lamps, "hall", lamps=2)
    allocate(lamps, "uid-a", "hall-1")
    async with FakeKubelet(lamps.root) as kubelet, lamps.plugin() as process:
        await until(kubelet.sockets)
        dra = await kubelet.register()
        await until(lambda: lamps.published() == ["hall-0", "hall-1"])
        assert (await kubelet.prepare(dra, reference("uid-a")))["uid-a"].error == ""
        await asyncio.sleep(2)  # until the names of its devices are stored
        await stop(process)
    before = lamps.api_server.objects(SLICES)
    lose_claims(lamps)
    lamps.api_server.remove(f"{POLICIES}/hall")
    policy(lamps, "porch", lamps=1)

    async with (
        FakePodResources(lamps.root / "pod-resources" / "kubelet.sock") as podresources,
        FakeKubelet(lamps.root) as kubelet,
    ):
        podresources.synced = False
        async with lamps.plugin() as process:
            await until(kubelet.sockets)
            await kubelet.register()
            await until(lambda: podresources.calls)
            await asyncio.sleep(3)  # longer than both grace periods
            assert lamps.api_server.objects(SLICES) == before
            await stop(process)
        podresources.synced = True
        podresources.add("claim-uid-a", "hall-1", uid="uid-a", driver=LAMPS)
        async with lamps.plugin() as process:
            await until(lambda: sorted(lamps.published()) == ["hall-1", "porch-0"])
            await stop(process)
