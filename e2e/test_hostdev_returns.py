"""
Devices that return: late after a reboot, on another node, or as drakit's devices under the name
that a device plugin of the kubelet used before.

The kernel of the test machine has no USB gadget, so loop devices without a file are plugged in and
out. All nodes of a local cluster have the same /dev, so a device on another node is a device of
another policy there. The device plugin of the tests represents those that list existing paths: it
is based on Kubernetes' own stub, and its device appears and disappears with drakit's device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from e2e.cluster.api import Capability
from e2e.fixtures import HOTPLUGGED
from e2e.foreign import KUBELETS, Yard, nodes_set, with_set
from e2e.kit import (
    DRIVER,
    Space,
    container,
    device_class,
    from_template,
    hotplugged_loop,
    pod,
    published,
    ready,
    template,
    wait_for,
)
from e2e.test_hostdev import applied, has_class, policy
from e2e.test_kubectl import User
from tests.unit.chart.class_writes import PREFIX

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.feature("hostdev")]

ONE, TWO = HOTPLUGGED + 3, HOTPLUGGED + 4


def deployment(name: str, pods: dict[str, Any]) -> dict[str, Any]:
    """Return a Deployment with one replica, whose pods end before their successors start."""
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pods["spec"]},
        },
    }


def requesting(name: str, resource: str, node: str, *, restart: str = "Never") -> dict[str, Any]:
    """Return a pod that requests an extended resource."""
    main = container("main", resources={"limits": {resource: 1}})
    return pod(name, containers=[main], node=node, restart=restart)


def pods_of(space: Space, app: str) -> list[dict[str, Any]]:
    found = space.items("pods")
    return [each for each in found if each["metadata"].get("labels", {}).get("app") == app]


def running(space: Space, app: str) -> dict[str, Any] | None:
    """Return the pod of a Deployment that is ready, and not being deleted."""
    alive = [one for one in pods_of(space, app) if "deletionTimestamp" not in one["metadata"]]
    return next((one for one in alive if one["status"]["phase"] == "Running" and ready(one)), None)


def containers_of(body: dict[str, Any]) -> str:
    """Return the IDs of a pod's containers, which change after a reboot."""
    return " ".join(each["containerID"] for each in body["status"]["containerStatuses"])


def allocatable(yard: Yard, resource: str) -> str:
    """Return the number of devices of a resource in the kubelet."""
    return yard.cluster.get("node", yard.node)["status"]["allocatable"].get(resource, "0")


# ------------------------------------------------------------ late after a reboot

LATE = "nodes.test/late"
"""The resource of the device plugin."""

LATE_SECONDS = 60


@pytest.mark.disruptive
@pytest.mark.serial
@pytest.mark.timeout(900)
@pytest.mark.needs(Capability.REBOOT)
def test_a_device_that_is_late_after_a_reboot_leaves_no_failed_pod(space, yard, release):
    """Prints the failed pods and the seconds for a claim, an extended resource and a plugin."""
    node, resource = yard.node, f"{PREFIX}late"
    numbers = {"claimed": ONE, "extended": TWO}
    bodies = [policy(name, release, f"/dev/loop{number}") for name, number in numbers.items()]
    bodies[1]["spec"]["deviceClass"] = {"extendedResourceName": resource}
    workloads = {
        "claimed": pod("claimed", ("disk", from_template("claimed")), node=node, restart="Always"),
        "extended": requesting("extended", resource, node, restart="Always"),
        "plugin": requesting("plugin", LATE, node, restart="Always"),
    }

    @contextmanager
    def plugged() -> Iterator[None]:
        with ExitStack() as loops:
            for number in numbers.values():
                loops.enter_context(hotplugged_loop(number))
            yard.plan({LATE: {"devices": {"late-0": {}}}}, "late")
            yield
            yard.plan({LATE: {"devices": {}}}, "late")

    yard.plan({LATE: {"devices": {}}}, "late")
    with (
        applied(release, *bodies),
        with_set(yard, nodes_set("late", directory=KUBELETS, plan="late")),
    ):
        with plugged():
            for name in numbers:
                wait_for("the class", lambda name=name: has_class(release, f"{name}.drakit.dev"))
            wait_for("the kubelet to have the device", lambda: allocatable(yard, LATE) == "1")
            space.apply(template("claimed", ("disk", "claimed.drakit.dev")))
            space.apply(*(deployment(name, body) for name, body in workloads.items()))
            before = {
                containers_of(wait_for(f"{name} to run", lambda n=name: running(space, n)))
                for name in workloads
            }
        release.reboot_node(node)
        time.sleep(LATE_SECONDS)
        with plugged():
            begun = time.monotonic()
            seconds: dict[str, float] = {}

            def all_run() -> bool:
                for name in workloads.keys() - seconds.keys():
                    found = running(space, name)
                    if found is not None and containers_of(found) not in before:
                        seconds[name] = time.monotonic() - begun
                return len(seconds) == len(workloads)

            wait_for("all pods to run again", all_run, seconds=360, period=1)
            failed = {
                name: sum(one["status"]["phase"] == "Failed" for one in pods_of(space, name))
                for name in workloads
            }
            for name in workloads:
                print(f"{name}: {failed[name]} failed pods, runs after {seconds[name]:.0f} s")
            assert (failed["claimed"], failed["extended"]) == (0, 0)
            space.kubectl("delete", "deployments", *workloads, "--cascade=foreground")


