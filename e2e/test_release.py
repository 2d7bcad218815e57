"""Install, roll back and remove a release, without unwanted remains."""

from __future__ import annotations

import json
from typing import Any

import pytest

from drakit_cli.setup import FIELD_MANAGER
from e2e.cluster.api import ClusterError, CommandError
from e2e.fixtures import release_values, wait_settled
from e2e.kit import (
    DRIVER,
    OPERATOR,
    cdi_files,
    claim,
    from_claim,
    plugin_pod,
    plugin_pods,
    pod,
    published,
    ready,
    signal_pod,
    slices,
    wait_for,
)
from e2e.release import CHART, DRAKIT, NAMESPACE, install, uninstall
from e2e.test_maintenance import Maintenances
from tools.crds.__main__ import CHECKSUM

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.serial,
    pytest.mark.disruptive,
    pytest.mark.timeout(300),
    pytest.mark.feature("release"),
]


def files_below(release, node: str, path: str) -> set[str]:
    folder = release.node_path(node, path)
    return {entry.name for entry in folder.iterdir()} if folder.exists() else set()


def registry(release, node: str) -> set[str]:
    names = files_below(release, node, "/var/lib/kubelet/plugins_registry")
    return {name for name in names if DRIVER in name}


def data(release, node: str) -> set[str]:
    return files_below(release, node, f"/var/lib/kubelet/plugins/drakit.dev/drivers/{DRIVER}")


def test_the_plugin_is_not_privileged(release):
    body = plugin_pod(release, release.nodes[0])
    (container,) = body["spec"]["containers"]
    context = container["securityContext"]
    assert not context.get("privileged")
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert not body["spec"].get("hostNetwork")
    assert not body["spec"].get("hostPID")


def test_helm_test_runs_a_pod_with_a_device_and_leaves_nothing(release):
    done = release.helm(
        *("test", DRAKIT.name, f"--namespace={NAMESPACE}", "--timeout=90s"), timeout=120
    )
    assert "Succeeded" in done.stdout
    assert "the container has its device: HOSTDEV_DEVICE=/dev/fuse" in done.stdout + done.stderr
    kinds = "pods,resourceclaimtemplates,resourceclaims"

    def left() -> str:
        return release.kubectl("-n", NAMESPACE, "get", kinds, "-o", "name").stdout

    wait_for("the test to be gone", lambda: "drakit-test" not in left())


def classes(release) -> list[str]:
    """Return the DeviceClasses of the release. Other releases may have their own classes."""
    owner = "meta.helm.sh/release-name"
    found = [body["metadata"] for body in release.get("deviceclasses")["items"]]
    return [m["name"] for m in found if m.get("annotations", {}).get(owner) == DRAKIT.name]


def policies(release) -> set[str]:
    return {body["metadata"]["name"] for body in release.get("hostdevicepolicies")["items"]}


def reports(release) -> list[dict[str, Any]]:
    items = release.get("nodedevicereports")["items"]
    return [body for body in items if body["spec"]["driver"] == DRIVER]


def revision(release) -> int:
    history = release.helm("history", DRAKIT.name, "-n", DRAKIT.namespace, "-o", "json").stdout
    return json.loads(history)[-1]["revision"]


def helm(release, action: str, *arguments: str) -> str:
    """Run helm for the release, and return its output. Helm escapes the lines of a hook."""
    done = release.helm(action, DRAKIT.name, *arguments, "-n", DRAKIT.namespace, timeout=240)
    return (done.stdout + done.stderr).replace("\\n", "\n")


@pytest.mark.slow
def test_the_operator_and_the_hooks_run_in_user_namespaces(release, zram):
    """Needs an OCI runtime that supports them, such as RUNTIME=runc-1.4."""
    handlers = release.get("node", release.nodes[0])["status"].get("runtimeHandlers", [])
    if not any(handler.get("features", {}).get("userNamespaces") for handler in handlers):
        pytest.skip("the container runtime of the nodes does not support user namespaces")
    values = release_values(release, zram)
    values["operator"]["hostUsers"] = False
    try:
        # Helm waits for the operator, and for the Job that applies the policies.
        install(release, values=values)
        maps = {uid_map(release, body) for body in operator_pods(release)}
        assert len(maps) == values["operator"]["replicas"], "each pod has a range of its own"
        assert all(first > 0 for first, _ in maps)
    finally:
        install(release, values=release_values(release, zram))
    wait_settled(release, zram)
    assert {uid_map(release, body)[0] for body in operator_pods(release)} == {0}


