"""
HostDevicePolicies on a real API server: its rejections, and the conditions.

A control plane without nodes is sufficient: the test writes Nodes and NodeDeviceReports in place of
kubelets and node plugins, and the operator runs as a local process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from drakit_formats import crds
from e2e.alone import control_plane, operator
from e2e.cluster.api import Capability, Cluster
from e2e.cluster.choice import REPOSITORY
from e2e.kit import device_class, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.feature("hostdev"),
    pytest.mark.needs(Capability.CONTROL_PLANE_ALONE),
]

DRIVER = "hostdev.drakit.dev"
FINE, BROKEN, DEAD = "fine", "broken", "dead"
MATCH: list[dict[str, Any]] = [{"subsystem": "tty", "paths": ["/dev/ttyUSB*"]}]


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with control_plane("policies") as started:
        yield started


def policy(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": crds.API_VERSION,
        "kind": "HostDevicePolicy",
        "metadata": {"name": name},
        "spec": {"match": MATCH, **spec},
    }


# ------------------------------------------------------------ rejections of the API server

SELECTOR = "write labels of nodes below matchLabels, or requirements below matchExpressions"
NO_BOOLEAN = 'must be of type string: "boolean"'


@pytest.mark.parametrize(
    ("spec", "field", "sentence"),
    [
        pytest.param({"nodeSelector": {"zone": "a"}}, "nodeSelector", SELECTOR, id="labels"),
        pytest.param(
            {"nodeSelector": {"zone": "a", "room": "b"}}, "nodeSelector", SELECTOR, id="two-labels"
        ),
        pytest.param(
            {"nodeSelector": {"matchLabel": {"a": "b"}}}, "nodeSelector", SELECTOR, id="misspelled"
        ),
        pytest.param({"nodeSelector": {}}, "nodeSelector", SELECTOR, id="empty"),
        pytest.param(
            {"nodeSelector": {"matchLabels": {"a": "b"}, "zone": "a"}},
            "nodeSelector",
            "must have at most 1 item",
            id="a-label-beside-matchLabels",
        ),
        pytest.param(
            {"nodeSelector": {"matchLabels": {}}}, "matchLabels", "at least 1", id="no-labels"
        ),
        pytest.param(
            {"nodeSelector": {"matchExpressions": [{"key": "zone", "operator": "In"}]}},
            "matchExpressions[0]",
            "operators In and NotIn need values, and the others have none",
            id="in-nothing",
        ),
        pytest.param({"allow": {"dangerous": True}}, "allow.dangerous", NO_BOOLEAN, id="dangerous"),
        pytest.param(
            {"deviceClass": {"create": False}}, "deviceClass.create", NO_BOOLEAN, id="create"
        ),
        pytest.param(
            {"container": {"byIdLinks": True}}, "container.byIdLinks", NO_BOOLEAN, id="byIdLinks"
        ),
        pytest.param(
            {"sharing": {"users": 2}}, "sharing", "needs mode: Users or mode: Capacity", id="users"
        ),
        pytest.param(
            {"container": {"mounts": [
                {"hostPath": f"/usr/share/{name}", "containerPath": "/x"} for name in "ab"
            ]}},
            "container.mounts[1]", "Duplicate value", id="two-mounts-at-one-path",
        ),
        pytest.param(
            {"group": "Unit", "container": {"path": "/dev/x"}}, "spec",
            "with group: Unit or group: Set, container.path must end in '/'", id="path-of-a-unit",
        ),
    ],
)  # fmt: skip
def test_a_refused_policy_names_the_field_and_is_never_stored_without_it(
    server, spec, field, sentence
):
    # Unlike kubectl, other clients do not request the rejection of unknown fields.
    body = json.dumps(policy("refused", **spec))
    done = server.kubectl("apply", "--validate=false", "-f", "-", input=body, check=False)
    assert done.returncode != 0
    assert field in done.stderr
    assert sentence in done.stderr
    assert server.get("hdp")["items"] == []


def test_a_policy_shows_its_defaults_and_can_be_selected_by_fields(server):
    shared = policy("shared", sharing={"mode": "Users", "users": 2})
    bodies = [policy("plain"), shared]
    server.apply("\n---\n".join(map(json.dumps, bodies)))
    try:
        spec = server.get("hdp", "plain")["spec"]
        assert spec == {
            "match": MATCH,
            "group": "Node",
            "identity": "Device",
            "sharing": {"mode": "Exclusive"},
            "container": {"permissions": "rw", "byIdLinks": "Never"},
            "onVanish": "Taint",
            "deviceClass": {"create": "Always"},
            "allow": {"dangerous": "Never", "unstableIdentity": "Never"},
        }
        selected = server.get("hdp", "--field-selector=spec.sharing.mode=Users")["items"]
        assert [each["metadata"]["name"] for each in selected] == ["shared"]
    finally:
        server.kubectl("delete", "hdp", "--all")


# ------------------------------------------------------------ conditions


class Scene:
    """Three nodes with reports, one of which is dead, and two policies."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def node(self, name: str) -> None:
        """Write a Node, like its kubelet."""
        labels = {"usb": "yes"}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        self.cluster.apply(json.dumps(body))

    def beat(self, node: str) -> None:
        """
        Write a node's heartbeat.

        Without a heartbeat, Kubernetes considers a node unreachable after 40 s. The time starts at
        the last heartbeat under that name, even if it came from a deleted node.
        """
        condition = {
            "type": "Ready",
            "status": "False" if node == DEAD else "True",
            "lastHeartbeatTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        self._patch_status("node", node, {"conditions": [condition]})

    def report(self, node: str, **outcomes: dict[str, Any]) -> None:
        """Write a node's report with the outcomes of policies by name, and its heartbeat."""
        self.beat(node)
        name = f"{node}.{DRIVER}"
        body = {
            "apiVersion": crds.API_VERSION,
            "kind": "NodeDeviceReport",
            "metadata": {"name": name},
            "spec": {"nodeName": node, "driver": DRIVER},
        }
        self.cluster.apply(json.dumps(body))
        policies = [
            {
                "name": policy,
                "uid": self.cluster.get("hdp", policy)["metadata"]["uid"],
                "observedGeneration": outcome["generation"],
                "matched": 1,
                "published": 1,
                **outcome,
            }
            for policy, outcome in outcomes.items()
        ]
        self._patch_status("ndr", name, {"policies": policies})

    def change(self, **spec: Any) -> int:
        """Change the policy `serial`, and return its new generation."""
        patch = json.dumps({"spec": spec})
        self.cluster.kubectl("patch", "hdp", "serial", "--type=merge", "-p", patch)
        return self.cluster.get("hdp", "serial")["metadata"]["generation"]

    def wait(self, condition: str, *, policy: str = "serial", seconds: int = 20) -> None:
        """Wait for a condition, like an administrator."""
        self.cluster.kubectl(
            *("wait", f"--for=condition={condition}", f"hdp/{policy}", f"--timeout={seconds}s")
        )

    def condition(self, wanted: str) -> tuple[str, str]:
        """Return reason and message of a condition."""
        found = self.cluster.get("hdp", "serial")["status"]["conditions"]
        return next((each["reason"], each["message"]) for each in found if each["type"] == wanted)

    def _patch_status(self, kind: str, name: str, status: dict[str, Any]) -> None:
        patch = json.dumps({"status": status})
        options = ("--subresource=status", "--type=merge", "-p", patch)
        self.cluster.kubectl("patch", kind, name, *options)


@pytest.fixture
def scene(server: Cluster, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(server)
    for name in (FINE, BROKEN, DEAD):
        scene.node(name)
        scene.report(name)
    with operator(server, tmp_path):
        yield scene
    server.kubectl("delete", "hdp,ndr,nodes,deviceclasses", "--all")


def test_each_condition_can_be_waited_for(scene):
    """One of three nodes is dead, and one has a problem."""
    selector = {"matchLabels": {"usb": "yes"}}
    scene.cluster.apply(json.dumps(policy("serial", nodeSelector=selector)))
    scene.wait("Applied=false")
    assert scene.condition("Applied") == (
        "Progressing",
        "0 of 2 nodes apply generation 1; waiting for broken, fine",
    )
    scene.report(DEAD, serial={"generation": 1, "problem": "of a node that is dead"})
    scene.report(FINE, serial={"generation": 1})
    scene.report(BROKEN, serial={"generation": 1})
    for condition in ("Accepted", "Applied", "Conflicting=false"):
        scene.wait(condition)
    columns = scene.cluster.kubectl("get", "hdp", "serial", "--no-headers").stdout.split()
    assert columns[:8] == [
        *("serial", "True", "True", "False"),
        *("2", "2", "2", "serial.drakit.dev"),
    ]

    # One node has a problem.
    generation = scene.change(group="Unit")
    scene.report(FINE, serial={"generation": generation})
    scene.report(BROKEN, serial={"generation": generation, "problem": "its bus is down"})
    scene.wait("Applied=false")
    wait_for("the problem", lambda: scene.condition("Applied")[0] == "NodeProblems")
    assert (
        scene.condition("Applied")[1] == "1 of 2 nodes apply generation 2; broken: its bus is down"
    )
    scene.wait("Accepted")
    wide = scene.cluster.kubectl("get", "hdp", "serial", "-o", "wide").stdout
    assert "its bus is down" in wide

    # One node rejects the specification.
    generation = scene.change(group="Node")
    scene.report(FINE, serial={"generation": generation})
    refused = {"generation": 2, "observedGeneration": generation, "problem": "match[0]: too wide"}
    scene.report(BROKEN, serial=refused)
    scene.wait("Accepted=false")
    assert scene.condition("Accepted")[0] == "Refused"
    assert "match[0]: too wide" in scene.condition("Accepted")[1]

    # Claims hold shares that the policy no longer offers, and another policy has the device.
    generation = scene.change(sharing={"mode": "Users", "users": 2})
    conflict = {"device": "/dev/ttyUSB0", "policy": "other"}
    scene.report(FINE, serial={"generation": generation, "conflicts": [conflict]})
    scene.report(BROKEN, serial={"generation": generation, "inUse": 3})
    scene.wait("Conflicting")
    assert "policy other matches /dev/ttyUSB0 on fine" in scene.condition("Conflicting")[1]
    scene.wait("Accepted")

    # On a slow machine, the operator sees each report separately. After 10 writes, it waits a
    # minute.
    def in_use() -> bool:
        for name in (FINE, BROKEN):
            scene.beat(name)
        return scene.condition("Applied")[0] == "DevicesInUse"

    wait_for("the shares", in_use, seconds=90, period=2)
    assert "broken: claims hold 3 devices" in scene.condition("Applied")[1]

    # Another owner has the DeviceClass.
    scene.cluster.apply(json.dumps(device_class("theirs", "theirs")))
    generation = scene.change(deviceClass={"name": "theirs"})
    scene.wait("Accepted=false")
    assert scene.condition("Accepted")[0] == "DeviceClassConflict"


def test_a_policy_that_is_created_again_waits_for_new_reports(scene):
    for _ in range(2):
        scene.cluster.apply(json.dumps(policy("serial")))
        scene.wait("Applied=false")
        assert scene.condition("Applied")[0] == "Progressing"
        for name in (FINE, BROKEN):
            scene.report(name, serial={"generation": 1})
        scene.wait("Applied")
        scene.cluster.kubectl("delete", "hdp", "serial")


@pytest.mark.slow
def test_the_status_of_a_policy_is_not_written_again_within_a_minute(scene):
    scene.cluster.apply(json.dumps(policy("serial")))
    for name in (FINE, BROKEN):
        scene.report(name, serial={"generation": 1})
    scene.wait("Applied")

    def status() -> dict[str, Any]:
        """Return the status without Kopf's data, which Kopf may write a moment later."""
        return scene.cluster.get("hdp", "serial")["status"] | {"kopf": None}

    before, ends = status(), time.monotonic() + 15
    for published in count(2):
        scene.report(FINE, serial={"generation": 1, "published": published})
        assert status() == before, "the status stays as it is"
        if time.monotonic() > ends:
            break


def test_fewer_users_cause_a_warning_before_they_take_effect(server):
    chart = str(REPOSITORY / "charts/drakit")
    shown = "--show-only=templates/operator-admission.yaml"
    image = "--set=image.repository=none.test/drakit"
    rendered = server.helm("template", "drakit", chart, shown, image).stdout
    bodies = list(yaml.safe_load_all(rendered))
    mine = [each for each in bodies if each["metadata"]["name"].endswith("-sharing")]
    manifest = "\n---\n".join(map(json.dumps, mine))
    server.apply(manifest)
    server.apply(json.dumps(policy("shared", sharing={"mode": "Users", "users": 4})))
    try:
        patch = json.dumps({"spec": {"sharing": {"users": 2}}})
        command = ("patch", "hdp", "shared", "--dry-run=server", "--type=merge", "-p", patch)
        sentence = "sharing.users is reduced from 4 to 2"
        wait_for("the warning", lambda: sentence in server.kubectl(*command).stderr, seconds=30)
    finally:
        server.kubectl("delete", "hdp", "shared")
        server.kubectl("delete", "-f", "-", input=manifest)
