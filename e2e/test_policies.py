"""Policies that configure a running driver, and the reports of nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster.api import Cluster
from e2e.kit import claim, from_claim, holds_for, pod, ready, slices, wait_for
from e2e.scripted.stage import PROCESS, SCRIPTED, SIGNS, Stage, device_class

pytestmark = [pytest.mark.e2e, pytest.mark.feature("vendors")]

GROUP = SIGNS
KIND = "SignPolicy"
PLURAL = "signpolicies"
READER = "signs-reader"

SIGN_POLICIES: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{PLURAL}.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Cluster",
        "names": {"kind": KIND, "plural": PLURAL, "singular": "signpolicy"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            # It leaves the check to the driver, so that a policy can be broken.
                            "spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                        },
                    }
                },
            }
        ],
    },
}


def permissions() -> list[dict[str, Any]]:
    """The permissions that a vendor grants the node plugin."""
    return [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": READER},
            "rules": [
                {"apiGroups": [GROUP], "resources": [PLURAL], "verbs": ["get", "list", "watch"]}
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": READER},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": READER,
            },
            "subjects": [
                {
                    "kind": "ServiceAccount",
                    "name": "scripted-drakit-nodeplugin",
                    "namespace": SCRIPTED.namespace,
                }
            ],
        },
    ]


def apply(cluster: Cluster, *bodies: dict[str, Any]) -> None:
    cluster.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": [*bodies]}))


class Signs:
    """The policies of the driver of signs, and what the first node makes of them."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.cluster = stage.cluster
        self.node = stage.node

    def policy(self, name: str, **spec: Any) -> None:
        body = {"apiVersion": f"{GROUP}/v1", "kind": KIND, "metadata": {"name": name}, "spec": spec}
        # Replaced as a whole: a merge would keep keys of the version before.
        existing = self.cluster.kubectl("get", PLURAL, name, check=False).returncode == 0
        verb = "replace" if existing else "create"
        self.cluster.kubectl(verb, "-f", "-", input=json.dumps(body))

    def delete(self, name: str) -> None:
        self.cluster.kubectl("delete", PLURAL, name)

    def slices(self) -> list[dict[str, Any]]:
        return slices(self.cluster, self.node, driver=SIGNS)

    def published(self) -> list[str]:
        return sorted(
            device["name"] for body in self.slices() for device in body["spec"].get("devices", ())
        )

    def wait_published(self, *names: str, seconds: float = 30) -> None:
        wanted = sorted(names)
        wait_for(f"the signs {wanted}", lambda: self.published() == wanted, seconds=seconds)

    def report(self) -> dict[str, Any] | None:
        return self.stage.get("nodedevicereport", f"{self.node}.{SIGNS}")

    def wait_reported(self, what: str, condition: Any) -> dict[str, Any]:
        def matching() -> dict[str, Any] | None:
            report = self.report()
            return report["status"] if report and condition(report["status"]) else None

        return wait_for(f"the report: {what}", matching, seconds=40)


@pytest.fixture
def signs(stage: Stage, request: pytest.FixtureRequest) -> Iterator[Signs]:
    cluster = stage.cluster
    bodies = [SIGN_POLICIES, *permissions(), device_class("sign.test", SIGNS)]
    apply(cluster, *bodies)
    name = f"crd/{PLURAL}.{GROUP}"
    cluster.kubectl("wait", "--for=condition=Established", name, "--timeout=30s")
    # It would find them within minutes.
    stage.kill_plugin()
    yield Signs(stage)
    if request.session.testsfailed:
        print(cluster.kubectl("get", "nodedevicereports", "-o", "yaml", check=False).stdout)
    listing = json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})
    cluster.kubectl("delete", "-f", "-", "--ignore-not-found", input=listing)


def policies_of(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in status["policies"]}


