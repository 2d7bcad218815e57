"""``kubectl drakit doctor``: findings about a cluster and the user, each with a remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from drakit_cli.kubectl.components import CONTROLLERS, GATES, KUBELET, SCHEDULER
from drakit_formats import crds
from tests.unit.kubectl.conftest import DRIVER

API = "/apis/resource.k8s.io/v1"
DRIVERS = [{"driver": "gpu_driver:Gpu", "name": DRIVER}]


@pytest.fixture
def healthy(site):
    """A node with a driver, a class that selects its devices, and a release."""
    site.node("n1")
    site.device_class("gpu")
    site.slice("s1", "a", "b")
    site.release("drakit", "n1", drivers=DRIVERS)
    site.runs(DRADeviceTaints=True, DRAListTypeAttributes=False)
    site.kubelet("n1", DynamicResourceAllocation=True)
    for component in ("kube-scheduler", "kube-controller-manager"):
        site.control_plane(component)
    return site


@pytest.fixture
def with_helper(monkeypatch):
    monkeypatch.setattr("drakit_cli.kubectl.cluster_checks.lacks_helper", lambda: False)


@pytest.mark.usefixtures("with_helper")
async def test_a_healthy_cluster_has_no_findings(healthy, run):
    code, out, error = await run("doctor")
    assert (code, error) == (0, "")
    assert out.splitlines() == [
        "Kubernetes 1.36.3",
        "API group resource.k8s.io: served in v1; used here: v1",
        "Disabled feature gates of the API server: DRAListTypeAttributes",
        "Feature gates also checked: 1 kubelet, 1 kube-controller-manager, 1 kube-scheduler",
        "",
        "DRIVER           NODES  POOLS  DEVICES",
        "gpu.example.com  1      1      2",
        "",
        "NAMESPACE      RELEASE  COMPONENT   VERSION  READY",
        "drakit-system  drakit   nodeplugin  0.1.0    1/1",
        "drakit-system  drakit   operator    0.1.0    1/1",
        "",
        "No problems found.",
    ]
    assert healthy.writes() == []
    assert (await run("doctor", "--fail-on=note"))[0] == 0


async def test_a_note_is_a_failure_if_the_user_wants_that(healthy, run):
    healthy.device_class("none", "false")
    assert (await run("doctor"))[0] == (await run("doctor", "--fail-on=problem"))[0] == 0
    assert (await run("doctor", "--fail-on=note"))[0] == 1


async def test_more_columns_name_gates_nodes_and_objects(healthy, run):
    healthy.slice("s2", "a", node="n2", driver="other.example.com")
    code, out, _ = await run("doctor", "-o", "wide")
    assert code == 1
    (line,) = [
        each for each in out.splitlines() if each.startswith("Enabled feature gates of the API")
    ]
    assert "DRADeviceTaints" in line
    rows = [line.split() for line in out.splitlines()]
    assert ["n1", DRIVER, "1", "2", "yes"] in rows
    assert ["n2", "other.example.com", "1", "1", "unknown"] in rows
    assert "  object: Pool other.example.com/n2" in out


async def test_a_driver_is_registered_when_the_node_plugin_is_ready(healthy, run):
    healthy.release("drakit", "n1", ready=False, drivers=DRIVERS)
    _, body = await run.json("doctor")
    node = {"node": "n1", "driver": DRIVER, "pools": 1, "devices": 2, "registered": "no"}
    assert body["nodes"] == [node]
    (plugin,) = body["nodePlugins"]
    assert (plugin["release"], plugin["node"], plugin["ready"]) == ("drakit", "n1", False)
    assert body["featureGates"]["DRADeviceTaints"] is True
    assert body["featureGates"]["DRAListTypeAttributes"] is False
    assert body["kubernetes"] == "v1.36.3"


async def test_a_driver_is_not_registered_if_its_report_denies_it(healthy, run):
    healthy.slice("s2", "a", node="n1", driver="other.example.com")
    for name, driver in (("Rejected", DRIVER), ("Registered", "other.example.com")):
        healthy.report("n1", state=name, driver=driver)
    _, body = await run.json("doctor")
    states = {each["driver"]: each["registered"] for each in body["nodes"]}
    assert states == {DRIVER: "no", "other.example.com": "unknown"}


def incomplete(site):
    site.slice("s1", "a", pool={"name": "n1", "generation": 2, "resourceSliceCount": 2})


def emptied(site):
    site.slice("s1", pool={"name": "n1", "generation": 2, "resourceSliceCount": 1})
    site.slice("old", "a", pool={"name": "n1", "generation": 1, "resourceSliceCount": 1})


def unreachable(site):
    field = {"key": "zone", "operator": "In", "values": ["nowhere"]}
    site.slice(
        "net",
        "a",
        node="",
        pool={"name": "net", "generation": 1, "resourceSliceCount": 1},
        nodeSelector={"nodeSelectorTerms": [{"matchExpressions": [field]}]},
    )


def vanished(site):
    site.slice("s9", "a", node="n9")


def driver_is_gone(site):
    site.node("n2")
    site.claim("held", device="a", pool="n2", pod="user")


def unhealthy(site):
    taint = {"key": "drakit.dev/unhealthy", "effect": "NoSchedule"}
    site.slice("s1", devices=[{"name": "a", "taints": [taint]}, {"name": "b"}])
    site.report("n1", a="no link", b="fine")


def stopped(site):
    taint = {"key": "drakit.dev/stopped", "effect": "NoSchedule"}
    site.slice("s1", devices=[{"name": "a", "taints": [taint]}])
    site.report("n1")
    message = "backends.allowed no longer has an entry for it; add it"
    endpoints = [{"name": DRIVER, "state": "Stopped", "message": message}]
    path = f"/apis/{crds.API_VERSION}/nodedevicereports/n1.{DRIVER}"
    site.change(path, {"status": {"endpoints": endpoints}})


def rejected(site):
    site.report("n1", state="Rejected")
    site.report("n2")


def refused(site):
    body = {"device": "kvm", "reason": "Refused", "message": "the step is too large"}
    ignored = {"device": "/dev/sda", "reason": "Dangerous"}
    status = {"devices": {"rejected": 2}, "rejectedDevices": [ignored, body]}
    site.store(
        f"/apis/{crds.API_VERSION}/nodedevicereports/n1.{DRIVER}",
        {"spec": {"nodeName": "n1", "driver": DRIVER}, "status": status},
    )


def slow(site):
    site.report("n1")
    message = "1 slow calls: it has not responded to prepare for 5 s (claim lab/a)"
    condition = {"type": "ClaimsProgressing", "status": "False", "message": message}
    path = f"/apis/{crds.API_VERSION}/nodedevicereports/n1.{DRIVER}"
    site.change(path, {"status": {"conditions": [condition]}})


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


def class_of_policy(site, expression):
    site.device_class("fast", expression)
    site.policy("fast", "fast", observedGeneration=1)


def failing_of_policy(site):
    class_of_policy(site, 'device.attributes["gpu.example.com"].speed > 3')


POOL = f"Pool {DRIVER}/n1"


@pytest.mark.parametrize(
    ("spoil", "subject", "text", "fix"),
    [
        pytest.param(incomplete, POOL, "incomplete: 1 of 2 slices", "must publish all slices"),
        pytest.param(
            emptied,
            POOL,
            "empty: the scheduler ignores slices of generations before 2",
            "read the log of",
        ),
        pytest.param(
            unreachable,
            f"Pool {DRIVER}/net",
            "unreachable: its node selector matches no node",
            "correct the node selector in the driver, or the labels of the nodes",
        ),
        pytest.param(
            vanished,
            f"Pool {DRIVER}/n9",
            "is for node n9, which does not exist",
            "kubectl delete resourceslices --field-selector spec.nodeName=n9",
        ),
        pytest.param(
            driver_is_gone,
            f"Pool {DRIVER}/n2",
            f"from pool n2 of driver {DRIVER}, node n2: not published",
            f"check that {DRIVER} runs on that node: claims hold its devices",
        ),
        pytest.param(
            unhealthy,
            POOL,
            f"1 device of pool n1 of driver {DRIVER} is unhealthy: a (no link)",
            "check the device",
        ),
        pytest.param(
            stopped,
            POOL,
            "is unavailable, because the driver has stopped: a",
            f"remove the cause, then read the log of {DRIVER} on node n1 if it persists: "
            "backends.allowed no longer has an entry for it; add it",
        ),
        pytest.param(
            rejected,
            f"NodeDeviceReport n1.{DRIVER}",
            f"driver {DRIVER} is not registered with the kubelet of node n1 (Rejected)",
            "read the log of the node plugin on node n1",
        ),
        pytest.param(
            refused,
            f"NodeDeviceReport n1.{DRIVER}",
            f"driver {DRIVER} does not publish 2 devices of node n1, such as kvm: the step is",
            f"kubectl describe nodedevicereport n1.{DRIVER}",
        ),
        pytest.param(
            slow,
            f"NodeDeviceReport n1.{DRIVER}",
            f"driver {DRIVER} is slow on node n1: 1 slow calls: it has not responded to prepare",
            "restart the pod in which the driver runs: that of its backend, otherwise the node",
        ),
        pytest.param(
            twins,
            f"Pool {DRIVER}/shared",
            "nodes n1, n2 publish devices of the same names",
            "name its pools",
        ),
        pytest.param(not_ready, "Node n1", "node n1 is not ready", "kubectl describe node n1"),
        pytest.param(
            class_missing, "ResourceClaim lab/mine", 'DeviceClass "absent"', "create it or correct"
        ),
        pytest.param(
            failing,
            "DeviceClass fast",
            "the selector of class fast fails: no such key: speed, on device a of pool n1",
            "kubectl edit deviceclass fast",
        ),
        pytest.param(
            failing_of_policy,
            "DeviceClass fast",
            "the selector of class fast fails: no such key: speed, on device a of pool n1",
            "the operator restores the class of HostDevicePolicy fast, so do not edit it",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
async def test_a_problem_has_a_remedy(healthy, run, spoil, subject, text, fix):
    spoil(healthy)
    code, body = await run.json("doctor")
    (found,) = [each for each in body["findings"] if text in each["finding"]]
    assert (code, found["severity"], found["object"]) == (1, "problem", subject)
    assert fix in found["fix"]


VIEW = "drakit-viewer-USER --clusterrole=drakit-viewer --user=USER"
"""The chart's ClusterRole, bound to the user."""


