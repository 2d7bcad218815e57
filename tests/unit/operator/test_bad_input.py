"""The operator against an API server that refuses, fails, and serves odd objects or versions."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from drakit_daemon.kube import events, lease
from drakit_explain.kinds import KINDS
from tests.unit.operator.conftest import GROUP
from tests.unit.operator.replicas import LEASE, SHORT_LEASE, holder, probe, replica, until

pytestmark = pytest.mark.timeout(90)

V1 = f"/apis/{GROUP}/v1"
CLAIMS = f"{V1}/namespaces/lab/resourceclaims"
DEEP = "[" * 1200 + "]" * 1200


def waiting_for_a_taken_device(cluster) -> None:
    cluster.device_class("gpu")
    cluster.slice("s1", "g0")
    cluster.claim("taken", device="g0", pod="first")
    cluster.claim("wants")
    cluster.pod("second", "wants")


def note_of(cluster, pod: str) -> str:
    notes = {event["regarding"]["name"]: event["note"] for event in cluster.events()}
    return notes.get(pod, "")


@pytest.mark.parametrize(
    ("served", "version"),
    [
        pytest.param(["v1beta1"], "v1beta1", id="only-v1beta1-and-no-taint-rules"),
        pytest.param(["v1beta1", "v1alpha3"], "v1beta1", id="v1beta1-with-taint-rules-in-v1alpha3"),
    ],
)
async def test_a_cluster_with_older_versions(cluster, tmp_path, served, version):
    cluster.served[GROUP] = served
    cluster.version = version
    waiting_for_a_taken_device(cluster)
    async with replica(cluster, tmp_path, "one") as app:
        await until(lambda: cluster.told_of_pods() == {("Pod", "second", "DevicesAllocated")})
        await until(lambda: cluster.watch_count == len(KINDS) + (0 if served == ["v1beta1"] else 1))
        assert (await probe(app, "/readyz"))[0] == 200


async def test_an_upgrade_of_the_control_plane_needs_no_restart(cluster, tmp_path):
    cluster.served[GROUP] = ["v1beta1"]
    cluster.version = "v1beta1"
    waiting_for_a_taken_device(cluster)
    async with replica(cluster, tmp_path, "one", resyncPeriod=0.5):
        await until(lambda: cluster.told_of_pods() == {("Pod", "second", "DevicesAllocated")})
        cluster.served[GROUP] = ["v1", "v1beta2"]
        cluster.version = "v1"
        waiting_for_a_taken_device(cluster)
        await until(lambda: ("WATCH", f"{V1}/resourceslices") in cluster.requests)
        cluster.claim("new", device_class="none")
        cluster.pod("third", "new")
        await until(lambda: ("Pod", "third", "DeviceClassMissing") in cluster.told())


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_without_permission_for_nodes_the_rest_works_until_it_is_allowed(
    cluster, tmp_path, verb
):
    cluster.forbidden |= {(verb, "nodes"), (verb, "devicetaintrules")}
    waiting_for_a_taken_device(cluster)
    cluster.node("n1", unschedulable=True)
    async with replica(cluster, tmp_path, "one", resyncPeriod=0.5) as app:
        await until(lambda: cluster.told_of_pods() == {("Pod", "second", "DevicesAllocated")})
        limits = (
            "(not considered, because the operator lacks permission: nodes and DeviceTaintRules)"
        )
        assert limits in note_of(cluster, "second")
        assert (await probe(app, "/readyz"))[0] == 200
        _, numbers = await probe(app, "/metrics")
        assert 'drakit_operator_kind_listed{kind="nodes"} 0.0' in numbers
        assert 'drakit_operator_kind_listed{kind="pods"} 1.0' in numbers
        assert not {("GET", "/api/v1/nodes"), ("WATCH", "/api/v1/nodes")} & set(cluster.requests)
        cluster.forbidden.clear()
        expected = ("Pod", "second", "DevicesOnOtherNodes")
        await until(lambda: expected in cluster.told())


async def test_a_template_that_may_not_be_listed_is_not_reported_as_missing(cluster, tmp_path):
    cluster.forbidden.add(("list", "resourceclaimtemplates"))
    cluster.template("tpl")
    claim = {"name": "gpu", "resourceClaimTemplateName": "tpl"}
    pod = {"spec": {"resourceClaims": [claim]}, "status": {"phase": "Pending"}}
    cluster.store("/api/v1/namespaces/lab/pods/templated", pod)
    cluster.pod("second", "gone")
    async with replica(cluster, tmp_path, "one"):
        await until(lambda: cluster.told_of_pods() == {("Pod", "second", "ResourceClaimMissing")})
        await asyncio.sleep(1)
        assert len(cluster.events()) == 1


async def test_a_node_with_too_little_cpu_is_named(cluster, tmp_path):
    cluster.device_class("gpu")
    cluster.slice("s1", "g0")
    cluster.claim("wants")
    node = {"kind": "Node", "status": {"allocatable": {"cpu": "4", "pods": "110"}}}
    cluster.store("/api/v1/nodes/n1", {"apiVersion": "v1", **node})

    containers = [{"name": "c", "resources": {"requests": {"cpu": "3"}}}]
    cluster.pod("runs", phase="Running", nodeName="n1", containers=containers)
    cluster.pod("ended", phase="Succeeded", nodeName="n1", containers=containers)
    async with replica(cluster, tmp_path, "one", resyncPeriod=0.5):
        await until(cluster.is_watched)
        cluster.pod("second", "wants", containers=containers)
        await until(lambda: cluster.told_of_pods() == {("Pod", "second", "DevicesOnOtherNodes")})
        assert "too little cpu left" in note_of(cluster, "second")


def half_filled() -> dict[str, dict]:
    """Objects with fields that are missing, of another type, or newer than this version."""
    metadata = {"name": "odd"}
    return {
        f"{CLAIMS}/no-spec": {"kind": "ResourceClaim"},
        f"{CLAIMS}/half": {
            "kind": "ResourceClaim",
            "spec": {"devices": {"requests": [{"exactly": {}}]}},
            "status": {"allocation": {"devices": {"results": [{"device": "g0"}]}}},
        },
        f"{CLAIMS}/newer": {"kind": "ResourceClaim", "spec": {"devices": {"requests": {"a": 1}}}},
        f"{V1}/resourceslices/newer": {"kind": "ResourceSlice", "spec": {"devices": [7]}},
        f"{V1}/deviceclasses/newer": {"kind": "DeviceClass", "spec": {"selectors": "all"}},
        "/api/v1/namespaces/lab/pods/half": {
            "kind": "Pod",
            "metadata": metadata | {"name": "half"},
            "spec": {"nodeName": "n1", "containers": [{"resources": {"requests": {"cpu": "x"}}}]},
            "status": {"phase": "Running"},
        },
        "/api/v1/namespaces/lab/pods/waits": {
            "kind": "Pod",
            "spec": {"resourceClaims": [{"resourceClaimName": "half"}]},
            "status": {"phase": "Pending"},
        },
        "/api/v1/nodes/newer": {"kind": "Node", "spec": {"taints": [["a"]]}},
        f"/apis/{GROUP}/v1beta2/devicetaintrules/newer": {
            "kind": "DeviceTaintRule",
            "spec": {"deviceSelector": "all", "taint": []},
        },
    }


@pytest.mark.parametrize("when", ["listed", "watched"])
async def test_odd_objects_affect_only_themselves(cluster, tmp_path, when):
    def add_odd_objects():
        cluster.verbatim["@deep"] = DEEP
        for path, body in half_filled().items():
            cluster.store(path, {"apiVersion": "v1", **body})
        cluster.store(f"{CLAIMS}/deep", {"kind": "ResourceClaim", "spec": {"x": "@deep"}})
        large = {"kind": "ResourceClaim", "spec": {"x": "y" * 5 * 2**20}}
        cluster.store(f"{CLAIMS}/large", large)

    if when == "listed":
        add_odd_objects()
    async with replica(cluster, tmp_path, "one") as app:
        await until(cluster.is_watched)
        if when == "watched":
            add_odd_objects()
        cluster.claim("wants", device_class="none")
        cluster.pod("second", "wants")
        expected = ("Pod", "second", "DeviceClassMissing")
        await until(lambda: expected in cluster.told())
        assert (await probe(app, "/readyz"))[0] == 200
        assert (await probe(app, "/healthz"))[0] == 200
        _, numbers = await probe(app, "/metrics")
        kind = 'kind="resourceclaims.resource.k8s.io"'
        assert f"drakit_operator_skipped_objects_total{{{kind}}}" in numbers
        assert 'result="error"' not in numbers


async def test_a_storm_of_errors_ends_and_everything_is_explained(cluster, tmp_path):
    async with replica(cluster, tmp_path, "one") as app:
        await until(cluster.is_watched)
        for method in ("GET", "WATCH"):
            cluster.fail(method, status=503, reason="Unavailable", times=10_000)
        cluster.drop_watches()
        await asyncio.sleep(1.5)
        during = len(cluster.requests)
        await asyncio.sleep(1)
        assert len(cluster.requests) - during < 30, "it backs off"
        assert (await probe(app, "/healthz"))[0] == 200
        cluster.pod("second", "gone")
        cluster.heal()
        expected = {("Pod", "second", "ResourceClaimMissing")}
        await until(lambda: cluster.told_of_pods() == expected, seconds=40)
        assert holder(cluster) == "one"


@pytest.mark.parametrize("days", [1, -1], ids=["forwards", "backwards"])
async def test_a_jump_of_the_wall_clock_changes_nothing(cluster, tmp_path, monkeypatch, days):
    class Jumped(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=days)

    async with replica(cluster, tmp_path, "one", election=SHORT_LEASE) as app:
        await until(cluster.is_watched)
        for module in (events, lease):  # nothing else reads the wall clock
            monkeypatch.setattr(module, "datetime", Jumped)
        cluster.pod("second", "gone")
        await until(lambda: cluster.told_of_pods() == {("Pod", "second", "ResourceClaimMissing")})
        await asyncio.sleep(2.5)  # longer than the Lease
        assert holder(cluster) == "one"
        renewed = datetime.fromisoformat(cluster.object(LEASE)["spec"]["renewTime"])
        assert abs(renewed - datetime.now(UTC)) > timedelta(hours=23), "the clock did not jump"
        assert (await probe(app, "/readyz"))[0] == 200
        assert (await probe(app, "/healthz"))[0] == 200
    assert len(cluster.events()) == 1
