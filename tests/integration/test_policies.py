"""Policies and reports: the node plugin as a separate process, with an API server in memory."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import pytest

from drakit.layout import driver_directory
from tests.fakes.kubelet import FakeKubelet, reference
from tests.fakes.lamps import LAMPS, POLICIES
from tests.fakes.podresources import FakePodResources
from tests.integration.rig import NODE, SLICES, stop

REPORTS = "/apis/drakit.dev/v1alpha1/nodedevicereports"
REPORT = f"{REPORTS}/{NODE}.{LAMPS}"
SECONDS = 30
"""Time limit of each wait. A report is written at most once in 10 s."""


@pytest.fixture
def lamps(rig):
    rig.config["drivers"] = [{"driver": "tests.fakes.lamps:Lamps"}]
    rig.api_server.cluster.without_status.add(REPORTS)
    return rig


def policy(rig, name: str, **spec) -> None:
    path = f"{POLICIES}/{name}"
    old = rig.api_server.object(path)
    generation = 1 if old is None else old["metadata"]["generation"] + 1
    rig.api_server.store(path, {"metadata": {"generation": generation}, "spec": spec})


async def until(condition) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.05)


async def reported(rig, condition) -> dict:
    """Wait for a report that fulfils a condition, and return its status."""
    async with asyncio.timeout(SECONDS):
        while True:
            report = rig.api_server.object(REPORT)
            if report is not None and condition(report["status"]):
                return report["status"]
            await asyncio.sleep(0.05)


def by_name(status: dict) -> dict[str, dict]:
    return {each["name"]: each for each in status["policies"]}


async def test_policies_are_applied_changed_broken_mended_and_deleted(lamps):
    policy(lamps, "hall", lamps=2)
    async with lamps.serving() as (_, _, process):
        await until(lambda: lamps.published() == ["hall-0", "hall-1"])
        status = await reported(lamps, lambda s: s["devices"]["published"] == 2)
        assert lamps.api_server.objects("/apis/events.k8s.io/v1/events") == []
        assert status["registration"] == {"state": "Registered"}
        assert status["endpoints"] == [{"name": LAMPS, "state": "Running"}]
        assert by_name(status)["hall"] == {
            "name": "hall",
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
        assert status["leftOut"] == [
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
    lamps.allocate("uid-a", "hall-1", driver=LAMPS)
    async with lamps.serving() as (kubelet, dra, process):
        await until(lambda: lamps.published() == ["hall-0", "hall-1"])
        assert (await kubelet.prepare(dra, reference("uid-a")))["uid-a"].error == ""
        # Refused policies do not replace those in force, neither now nor on the node.
        policy(lamps, "wine", lamps=1, room="cellar")
        status = await reported(lamps, lambda s: "policiesRefused" in s)
        assert "the cellar has no lamps" in status["policiesRefused"]
        await stop(process)
    before = lamps.api_server.objects(SLICES)
    report = lamps.api_server.object(REPORT)

    # The claim itself must be read after a reboot.
    for path in (POLICIES, SLICES, "/api/v1/nodes"):
        lamps.api_server.fail(path=path, status=503, times=1_000_000)
    (lamps.root / "boot_id").write_text("boot-2\n")
    async with lamps.serving() as (kubelet, dra, process):
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


def lose_claims(rig) -> None:
    """Remove the entries of claims, but not their CDI files."""
    with closing(sqlite3.connect(driver_directory(rig.root, LAMPS) / "checkpoint.db")) as database:
        for table in ("claims", "bodies", "devices", "counters"):
            database.execute(f"DELETE FROM {table}")
        database.commit()


@pytest.mark.timeout(90)  # three lives of the node plugin
async def test_nothing_is_listed_before_a_lost_checkpoint_is_rebuilt(lamps):
    """The policy of the held lamp is deleted during the restart."""
    lamps.config["devices"] = {"startGracePeriod": "1s", "endpointStopGracePeriod": "1s"}
    policy(lamps, "hall", lamps=2)
    lamps.allocate("uid-a", "hall-1", driver=LAMPS)
    async with lamps.serving() as (kubelet, dra, process):
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