# ------------------------------------------------------------ on another node

HERE, THERE = "here", "there"
MOVES = "moves.test"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("vanish", ["Evict", "Taint"])
def test_a_pod_of_a_deployment_follows_its_device_to_another_node(space, release, vanish):
    """With Taint, explain names the device on the other node, and the test applies its remedy."""
    first, second = release.nodes[:2]
    here = policy(HERE, release, f"/dev/loop{ONE}", onVanish=vanish)
    there = policy(THERE, release, f"/dev/loop{TWO}", onVanish=vanish)
    there["spec"]["nodeSelector"]["matchLabels"]["kubernetes.io/hostname"] = second
    either = f'device.attributes["{DRIVER}"].policy in ["{HERE}", "{THERE}"]'
    release.apply(json.dumps(device_class(MOVES, DRIVER, either)))
    moved = f"{THERE}-loop{TWO}"

    def node_of_pod() -> str:
        found = running(space, "moving")
        return found["spec"]["nodeName"] if found is not None else ""

    try:
        with applied(release, here, there):
            with hotplugged_loop(ONE):
                wait_for("the device", lambda: f"{HERE}-loop{ONE}" in published(release, first))
                space.apply(
                    template("moving", ("disk", MOVES)),
                    deployment(
                        "moving", pod("moving", ("disk", from_template("moving")), restart="Always")
                    ),
                )
                wait_for("the pod to run here", lambda: node_of_pod() == first)
            begun = time.monotonic()
            with hotplugged_loop(TWO):
                wait_for("the device there", lambda: moved in published(release, second))
                if vanish == "Taint":
                    admin = User(space, release.kubeconfig)
                    ask = ("explain", "deployment/moving")
                    report = wait_for(
                        "the problem",
                        lambda: found[1] if (found := admin.json(*ask))[0] == 1 else None,
                    )
                    (body,) = report["groups"]
                    assert [each["code"] for each in body["reasons"]] == ["DeviceGone"]
                    assert body["remedy"] == (
                        f"device {moved} on node {second} matches and is free: delete the pod, and "
                        f"a pod that replaces it gets that device; with onVanish: Evict in "
                        f"HostDevicePolicy {HERE}, Kubernetes deletes such a pod"
                    )
                    assert node_of_pod() == first
                    space.kubectl("delete", "pods", "-l", "app=moving")
                wait_for("the pod to run there", lambda: node_of_pod() == second, seconds=120)
                print(f"{vanish}: runs on the other node after {time.monotonic() - begun:.0f} s")
                space.kubectl("delete", "deployment", "moving", "--cascade=foreground")
    finally:
        release.kubectl("delete", "deviceclass", MOVES, "--ignore-not-found")


# ------------------------------------------------------------ with the name of a device plugin

PAIR = f"{PREFIX}pair"
"""The resource of a device plugin, and then of a policy."""

FORGOTTEN_SECONDS = 310
"""The kubelet forgets the endpoint of a stopped device plugin after 5 minutes."""

STALE = "endpoint not found in cache for a registered resource"


@pytest.mark.disruptive
@pytest.mark.serial
@pytest.mark.timeout(1200)
def test_the_name_of_a_device_plugin_goes_to_a_policy_in_both_orders(yard, release):
    """docs/admin/migrate.md: either the pods or the device plugin first."""
    yard.plan({PAIR: {"devices": {"pair-0": {}}}}, "pair")
    ours = policy("pair", release, deviceClass={"extendedResourceName": PAIR})
    ours["spec"]["match"] = [{"subsystem": "mem", "paths": ["/dev/full"]}]

    def start_old(name: str) -> None:
        """Run a pod with a device of the device plugin."""
        wait_for("the kubelet to have the device", lambda: allocatable(yard, PAIR) == "1")
        yard.apply(requesting(name, PAIR, yard.node))
        yard.wait_phase(name, "Running")

    def start_new(name: str) -> None:
        """Create a pod that gets a device of the policy."""
        wait_for("the kubelet to have no device", lambda: allocatable(yard, PAIR) == "0")
        wait_for("the class", lambda: has_class(release, "pair.drakit.dev"))
        yard.apply(requesting(name, PAIR, yard.node))

    with with_set(yard, nodes_set("pair", directory=KUBELETS, plan="pair")):
        start_old("old")
        yard.delete("pod", "old")
    with applied(release, ours):
        start_new("new")
        yard.wait_phase("new", "Running")
        body = yard.get("pod", "new")
        assert body is not None
        assert "extendedResourceClaimStatus" in body["status"]
        yard.delete("pod", "new")

    with with_set(yard, nodes_set("pair", directory=KUBELETS, plan="pair")):
        start_old("forgotten")
    time.sleep(FORGOTTEN_SECONDS)
    with applied(release, ours):
        start_new("late")
        yard.event("late", STALE)
        release.restart_kubelet(yard.node)
        release.wait_for_nodes()
        yard.nudge("late")
        time.sleep(30)
        assert yard.phase("late") == "Pending"
        yard.delete("pod", "forgotten")
        yard.wait_phase("late", "Running", seconds=90)
        yard.delete("pod", "late")
