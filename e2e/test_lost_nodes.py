"""Nodes that fail with prepared claims, that are deleted, and that return under the same name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from e2e.cluster.api import Capability, Cluster
from e2e.kit import (
    DRIVER,
    NAMESPACE,
    devices_of,
    from_template,
    plugin_pod,
    pod,
    ready,
    restarts,
    slices,
    template,
    wait_for,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,  # a lost node is noticed after 40 s or more
    pytest.mark.disruptive,
    pytest.mark.serial,
    pytest.mark.timeout(600),
    pytest.mark.feature("faults"),
]

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"

LOST_SECONDS = 150
"""Kubernetes waits 50 s for a heartbeat, then deletes pods every 20 s. Pods of a deleted node wait
for another 40 s."""


@pytest.fixture
def node(release: Cluster) -> str:
    return release.nodes[1]


@pytest.fixture
def holder(space, node) -> dict[str, Any]:
    """The claim of a running pod on the second node."""
    space.apply(
        template("disk", ("disk", "zram-second.test")),
        pod("holder", ("disk", from_template("disk")), restart="Always"),
    )
    space.wait_phase("holder", "Running")
    assert space.get("pod", "holder")["spec"]["nodeName"] == node
    claim = space.claim_of("holder", "disk")
    assert prepared(space.cluster, node) == {claim["metadata"]["uid"]}
    return claim


def prepared(cluster: Cluster, node: str) -> set[str]:
    """Return the claims in the checkpoint of hostdev on a node."""
    found = plugin_pod(cluster, node)
    assert found is not None
    command = ("drakit", "node", "checkpoint", "show", "--json", f"--driver={DRIVER}")
    text = cluster.kubectl("-n", NAMESPACE, "exec", found["metadata"]["name"], "--", *command)
    (checkpoint,) = json.loads(text.stdout)["checkpoints"]
    return {claim["uid"] for claim in checkpoint["claims"]}


def uid_of_node(cluster: Cluster, node: str) -> str:
    found = cluster.kubectl(
        "get", "node", node, "-o", "jsonpath={.metadata.uid}", "--ignore-not-found"
    )
    return found.stdout


def owners(cluster: Cluster, node: str) -> set[str]:
    """Return the UIDs of the owners of hostdev's slices for a node."""
    return {
        owner["uid"]
        for body in slices(cluster, node)
        for owner in body["metadata"]["ownerReferences"]
    }


def wait_lost(space, claim: dict[str, Any]) -> None:
    """Wait until Kubernetes has deleted the pod and its claim, although the node cannot respond."""
    space.wait_gone("holder", seconds=LOST_SECONDS)
    name = claim["metadata"]["name"]
    wait_for("the claim to be gone", lambda: space.get("resourceclaim", name) is None)


def wait_returned(space, node: str, claim: dict[str, Any]) -> None:
    """Wait until the node has unprepared the claim, and all of its devices are usable again."""
    cluster = space.cluster
    cluster.wait_for_nodes()
    wait_for("the plugin", lambda: ready(plugin_pod(cluster, node)), seconds=120)
    wait_for("the claim to be unprepared", lambda: not prepared(cluster, node), seconds=180)
    every = {"deviceClassName": "zram-second.test", "allocationMode": "All"}
    space.apply(
        template("every", {"name": "disk", "exactly": every}),
        pod("next", ("disk", from_template("every"))),
    )
    space.wait_phase("next", "Running")
    assert set(devices_of(claim)) < set(devices_of(space.claim_of("next", "disk")))


@pytest.mark.needs(Capability.REBOOT)
def test_a_node_that_dies_with_prepared_claims_is_taken_out_of_service(space, node, holder):
    cluster = space.cluster
    taint = f"{OUT_OF_SERVICE}=nodeshutdown:NoExecute"
    try:
        with cluster.power_off(node):
            cluster.kubectl("taint", "nodes", node, taint)
            wait_lost(space, holder)
            assert slices(cluster, node), "the node still exists"
    finally:
        cluster.kubectl("taint", "nodes", node, f"{OUT_OF_SERVICE}-")
    wait_returned(space, node, holder)


@pytest.mark.needs(Capability.REBOOT)
def test_a_dead_node_that_is_deleted_returns_under_the_same_name(space, node, holder):
    cluster = space.cluster
    before = uid_of_node(cluster, node)
    with cluster.power_off(node):
        cluster.kubectl("delete", "node", node)
        wait_for("the slices to be gone", lambda: not slices(cluster, node))
        report = ("nodedevicereport", f"{node}.{DRIVER}", "--ignore-not-found", "-o", "name")
        wait_for("its report to be gone", lambda: not cluster.kubectl("get", *report).stdout)
        wait_lost(space, holder)
    wait_for("the node", lambda: uid_of_node(cluster, node) not in ("", before))
    wait_for(
        "its slices", lambda: owners(cluster, node) == {uid_of_node(cluster, node)}, seconds=120
    )
    wait_returned(space, node, holder)


def test_a_node_that_is_created_again_under_running_pods_keeps_their_claims(space, node, holder):
    """An administrator deletes the Node by mistake, but its kubelet, plugin and pods continue."""
    cluster = space.cluster
    before, plugin = uid_of_node(cluster, node), plugin_pod(cluster, node)
    cluster.kubectl("delete", "node", node)
    cluster.restart_kubelet(node)  # before Kubernetes deletes the pods of the deleted Node
    wait_for("the node", lambda: uid_of_node(cluster, node) not in ("", before))
    cluster.wait_for_nodes()
    wait_for(
        "its slices", lambda: owners(cluster, node) == {uid_of_node(cluster, node)}, seconds=60
    )
    after = plugin_pod(cluster, node)
    assert after is not None
    assert plugin is not None
    assert (after["metadata"]["uid"], restarts(after)) == (
        plugin["metadata"]["uid"],
        restarts(plugin),
    ), "the running plugin has published them"
    assert space.phase("holder") == "Running"
    assert prepared(cluster, node) == {holder["metadata"]["uid"]}
    space.delete("pod", "holder")
    wait_for("the claim to be unprepared", lambda: not prepared(cluster, node), seconds=120)
