"""The operator as a whole, with Kopf, against an API server in memory. Seconds are real here."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from drakit_explain.kinds import MAINTENANCES
from drakit_formats import crds
from drakit_operator.sources import LoadWatch
from e2e.closed_list import Write, documented
from tests.unit.operator.replicas import LEASE, SHORT_LEASE, config, holder, probe, replica, until

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def process(cluster, folder, name, **options) -> AsyncIterator[asyncio.subprocess.Process]:
    """A replica as it is deployed: a process with arguments and environment."""
    settings = folder / "config.yaml"
    settings.write_text(config(election=SHORT_LEASE).model_dump_json(by_alias=True))
    arguments = ["--config", settings, "--kubeconfig", cluster.write_kubeconfig(folder)]
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "drakit_operator",
        *arguments,
        env=os.environ | {"POD_NAME": name, "POD_NAMESPACE": "sys"},
        **options,
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def writes_elsewhere(cluster) -> list:
    """Return the writes that the operator's page does not list."""
    return [
        (method, path)
        for method, path in cluster.writes()
        if Write(VERBS[method], resource_of(path)) not in documented()
    ]


def resource_of(path: str) -> str:
    """Return the resource of a path, with the subresource if there is one."""
    _, _, _, _, *rest = path.split("/")  # /apis/GROUP/VERSION/namespaces/NAMESPACE/...
    resource, *names = rest[2:] if rest[0] == "namespaces" else rest
    return "/".join((resource, *names[1:]))


async def test_pods_and_templates_get_an_event_with_the_reason(cluster, tmp_path):
    cluster.device_class("gpu")
    cluster.slice("s1", "g0")
    cluster.claim("taken", device="g0", pod="first")
    cluster.pod("old", "gone")
    async with replica(cluster, tmp_path, "one") as app:
        await until(cluster.is_watched)
        cluster.fail("POST", "/apis/events.k8s.io", status=503, times=2)
        cluster.claim("wants-gpu")
        cluster.claim("wants-none", device_class="none")
        cluster.template("tpl", device_class="none")
        cluster.pod("second", "wants-gpu")
        cluster.pod("third", "wants-none")
        cluster.pod("runs", "wants-none", phase="Running")
        expected = {
            ("Pod", "old", "ResourceClaimMissing"),
            ("Pod", "second", "DevicesAllocated"),
            ("Pod", "third", "DeviceClassMissing"),
            ("ResourceClaim", "wants-gpu", "DevicesAllocated"),
            ("ResourceClaim", "wants-none", "DeviceClassMissing"),
            ("ResourceClaimTemplate", "tpl", "DeviceClassMissing"),
        }
        await until(lambda: cluster.told() == expected)
        notes = {event["regarding"]["name"]: event["note"] for event in cluster.events()}
        assert "claim lab/taken (pod first)" in notes["second"]
        assert notes["wants-gpu"].startswith(
            "ResourceClaim lab/wants-gpu is not allocated for pod second: the only device"
        )

        # Passes that find the same write nothing more.
        written = len(cluster.writes_of_events())
        for generation in range(3):
            cluster.slice(f"other-{generation}", "x", driver="elsewhere")
            await asyncio.sleep(0.5)
        assert len(cluster.writes_of_events()) == written
        assert cluster.told() == expected

        assert (await probe(app, "/healthz"))[0] == 200
        assert (await probe(app, "/readyz"))[0] == 200
        _, numbers = await probe(app, "/metrics")
        assert "drakit_operator_leader 1.0" in numbers
        assert 'drakit_operator_events_total{reason="DeviceClassMissing"} 3.0' in numbers
    assert writes_elsewhere(cluster) == []
    assert holder(cluster) == "", "the Lease was not released"


async def test_the_rules_are_those_of_the_release_of_kubernetes(cluster, tmp_path):
    cluster.texts["/version"] = json.dumps({"gitVersion": "v1.34.13"})
    cluster.device_class("gpu")
    cluster.slice("s1", "g0", "g0", node="n1")
    cluster.slice("s2", "g0", node="n2")
    cluster.claim("mine")
    cluster.pod("waits", "mine")
    async with replica(cluster, tmp_path, "one"):
        told = {("Pod", "waits", "PoolInvalid"), ("ResourceClaim", "mine", "PoolInvalid")}
        await until(lambda: cluster.told() == told)
    assert "the pod would fit on node n2, but the scheduler gives up" in cluster.events()[0]["note"]


