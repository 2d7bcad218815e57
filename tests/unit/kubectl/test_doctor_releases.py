"""``kubectl drakit doctor``: findings about releases of drakit and their values."""

from __future__ import annotations

import pytest

from tests.unit.kubectl.conftest import DRIVER, labels

DRIVERS = [{"driver": "gpu_driver:Gpu", "name": DRIVER}]
GATES = {
    "DRADeviceTaints": ("unhealthy devices are still allocated", ""),
    "DRAPartitionableDevices": (
        "partitions are not published",
        "--set-json 'simulated.config.gpu.partitions=[]'",
    ),
    "DRAConsumableCapacity": (
        "claims cannot share a device",
        "nic.count=0,simulated.config.cpu.grouping=devices",
    ),
    "DRAListTypeAttributes": ("without list attributes", "nic.listAttributes=false"),
    "DRAExtendedResource": ("only with claims", ""),
}
"""A feature of a release that needs a gate, and the value that avoids it."""

SIMULATED = {"driverName": "sim.example.com", "gpu": {"partitions": [1]}, "nic": {"count": 1}}


@pytest.fixture
def cluster(site):
    """Two nodes with devices, and no release."""
    for node in ("n1", "n2"):
        site.node(node)
        site.slice(f"s-{node}", "a", node=node)
    site.runs(**dict.fromkeys(GATES, True))
    return site


@pytest.fixture
def findings(cluster, run):
    """Run the doctor. Return its findings, except for the missing program drakit-cel."""

    async def ask() -> list[dict]:
        _, body = await run.json("doctor")
        return [each for each in body["findings"] if "drakit-cel" not in each["object"]]

    return ask


async def test_releases_that_fit_have_no_findings(cluster, findings):
    cluster.release("drakit", "n1", "n2", drivers=DRIVERS)
    cluster.release("lamps", "n1", operator=0, backends={"enabled": True, "directory": "/b"})
    assert await findings() == []


async def test_no_release_is_a_note(cluster, findings):
    (found,) = await findings()
    assert found["finding"] == "no release of drakit is installed"
    assert found["severity"] == "note"
    assert "admin/install/" in found["fix"]


async def test_a_release_that_is_gone_comes_first_if_drivers_need_it(cluster, findings):
    cluster.slice("incomplete", "a", pool={"name": "p", "generation": 1, "resourceSliceCount": 2})
    cluster.report("n1")
    first, *others = await findings()
    assert first["severity"] == "problem"
    assert "drivers of an earlier one have reports on n1" in first["finding"]
    assert others


async def test_a_node_that_a_node_plugin_has_left_is_a_problem(cluster, findings):
    cluster.release("drakit", "n1", drivers=DRIVERS)
    for node in ("n1", "n2", "deleted"):
        cluster.report(node)
    first, *_ = await findings()
    assert (first["severity"], first["object"]) == ("problem", "Node n2")
    assert "no node plugin runs on n2" in first["finding"]
    assert "(the DaemonSets select 1 of 2 nodes)" in first["finding"]


async def test_a_node_plugin_that_selects_no_node_is_a_problem(cluster, findings):
    cluster.release("drakit", drivers=DRIVERS)
    (found,) = await findings()
    assert found["severity"] == "problem"
    assert "selects 0 of 2 nodes" in found["finding"]


@pytest.fixture
def hostdev(cluster):
    cluster.slice("h", driver="hostdev.drakit.dev")
    cluster.release("drakit", "n1", drivers=[{"driver": "hostdev"}])
    return cluster


async def test_a_missing_definition_of_policies_is_an_outage(hostdev, findings):
    path = "/apis/drakit.dev/v1beta1/hostdevicepolicies"
    hostdev.fail("GET", path, status=404, reason="NotFound", times=9)
    (found,) = await findings()
    assert found["severity"] == "problem"
    assert "hostdevicepolicies.drakit.dev is missing" in found["finding"]
    assert "helm upgrade drakit" in found["fix"]


async def test_a_policy_that_the_operator_does_not_see_is_named(hostdev, findings):
    hostdev.policy("seen", observedGeneration=1)
    assert await findings() == []
    hostdev.policy("kvm")
    (found,) = await findings()
    assert "the operator has not written the status of kvm" in found["finding"]
    assert "kubectl -n drakit-system logs deployment/drakit-operator" in found["fix"]


def pods_not_ready(site):
    site.release("drakit", "n1", "n2", ready=False, drivers=DRIVERS)


