"""The operator as a whole, with Kopf, against an API server in memory. Seconds are real here."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.unit.operator.replicas import LEASE, SHORT_LEASE, config, holder, probe, replica, until

NODES = "/api/v1/nodes"
WRITTEN = {
    ("POST", "events.k8s.io", "events"),
    ("PATCH", "events.k8s.io", "events"),
    ("POST", "coordination.k8s.io", "leases"),
    ("PUT", "coordination.k8s.io", "leases"),
    ("PATCH", "drakit.dev", "hostdevicepolicies/status"),
    ("POST", "resource.k8s.io", "deviceclasses"),
    ("PATCH", "resource.k8s.io", "deviceclasses"),
    ("DELETE", "resource.k8s.io", "deviceclasses"),
}
"""All that the operator may write: method, group and resource."""

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


def writes_elsewhere(cluster) -> list:
    """Return the writes to anything that is not in the closed list."""
    return [
        (method, path) for method, path in cluster.writes() if target(method, path) not in WRITTEN
    ]


def target(method: str, path: str) -> tuple[str, str, str]:
    """Return method, group and resource, with the subresource if there is one."""
    _, _, group, _, *rest = path.split("/")  # /apis/GROUP/VERSION/namespaces/NAMESPACE/...
    resource, *names = rest[2:] if rest[0] == "namespaces" else rest
    return method, group, "/".join((resource, *names[1:]))


async def test_pods_and_templates_get_an_event_with_the_reason(cluster, tmp_path):
    cluster.add_class("gpu.example", "d")
    cluster.add_slice("s1", "d", "g0")
    cluster.add_claim("taken", "gpu.example", allocated="g0", pod="first")
    cluster.add_pod("old", "gone")
    async with replica(cluster, tmp_path, "one") as app:
        await until(cluster.is_watched)
        cluster.add_claim("wants-gpu", "gpu.example")
        cluster.add_claim("wants-none", "none.example")
        cluster.add_template("tpl", "none.example")
        cluster.add_pod("second", "wants-gpu")
        cluster.add_pod("third", "wants-none")
        cluster.add_pod("runs", "wants-none", phase="Running")
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
            cluster.add_slice(f"other-{generation}", "elsewhere", "x")
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


async def test_classes_templates_nodes_and_slices_get_an_event_when_a_problem_lasts(
    cluster, tmp_path
):
    events = {"debounce": 0.3, "patience": 1.5, "repeatPause": 2}
    async with replica(cluster, tmp_path, "one", events=events) as app:
        await until(cluster.is_watched)
        for node in ("n1", "n2"):
            cluster.add_node(node)
        cluster.add_class("gpu.example", "d")
        cluster.add_class("nic.example", "e")
        cluster.add_template("tpl", "nic.example")
        cluster.add_slice("half", "d", "g0", slices=2)
        cluster.add_slice("lost", "other", "g0", node="gone")
        cluster.add_slice("twin-1", "twin", "g0")
        cluster.add_slice("twin-2", "twin", "g0", node="n2")
        await asyncio.sleep(1)
        assert cluster.told() == set(), "a driver may be about to publish more"
        expected = {
            ("DeviceClass", "nic.example", "NoDevicePublished"),
            ("ResourceClaimTemplate", "tpl", "NoDevicePublished"),
            ("Node", "n1", "PoolIncomplete"),
            ("Node", "n2", "PoolNameConflict"),
            ("ResourceSlice", "lost", "NodeGone"),
        }
        await until(lambda: cluster.told() == expected)
        places = {
            each["regarding"]["kind"]: each["metadata"]["namespace"] for each in cluster.events()
        }
        assert places.pop("ResourceClaimTemplate") == "lab"
        assert set(places.values()) == {"default"}, "Events about objects without a namespace"
        _, numbers = await probe(app, "/metrics")
        for state in ("incomplete", "node-missing"):
            assert f'drakit_operator_pools{{state="{state}"}} 1.0' in numbers
        assert 'drakit_operator_pools{state="conflicting"} 2.0' in numbers

        def repeated():
            return {each["regarding"]["kind"] for each in cluster.events() if "series" in each}

        await until(lambda: len(repeated()) > 1)
        await asyncio.sleep(1)
        assert repeated() == {"Node", "ResourceSlice"}, "templates and classes get one Event"
    assert writes_elsewhere(cluster) == []


async def test_a_pod_that_is_scheduled_at_once_gets_no_event(cluster, tmp_path):
    async with replica(cluster, tmp_path, "one"):
        await until(cluster.is_watched)
        cluster.add_pod("quick", "late")
        await asyncio.sleep(0.1)
        cluster.add_claim("late", "gpu.example", allocated="g0", pod="quick")
        cluster.add_pod("quick", "late", phase="Running")
        await asyncio.sleep(1)
    assert cluster.events() == []


async def test_the_second_replica_goes_on_at_once_when_the_leader_stops(cluster, tmp_path):
    cluster.add_pod("waits", "gone")
    async with replica(cluster, tmp_path, "one") as first:
        await until(lambda: len(cluster.told()) == 1)
        async with replica(cluster, tmp_path, "two") as second:
            await asyncio.sleep(0.5)
            assert (await probe(second, "/readyz"))[0] == 200, "a replica that waits is ready"
            assert holder(cluster) == "one"
            first.stop.set()
            await until(lambda: holder(cluster) == "two", seconds=10)
            cluster.add_pod("late", "gone")
            await until(lambda: len(cluster.told()) == 2, seconds=10)
    # Not a second Event for what the first leader had told: it is counted up where it stands.
    assert len(cluster.events()) == 2
    assert writes_elsewhere(cluster) == []


async def test_the_second_process_goes_on_when_the_first_is_killed(cluster, tmp_path):
    cluster.add_pod("waits", "gone")
    async with process(cluster, tmp_path, "one") as first:
        await until(lambda: len(cluster.told()) == 1)
        async with process(cluster, tmp_path, "two") as second:
            await asyncio.sleep(0.5)
            assert holder(cluster) == "one"
            first.kill()
            cluster.add_pod("late", "gone")
            await until(lambda: len(cluster.told()) == 2)
            assert holder(cluster) == "two"
            second.terminate()
            assert await asyncio.wait_for(second.wait(), 20) == 0
    assert holder(cluster) == "", "the Lease was not released"
    assert len(cluster.events()) == 2
    assert writes_elsewhere(cluster) == []


async def test_an_error_that_ends_kopf_ends_the_process(cluster, tmp_path):
    async with process(cluster, tmp_path, "one") as first:
        await until(cluster.is_watched)
        cluster.send_to_watches({"type": "ERROR", "object": {"code": 500, "message": "odd"}})
        assert await asyncio.wait_for(first.wait(), 20) == 1
    assert holder(cluster) == "", "the Lease was not released"
    cluster.add_pod("later", "gone")
    async with process(cluster, tmp_path, "one"):
        await until(lambda: cluster.told() == {("Pod", "later", "ResourceClaimMissing")})


@pytest.mark.parametrize("missing", ["resource", "group", "permission"])
async def test_policies_are_served_as_soon_as_they_can_be(cluster, tmp_path, missing):
    if missing == "resource":
        cluster.served["drakit.dev"] = []
    elif missing == "group":
        cluster.listings_of_our_group = 0
    else:
        cluster.forbidden.add(("list", "hostdevicepolicies"))
    cluster.add_pod("waits", "gone")
    path = "/apis/drakit.dev/v1alpha1/hostdevicepolicies/serial"
    async with replica(cluster, tmp_path, "one", resyncPeriod=0.3) as app:
        await until(lambda: cluster.told() == {("Pod", "waits", "ResourceClaimMissing")})
        cluster.add_policy("serial")
        await asyncio.sleep(1)
        assert "status" not in cluster.object(path)
        assert (await probe(app, "/readyz"))[0] == 200
        cluster.served["drakit.dev"] = ["v1alpha1"]
        cluster.listings_of_our_group = 1_000_000
        cluster.forbidden.clear()
        await until(lambda: cluster.object(path).get("status"))


async def test_a_kopf_that_does_not_find_policies_ends_the_process(cluster, tmp_path):
    cluster.listings_of_our_group = 1
    async with process(cluster, tmp_path, "one", stderr=asyncio.subprocess.PIPE) as running:
        _, log = await asyncio.wait_for(running.communicate(), 20)
    assert running.returncode == 1
    assert b"Kopf did not find hostdevicepolicies.drakit.dev" in log


async def test_objects_that_cannot_be_parsed_do_not_prevent_events_of_other_pods(cluster, tmp_path):
    cluster.verbatim["@deep"] = "[" * 1200 + "]" * 1200
    config = [{"opaque": {"driver": "d", "parameters": {"x": "@deep"}}}]
    deep = {"kind": "ResourceClaim", "spec": {"devices": {"config": config}}}
    claims = "/apis/resource.k8s.io/v1/namespaces/lab/resourceclaims"
    cluster.store(f"{claims}/listed", deep)
    cluster.add_pod("names-deep", "listed")
    cluster.add_pod("old", "gone")
    async with replica(cluster, tmp_path, "one") as app:
        await until(cluster.is_watched)
        cluster.store(f"{claims}/watched", deep)
        cluster.add_pod("new", "gone")
        expected = {("Pod", name, "ResourceClaimMissing") for name in ("old", "new")}
        await until(lambda: cluster.told() == expected)
        await asyncio.sleep(1)
        assert cluster.told() == expected, "an unreadable claim allows no conclusion"
        assert (await probe(app, "/readyz"))[0] == 200
        _, numbers = await probe(app, "/metrics")
        kind = 'kind="resourceclaims.resource.k8s.io"'
        assert f"drakit_operator_skipped_objects_total{{{kind}}} 2.0" in numbers


async def test_a_kind_that_cannot_be_listed_makes_the_leader_unready(cluster, tmp_path):
    slices = "/apis/resource.k8s.io/v1/resourceslices"
    for method in ("GET", "WATCH"):
        cluster.fail(method, slices, status=403, reason="Forbidden", times=1000)
    async with replica(cluster, tmp_path, "one") as app:
        await until(lambda: holder(cluster))
        async with asyncio.timeout(20):
            while (await probe(app, "/readyz"))[0] == 200:
                await asyncio.sleep(0.05)
        _, numbers = await probe(app, "/metrics")
        kind = 'kind="resourceslices.resource.k8s.io"'
        assert f"drakit_operator_kind_listed{{{kind}}} 0.0" in numbers
        assert (await probe(app, "/healthz"))[0] == 200, "a new process would not help"
        cluster.heal()
        async with asyncio.timeout(20):
            while (await probe(app, "/readyz"))[0] != 200:
                await asyncio.sleep(0.05)


async def test_after_a_gap_everything_is_listed_again(cluster, tmp_path):
    cluster.add_class("gpu.example", "d")
    cluster.add_slice("s1", "d", "g0")
    async with replica(cluster, tmp_path, "one"):
        await until(cluster.is_watched)
        cluster.forget("/apis/resource.k8s.io/v1/deviceclasses/gpu.example")
        cluster.add_claim("wants", "gpu.example")
        cluster.add_pod("second", "wants")
        cluster.expire_history()
        cluster.drop_watches()
        await until(lambda: ("Pod", "second", "DeviceClassMissing") in cluster.told())


async def test_an_event_that_could_not_be_written_is_written_later(cluster, tmp_path):
    async with replica(cluster, tmp_path, "one"):
        await until(cluster.is_watched)
        cluster.fail("POST", "/apis/events.k8s.io", status=503, times=2)
        cluster.add_pod("waits", "gone")
        await until(lambda: cluster.told() == {("Pod", "waits", "ResourceClaimMissing")})


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


async def test_a_policy_gets_its_class_and_its_status(cluster, tmp_path):
    path = "/apis/drakit.dev/v1alpha1/hostdevicepolicies/serial"

    def status() -> dict:
        return (cluster.object(path) or {}).get("status", {})

    async with replica(cluster, tmp_path, "one"):
        await until(cluster.is_watched)
        cluster.add_policy("serial")
        await until(lambda: status().get("deviceClass") == "serial.drakit.dev")
        assert [(each["type"], each["status"]) for each in status()["conditions"]] == [
            ("Ready", "Unknown")
        ]
        cluster.add_report("n1", "serial")
        await until(lambda: status().get("nodes") == 1)
        assert [each["status"] for each in status()["conditions"]] == ["True"]
        # Kopf's state is in the status, and a change of the status is no change of the policy.
        assert list(status()["kopf"]) == ["last-handled-configuration"]
        body = cluster.object(path)
        assert "finalizers" not in body["metadata"]
        assert "annotations" not in body["metadata"]
        device_class = "/apis/resource.k8s.io/v1/deviceclasses/serial.drakit.dev"
        assert cluster.object(device_class)
        writes = len(cluster.writes())
        await asyncio.sleep(3)
        assert [path for _, path in cluster.writes()[writes:] if "/leases/" not in path] == []

        # A new spec is handled at once: the class gets another name.
        cluster.store(path, {**body, "spec": {"deviceClass": {"name": "tty"}}})
        await until(lambda: status().get("deviceClass") == "tty")
        assert cluster.object(device_class) is None
    assert writes_elsewhere(cluster) == []


async def test_policies_that_fail_are_tried_again_and_do_not_stop_others(cluster, tmp_path):
    classes = "/apis/resource.k8s.io/v1/deviceclasses"
    base = "/apis/drakit.dev/v1alpha1/hostdevicepolicies"
    async with replica(cluster, tmp_path, "one"):
        await until(cluster.is_watched)
        cluster.fail("GET", f"{classes}/bad.drakit.dev", status=503, times=1)
        for name in ("bad", "good"):
            cluster.add_policy(name)
        await until(lambda: cluster.object(f"{base}/good").get("status", {}).get("deviceClass"))
        await until(lambda: cluster.object(f"{base}/bad").get("status", {}).get("deviceClass"))
    assert writes_elsewhere(cluster) == []