async def test_the_log_names_the_release_that_is_assumed(cluster, tmp_path, caplog):
    caplog.set_level("INFO", "drakit_operator")
    cluster.texts["/version"] = json.dumps({"gitVersion": "v1.36.2"})
    cluster.fail("GET", "/version", status=403, times=1)

    def assumed() -> list[str]:
        return [vars(each)["assumed"] for each in caplog.records if hasattr(each, "assumed")]

    async with replica(cluster, tmp_path, "one", resyncPeriod=0.3):
        await until(lambda: assumed() == ["the newest one"])
        await until(lambda: "the release of Kubernetes is known" in caplog.messages)
        cluster.fail("GET", "/version", status=403, times=1)
        await until(lambda: assumed() == ["the newest one", "1.36"])


async def until_ready(app, *, is_ready: bool = True) -> None:
    await until(lambda: app.servers.probes._listener)
    async with asyncio.timeout(20):
        while ((await probe(app, "/readyz"))[0] == 200) is not is_ready:
            await asyncio.sleep(0.05)


async def test_probes_do_not_wait_for_the_main_loop(cluster, tmp_path, monkeypatch):
    def statuses(app, *, busy_seconds) -> list[int]:
        """Ask for the status while the main loop does something else."""
        with ThreadPoolExecutor() as threads:
            asked = [
                threads.submit(status, app, path, after_seconds=busy_seconds / 2)
                for path in ("/healthz", "/readyz", "/metrics")
            ]
            ends = time.monotonic() + busy_seconds
            while time.monotonic() < ends:
                pass
            return [each.result(timeout=2) for each in asked]

    monkeypatch.setattr("drakit_operator.app.HEALTH_SECONDS", 0.1)
    # The API server of this test is in the main loop, too.
    long_lease = {"leaseDuration": 60, "renewDeadline": 50, "retryPeriod": 0.2}
    async with replica(cluster, tmp_path, "one", election=long_lease) as app:
        await until(cluster.is_watched)
        await until_ready(app)
        assert statuses(app, busy_seconds=3) == [200, 200, 200]
        monkeypatch.setattr("drakit_operator.app.HANGING_LIMIT_SECONDS", 1)
        await until_ready(app)
        assert statuses(app, busy_seconds=4) == [503, 503, 200]
        await until_ready(app)
        assert holder(cluster) == "one"


def status(app, path, *, after_seconds) -> int:
    time.sleep(after_seconds)
    port = (app.servers.metrics if path == "/metrics" else app.servers.probes).port
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


async def test_an_error_on_a_node_without_room_is_no_reason_while_pods_are_listed(
    cluster, tmp_path, monkeypatch
):
    cluster.texts["/version"] = json.dumps({"gitVersion": "v1.34.13"})
    for name, room in (("n1", "1"), ("n2", "9")):
        cluster.store(f"/api/v1/nodes/{name}", {"status": {"allocatable": {"pods": room}}})
    cluster.device_class("gpu")
    cluster.slice("s1", "g0", "g0", node="n1")
    cluster.slice("s2", "g0", node="n2")
    cluster.claim("mine")
    cluster.pod("waits", "mine")
    cluster.pod("runs", phase="Running", nodeName="n1")
    listed = asyncio.Event()

    async def run_late(watch, *, run=LoadWatch.run):
        await asyncio.sleep(2)
        listed.set()
        await run(watch)

    monkeypatch.setattr(LoadWatch, "run", run_late)
    async with replica(cluster, tmp_path, "one"):
        await listed.wait()
        await asyncio.sleep(2)
        assert cluster.told() == set()
        cluster.remove("/api/v1/namespaces/lab/pods/runs")
        cluster.pod("waits", "mine", message="again")
        await until(lambda: ("Pod", "waits", "PoolInvalid") in cluster.told())


