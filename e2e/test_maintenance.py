"""
Devices that are taken out of service and put back: the effects on their pods and on other devices.

The same tests run with DeviceTaintRules and, in a cluster that does not serve them, with the taint
of the node plugin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from drakit_formats import crds
from e2e.alone import control_plane, operator
from e2e.cluster.api import Capability, Cluster
from e2e.images.go import cel_program
from e2e.kit import (
    DRIVER,
    NAMESPACE,
    OPERATOR,
    Space,
    container,
    device_class,
    devices_of,
    from_template,
    lease_holder,
    pod,
    published,
    taints,
    template,
    wait_for,
)
from e2e.test_hostdev import applied, policy
from e2e.test_hostdev_returns import deployment, pods_of, running

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.feature("operator")]

CLASS = "zram-second.test"
TAINT = "drakit.dev/maintenance"


class Maintenances:
    """The maintenances of a test, which are removed at its end."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.names: list[str] = []

    def create(self, name: str, **spec: Any) -> None:
        self.names.append(name)
        body = {
            "apiVersion": crds.API_VERSION,
            "kind": "DeviceMaintenance",
            "metadata": {"name": name},
            "spec": spec,
        }
        self.cluster.apply(json.dumps(body))

    def status(self, name: str) -> dict[str, Any]:
        return self.cluster.get("devicemaintenance", name).get("status", {})

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        conditions = self.status(name).get("conditions", [])
        found = (each for each in conditions if each["type"] == kind)
        return next(((each["status"], each["reason"]) for each in found), ("", ""))

    def wait(self, name: str, kind: str, status: str, reason: str, *, seconds: float = 60) -> None:
        wait_for(
            f"{kind} of {name} to be {status} ({reason})",
            lambda: self.condition(name, kind) == (status, reason),
            seconds=seconds,
        )

    def end(self, name: str) -> None:
        self.cluster.kubectl("delete", "devicemaintenance", name, "--ignore-not-found")

    def tainted(self) -> set[str]:
        """Return the devices that are out of service, through rules or the node plugin."""
        by_plugin = {
            name
            for name, keys in taints(self.cluster, DRIVER).items()
            if any(key.startswith(TAINT) for key in keys)
        }
        listed = self.cluster.kubectl("get", "devicetaintrules", "-o", "json", check=False)
        rules = json.loads(listed.stdout)["items"] if listed.returncode == 0 else []
        return by_plugin | {
            rule["spec"]["deviceSelector"]["device"]
            for rule in rules
            if rule["spec"]["taint"]["key"] == TAINT
        }


@pytest.fixture
def maintenances(release: Cluster) -> Iterator[Maintenances]:
    found = Maintenances(release)
    yield found
    for name in found.names:
        found.end(name)
    wait_for("all devices to be in service", lambda: not found.tainted(), seconds=60)