@pytest.mark.slow
def test_policies_change_while_pods_run_and_reports_show_what_becomes_of_them(signs: Signs):
    stage, cluster = signs.stage, signs.cluster
    selector = {"kubernetes.io/hostname": signs.node}
    signs.policy("exit", signs=2, text="exit", nodeSelector=selector)
    signs.policy("elsewhere", signs=1, nodeSelector={"kubernetes.io/hostname": "nowhere"})
    signs.wait_published("exit-0", "exit-1")
    stage.apply(
        claim("sign", ("sign", "sign.test")),
        pod("reader", ("sign", from_claim("sign")), command=["sh", "-c", "echo $SIGN; sleep 3600"]),
    )
    stage.wait_phase("reader", "Running")
    assert stage.logs("reader").split() == ["exit"]
    status = signs.wait_reported("a claim", lambda s: s["devices"]["allocated"] == 1)
    assert status["registration"] == {"state": "Registered"}
    assert status["endpoints"] == [{"name": SIGNS, "state": "Running"}]
    assert status["devices"]["published"] == 2
    assert status["claims"]["prepared"] == 1
    assert policies_of(status)["exit"]["matched"] == 2
    assert policies_of(status)["elsewhere"]["matched"] == 0
    body = signs.report()
    assert body is not None
    node_uid = cluster.get("node", signs.node)["metadata"]["uid"]
    assert [each["uid"] for each in body["metadata"]["ownerReferences"]] == [node_uid]
    line = cluster.kubectl("get", "ndr", body["metadata"]["name"], "--no-headers").stdout.split()
    assert line[1:8] == [signs.node, SIGNS, "Registered", "2", "2", "1", "0"]

    # Changed.
    signs.policy("exit", signs=4, text="way out", nodeSelector=selector)
    signs.wait_published("exit-0", "exit-1", "exit-2")
    # Broken, and another one is not affected.
    signs.policy("exit", signs=-1, nodeSelector=selector)
    signs.policy("stairs", signs=1)
    signs.wait_published("exit-0", "exit-1", "exit-2", "stairs-0")
    status = signs.wait_reported("a broken policy", lambda s: "stairs" in policies_of(s))
    exit_policy = policies_of(status)["exit"]
    assert (exit_policy["observedGeneration"], exit_policy["generation"]) == (3, 2)
    assert exit_policy["problem"].startswith("spec.signs: Input should be greater")
    assert [each["reason"] for each in status["leftOut"]] == ["TooMany"]
    # Refused by the driver, as a whole.
    signs.policy("lift", signs=1, text="forbidden")
    status = signs.wait_reported("a refusal", lambda s: "policiesRefused" in s)
    assert "policy lift: spec.text" in status["policiesRefused"]
    assert signs.published() == ["exit-0", "exit-1", "exit-2", "stairs-0"]

    # A restart without the API server keeps all of it, and writes nothing.
    before = {body["metadata"]["name"]: body["metadata"] for body in signs.slices()}
    report = signs.report()
    cluster.cut_node(signs.node)
    try:
        restart(stage)
        holds_for(
            "the slices stay",
            lambda: (
                {body["metadata"]["name"]: body["metadata"] for body in signs.slices()} == before
            ),
            seconds=8,
        )
    finally:
        cluster.heal_node(signs.node)
    wait_for("the plugin to be ready", lambda: ready(stage.plugin()), seconds=90)
    holds_for("the devices stay", lambda: len(signs.published()) == 4, seconds=3)
    after = {body["metadata"]["name"]: body["metadata"] for body in signs.slices()}
    assert {name: each["resourceVersion"] for name, each in after.items()} == {
        name: each["resourceVersion"] for name, each in before.items()
    }
    assert signs.report() == report

    # Mended, and deleted while a pod uses one of its devices.
    signs.delete("lift")
    signs.policy("exit", signs=1, text="exit", nodeSelector=selector)
    wait_for("the mended policy", lambda: "exit-2" not in signs.published(), seconds=60)
    signs.delete("exit")
    signs.delete("stairs")
    signs.delete("elsewhere")
    signs.wait_reported("no policy", lambda s: not s["policies"])
    assert stage.phase("reader") == "Running"
    stage.delete("pod", "reader")


def restart(stage: Stage) -> None:
    """Kill the plugin on a node that the API server cannot be reached from."""

    def starts() -> int:
        return len([line for line in stage.log() if line["msg"] == "node plugin is serving"])

    before = starts()
    stage.cluster.exec_on_node(stage.node, ["pkill", "-KILL", "-f", "--", PROCESS])
    wait_for("the plugin to start again", lambda: starts() > before, seconds=120)