async def test_the_second_replica_goes_on_at_once_when_the_leader_stops(cluster, tmp_path):
    cluster.pod("waits", "gone")
    async with replica(cluster, tmp_path, "one") as first:
        await until(lambda: len(cluster.told()) == 1)
        async with replica(cluster, tmp_path, "two") as second:
            await asyncio.sleep(0.5)
            await until_ready(second)
            assert holder(cluster) == "one"
            first.stop.set()
            await until(lambda: holder(cluster) == "two", seconds=10)
            cluster.pod("late", "gone")
            await until(lambda: len(cluster.told()) == 2, seconds=10)
    # The new leader increases the count of the first leader's Event, and writes no second one.
    assert len(cluster.events()) == 2
    assert writes_elsewhere(cluster) == []


async def test_the_second_process_goes_on_when_the_first_is_killed(cluster, tmp_path):
    cluster.pod("waits", "gone")
    async with process(cluster, tmp_path, "one") as first:
        await until(lambda: len(cluster.told()) == 1)
        async with process(cluster, tmp_path, "two") as second:
            await asyncio.sleep(0.5)
            assert holder(cluster) == "one"
            first.kill()
            cluster.pod("late", "gone")
            await until(lambda: len(cluster.told()) == 2)
            assert holder(cluster) == "two"
            second.terminate()
            assert await asyncio.wait_for(second.wait(), 20) == 0
    assert holder(cluster) == "", "the Lease was not released"
    assert len(cluster.events()) == 2
    assert writes_elsewhere(cluster) == []


@pytest.mark.parametrize("missing", ["resource", "permission"])
async def test_policies_are_served_as_soon_as_they_can_be(cluster, tmp_path, missing):
    if missing == "resource":
        cluster.served["drakit.dev"] = []
    else:
        cluster.forbidden.add(("list", "hostdevicepolicies"))
    cluster.pod("waits", "gone")
    path = f"/apis/{crds.API_VERSION}/hostdevicepolicies/serial"
    async with replica(cluster, tmp_path, "one", resyncPeriod=0.3) as app:
        await until(lambda: cluster.told() == {("Pod", "waits", "ResourceClaimMissing")})
        cluster.add_policy("serial")
        await asyncio.sleep(1)
        assert "status" not in cluster.object(path)
        assert (await probe(app, "/readyz"))[0] == 200
        cluster.served["drakit.dev"] = [crds.VERSION]
        cluster.forbidden.clear()
        await until(lambda: cluster.object(path).get("status"))


async def test_policies_are_left_alone_where_hostdev_is_not_enabled(cluster, tmp_path):
    cluster.forbidden.add(("list", "hostdevicepolicies"))
    cluster.add_policy("serial")
    cluster.pod("waits", "gone")
    async with replica(cluster, tmp_path, "one", hostDevicePolicies=False) as app:
        await until(lambda: cluster.told() == {("Pod", "waits", "ResourceClaimMissing")})
        assert app._leader.sources.problem() is None
    assert not [path for _, path in cluster.requests if "hostdevicepolicies" in path]