def image_not_pulled(site):
    site.release("drakit", "n1", "n2", ready=False, drivers=DRIVERS)
    image = "registry.example.com/drakit-nodeplugin:0.1.0"
    waiting = {
        "reason": "ImagePullBackOff",
        "message": f'Back-off pulling image "{image}": ErrImagePull: {image}: not found',
    }
    status = {"image": image, "state": {"waiting": waiting}}
    for node in ("n1", "n2"):
        site.change(
            f"/api/v1/namespaces/drakit-system/pods/drakit-{node}",
            {"status": {"containerStatuses": [status]}},
        )


def operators_image_not_pulled(site):
    site.release("drakit", "n1", drivers=DRIVERS)
    waiting = {"reason": "ErrImageNeverPull", "message": "not present with pull policy of Never"}
    site.store(
        "/api/v1/namespaces/drakit-system/pods/drakit-operator-1",
        {
            "metadata": labels("drakit", "operator", "0.1.0"),
            "status": {
                "containerStatuses": [
                    {"image": "localhost/drakit-operator:dev", "state": {"waiting": waiting}}
                ]
            },
        },
    )


def half_upgraded(site):
    site.release("drakit", "n1", version="0.2.0", operator=0, drivers=DRIVERS)
    site.store(
        "/apis/apps/v1/namespaces/drakit-system/deployments/drakit-operator",
        {"metadata": labels("drakit", "operator", "0.1.0"), "spec": {"replicas": 0}},
    )


def old_cluster(site):
    site.runs("v1.33.9+vendor", **dict.fromkeys(GATES, True))
    site.release("drakit", "n1", drivers=DRIVERS)


def driver_without_slices(site):
    site.release("drakit", "n1", drivers=[*DRIVERS, {"driver": "hostdev"}])


def same_driver(site):
    site.release("drakit", "n1", "n2", drivers=DRIVERS)
    site.release("other", "n2", operator=0, drivers=DRIVERS)


def same_shipped_driver(site):
    site.slice("h", driver="hostdev.drakit.dev")
    site.release("drakit", "n1", drivers=[{"driver": "hostdev"}])
    site.release("other", "n1", operator=0, drivers=[{"driver": "hostdev"}])


def same_name_of_device_plugins(site):
    for name in ("drakit", "other"):
        plugins = {"enabled": True, "driverName": "plugins.example.com", "directory": f"/{name}"}
        site.release(name, "n1", operator=int(name == "drakit"), devicePlugins=plugins)


def same_driver_of_backends(site):
    for name in ("drakit", "other"):
        allowed = {f"of-{name}": {"driver": "gpu.example.com"}, name: {"driver": f"{name}.test"}}
        backends = {"enabled": True, "directory": f"/{name}", "allowed": allowed}
        site.release(name, "n1", operator=int(name == "drakit"), backends=backends)


def same_directory(site):
    backends = {"enabled": True, "directory": "/run/backends"}
    site.release("drakit", "n1", drivers=DRIVERS, backends=backends)
    site.release("other", "n1", operator=0, backends=backends)


def operator_without_nodes(site):
    site.release("drakit", "n1", drivers=DRIVERS)
    site.denied = ("drakit-operator list nodes", "drakit-operator watch nodes")


def operator_without_its_lease(site):
    site.release("drakit", "n1", drivers=DRIVERS)
    site.denied = ("drakit-operator update leases",)


def plugin_without_slices(site):
    site.release("drakit", "n1", drivers=DRIVERS)
    site.denied = ("drakit-nodeplugin create resourceslices",)