def operator_pods(release) -> list[dict]:
    """Return the operator's pods that are not terminating."""
    items = release.get("pods", "-n", NAMESPACE, "-l", OPERATOR)["items"]
    return [body for body in items if "deletionTimestamp" not in body["metadata"]]


def uid_map(release, body: dict) -> tuple[int, int]:
    """Return the node's user ID of user 0 in a pod, and the number of user IDs in the pod."""
    (process, *_) = signal_pod(release, body, "drakit-operator", "0")
    text = release.exec_on_node(body["spec"]["nodeName"], ["cat", f"/proc/{process}/uid_map"])
    inside, outside, count = map(int, text.stdout.split())
    assert inside == 0
    return outside, count


@pytest.mark.slow
def test_a_removed_release_leaves_only_its_data_and_no_slice(release, zram):
    nodes = release.nodes[:2]
    for node in nodes:
        assert registry(release, node)
    assert reports(release)
    assert "node plugins: stopped on 2 nodes" in uninstall(release)

    for node in nodes:
        assert plugin_pod(release, node) is None
        assert registry(release, node) == set()
        assert data(release, node) <= {"checkpoint.db", "policies.json"}
        assert cdi_files(release, node) == set()
    assert not slices(release), "they do not wait for the kubelet's wipe"
    assert not reports(release)
    assert not policies(release)
    assert not classes(release)

    # A plain install becomes ready (helm waits for that) and publishes nothing.
    install(release)
    assert all(ready(plugin_pod(release, node)) for node in nodes)
    assert not published(release)
    assert not classes(release)

    install(release, values=release_values(release, zram))
    wait_settled(release, zram)


@pytest.mark.slow
def test_policies_are_in_force_neither_after_a_rollback_nor_after_an_uninstall(release, zram):
    uninstall(release)
    install(release)
    assert policies(release) == set()
    install(release, values=release_values(release, zram))
    wait_settled(release, zram)
    assert policies(release)
    helm(release, "rollback", "1", "--wait")
    assert policies(release) == set()
    wait_for("no published device", lambda: not published(release))

    # Without its hook, a rollback keeps the policies; the uninstallation deletes them.
    install(release, values=release_values(release, zram))
    helm(release, "rollback", "1", "--no-hooks")
    assert policies(release)
    uninstall(release)
    assert policies(release) == set()

    install(release, values=release_values(release, zram))
    wait_settled(release, zram)


def test_a_release_whose_devices_pods_use_is_not_uninstalled(space, zram):
    release, node = space.cluster, space.cluster.nodes[0]
    space.apply(claim("disk", ("disk", "zram.test")), pod("user", ("disk", from_claim("disk"))))
    space.wait_phase("user", "Running")
    before = plugin_pod(release, node)
    with pytest.raises(CommandError) as refused:
        uninstall(release)
    assert f"pod {space.name}/user: uses claim disk of {DRIVER}" in refused.value.output
    assert "drakit.dev/force-uninstall=true" in refused.value.output
    assert plugin_pod(release, node) == before
    assert policies(release)
    assert space.phase("user") == "Running"
    # Helm keeps the state `uninstalling`, which a rollback to the installed revision ends.
    helm(release, "rollback", str(revision(release)), "--wait")
    install(release, values=release_values(release, zram))

    override = "drakit.dev/force-uninstall=true"
    release.kubectl("annotate", "ds", "drakit-nodeplugin", override, "-n", DRAKIT.namespace)
    assert f"pod {space.name}/user" in uninstall(release)
    assert not slices(release)
    assert space.phase("user") == "Running"
    space.delete("pod", "user", wait=False)
    install(release, values=release_values(release, zram))
    space.wait_gone("user")
    wait_settled(release, zram)
    wait_for("its CDI file to be gone", lambda: not cdi_files(release, node))