def kubectl_drakit(cluster: Cluster, *arguments: str) -> tuple[int, str]:
    """Run the command as an administrator."""
    done = subprocess.run(
        [sys.executable, "-m", "drakit_cli.kubectl.main", *arguments],
        env={
            **os.environ,
            "KUBECONFIG": str(cluster.kubeconfig),
            "DRAKIT_CEL": str(cel_program(cluster.minor)),
        },
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    print(done.stdout, done.stderr)
    return done.returncode, done.stdout


def user(name: str, **labels: str) -> dict[str, Any]:
    """Return a pod with one device of the second node."""
    body = pod(name, ("disk", from_template("disk")))
    body["metadata"]["labels"] = labels
    return body


def device_of(space: Space, name: str) -> str:
    (device,) = devices_of(space.claim_of(name, "disk"))
    return device.rpartition("/")[2]


@pytest.fixture
def users(space: Space) -> Space:
    """Two pods with the two devices of the second node."""
    space.apply(template("disk", ("disk", CLASS)), user("one", app="web"), user("two"))
    for name in ("one", "two"):
        space.wait_phase(name, "Running")
    return space


# ------------------------------------------------------------ one device and its neighbor


def test_what_the_preview_says_happens_and_a_neighbour_keeps_its_pod(users, maintenances):
    cluster, device = users.cluster, device_of(users, "one")
    uid = users.get("pod", "two")["metadata"]["uid"]
    words = ("drain", device, f"--driver={DRIVER}", "--name=repair", "--reason=new disk")
    maintenances.names.append("repair")
    code, out = kubectl_drakit(cluster, *words, "--dry-run", "-o", "json")
    preview = json.loads(out)
    assert code == 0
    (blocker,) = preview["blockers"]
    assert (blocker["kind"], blocker["name"]) == ("Pod", "one")
    assert blocker["afterwards"] == "no controller creates it again"
    assert maintenances.tainted() == set()

    assert kubectl_drakit(cluster, *words, "--wait", "--timeout=120s")[0] == 0

    assert users.phase("one") == "Gone"
    assert maintenances.tainted() == {device}
    assert [each.rpartition("/")[2] for each in preview["devices"]] == [device]
    assert maintenances.status("repair")["pods"] == 0
    assert users.get("pod", "two")["metadata"]["uid"] == uid
    assert any("new disk" in (each.get("message") or "") for each in users.events("one"))
    users.apply(user("three"))
    users.refused("three")
    assert kubectl_drakit(cluster, "uncordon", "repair")[0] == 0
    users.wait_phase("three", "Running")
    assert device_of(users, "three") == device


@pytest.mark.parametrize("free", [True, False], ids=["a-device-is-free", "no-device-is-free"])
def test_a_replacement_runs_or_waits_as_the_preview_says(space, maintenances, free):
    cluster, disk = space.cluster, ("disk", from_template("disk"))
    space.apply(template("disk", ("disk", CLASS)))
    space.apply(deployment("web", pod("web", disk, restart="Always")))
    first = wait_for("the pod to run", lambda: running(space, "web"))
    if not free:
        space.apply(user("neighbour"))
        space.wait_phase("neighbour", "Running")
    name, node = first["metadata"]["name"], first["spec"]["nodeName"]
    device = device_of(space, name)
    words = ("drain", device, f"--driver={DRIVER}", "--name=replaced")
    maintenances.names.append("replaced")
    code, out = kubectl_drakit(cluster, *words, "--dry-run", "-o", "json")
    (blocker,) = json.loads(out)["blockers"]
    assert (code, blocker["name"]) == (0, name)
    expected = f"a new one fits on node {node}" if free else "a new one waits: "
    assert blocker["afterwards"].startswith(expected)

    assert kubectl_drakit(cluster, *words, "--wait", "--timeout=120s")[0] == 0

    space.wait_gone(name)
    if not free:
        (second,) = (each["metadata"]["name"] for each in pods_of(space, "web"))
        space.refused(second)
        assert space.phase("neighbour") == "Running"
        assert kubectl_drakit(cluster, "uncordon", "replaced")[0] == 0
    again = wait_for("another pod to run", lambda: running(space, "web"))
    assert again["spec"]["nodeName"] == node
    assert (device_of(space, again["metadata"]["name"]) == device) is not free


@pytest.mark.parametrize("mode", ["Users", "Capacity"])
def test_all_pods_of_a_shared_device_are_evicted_and_those_on_another_node_stay(
    space, maintenances, mode
):
    cluster, name = space.cluster, "maintained"
    first, second = cluster.nodes[:2]
    shared = policy(name, cluster, sharing={"mode": mode, "users": 4})
    shared["spec"]["match"] = [{"subsystem": "mem", "paths": ["/dev/full"]}]
    del shared["spec"]["nodeSelector"]  # both nodes have the device, because they share /dev

    def published_on(node: str) -> set[str]:
        return {each for each in published(cluster, node) if each.startswith(name)}

    with applied(cluster, shared):
        wait_for("the device on both nodes", lambda: published_on(first) and published_on(second))
        space.apply(template("share", ("share", f"{name}.drakit.dev")))
        for each, node in (("one", first), ("two", first), ("elsewhere", second)):
            space.apply(pod(each, ("share", from_template("share")), node=node))
            space.wait_phase(each, "Running")
        words = ("drain", f"--class={name}.drakit.dev", f"--node={first}", f"--name={name}")
        maintenances.names.append(name)
        code, out = kubectl_drakit(cluster, *words, "--dry-run", "-o", "json")
        preview = json.loads(out)
        devices = {each.rpartition("/")[2] for each in preview["devices"]}
        assert (code, devices) == (0, published_on(first))
        assert {each["name"] for each in preview["blockers"]} == {"one", "two"}
        assert kubectl_drakit(cluster, *words, "--wait", "--timeout=120s")[0] == 0
        for each in ("one", "two"):
            space.wait_gone(each, seconds=10)
        assert space.phase("elsewhere") == "Running"
        space.delete("pod", "elsewhere")


def test_a_cordon_of_a_node_keeps_its_pods_and_ends_with_its_window(users, maintenances):
    node = users.get("pod", "one")["spec"]["nodeName"]
    maintenances.create("node", devices={"node": node, "driver": DRIVER}, mode="Cordon")
    maintenances.wait("node", "Tainted", "True", "Tainted")
    assert maintenances.condition("node", "Drained") == ("False", "InUse")
    assert maintenances.tainted() == published(users.cluster, node)
    assert [users.phase(name) for name in ("one", "two")] == ["Running", "Running"]
    past = {"spec": {"window": {"end": "2020-01-01T00:00:00Z"}}}
    users.cluster.kubectl(
        "patch", "devicemaintenance", "node", "--type=merge", "-p", json.dumps(past)
    )
    maintenances.wait("node", "Ended", "True", "WindowOver")
    wait_for("the taints to be gone", lambda: maintenances.tainted() == set(), seconds=30)


def test_a_budget_blocks_a_drain_until_it_yields(users, maintenances):
    device = device_of(users, "one")
    users.apply(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "web"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}},
        }
    )
    wait_for(
        "the budget to count its pod",
        lambda: users.get("pdb", "web")["status"].get("currentHealthy") == 1,
    )
    maintenances.create("budget", devices={"driver": DRIVER, "device": device}, mode="Drain")
    maintenances.wait("budget", "Drained", "False", "Blocked")
    (blocker,) = maintenances.status("budget")["blockers"]
    assert "web" in blocker["message"], blocker
    assert users.phase("one") == "Running"
    users.delete("pdb", "web")
    users.wait_gone("one", seconds=90)
    maintenances.wait("budget", "Drained", "True", "Drained")