def unselected(site):
    site.device_class("none", 'device.driver == "other.example.com"')


def misspelt(site):
    site.device_class("none", 'device.driver == "gpu.exmaple.com"')


def one_resource_of_two_classes(site):
    for name, created in (("gpu", "2026-01-01T00:00:00Z"), ("young", "2026-01-02T00:00:00Z")):
        site.device_class(name)
        site.change(
            f"{API}/deviceclasses/{name}",
            {
                "metadata": {"creationTimestamp": created},
                "spec": {"extendedResourceName": "example.com/gpu"},
            },
        )


def unselected_of_policy(site):
    class_of_policy(site, 'device.driver == "hostdev.drakit.dev"')


def template_of_a_class_that_is_gone(site):
    site.template("left", device_class="absent")


def daemon_sets_of_others(site):
    site.forbid("/apis/apps/v1/daemonsets")


def no_nodes(site):
    site.forbid("/api/v1/nodes")


def no_metrics(site):
    site.forbid("/metrics")


def no_configuration(site):
    site.forbid("/api/v1/configmaps")
    site.forbid("/api/v1/namespaces/lab/configmaps")


def no_version(site):
    site.fail("*", "/version", status=500, message="busy")


def no_reviews(site):
    site.forbid("/apis/authorization.k8s.io")