async def test_a_maintenance_taints_the_devices_of_a_class_and_its_status_says_so(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setattr("drakit_operator.maintenance.WRITE_SECONDS", 0.5)
    path = f"/apis/{crds.API_VERSION}/devicemaintenances/fix"
    rules = "/apis/resource.k8s.io/v1beta2/devicetaintrules"
    cluster.device_class("gpu")
    cluster.slice("s", "g0", "g1")
    async with replica(cluster, tmp_path, "one", resyncPeriod=0.3) as app:
        await until(cluster.is_watched)
        cluster.add_maintenance("fix", **{"class": "gpu"})
        await until(lambda: len(cluster.objects(rules)) == 2)
        devices = {each["spec"]["deviceSelector"]["device"] for each in cluster.objects(rules)}
        assert devices == {"g0", "g1"}
        await until(lambda: '"Tainted", "status": "True"' in json.dumps(cluster.object(path)))
        # An API server that starts does not serve the kind yet.
        cluster.served["drakit.dev"] = []
        await until(lambda: app._leader.sources.is_absent(MAINTENANCES))
        await asyncio.sleep(1)
        assert len(cluster.objects(rules)) == 2
        cluster.served["drakit.dev"] = [crds.VERSION]
        await until(lambda: not app._leader.sources.is_absent(MAINTENANCES))
        cluster.remove(path)
        await until(lambda: cluster.objects(rules) == [])


async def test_a_role_that_forbids_classes_makes_the_leader_unready(cluster, tmp_path):
    words = 'User "one" cannot create resource "deviceclasses" in API group "resource.k8s.io"'
    classes = "/apis/resource.k8s.io/v1/deviceclasses"
    cluster.fail("POST", classes, status=403, reason="Forbidden", message=words, times=1000)
    async with replica(cluster, tmp_path, "one") as app:
        await until(cluster.is_watched)
        cluster.add_policy("serial")
        await until_ready(app, is_ready=False)
        (problem,) = await app.readiness_problems()
        assert 'lacks the verb "create" on "deviceclasses"' in problem
        path = f"/apis/{crds.API_VERSION}/hostdevicepolicies/serial"
        await until(lambda: words in str((cluster.object(path) or {}).get("status")))
        cluster.heal()
        cluster.add_report("n1", "serial")
        await until_ready(app)


async def test_a_kind_that_cannot_be_listed_makes_the_leader_unready(cluster, tmp_path):
    slices = "/apis/resource.k8s.io/v1/resourceslices"
    for method in ("GET", "WATCH"):
        cluster.fail(method, slices, status=403, reason="Forbidden", times=1000)
    async with replica(cluster, tmp_path, "one") as app:
        await until(lambda: holder(cluster))
        await until_ready(app, is_ready=False)
        _, numbers = await probe(app, "/metrics")
        kind = 'kind="resourceslices.resource.k8s.io"'
        assert f"drakit_operator_kind_listed{{{kind}}} 0.0" in numbers
        assert (await probe(app, "/healthz"))[0] == 200, "a new process would not help"
        cluster.heal()
        await until_ready(app)


async def test_a_leader_that_cannot_renew_ends(cluster, tmp_path):
    async with process(cluster, tmp_path, "one", stderr=asyncio.subprocess.PIPE) as running:
        await until(cluster.is_watched)
        cluster.fail("*", LEASE, status=503, times=1000)
        _, log = await asyncio.wait_for(running.communicate(), 20)
    assert running.returncode == 1
    assert b"the Lease was not renewed in time" in log
    assert holder(cluster) == "one", "it is still in use"


async def test_a_leader_whose_main_loop_hangs_ends_when_its_lease_is_taken(cluster, tmp_path):
    async with process(cluster, tmp_path, "one") as running:
        await until(cluster.is_watched)
        lease = cluster.object(LEASE)
        lease["spec"]["holderIdentity"] = "somebody"
        cluster.store(LEASE, lease)
        assert await asyncio.wait_for(running.wait(), 20) == 1
    assert holder(cluster) == "somebody"


async def test_a_policy_gets_its_class_and_its_status_after_a_failure(cluster, tmp_path):
    path = f"/apis/{crds.API_VERSION}/hostdevicepolicies/serial"
    device_class = "/apis/resource.k8s.io/v1/deviceclasses/serial.drakit.dev"

    def status() -> dict:
        return (cluster.object(path) or {}).get("status", {})

    async with replica(cluster, tmp_path, "one"):
        await until(cluster.is_watched)
        classes = "/apis/resource.k8s.io/v1/deviceclasses"
        cluster.fail("POST", classes, status=503, times=1)
        cluster.add_policy("serial")
        await until(lambda: status().get("deviceClass") == "serial.drakit.dev")
        assert {each["reason"] for each in status()["conditions"]} == {"NoNodes"}
        cluster.add_report("n1", "serial")
        await until(lambda: status().get("nodes") == 1)
        assert {each["type"]: each["status"] for each in status()["conditions"]} == {
            "Accepted": "True",
            "Applied": "True",
            "Conflicting": "False",
        }
        body = cluster.object(path)
        assert status()["kopf"]["last-handled-configuration"] == '{"spec":{}}'
        assert "finalizers" not in body["metadata"]
        assert "annotations" not in body["metadata"]
        assert cluster.object(device_class)
        writes = len(cluster.writes())
        await asyncio.sleep(3)
        later = {resource_of(path) for _, path in cluster.writes()[writes:]}
        assert later <= {"leases", "devicedrivers", "devicedrivers/status"}

        # A new spec is handled at once: the class gets another name.
        metadata = {"generation": body["metadata"]["generation"] + 1}
        cluster.store(path, {"metadata": metadata, "spec": {"deviceClass": {"name": "tty"}}})
        await until(lambda: status().get("deviceClass") == "tty")
        assert cluster.object(device_class) is None
    assert writes_elsewhere(cluster) == []