@pytest.mark.slow
def test_an_uninstall_names_a_node_that_does_not_answer(release, zram):
    first, second = release.nodes[:2]
    values = release_values(release, zram)
    install(release, values={**values, "nodeplugin": {"terminationGracePeriodSeconds": 1}})
    wait_settled(release, zram)
    release.stop_kubelet(second)
    try:
        printed = helm(release, "uninstall")
        assert "node plugins: stopped on 1 node\n" in printed
        assert f"\nnode {second}" in printed
        assert not slices(release, first)
        assert slices(release, second)
    finally:
        release.start_kubelet(second)
    wait_for("no slice of the node", lambda: not slices(release, second), seconds=90)
    wait_for("no plugin of the node", lambda: not plugin_pods(release, second), seconds=90)
    assert registry(release, second) == set()
    install(release, values=values)
    wait_settled(release, zram)


@pytest.mark.slow
def test_an_uninstall_whose_hook_has_no_image_succeeds_without_hooks(release, zram):
    helm(release, "uninstall")
    values = ("--reuse-values", "--set", "image.tag=missing", "--no-hooks")
    install(release, values=release_values(release, zram))
    helm(release, "upgrade", str(CHART), *values)
    with pytest.raises(CommandError):
        helm(release, "uninstall", "--timeout", "10s")
    assert policies(release)
    helm(release, "uninstall", "--no-hooks", "--wait")
    labels = "drakit.dev/release-namespace=drakit-system,drakit.dev/release-name=drakit"
    release.kubectl("delete", "hostdevicepolicies", "-l", labels)
    assert policies(release) == set()
    # Helm has deleted the account and the roles of the failed Job.
    setup = ("-l", "app.kubernetes.io/component=setup", "-o", "name")
    jobs = release.kubectl("delete", "jobs", "-n", DRAKIT.namespace, *setup).stdout
    assert "drakit-setup-remove" in jobs
    assert release.kubectl("get", "clusterroles,clusterrolebindings", *setup).stdout == ""
    install(release, values=release_values(release, zram))
    wait_settled(release, zram)


@pytest.mark.slow
def test_an_uninstall_names_what_is_in_maintenance_and_without_drakit_a_deletion_ends_it(
    release, zram
):
    found = Maintenances(release)
    try:
        found.create("left", devices={"driver": DRIVER, "node": release.nodes[1]}, mode="Cordon")
        found.wait("left", "Tainted", "True", "Tainted")
        by_rules = found.status("left")["taintedBy"] == "DeviceTaintRule"
        tainted = found.tainted()
        assert tainted
        assert "devicemaintenance left: " in uninstall(release)
        if by_rules:
            assert found.tainted() == tainted, "only a deletion ends a maintenance"
        found.end("left")
        wait_for("no rule and no taint", lambda: not found.tainted(), seconds=60)
    finally:
        found.end("left")
        install(release, values=release_values(release, zram))
        wait_settled(release, zram)


def checksum(release, name: str) -> str:
    return release.get("crd", name)["metadata"].get("annotations", {}).get(CHECKSUM, "")


@pytest.mark.slow
def test_definitions_that_an_earlier_release_left_are_upgraded(release, zram):
    name = "nodedevicereports.drakit.dev"
    current = checksum(release, name)
    assert current
    uninstall(release)
    # As after an upgrade, whose hook applies the definitions of its release.
    left = release.get("crd", name)
    metadata = {"name": name, "annotations": {CHECKSUM: "0"}}
    body = json.dumps({**left, "metadata": metadata, "status": {}})
    as_hook = ("--server-side", "--force-conflicts", f"--field-manager={FIELD_MANAGER}")
    release.kubectl("apply", *as_hook, "-f", "-", input=body)
    values = release_values(release, zram)
    with pytest.raises(ClusterError, match=f'conflict with "{FIELD_MANAGER}"'):
        install(release, values=values)
    install(release, values=values, arguments=["--force-conflicts"])
    assert checksum(release, name) == current
    wait_settled(release, zram)