def test_a_pod_with_an_extended_resource_is_evicted_too(space, maintenances):
    resource = "e2e.drakit.dev/disk"
    policy = f'device.attributes["{DRIVER}"].policy == "zram-second"'
    body = device_class("extended-disk.test", DRIVER, policy, extendedResourceName=resource)
    space.cluster.apply(json.dumps(body))
    try:
        limits = {"limits": {resource: "1"}}
        space.apply(pod("plain", containers=[container("main", resources=limits)]))
        space.wait_phase("plain", "Running")
        maintenances.create("extended", devices={"class": "extended-disk.test"}, mode="Drain")
        space.wait_gone("plain")
        maintenances.wait("extended", "Drained", "True", "Drained")
    finally:
        space.kubectl("delete", "pod", "plain", "--ignore-not-found")
        space.cluster.kubectl("delete", "deviceclass", "extended-disk.test")


# ------------------------------------------------------------ operators that fail


def test_a_leader_that_is_killed_while_it_drains_loses_nothing(users, maintenances):
    devices = {device_of(users, name) for name in ("one", "two")}
    maintenances.create("killed", devices={"class": CLASS}, mode="Drain")
    for _ in range(3):
        leader = lease_holder(users.cluster).split("_")[0]
        users.cluster.kubectl(
            *("-n", NAMESPACE, "delete", "pod", leader, "--force", "--grace-period=0"),
            check=False,
        )
        wait_for(
            "another leader",
            lambda leader=leader: lease_holder(users.cluster).split("_")[0] not in ("", leader),
            seconds=60,
        )
    maintenances.wait("killed", "Drained", "True", "Drained", seconds=120)
    assert maintenances.tainted() == devices
    for name in ("one", "two"):
        assert users.phase(name) == "Gone"


