"""A release is removed when nothing uses its devices, and from every node that responds."""

from __future__ import annotations

import asyncio

import pytest

from drakit.testing.apiserver import FakeApiServer
from drakit_cli import removal
from drakit_cli.main import main
from drakit_cli.removal import FORCE_ANNOTATION, Removal, name_maintenances, remove_release
from drakit_cli.setup import Owner
from drakit_daemon.kube import connect
from drakit_formats import crds

OURS = Owner(namespace="drakit-system", name="drakit")
OTHER = Owner(namespace="lab", name="second")
LAMPS, HORNS, FOREIGN = "lamps.test", "horns.test", "foreign.test"
REMOVAL = Removal(owner=OURS, daemonset="drakit-nodeplugin", drivers={LAMPS, HORNS})

DAEMONSET = "/apis/apps/v1/namespaces/drakit-system/daemonsets/drakit-nodeplugin"
PODS = "/api/v1/namespaces/drakit-system/pods"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims/{}"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
REPORTS = f"/apis/{crds.API_VERSION}/nodedevicereports"
POLICIES = f"/apis/{crds.API_VERSION}/hostdevicepolicies"
LABELS = {"app.kubernetes.io/name": "drakit", "app.kubernetes.io/component": "nodeplugin"}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Wait fractions of a second, and still several times."""
    for name, seconds in (("POLL_SECONDS", 0.02), ("RELEASED_SECONDS", 0.3), ("STOP_SECONDS", 0.3)):
        monkeypatch.setattr(removal, name, seconds)


@pytest.fixture
async def server():
    """Two nodes with drakit, and a third one of another release."""
    async with FakeApiServer() as server:
        template = {"spec": {"terminationGracePeriodSeconds": 0}}
        spec = {"selector": {"matchLabels": LABELS}, "template": template}
        server.store(DAEMONSET, {"metadata": {}, "spec": spec})
        for node in ("node-1", "node-2"):
            plugin(server, node)
        plugin(server, "node-3", labels={**LABELS, "app.kubernetes.io/name": "second"})
        for node in ("node-1", "node-2", "node-3"):
            for driver in (LAMPS, FOREIGN):
                body = {"spec": {"driver": driver, "nodeName": node}}
                server.store(f"{SLICES}/{node}-{driver}", body)
                report(server, node, driver)
        server.store(f"{SLICES}/network", {"spec": {"driver": LAMPS}})
        for name, owner in (("ours", OURS), ("theirs", OTHER)):
            server.store(f"{POLICIES}/{name}", {"metadata": {"labels": owner.labels}, "spec": {}})
        yield server


@pytest.fixture
async def session(server, tmp_path):
    async with await connect(server.write_kubeconfig(tmp_path), user_agent="test") as session:
        yield session


def plugin(server, node, *, labels=LABELS, ready=True):
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    server.store(
        f"{PODS}/{labels['app.kubernetes.io/name']}-{node}",
        {
            "metadata": {"labels": labels},
            "spec": {"nodeName": node},
            "status": {"conditions": conditions},
        },
    )


def report(server, node, driver, **claims):
    body = {"spec": {"nodeName": node, "driver": driver}, "status": {"claims": claims}}
    server.store(f"{REPORTS}/{node}.{driver}", body)


def claim(server, name, *results, pods=("train",), namespace="lab"):
    allocated = [{"driver": driver, "pool": pool, "device": "d"} for driver, pool in results]
    status = {
        "allocation": {"devices": {"results": allocated}},
        "reservedFor": [{"resource": "pods", "name": each, "uid": each} for each in pods],
    }
    server.store(CLAIMS.format(namespace, name), {"spec": {}, "status": status})


def stop_plugins(server, *nodes):
    """Stop the node plugins of some nodes when the DaemonSet is deleted, as their kubelets do."""

    async def follow():
        while server.object(DAEMONSET) is not None:
            await asyncio.sleep(0.01)
        for node in nodes:
            server.remove(f"{PODS}/drakit-{node}")

    return asyncio.create_task(follow())


def names(server, path):
    return {body["metadata"]["name"] for body in server.objects(path)}


async def test_a_removal_stops_every_node_plugin_and_deletes_what_it_published(
    server, session, capsys
):
    stopping = stop_plugins(server, "node-1", "node-2")
    assert await remove_release(session, REMOVAL) == 0
    await stopping
    # Devices of other drivers, of another release and of the network remain.
    remaining = {f"{node}-{FOREIGN}" for node in ("node-1", "node-2", "node-3")}
    assert names(server, SLICES) == remaining | {f"node-3-{LAMPS}", "network"}
    remaining = {f"{node}.{FOREIGN}" for node in ("node-1", "node-2", "node-3")}
    assert names(server, REPORTS) == remaining | {f"node-3.{LAMPS}"}
    assert names(server, POLICIES) == {"theirs"}
    assert "node plugins: stopped on 2 nodes" in capsys.readouterr().out


async def test_nodes_that_do_not_answer_are_named_and_keep_what_they_publish(
    server, session, capsys
):
    stopping = stop_plugins(server, "node-1")
    assert await remove_release(session, REMOVAL) == 0
    await stopping
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "node node-2"
    assert "did not respond" in lines[-2]
    assert f"node-2-{LAMPS}" in names(server, SLICES)
    assert f"node-1-{LAMPS}" not in names(server, SLICES)


@pytest.mark.parametrize(
    ("results", "refused"),
    [
        pytest.param([(LAMPS, "node-1")], True, id="a-device-of-a-node"),
        pytest.param([(FOREIGN, "node-1"), (HORNS, "node-2/right")], True, id="a-second-pool"),
        pytest.param([(FOREIGN, "node-1")], False, id="another-driver"),
        pytest.param([(LAMPS, "node-3")], False, id="a-node-of-another-release"),
        pytest.param([(LAMPS, "node-10")], False, id="a-node-whose-name-begins-the-same"),
    ],
)
async def test_a_release_whose_devices_pods_use_stays(server, session, capsys, results, refused):
    claim(server, "used", *results, pods=("train", "eval"))
    claim(server, "unused", (LAMPS, "node-1"), pods=())
    stopping = stop_plugins(server, "node-1", "node-2")
    assert await remove_release(session, REMOVAL) == int(refused)
    stopping.cancel()
    out = capsys.readouterr().out
    for pod in ("train", "eval"):
        assert (f"pod lab/{pod}: uses claim used" in out) is refused
    assert "unused" not in out
    assert (FORCE_ANNOTATION in out) is refused
    assert (server.object(DAEMONSET) is not None) is refused
    assert ("ours" in names(server, POLICIES)) is refused


async def test_the_annotation_overrides_the_refusal(server, session, capsys):
    claim(server, "used", (LAMPS, "node-1"))
    body = server.object(DAEMONSET)
    body["metadata"]["annotations"] = {FORCE_ANNOTATION: "true"}
    server.store(DAEMONSET, body)
    stopping = stop_plugins(server, "node-1", "node-2")
    assert await remove_release(session, REMOVAL) == 0
    await stopping
    out = capsys.readouterr().out
    assert "pod lab/train: uses claim used" in out
    assert f"node-1-{LAMPS}" not in names(server, SLICES)


async def test_claims_that_no_pod_uses_are_waited_for(server, session):
    report(server, "node-1", HORNS, prepared=1, unpreparing=1)

    async def release() -> None:
        await asyncio.sleep(0.1)
        assert server.object(DAEMONSET) is not None, "it waits"
        report(server, "node-1", HORNS, prepared=0, unpreparing=0)

    releasing = asyncio.create_task(release())
    stopping = stop_plugins(server, "node-1", "node-2")
    assert await remove_release(session, REMOVAL) == 0
    await asyncio.gather(releasing, stopping)


async def test_claims_that_stay_prepared_are_named_by_node(server, session, capsys):
    report(server, "node-1", HORNS, prepared=1, unpreparing=1)
    report(server, "node-3", HORNS, prepared=5)
    report(server, "node-2", FOREIGN, prepared=5)
    assert await remove_release(session, REMOVAL) == 1
    named = [line for line in capsys.readouterr().out.splitlines() if line.startswith("node ")]
    assert len(named) == 1
    assert named[0].startswith(f"node node-1 has 2 prepared claims of {HORNS} without")
    assert server.object(DAEMONSET) is not None


async def test_the_report_of_a_node_without_a_ready_plugin_does_not_block(server, session):
    report(server, "node-2", HORNS, prepared=1)
    plugin(server, "node-2", ready=False)
    stopping = stop_plugins(server, "node-1", "node-2")
    assert await remove_release(session, REMOVAL) == 0
    await stopping


async def test_a_second_attempt_finds_neither_daemonset_nor_definitions(server, session, capsys):
    server.remove(DAEMONSET)
    claim(server, "used", (LAMPS, "node-1"))
    server.fail("GET", POLICIES, status=404, reason="NotFound", message="no such resource")
    assert await remove_release(session, REMOVAL) == 0
    assert "daemonset drakit-nodeplugin: does not exist" in capsys.readouterr().out


async def test_without_the_definitions_there_are_no_reports(server, session):
    server.fail("GET", REPORTS, status=404, reason="NotFound", message="no such resource", times=9)
    stopping = stop_plugins(server, "node-1", "node-2")
    assert await remove_release(session, REMOVAL) == 0
    await stopping
    assert f"node-1-{LAMPS}" not in names(server, SLICES)


async def test_a_cluster_may_serve_only_an_older_version(server, session, capsys):
    server.served["resource.k8s.io"] = ["v1beta1"]
    old = {"spec": {"driver": LAMPS, "nodeName": "node-1"}}
    path = SLICES.replace("/v1/", "/v1beta1/")
    server.store(f"{path}/old", old)
    server.store(f"{path}/other", {"spec": {"driver": FOREIGN, "nodeName": "node-1"}})
    stopping = stop_plugins(server, "node-1", "node-2")
    assert await remove_release(session, REMOVAL) == 0
    await stopping
    assert names(server, path) == {"other"}


async def test_long_lists_are_counted(server, session, capsys):
    pods = [f"pod-{number:03}" for number in range(60)]
    claim(server, "shared", (LAMPS, "node-1"), pods=pods)
    assert await remove_release(session, REMOVAL) == 1
    out = capsys.readouterr().out
    assert "pod-049" in out
    assert "pod-050" not in out
    assert "... and 10 more" in out


async def test_a_removal_names_what_stays_in_maintenance_and_never_fails_for_it(
    server, session, capsys
):
    path = f"/apis/{crds.API_VERSION}/devicemaintenances"
    for name, phase in (("fans", "Active"), ("later", "Scheduled"), ("over", "Ended")):
        server.store(f"{path}/{name}", {"spec": {}, "status": {"phase": phase, "deviceCount": 2}})
    await name_maintenances(session)
    lines = capsys.readouterr().out.splitlines()
    assert [each.partition(":")[0].split()[1] for each in lines] == ["fans", "later"]
    assert lines[0].endswith("its devices stay out of service")
    server.forbidden.add(("list", "devicemaintenances"))
    await name_maintenances(session)


async def test_the_command_reports_what_the_api_server_denies(server, tmp_path, capsys):
    server.forbidden.add(("list", "resourceclaims"))
    kubeconfig = server.write_kubeconfig(tmp_path)
    arguments = ["setup", "remove", "--release", str(OURS), "--daemonset", "drakit-nodeplugin"]
    options = ["--driver", LAMPS, "--unnamed-drivers", "--kubeconfig", str(kubeconfig)]
    assert await asyncio.to_thread(main, [*arguments, *options]) == 1
    out, error = capsys.readouterr()
    assert "entries without a name" in out
    assert "resourceclaims" in error
    assert server.object(DAEMONSET) is not None