@pytest.mark.parametrize(
    ("spoil", "subject", "text", "fix"),
    [
        pytest.param(
            unselected,
            "DeviceClass none",
            "none selects none of the 2 published devices",
            "check its selectors",
        ),
        pytest.param(
            misspelt,
            "DeviceClass none",
            "of the 2 published devices: no slice of driver gpu.exmaple.com has devices, but "
            "driver gpu.example.com publishes some",
            "check its selectors",
        ),
        pytest.param(
            one_resource_of_two_classes,
            "DeviceClass young",
            "DeviceClasses gpu, young have the extended resource example.com/gpu: a pod that",
            "set another extendedResourceName",
        ),
        pytest.param(
            unselected_of_policy,
            "DeviceClass fast",
            "fast selects none of the 2 published devices",
            "kubectl describe hostdevicepolicy fast",
        ),
        pytest.param(
            template_of_a_class_that_is_gone,
            "ResourceClaimTemplate lab/left",
            'DeviceClass "absent"',
            "create it or correct",
        ),
        pytest.param(
            daemon_sets_of_others,
            "Your permissions",
            "no permission to list daemonsets in namespaces other than lab",
            "--verb=get,list --resource=daemonsets.apps",
        ),
        pytest.param(
            no_nodes,
            "Your permissions",
            "no permission to list nodes",
            "kubectl create clusterrole drakit-user-nodes --verb=get,list --resource=nodes",
        ),
        pytest.param(
            no_metrics,
            "Your permissions",
            "no permission to read feature gates of the API server (/metrics)",
            "--verb=get --non-resource-url=/metrics",
        ),
        pytest.param(
            no_configuration,
            "Your permissions",
            "no permission to list configmaps",
            "--verb=get,list --resource=configmaps",
        ),
        pytest.param(no_version, "/version", "version of the API server cannot be read", "again"),
        pytest.param(
            no_reviews,
            "Your permissions",
            "no permission to create SubjectAccessReviews",
            "--verb=create --resource=subjectaccessreviews.authorization.k8s.io",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
async def test_a_note_is_no_problem(healthy, run, spoil, subject, text, fix):
    spoil(healthy)
    code, body = await run.json("doctor")
    (found,) = [each for each in body["findings"] if text in each["finding"]]
    assert (code, found["severity"], found["object"]) == (0, "note", subject)
    assert fix in found["fix"]


@pytest.mark.parametrize("plugin", [False], indirect=True)
async def test_without_the_programs_of_the_plugin_less_is_checked(healthy, run):
    code, body = await run.json("doctor")
    subject = "Program drakit-cel"
    (found,) = [each for each in body["findings"] if each["object"] == subject]
    assert (code, found["severity"]) == (0, "note")
    assert 'pip install "$(make -s wheel)[kubectl]"' in found["fix"]
    healthy.device_class("gpu", "device.allowMultipleAllocations == false")
    healthy.runs(DRAConsumableCapacity=True)
    _, body = await run.json("doctor")
    assert not [each for each in body["findings"] if "DeviceClass gpu" in each["finding"]]
    healthy.runs(DRAConsumableCapacity=False)
    _, body = await run.json("doctor")
    (found,) = [each for each in body["findings"] if "DeviceClass gpu" in each["finding"]]
    assert "is not checked" in found["finding"]


@pytest.mark.parametrize(
    ("kubernetes", "named"), [("v1.36.5", False), ("v1.36.3", True), ("v1.36.3+k3s1", True)]
)
async def test_a_known_bug_of_the_release_is_named_with_the_fix(healthy, run, kubernetes, named):
    healthy.runs(kubernetes)
    for driver in (DRIVER, "other.example.com"):
        pool = {"name": "p", "generation": 1, "resourceSliceCount": 1}
        sets = [{"name": "board", "counters": {"slots": {"value": "4"}}}]
        healthy.slice(f"c-{driver}", driver=driver, pool=pool, sharedCounters=sets)
    _, body = await run.json("doctor")
    found = [
        each for each in body["findings"] if "adds up the counters of pools" in each["finding"]
    ]
    assert len(found) == named
    for each in found:
        assert each["object"].startswith("ResourceSlice c-")
        assert each["severity"] == "note"
        assert each["fix"] == (
            "upgrade to Kubernetes 1.36.4 (https://github.com/kubernetes/kubernetes/issues/140434)"
        )


async def test_a_known_bug_of_kubelets_is_named_once_and_is_not_nothing(healthy, run):
    for number in range(1, 4):
        name = f"n{number}"
        healthy.slice(f"s{number}", "a", "b", node=name)
        healthy.node(name)
        info = {"kubeletVersion": "v1.34.1", "containerRuntimeVersion": "containerd://2.4.2"}
        healthy.change(f"/api/v1/nodes/{name}", {"status": {"nodeInfo": info}})
    _, out, _ = await run("doctor")
    assert out.count("kubelet 1.34.1 on node n1 loses its connection") == 1
    assert "; so does that of 2 other nodes" in out
    assert "fix: upgrade to Kubernetes 1.34.2 (https://" in out
    assert "No problems found" not in out


async def test_an_older_api_is_named(site, run):
    site.serve("v1beta1")
    site.node("n1")
    site.slice("s1", "a")
    _, out, _ = await run("doctor")
    assert "API group resource.k8s.io: served in v1beta1; used here: v1beta1\n" in out
    assert "the API server does not serve resource.k8s.io/v1" in out


async def test_a_user_who_may_list_only_own_claims_gets_what_there_is(healthy, run):
    healthy.claim("mine")
    for path in ("resourceslices", "deviceclasses", "resourceclaims"):
        healthy.forbid(f"{API}/{path}")
    for path in ("/api/v1/nodes", "/apis/apps", "/api/v1/pods", "/api/v1/configmaps", "/metrics"):
        healthy.forbid(path)
    healthy.forbid("/api/v1/namespaces/lab/configmaps")
    code, body = await run.json("doctor")
    assert code == 0
    assert {each["severity"] for each in body["findings"]} == {"note"}
    named = " ".join(each["finding"] for each in body["findings"])
    for kind in (
        *("ResourceSlices", "DeviceClasses", "nodes", "deployments", "daemonsets", "configmaps"),
    ):
        assert f"no permission to list {kind}" in named


async def test_what_the_other_commands_may_not_read_is_granted_by_one_command(healthy, run):
    healthy.denied = ("me list events", "me get pods")
    code, body = await run.json("doctor")
    (found,) = [each for each in body["findings"] if "you are not allowed" in each["finding"]]
    assert (code, found["severity"], found["object"]) == (0, "note", "Your permissions")
    assert "get pods (explain pod/NAME), list events (explain" in found["finding"]
    assert found["fix"] == f"ask an administrator: kubectl -n lab create rolebinding {VIEW}"


async def test_several_kinds_are_granted_by_the_viewers_role(healthy, run):
    no_nodes(healthy)
    daemon_sets_of_others(healthy)
    no_configuration(healthy)
    _, body = await run.json("doctor")
    fixes = [each["fix"] for each in body["findings"] if each["object"] == "Your permissions"]
    view = f"ask an administrator: kubectl create clusterrolebinding {VIEW}"
    assert fixes.count(view) == 2
    (own,) = set(fixes) - {view}
    assert "create clusterrole drakit-user-configmaps " in own


async def test_a_release_without_an_operator_has_no_viewers_role(site, run):
    """A vendor's release: the user reads all of it."""
    site.slice("s1", "a")
    site.release("acme", "n1", operator=0)
    site.forbid(f"/apis/{crds.API_VERSION}/nodedevicereports")
    site.forbid("/api/v1/nodes")
    _, body = await run.json("doctor")
    fixes = {each["fix"] for each in body["findings"] if each["object"] == "Your permissions"}
    assert {fix.partition(" --verb=get,list ")[2].partition(" &&")[0] for fix in fixes} == {
        "--resource=nodes",
        "--resource=nodedevicereports.drakit.dev",
    }


async def test_without_a_release_a_user_gets_a_role_of_his_own(site, run):
    site.slice("s1", "a")
    site.forbid("/api/v1/nodes")
    site.denied = ("me list events", "me get pods")
    _, body = await run.json("doctor")
    fixes = {each["fix"] for each in body["findings"] if each["object"] == "Your permissions"}
    start = "ask an administrator: kubectl"
    assert fixes == {
        f"{start} create clusterrole drakit-user-nodes --verb=get,list --resource=nodes && kubectl "
        "create clusterrolebinding drakit-user-nodes --clusterrole=drakit-user-nodes --user=USER",
        f"{start} -n lab create role drakit-user --verb=get,list --resource=events,pods && kubectl "
        "-n lab create rolebinding drakit-user --role=drakit-user --user=USER",
    }


async def test_an_administrator_looks_for_the_role_of_a_release_that_a_user_cannot_see(
    healthy, run
):
    healthy.forbid(f"/apis/{crds.API_VERSION}/nodedevicereports")
    healthy.forbid("/apis/apps")
    _, body = await run.json("doctor")
    fixes = {each["fix"] for each in body["findings"] if each["object"] == "Your permissions"}
    assert fixes == {
        "ask an administrator: kubectl create clusterrolebinding drakit-viewer-USER "
        '--clusterrole="$(kubectl get clusterroles '
        "-l app.kubernetes.io/part-of=drakit,app.kubernetes.io/component=viewer "
        "-o jsonpath='{.items[0].metadata.name}')\" --user=USER"
    }


def _of_gates(body):
    return {
        (each["object"], each["finding"].partition(" but not in ")[2].partition(":")[0])
        for each in body["findings"]
        if each["object"].startswith("Feature gate")
    }


async def test_a_gate_that_another_component_lacks_is_named(healthy, run):
    healthy.runs(DRADeviceTaints=True, DRAExtendedResource=True, ResourceHealthStatus=True)
    healthy.node("n2")
    healthy.slice("s2", "a", node="n2")
    healthy.kubelet("n1", ResourceHealthStatus=False, DRADeviceTaints=False)
    healthy.kubelet("n2", ResourceHealthStatus=False, DRAExtendedResource=False)
    healthy.control_plane(
        "kube-scheduler", "--bind-address=::", "--feature-gates=A=true,DRADeviceTaints=false"
    )
    healthy.control_plane("kube-controller-manager", version="1.35.2")
    code, body = await run.json("doctor")
    assert code == 0
    assert _of_gates(body) == {
        ("Feature gate DRADeviceTaints", "kube-scheduler (in pod kube-scheduler-cp)"),
        (
            "Feature gate DRADeviceTaints",
            "kube-controller-manager (in pod kube-controller-manager-cp)",
        ),
        (
            "Feature gate DRAExtendedResource",
            "kube-controller-manager (in pod kube-controller-manager-cp)",
        ),
        ("Feature gate DRAExtendedResource", "kubelet (on node n2)"),
        ("Feature gate ResourceHealthStatus", "kubelet (on nodes n1, n2)"),
    }
    assert body["notChecked"] == []


async def test_a_component_that_cannot_be_asked_is_not_checked(healthy, run):
    healthy.forbid("/api/v1/nodes/n1/proxy/metrics")
    healthy.remove("/api/v1/namespaces/kube-system/pods/kube-scheduler-cp")
    code, body = await run.json("doctor")
    assert (code, _of_gates(body)) == (0, set())
    assert body["notChecked"] == [
        "kubelets: you are not allowed to get nodes/proxy",
        "kube-scheduler: not a pod in namespace kube-system with the label tier=control-plane",
    ]


def test_the_gates_are_those_of_the_page():
    page = Path("docs/reference/feature-gates.md").read_text()
    defaults, features = (
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines()[2:]]
        for part in re.findall(r"^\| Feature gate \|.*?(?=\n\n)", page, re.M | re.S)
    )
    assert {name: gate.since for name, gate in GATES.items()} == {
        name: next((34 + n for n, cell in enumerate(cells) if cell.startswith("on")), None)
        for name, *cells in defaults
    }
    words = {SCHEDULER: "scheduler", CONTROLLERS: "controller manager", KUBELET: "kubelet"}
    for name, _, components, _ in features:
        expected = {
            each for each, word in words.items() if word in components or "all," in components
        }
        assert set(GATES[name].components) == expected, name


async def test_nobody_is_told_to_allow_kinds_that_the_cluster_does_not_have(healthy, run):
    for plural in ("nodedevicereports", "hostdevicepolicies"):
        healthy.forbid(f"/apis/drakit.dev/v1beta1/{plural}")
    _, body = await run.json("doctor")
    assert any("NodeDeviceReports" in each["finding"] for each in body["findings"])
    healthy.served["drakit.dev"] = ["v1"]  # what a cluster without drakit has: no such version
    _, body = await run.json("doctor")
    assert not any("NodeDeviceReports" in each["finding"] for each in body["findings"])


async def test_without_the_permission_for_slices_no_device_is_gone(site, run):
    site.node("n1")
    site.slice("s1", "a")
    site.claim("mine", device="a", pod="user")
    site.forbid("/apis/resource.k8s.io/v1/resourceslices")
    code, body = await run.json("doctor")
    assert (code, body["drivers"]) == (0, [])


HOSTDEV = "hostdev.drakit.dev"
OF_POLICY = (
    f'device.driver == "{HOSTDEV}" && "policy" in device.attributes["{HOSTDEV}"] && '
    f'device.attributes["{HOSTDEV}"].policy == "serial"'
)
WITHOUT = f'!(device.attributes["{HOSTDEV}"].?policy.orValue("") == "serial")'


@pytest.mark.parametrize(
    ("expression", "count"),
    [
        pytest.param(f'device.driver == "{HOSTDEV}"', 2, id="class-of-the-driver"),
        pytest.param("true", 2, id="class-of-everything"),
        pytest.param(f"{OF_POLICY} && device.attributes['{HOSTDEV}'].port == 1", 1, id="narrower"),
        pytest.param(f'device.driver == "{HOSTDEV}" && {WITHOUT}', 0, id="as-the-remedy-says"),
        pytest.param(f'device.driver == "{DRIVER}"', 0, id="other-driver"),
    ],
)
@pytest.mark.parametrize("restricted", [True, False])
async def test_a_class_that_gets_around_the_namespaces_of_a_policy_is_found(
    healthy, run, expression, count, restricted
):
    devices = [
        {"name": name, "attributes": {"policy": {"string": policy}, "port": {"int": port}}}
        for name, policy, port in (("a", "serial", 1), ("b", "serial", 2), ("c", "other", 1))
    ]
    healthy.slice("h1", driver=HOSTDEV, devices=devices)
    healthy.device_class("serial.drakit.dev", OF_POLICY)
    healthy.policy("serial", "serial.drakit.dev", observedGeneration=1)
    # The class of another restricted policy is not made by the operator.
    healthy.policy("other", observedGeneration=1)
    allowed = {"allowedNamespaces": {"names": ["lab"]}}
    of_other = {"deviceClass": {"create": "Never", "name": "around"}}
    for name, spec in (("serial", allowed if restricted else {}), ("other", allowed | of_other)):
        healthy.change(f"/apis/{crds.API_VERSION}/hostdevicepolicies/{name}", {"spec": spec})
    healthy.device_class("around", expression)
    _, body = await run.json("doctor")
    found = [each for each in body["findings"] if "allowedNamespaces" in each["finding"]]
    assert len(found) == bool(count and restricted)
    for each in found:
        assert (each["severity"], each["object"]) == ("note", "DeviceClass around")
        assert f"selects {count} device" in each["finding"]
        assert f"the selector {WITHOUT}" in each["fix"]


@pytest.mark.parametrize(
    ("labels", "admin_access", "found"),
    [
        pytest.param({}, True, True, id="no-label"),
        pytest.param({"resource.kubernetes.io/admin-access": "false"}, True, True, id="false"),
        pytest.param({"resource.kubernetes.io/admin-access": "true"}, True, False, id="allowed"),
        pytest.param({}, False, False, id="no-admin-access"),
    ],
)
async def test_admin_access_in_a_namespace_without_the_label_is_named(
    healthy, run, labels, admin_access, found
):
    healthy.store("/api/v1/namespaces/lab", {"metadata": {"labels": labels}})
    exact = {"deviceClassName": "gpu", "adminAccess": admin_access}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exact}]}}
    healthy.resource("resourceclaims", "watch", {"spec": spec}, namespace="lab")
    body = {"spec": {"spec": spec}}
    healthy.resource("resourceclaimtemplates", "watch", body, namespace="lab")
    _, answer = await run.json("doctor")
    notes = [each for each in answer["findings"] if "has admin access" in each["finding"]]
    kinds = [each["object"] for each in notes]
    assert kinds == ["ResourceClaim lab/watch", "ResourceClaimTemplate lab/watch"] * found
    for each in notes:
        command = "kubectl label namespace lab resource.kubernetes.io/admin-access=true"
        assert each["fix"].endswith(command)


async def test_a_class_whose_devices_do_not_count_leads_to_the_pools(healthy, run):
    healthy.slice("left", "a", node="n9", driver="left.example.com")
    healthy.device_class("left", 'device.driver == "left.example.com"')
    _, body = await run.json("doctor")
    (found,) = [each for each in body["findings"] if each["object"] == "DeviceClass left"]
    assert "in ResourceSlice left of node n9, which does not exist" in found["finding"]
    assert found["fix"] == "kubectl drakit devices: the state of the pool"
