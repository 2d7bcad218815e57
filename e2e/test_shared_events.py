"""If 50 objects have the same cause, one object in each namespace gets the whole message."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from e2e.alone import control_plane, operator
from e2e.cluster.api import Capability, Cluster
from e2e.kit import claim, device_class, from_template, pod, template, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.feature("operator", "explain"),
    pytest.mark.needs(Capability.CONTROL_PLANE_ALONE),
]

NUMBER = 50
SPACES = ("lab-a", "lab-b")
NODES = ("here", "there")
DRIVERS = ("gpu.test", "nic.test")
"""Drivers, which are also the names of their classes. The second publishes no devices."""

REASONS = ("DevicesTainted", "NoDevicePublished")
GONE = "gone"
TOTAL = 2 * NUMBER + 2
"""The number of claims: those that are allocated, and those of the pods."""

QUIET_SECONDS = 8
"""Time in which no further Event may follow. It is longer than the time in which a cause may
grow."""

MEMBERS = ("Pod", "ResourceClaim")

Object = dict[str, Any]


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with control_plane("events") as started:
        yield started


def apply(server: Cluster, *bodies: Object) -> None:
    server.apply(listed(bodies))


def listed(bodies: Sequence[Object]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})


def within(space: str, body: Object) -> Object:
    return body | {"metadata": body["metadata"] | {"namespace": space}}


def pool(node: str) -> Object:
    """Return the pool of a node, all of whose devices are unhealthy."""
    taint = {"key": "drakit.dev/unhealthy", "effect": "NoSchedule"}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"gpu-{node}"},
        "spec": {
            "driver": "gpu.test",
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"g{number}", "taints": [taint]} for number in range(2)],
        },
    }


def held(number: int) -> Object:
    """Return a claim that is allocated on the missing node."""
    name = f"held-{number}"
    only = {"key": "metadata.name", "operator": "In", "values": [GONE]}
    result = {"request": "r", "driver": "gpu.test", "pool": GONE, "device": name}
    allocation = {
        "devices": {"results": [result]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [only]}]},
    }
    # Kubernetes does not check whether consumers other than pods exist.
    consumer = {"apiGroup": "jobs.test", "resource": "jobs", "name": name, "uid": name}
    status = {"allocation": allocation, "reservedFor": [consumer]}
    return claim(name, ("r", "gpu.test")) | {"status": status}


def events(server: Cluster, *, naming: bool) -> list[Object]:
    """Return the operator's Events that name another object, or those that do not."""
    return [
        each
        for each in server.get("events", "-A")["items"]
        if "drakit" in (each.get("reportingComponent") or "")
        and ("; the Event of " in each["message"]) is naming
    ]


def reported(server: Cluster) -> list[tuple[str, str, str]]:
    """Return the kind, the name or namespace, and the reason of each Event that names no other
    object."""
    found = [(each["involvedObject"], each["reason"]) for each in events(server, naming=False)]
    return sorted(
        (of["kind"], of["namespace" if of["kind"] in MEMBERS else "name"], reason)
        for of, reason in found
    )


def are_ready(server: Cluster) -> bool:
    """Return whether pods can be scheduled to the nodes. The node controller removes the taint."""
    return not any(each["spec"].get("taints") for each in server.get("nodes")["items"])


def test_of_fifty_objects_with_one_cause_one_in_each_namespace_has_it_all(
    server: Cluster, tmp_path: Path
):
    """Two causes have 50 objects each, in two namespaces. Two pods have a third cause."""
    indexes = range(NUMBER // len(SPACES))
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"pods": "110"}}
    nodes = [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": each}, "status": ready}
        for each in NODES
    ]
    claims = [within(space, held(index)) for space in SPACES for index in indexes]
    pods = [
        within(space, pod(f"train-{index}", ("r", from_template("gpu.test"))))
        for space in SPACES
        for index in indexes
    ]
    pods += [
        within(each, pod(f"other-{each}", ("r", from_template("nic.test")))) for each in SPACES
    ]
    apply(
        server,
        *[{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": each}} for each in SPACES],
        *[device_class(each, each) for each in DRIVERS],
        *[within(space, template(each, ("r", each))) for space in SPACES for each in DRIVERS],
        *[pool(each) for each in NODES],
        *[*nodes, *claims],
    )
    body = listed([*nodes, *claims])
    server.kubectl("replace", "--subresource=status", "-f", "-", input=body)
    wait_for("the nodes", lambda: are_ready(server))
    for space in SPACES:
        accounts = ("serviceaccounts", "-n", space)
        wait_for("the ServiceAccount", lambda query=accounts: server.get(*query)["items"])
    expected = [
        ("DeviceClass", "gpu.test", "DevicesTainted"),
        ("DeviceClass", "nic.test", "NoDevicePublished"),
        ("Node", GONE, "NodeGone"),
        *[("Pod", each, reason) for each in SPACES for reason in REASONS],
        *[("ResourceClaim", each, "NodeGone") for each in SPACES],
        *[("ResourceClaimTemplate", "nic.test", "NoDevicePublished") for _ in SPACES],
    ]
    apply(server, *pods)
    wait_for("the pods' claims", lambda: len(server.get("resourceclaims", "-A")["items"]) == TOTAL)
    # The operator finds all of them at once. If objects appear one by one, the first get separate
    # Events.
    with operator(server, tmp_path, events={"patience": "1s"}):
        wait_for("all Events", lambda: set(expected) <= set(reported(server)), seconds=30)
        time.sleep(QUIET_SECONDS)
        assert reported(server) == expected
        assert len(events(server, naming=True)) == 2 * NUMBER - 2 * len(SPACES)
        (event,) = server.get("events", "-A", "--field-selector=involvedObject.name=gpu.test")[
            "items"
        ]
        assert "this affects 50 Pods in 2 namespaces" in event["message"]