def test_without_an_operator_a_deletion_still_ends_the_taints(users, maintenances):
    cluster, scale = users.cluster, ("-n", NAMESPACE, "scale", "deployment", "-l", OPERATOR)
    maintenances.create("alone", devices={"class": CLASS}, mode="Cordon")
    maintenances.wait("alone", "Tainted", "True", "Tainted")
    cluster.kubectl(*scale, "--replicas=0")
    try:
        maintenances.end("alone")
        wait_for("the taints to be gone", lambda: maintenances.tainted() == set(), seconds=60)
    finally:
        cluster.kubectl(*scale, "--replicas=2")
        wait_for("a leader", lambda: lease_holder(cluster), seconds=60)


# ------------------------------------------------------------ the API server, and many devices


@pytest.fixture(scope="module")
def server() -> Iterator[Cluster]:
    with control_plane("maintenance") as started:
        yield started


ALONE = pytest.mark.needs(Capability.CONTROL_PLANE_ALONE)


@ALONE
@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        pytest.param({"devices": {}, "mode": "Cordon"}, "at least 1", id="empty-selection"),
        pytest.param({"devices": {"device": ""}, "mode": "Cordon"}, "at least 1", id="empty-name"),
        pytest.param({"devices": {"device": "a"}, "mode": "Evict"}, "supported values", id="mode"),
        pytest.param(
            {"devices": {"device": "a"}, "mode": "Cordon", "timeLimitSeconds": 1},
            *("needs mode: Drain",),
            id="limit",
        ),
        pytest.param(
            {
                "devices": {"device": "a"},
                "mode": "Cordon",
                "window": {"start": "2030-01-02T00:00:00Z", "end": "2030-01-01T00:00:00Z"},
            },
            *("must end after it starts",),
            id="window",
        ),
    ],
)
def test_the_api_server_refuses_what_taints_nothing_or_everything(server, spec, sentence):
    body = {
        "apiVersion": crds.API_VERSION,
        "kind": "DeviceMaintenance",
        "metadata": {"name": "refused"},
        "spec": spec,
    }
    done = server.kubectl("apply", "-f", "-", input=json.dumps(body), check=False)
    assert done.returncode != 0
    assert sentence in done.stderr


@ALONE
def test_64_devices_are_tainted_and_65_are_refused_and_a_selection_cannot_grow(server, tmp_path):
    found = Maintenances(server)
    for pool, number in (("few", 64), ("many", 65)):
        halves = [range(number // 2), range(number // 2, number)]
        for index, names in enumerate(halves):
            server.apply(json.dumps(slice_of(pool, index, [f"d{each}" for each in names])))
    with operator(server, tmp_path, deviceMaintenance=True):
        found.create("few", devices={"pool": "few"}, mode="Cordon")
        found.create("many", devices={"pool": "many"}, mode="Cordon")
        found.wait("many", "Accepted", "False", "TooManyDevices")
        found.wait("few", "Tainted", "True", "Tainted")
        assert len(found.tainted()) == 64
        change = json.dumps({"spec": {"devices": {"pool": None, "driver": "e2e.test"}}})
        done = server.kubectl(
            *("patch", "devicemaintenance", "few", "--type=merge", "-p", change), check=False
        )
        assert "the selection cannot change" in done.stderr
        found.end("few")
        wait_for("the rules to be gone", lambda: not found.tainted(), seconds=60)


def slice_of(pool: str, index: int, names: list[str]) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"e2e-{pool}-{index}"},
        "spec": {
            "driver": "e2e.test",
            "pool": {"name": pool, "generation": 1, "resourceSliceCount": 2},
            "allNodes": True,
            "devices": [{"name": name} for name in names],
        },
    }
