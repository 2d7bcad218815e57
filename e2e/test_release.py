"""Installing, stopping and removing: nothing is left that should not be."""

from __future__ import annotations

import pytest

from e2e.fixtures import release_values, wait_settled
from e2e.kit import DRIVER, cdi_files, plugin_pod, published, ready, slices, wait_for
from e2e.release import DRAKIT, NAMESPACE, install, uninstall
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


@pytest.mark.slow
def test_a_removed_release_leaves_only_its_data_and_after_the_kubelets_wipe_no_slice(release, zram):
    nodes = release.nodes[:2]
    for node in nodes:
        assert registry(release, node)
    uninstall(release)

    for node in nodes:
        wait_for("the plugin to be gone", lambda: plugin_pod(release, node) is None)  # noqa: B023
        assert registry(release, node) == set()
        assert data(release, node) <= {"checkpoint.db", "policies.json"}
        assert cdi_files(release, node) == set()
    wait_for("the kubelet's wipe, 30 s after the plugin", lambda: not slices(release), seconds=60)
    # Other releases may have classes of their own below drakit.dev.
    owner = "meta.helm.sh/release-name"

    def classes() -> list[dict]:
        return [body["metadata"] for body in release.get("deviceclasses")["items"]]

    assert not [m for m in classes() if m.get("annotations", {}).get(owner) == DRAKIT.name]

    # A plain install is ready (helm waits for that) and publishes nothing.
    install(release)
    assert all(ready(plugin_pod(release, node)) for node in nodes)
    assert not published(release)
    assert not [m for m in classes() if m.get("annotations", {}).get(owner) == DRAKIT.name]

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
    release.kubectl("annotate", "crd", name, f"{CHECKSUM}=0", "--overwrite")
    install(release, values=release_values(release, zram))
    assert checksum(release, name) == current
    wait_settled(release, zram)
