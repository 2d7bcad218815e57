"""``kubectl drakit doctor``: findings, each with a remedy."""

from __future__ import annotations

import pytest

API = "/apis/resource.k8s.io/v1"


@pytest.fixture
def healthy(site):
    """A node with a driver, a class that selects its devices, and a release."""
    site.node("n1")
    site.device_class("gpu")
    site.slice("s1", "a", "b")
    workload(
        site, "daemonsets", "nodeplugin", status={"desiredNumberScheduled": 1, "numberReady": 1}
    )
    workload(site, "deployments", "operator", spec={"replicas": 2}, status={"readyReplicas": 2})
    plugin_pod(site, "n1")
    return site


def labels(component: str, version: str = "0.1.0") -> dict:
    return {
        "labels": {
            "app.kubernetes.io/part-of": "drakit",
            "app.kubernetes.io/instance": "drakit",
            "app.kubernetes.io/component": component,
            "app.kubernetes.io/version": version,
        }
    }


def workload(site, plural: str, component: str, *, version: str = "0.1.0", **body: dict) -> None:
    site.store(
        f"/apis/apps/v1/namespaces/drakit-system/{plural}/drakit-{component}",
        {"metadata": labels(component, version), **body},
    )


def plugin_pod(site, node: str) -> None:
    ready = {"type": "Ready", "status": "True"}
    site.store(
        f"/api/v1/namespaces/drakit-system/pods/plugin-{node}",
        {
            "metadata": labels("nodeplugin"),
            "spec": {"nodeName": node},
            "status": {"conditions": [ready]},
        },
    )


async def test_a_healthy_cluster_has_no_findings(healthy, run):
    code, out, error = await run("doctor")
    assert (code, error) == (0, "")
    assert out.splitlines() == [
        "API group resource.k8s.io: served in v1; used here: v1",
        "",
        "DRIVER           NODES  POOLS  DEVICES",
        "gpu.example.com  1      1      2",
        "",
        "NAMESPACE      RELEASE  COMPONENT   VERSION  READY",
        "drakit-system  drakit   nodeplugin  0.1.0    1/1",
        "drakit-system  drakit   operator    0.1.0    2/2",
        "",
        "No problems found.",
    ]
    assert healthy.writes() == []


def incomplete(site):
    site.slice("s1", "a", pool={"name": "n1", "generation": 2, "resourceSliceCount": 2})


def vanished(site):
    site.slice("s9", "a", node="n9")


def unhealthy(site):
    taint = {"key": "drakit.dev/unhealthy", "effect": "NoSchedule"}
    site.slice("s1", devices=[{"name": "a", "taints": [taint]}, {"name": "b"}])


def twins(site):
    site.node("n2")
    pool = {"name": "shared", "generation": 1, "resourceSliceCount": 1}
    site.slice("s1", "a", pool=pool)
    site.slice("s2", "a", node="n2", pool=pool)


def not_ready(site):
    body = {"conditions": [{"type": "Ready", "status": "False"}]}
    site.store("/api/v1/nodes/n1", {"status": body})


def class_missing(site):
    site.claim("mine", device_class="absent")


def failing(site):
    site.device_class("fast", 'device.attributes["gpu.example.com"].speed > 3')


def daemon_down(site):
    status = {"desiredNumberScheduled": 3, "numberReady": 1}
    workload(site, "daemonsets", "nodeplugin", status=status)


def half_upgraded(site):
    workload(site, "deployments", "operator", version="0.2.0", spec={"replicas": 0})


@pytest.mark.parametrize(
    ("spoil", "text", "fix"),
    [
        pytest.param(incomplete, "incomplete: 1 of 2 slices", "must publish all slices"),
        pytest.param(vanished, "is for node n9, which does not exist", "delete its ResourceSlices"),
        pytest.param(unhealthy, "1 device of pool n1", "check the device"),
        pytest.param(twins, "nodes n1, n2 publish devices of the same names", "name its pools"),
        pytest.param(not_ready, "node n1 is not ready", "kubectl describe node n1"),
        pytest.param(class_missing, 'DeviceClass "absent"', "create it or correct"),
        pytest.param(failing, "DeviceClass fast fails on device", "test that a key exists"),
        pytest.param(daemon_down, "1 of 3 pods ready", "describe daemonset/drakit-nodeplugin"),
        pytest.param(half_upgraded, "components of versions 0.1.0, 0.2.0", "helm upgrade drakit"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
async def test_a_problem_has_a_remedy(healthy, run, spoil, text, fix):
    spoil(healthy)
    code, body = await run.json("doctor")
    (found,) = [each for each in body["findings"] if text in each["finding"]]
    assert (code, found["severity"]) == (1, "problem")
    assert fix in found["fix"]


def unselected(site):
    site.device_class("none", 'device.driver == "other.example.com"')


def silent_node(site):
    site.node("n2")
    plugin_pod(site, "n2")


def only_own_namespace(site):
    site.forbid("/apis/apps/v1/daemonsets")


def no_nodes(site):
    site.forbid("/api/v1/nodes")


@pytest.mark.parametrize(
    ("spoil", "text", "fix"),
    [
        pytest.param(unselected, "none selects none of 2 devices", "check its selectors"),
        pytest.param(silent_node, "node n2 has a node plugin", "logs plugin-n2"),
        pytest.param(
            only_own_namespace, "daemonsets of namespaces other than lab", "the verb list"
        ),
        pytest.param(no_nodes, "nodes may not be listed", "the verb list on nodes"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
async def test_a_note_is_no_problem(healthy, run, spoil, text, fix):
    spoil(healthy)
    code, body = await run.json("doctor")
    (found,) = [each for each in body["findings"] if text in each["finding"]]
    assert (code, found["severity"]) == (0, "note")
    assert fix in found["fix"]


async def test_no_release_is_a_note(site, run):
    code, out, _ = await run("doctor")
    assert code == 0
    assert "note: no release of drakit is installed" in out


async def test_an_older_api_is_named(site, run):
    site.serve("v1beta1")
    site.node("n1")
    site.slice("s1", "a")
    _, out, _ = await run("doctor")
    assert out.startswith("API group resource.k8s.io: served in v1beta1; used here: v1beta1\n")
    assert "the API server does not serve resource.k8s.io/v1" in out


async def test_a_user_who_may_list_only_own_claims_gets_what_there_is(healthy, run):
    healthy.claim("mine")
    for path in ("resourceslices", "deviceclasses", "resourceclaims"):
        healthy.forbid(f"{API}/{path}")
    healthy.forbid("/api/v1/nodes")
    healthy.forbid("/apis/apps")
    healthy.forbid("/api/v1/pods")
    code, body = await run.json("doctor")
    assert code == 0
    assert {each["severity"] for each in body["findings"]} == {"note"}
    named = " ".join(each["finding"] for each in body["findings"])
    for kind in ("ResourceSlices", "DeviceClasses", "nodes", "deployments", "daemonsets"):
        assert f"{kind} may not be listed" in named
