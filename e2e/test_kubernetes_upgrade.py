"""
Nodes that run another release of Kubernetes than the control plane, while drakit is running.

Kubernetes is upgraded in the same order as by administrators: the control plane first, then one
node after the other. The oldest kubelet that a supported control plane can have calls drivers only
through version v1beta1 of its DRA API.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.cluster.api import Capability, Cluster, Options
from e2e.cluster.choice import cluster_of_tests
from e2e.cluster.local.binaries import KUBELETS
from e2e.images import build_images
from e2e.kit import (
    Space,
    cdi_files,
    devices,
    from_template,
    plugin_pod,
    ready,
    restarts,
    template,
    wait_for,
)
from e2e.release import install, uninstall
from e2e.simulated import DRIVER, GPU, user

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,  # it builds programs of other releases, and starts separate clusters
    pytest.mark.feature("versions"),
    pytest.mark.needs(Capability.UPGRADE),
    pytest.mark.timeout(900),
]

OLD, NEW = "1.36", "1.37"
OLDEST = "1.34"
"""The oldest release that drakit supports."""

(OLD_KUBELET,) = KUBELETS
VALUES = {
    "hostdev": {"enabled": False},
    # A GPU on each node for the pod before the upgrade, the one during it, and the one after it.
    "simulated": {"enabled": True, "config": {"gpu": {"count": 3}}},
}


@contextmanager
def cluster_with(minor: str, *, kubelet: str | None = None) -> Generator[Space]:
    """Start a cluster of two nodes with drakit and its simulated devices during the block."""
    cluster = cluster_of_tests("upgrade", minor=minor)
    cluster.start(Options(nodes=2, kubelet=kubelet))
    for archive in build_images():
        cluster.load_image(archive)
    install(cluster, values=VALUES)
    for node in cluster.nodes:
        wait_for(f"devices of {node}", lambda: devices(cluster, node, driver=DRIVER))  # noqa: B023
    space = Space(cluster, "default")
    space.apply(template("gpu", ("gpu", GPU)))
    yield space
    space.kubectl("delete", "pods,resourceclaims", "--all", "--timeout=60s", timeout=90)
    for node in cluster.nodes:
        assert cdi_files(cluster, node, driver=DRIVER) == set()
    uninstall(cluster)
    cluster.stop()
    assert cluster.leftovers() == []


def start(space: Space, name: str, *, node: str) -> None:
    """Create a pod with a GPU on a node, and wait until it runs."""
    space.apply(user(name, ("gpu", from_template("gpu")), node=node))
    space.wait_phase(name, "Running")


def identity(space: Space, name: str) -> tuple[str, int, list[str]]:
    """Return the UID of a pod, the restarts of its containers, and the devices in its process."""
    body = space.get("pod", name)
    assert body is not None
    environment = space.kubectl("exec", name, "--", "env").splitlines()
    gpus = sorted(line for line in environment if line.startswith("SIMULATED_"))
    return body["metadata"]["uid"], restarts(body), gpus


def kubelet_version(cluster: Cluster, node: str) -> str:
    body: dict[str, Any] = json.loads(cluster.kubectl("get", "node", node, "-o", "json").stdout)
    return body["status"]["nodeInfo"]["kubeletVersion"]


def server_version(cluster: Cluster) -> str:
    return json.loads(cluster.kubectl("get", "--raw", "/version").stdout)["gitVersion"]


def test_pods_keep_their_devices_while_kubernetes_is_upgraded_node_by_node():
    with cluster_with(OLD) as space:
        cluster = space.cluster
        before = {node: set(devices(cluster, node, driver=DRIVER)) for node in cluster.nodes}
        plugins = {node: plugin_pod(cluster, node) for node in cluster.nodes}
        for number, node in enumerate(cluster.nodes):
            start(space, f"old-{number}", node=node)
        old = {name: identity(space, name) for name in ("old-0", "old-1")}
        assert all(gpus for _, _, gpus in old.values())

        cluster.upgrade_control_plane(NEW)
        cluster.wait_for_nodes()
        assert server_version(cluster).startswith(f"v{NEW}.")
        for number, node in enumerate(cluster.nodes):
            assert kubelet_version(cluster, node).startswith(f"v{OLD}.")
            start(space, f"skewed-{number}", node=node)

        for number, node in enumerate(cluster.nodes):
            cluster.upgrade_node(node)
            wait_for(
                f"the kubelet of {node} to report its version",
                lambda: kubelet_version(cluster, node).startswith(f"v{NEW}."),  # noqa: B023
            )
            cluster.wait_for_nodes()
            # A kubelet deletes the slices of its node when it starts.
            wait_for(
                f"the slices of {node}",
                lambda: set(devices(cluster, node, driver=DRIVER)) == before[node],  # noqa: B023
            )
            start(space, f"new-{number}", node=node)
            assert {name: identity(space, name) for name in old} == old

        for node, body in plugins.items():
            assert body is not None
            now = plugin_pod(cluster, node)
            assert now is not None
            assert ready(now)
            assert (now["metadata"]["uid"], restarts(now)) == (body["metadata"]["uid"], 0)


def test_a_kubelet_that_knows_only_v1beta1_prepares_and_unprepares_claims():
    with cluster_with(OLDEST, kubelet=OLD_KUBELET) as space:
        for number, node in enumerate(space.cluster.nodes):
            assert kubelet_version(space.cluster, node).startswith(f"v{OLD_KUBELET}.")
            start(space, f"pod-{number}", node=node)
            _, _, gpus = identity(space, f"pod-{number}")
            assert gpus
            assert len(cdi_files(space.cluster, node, driver=DRIVER)) == 1
        space.delete("pod", "pod-0")
        first = space.cluster.nodes[0]
        wait_for(
            "the claim to be unprepared", lambda: not cdi_files(space.cluster, first, driver=DRIVER)
        )