@pytest.mark.parametrize(
    ("spoil", "subject", "text", "fix"),
    [
        pytest.param(
            pods_not_ready,
            "DaemonSet drakit-system/drakit-nodeplugin",
            "0 of 2 pods ready; not ready on n1, n2",
            "nodeplugin.kubeletRoot",
        ),
        pytest.param(
            image_not_pulled,
            "Pod drakit-system/drakit-n1",
            "2 pods in namespace drakit-system cannot pull image "
            "registry.example.com/drakit-nodeplugin:0.1.0 (drakit-n1, drakit-n2): "
            "ImagePullBackOff: Back-off pulling image "
            '"registry.example.com/drakit-nodeplugin:0.1.0": ErrImagePull: '
            "registry.example.com/drakit-nodeplugin:0.1.0: not found",
            "imagePullSecrets",
        ),
        pytest.param(
            operators_image_not_pulled,
            "Pod drakit-system/drakit-operator-1",
            "cannot pull image localhost/drakit-operator:dev (drakit-operator-1): "
            "ErrImageNeverPull: not present with pull policy of Never",
            "--set image.repository=REPOSITORY --set image.tag=TAG",
        ),
        pytest.param(
            half_upgraded,
            "Release drakit-system/drakit",
            "components of versions 0.1.0, 0.2.0",
            "helm upgrade drakit",
        ),
        pytest.param(
            old_cluster,
            "Release drakit-system/drakit",
            "needs Kubernetes 1.34, but the API server is v1.33.9+vendor",
            "upgrade the cluster",
        ),
        pytest.param(
            driver_without_slices,
            "Node n1",
            "driver hostdev.drakit.dev publishes no ResourceSlice there",
            "kubectl -n drakit-system logs drakit-n1",
        ),
        pytest.param(
            same_driver,
            "Release other-system/other",
            f"both run driver {DRIVER} on node n2",
            "helm get values other -n other-system > values.yaml, edit the file, and helm upgrade "
            "other charts/drakit -n other-system --reset-then-reuse-values --values values.yaml",
        ),
        pytest.param(
            same_shipped_driver,
            "Release other-system/other",
            "both run driver hostdev.drakit.dev on node n1",
            "helm uninstall other -n other-system",
        ),
        pytest.param(
            same_name_of_device_plugins,
            "Release other-system/other",
            "both run driver plugins.example.com on node n1",
            "--set devicePlugins.driverName=NAME",
        ),
        pytest.param(
            same_driver_of_backends,
            "Release other-system/other",
            "both run driver gpu.example.com on node n1",
            "--set backends.allowed.of-other=null",
        ),
        pytest.param(
            same_directory,
            "Release other-system/other",
            "both use the directory /run/backends on node n1",
            "--set backends.directory=DIRECTORY",
        ),
        pytest.param(
            operator_without_nodes,
            "Deployment drakit-system/drakit-operator",
            "drakit-system/drakit-operator of the operator is not allowed to list nodes, watch "
            "nodes",
            "helm upgrade drakit charts/drakit -n drakit-system --reset-then-reuse-values "
            "--force-conflicts",
        ),
        pytest.param(
            operator_without_its_lease,
            "Deployment drakit-system/drakit-operator",
            "is not allowed to update leases.coordination.k8s.io",
            "helm upgrade drakit",
        ),
        pytest.param(
            plugin_without_slices,
            "DaemonSet drakit-system/drakit-nodeplugin",
            "of the nodeplugin is not allowed to create resourceslices.resource.k8s.io",
            "helm upgrade drakit",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
async def test_a_problem_of_a_release_has_a_remedy(cluster, findings, spoil, subject, text, fix):
    spoil(cluster)
    found = {each["finding"]: each for each in await findings() if each["severity"] == "problem"}
    (what,) = [each for each in found if text in each]
    assert found[what]["object"] == subject
    assert fix in found[what]["fix"]


async def test_a_pod_with_earlier_values_is_not_held_to_the_new_ones(cluster, findings):
    driver_without_slices(cluster)
    changed = {"checksum/config": "new"}
    cluster.change(
        "/apis/apps/v1/namespaces/drakit-system/daemonsets/drakit-nodeplugin",
        {"spec": {"template": {"metadata": {"annotations": changed}}}},
    )
    assert await findings() == []
    cluster.change(
        "/api/v1/namespaces/drakit-system/pods/drakit-n1", {"metadata": {"annotations": changed}}
    )
    assert len(await findings()) == 1


def two_operators(site):
    site.release("drakit", "n1", drivers=DRIVERS)
    site.release("other", "n2", backends={"enabled": True, "directory": "/b"})


def other_kubelet(site):
    site.release("drakit", "n1", drivers=DRIVERS)
    path = {"path": "/var/snap/kubelet/plugins_registry/"}
    volumes = [{"name": "registration", "hostPath": path}]
    body = {"spec": {"template": {"spec": {"volumes": volumes}}}}
    site.store("/apis/apps/v1/namespaces/storage/daemonsets/csi", body)


def silent_backends(site):
    site.remove("/apis/resource.k8s.io/v1/resourceslices/s-n2")
    site.release("drakit", "n2", backends={"enabled": True, "directory": "/b"})


def restarted(site):
    site.release("drakit", "n1", drivers=DRIVERS)
    ended = {
        "exitCode": 1,
        "reason": "Error",
        "finishedAt": "2026-03-01T09:30:00Z",
        "message": "Traceback\n  ...\nKeyError: 'cap-1'\n",
    }
    status = {"name": "nodeplugin", "restartCount": 3, "lastState": {"terminated": ended}}
    fresh = {"name": "sidecar", "restartCount": 0, "lastState": {}}
    site.change(
        "/api/v1/namespaces/drakit-system/pods/drakit-n1",
        {"status": {"containerStatuses": [status, fresh]}},
    )


@pytest.mark.parametrize(
    ("spoil", "text", "fix"),
    [
        pytest.param(
            restarted,
            "container nodeplugin of pod drakit-n1 on node n1 was restarted 3 times; its last "
            "exit: Error, exit code 1 at 2026-03-01T09:30:00Z: KeyError: 'cap-1'",
            "kubectl -n drakit-system logs drakit-n1 -c nodeplugin --previous",
        ),
        pytest.param(two_operators, "both run an operator", "--set operator.enabled=false"),
        pytest.param(
            other_kubelet,
            "uses the kubelet directory /var/lib/kubelet, but DaemonSet storage/csi uses "
            "/var/snap/kubelet",
            "--set nodeplugin.kubeletRoot=/var/snap/kubelet",
        ),
        pytest.param(
            silent_backends,
            "node n2 has a node plugin, but no ResourceSlice is published for the node",
            "logs drakit-n2",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
async def test_a_state_of_a_release_that_may_be_intended(cluster, findings, spoil, text, fix):
    spoil(cluster)
    (found,) = await findings()
    assert found["severity"] == "note"
    assert text in found["finding"]
    assert fix in found["fix"]


async def test_a_daemon_set_of_the_same_kubelet_agrees(cluster, findings):
    other_kubelet(cluster)
    cluster.release("drakit", "n1", root="/var/snap/kubelet", drivers=DRIVERS)
    assert await findings() == []


@pytest.fixture
def with_all_values(cluster):
    config = SIMULATED | {"nic": {"count": 1, "listAttributes": True}}
    cluster.slice("sim", "a", driver="sim.example.com")
    cluster.release(
        *("drakit", "n1"),
        drivers=[{"driver": "simulated", "config": config}],
        devicePlugins={"enabled": True, "directory": "/d", "driverName": "p.example.com"},
    )
    return cluster


@pytest.mark.parametrize("gate", GATES)
async def test_a_value_that_needs_a_disabled_gate(with_all_values, findings, gate):
    without, value = GATES[gate]
    with_all_values.runs(**dict.fromkeys(GATES, True) | {gate: False})
    (found,) = await findings()
    assert f"{gate}, which is disabled: " in found["finding"]
    assert without in found["finding"]
    assert f"--feature-gates={gate}=true" in found["fix"]
    assert value in found["fix"]


@pytest.mark.parametrize(
    ("kubernetes", "disabled"),
    [
        pytest.param("v1.36.0", {"DRAListTypeAttributes"}, id="defaults-of-1.36"),
        pytest.param("v1.35.4", set(GATES), id="defaults-of-1.35"),
        pytest.param("unusual", set(), id="an-unknown-version-allows-no-conclusion"),
    ],
)
async def test_gates_that_may_not_be_read_are_those_of_the_version(
    with_all_values, findings, kubernetes, disabled
):
    with_all_values.runs(kubernetes)
    with_all_values.forbid("/metrics")
    found = [each["finding"] for each in await findings() if "uses the feature" in each["finding"]]
    assert {gate for gate in GATES for each in found if gate in each} == disabled
    assert all("disabled by default" in each for each in found)


async def test_values_that_nobody_may_read_are_not_guessed(cluster, findings):
    same_driver(cluster)
    cluster.forbid("/api/v1/configmaps")
    cluster.forbid("/api/v1/namespaces/lab/configmaps")
    (found,) = await findings()
    assert found["finding"].startswith("no permission to list configmaps: the values of releases")


async def test_a_malformed_configuration_costs_only_itself(cluster, findings):
    cluster.release("drakit", "n1", drivers=DRIVERS)
    for text in ("{", "[]", "drivers: 3"):
        cluster.store(
            "/api/v1/namespaces/drakit-system/configmaps/drakit-nodeplugin",
            {"data": {"nodeplugin.yaml": text}},
        )
        assert [each for each in await findings() if each["severity"] == "problem"] == []


async def test_a_release_that_helm_did_not_install_has_no_command_of_helm(site, run):
    site.release("drakit", "n1", drivers=DRIVERS)
    site.denied = ("drakit-operator list nodes",)
    path = "/apis/apps/v1/namespaces/drakit-system/{}/drakit-{}"
    for plural, component in (("deployments", "operator"), ("daemonsets", "nodeplugin")):
        change = {"metadata": {"annotations": {"meta.helm.sh/release-name": None}}}
        site.change(path.format(plural, component), change)
    _, body = await run.json("doctor")
    (found,) = [each for each in body["findings"] if "list nodes" in each["finding"]]
    assert "helm upgrade" not in found["fix"]
    assert "apply the chart again with the tool that installed it" in found["fix"]


async def test_a_permission_that_only_adds_to_answers_is_a_note(site, run):
    site.release("drakit", "n1", drivers=DRIVERS)
    site.release("other", "n2", drivers=DRIVERS)
    site.denied = (
        "drakit-operator get /metrics",
        "drakit-operator patch hostdevicepolicies/status",
        "other-nodeplugin delete nodedevicereports",
    )
    _, body = await run.json("doctor")
    found = {
        each["object"]: (each["severity"], each["finding"].partition("is not allowed to ")[2])
        for each in body["findings"]
        if "is not allowed to" in each["finding"]
    }
    assert found == {
        "Deployment drakit-system/drakit-operator": ("note", "get /metrics"),
        "DaemonSet other-system/other-nodeplugin": (
            "note",
            "delete nodedevicereports.drakit.dev",
        ),
    }
    site.release("drakit", "n1", drivers=[{"driver": "hostdev"}])
    _, body = await run.json("doctor")
    assert any("patch hostdevicepolicies/status" in each["finding"] for each in body["findings"])


async def test_the_permissions_of_claim_status_are_checked_where_it_is_enabled(site, run):
    site.release("drakit", "n1", drivers=DRIVERS, claimStatus={"enabled": True})
    site.release("other", "n2", operator=0, drivers=[{"driver": "a:A", "name": "a.example.com"}])
    of = ("patch resourceclaims/status", "associated-node:patch resourceclaims/driver")
    site.denied = tuple(f"{name}-nodeplugin {each}" for name in ("drakit", "other") for each in of)
    _, body = await run.json("doctor")
    found = [each for each in body["findings"] if "is not allowed to" in each["finding"]]
    assert [(each["object"], each["severity"]) for each in found] == [
        ("DaemonSet drakit-system/drakit-nodeplugin", "note")
    ]
    assert found[0]["finding"].endswith(
        "is not allowed to patch resourceclaims/status.resource.k8s.io, "
        "associated-node:patch resourceclaims/driver.resource.k8s.io"
    )


@pytest.mark.parametrize("driver_taints", [True, False])
@pytest.mark.parametrize("maintenance", [True, False])
async def test_the_permission_for_taints_is_checked_where_a_value_needs_it(
    site, run, driver_taints, maintenance
):
    settings = {"drivers": DRIVERS, "deviceMaintenance": maintenance}
    site.release("drakit", "n1", driver_taints=driver_taints, **settings)
    site.denied = ("drakit-operator create devicetaintrules",)
    _, body = await run.json("doctor")
    found = [each["object"] for each in body["findings"] if "devicetaintrules" in each["finding"]]
    assert found == ["Deployment drakit-system/drakit-operator"] * (driver_taints or maintenance)


@pytest.mark.parametrize(
    ("driver_taints", "readable", "seconds", "noted"),
    [
        pytest.param(False, True, 300, True, id="disabled"),
        pytest.param(True, True, 300, False, id="enabled"),
        pytest.param(False, True, None, False, id="no-driver-asks-for-taints"),
        pytest.param(False, False, 300, False, id="the-values-cannot-be-read"),
    ],
)
async def test_a_driver_that_asks_for_taints_needs_the_value(
    site, run, driver_taints, readable, seconds, noted
):
    site.release("drakit", "n1", drivers=DRIVERS, driver_taints=driver_taints)
    spec = {} if seconds is None else {"taintAfterSeconds": seconds}
    site.store(f"/apis/drakit.dev/v1beta1/devicedrivers/{DRIVER}", {"spec": spec})
    if not readable:
        site.forbid("/api/v1/configmaps")
        site.forbid("/api/v1/namespaces/lab/configmaps")
    _, body = await run.json("doctor")
    found = [each for each in body["findings"] if "taintAfterSeconds" in each["finding"]]
    assert [each["severity"] for each in found] == ["note"] * noted
    assert all("operator.driverTaints.enabled=true" in each["fix"] for each in found)
