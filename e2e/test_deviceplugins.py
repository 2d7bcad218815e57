"""
Device plugins that register with the node plugin instead of the kubelet, on a real kubelet.

Kubernetes' own sample is unmodified, and so is its manifest except for one path. The same applies
to NVIDIA's plugin, which assumes that it runs on a Tegra. Our plugin `nodes`, based on Kubernetes'
stub, has the features that they lack (device nodes, health, PreStartContainer).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.api import Capability
from e2e.foreign import (
    BLINKERS,
    BLINKERS_DIRECTORY,
    CLASH,
    COUNT,
    COUNT_CLASS,
    FOREIGN,
    FUSE,
    FUSE_DEVICES,
    GREEDY,
    KUBELETS,
    LOCAL,
    MOVED,
    NODES_SET,
    OURS,
    PLUGINS,
    SAMPLE,
    SAMPLE_CLASS,
    SAMPLE_SET,
    STOP_GRACE_SECONDS,
    Yard,
    nodes_set,
    with_set,
)
from e2e.kit import cdi_files, container, from_template, pod, restarts, template, wait_for
from e2e.nvidia import GPU, GPU_CLASS, GPU_IDS, NVIDIA_SET, UUID
from e2e.simulated import STAY, example
from e2e.writes import written

pytestmark = [pytest.mark.e2e, pytest.mark.feature("deviceplugins")]

STOPPED = "drakit.dev/stopped:NoSchedule"
REGISTERED = f"Registered device plugin for '{GPU}'"
"""The line that NVIDIA's plugin logs after its registration."""

WELL, OTHER = sorted(FUSE_DEVICES)


def stay(name: str, *claims: tuple[str, dict[str, str]], **options: Any) -> dict[str, Any]:
    """Return a pod that uses claims until it is deleted, and then ends immediately."""
    return pod(name, *claims, command=["sh", "-c", STAY], **options)


def by_id(given: str) -> str:
    return f'device.attributes["{PLUGINS}"].id == "{given}"'


def with_device(yard: Yard, name: str, given: str, class_name: str = SAMPLE_CLASS) -> None:
    """Return a running pod with one device of a device plugin, through a claim; by default, of the
    sample."""
    yard.apply(
        template(name, ("device", class_name, by_id(given))),
        stay(name, ("d", from_template(name))),
    )
    yard.wait_phase(name, "Running")


def mounted(yard: Yard, name: str) -> set[str]:
    """Return the sample's devices in a container: files that are mounted in /tmp."""
    return {line.split()[4] for line in yard.inside(name, "grep ' /tmp/Dev-' /proc/self/mountinfo")}


def allocations(yard: Yard) -> int:
    """Return the number of Allocate calls of the sample since its last start."""
    return yard.calls(SAMPLE_SET, "Allocate")


def visible(yard: Yard, name: str) -> list[str]:
    """Return NVIDIA's devices in a container."""
    return yard.inside(name, 'echo "$NVIDIA_VISIBLE_DEVICES"')


def results_of(yard: Yard, name: str) -> list[dict[str, Any]]:
    """Return the allocation results of a pod's only claim."""
    (claim,) = [
        claim
        for claim in yard.items("resourceclaims")
        for user in claim["status"].get("reservedFor", [])
        if user["name"] == name
    ]
    return claim["status"]["allocation"]["devices"]["results"]


# ------------------------------------------------------------ from a plugin to a pod


def test_the_devices_of_the_unmodified_sample_are_given_out_by_claims(yard):
    assert set(yard.of(SAMPLE)) == {"Dev-1", "Dev-2"}
    yard.apply(*example("device-plugin/claim-pod"))
    yard.wait_phase("claiming", "Running")
    assert mounted(yard, "claiming") == {"/tmp/Dev-2"}
    read = json.loads("".join(yard.inside("claiming", "read-metadata template device device")))
    ((found,),) = [request["Devices"] for request in read["Requests"]]
    published = yard.of(SAMPLE)["Dev-2"]
    assert (found["Driver"], found["Name"]) == (PLUGINS, published["name"])
    assert found["Attributes"] == published["attributes"]

    yard.delete("pod", "claiming")

    before = allocations(yard)
    both: dict[str, Any] = {"deviceClassName": SAMPLE_CLASS, "count": 2}
    yard.apply(
        template("both", {"name": "both", "exactly": both}),
        stay("both", ("d", from_template("both"))),
    )
    yard.wait_phase("both", "Running")
    assert mounted(yard, "both") == {"/tmp/Dev-1", "/tmp/Dev-2"}
    assert allocations(yard) == before + 1, "one call for all devices of a request"
    assert yard.calls(SAMPLE_SET, "GetPreferredAllocation") == 0
    yard.delete("pod", "both")
    wait_for(
        "the CDI file to be gone", lambda: not cdi_files(yard.cluster, yard.node, driver=PLUGINS)
    )


def test_a_pod_that_asks_for_an_extended_resource_alone_runs_unchanged(yard):
    (unchanged,) = example("device-plugin/extended-resource-pod")
    assert "resourceClaims" not in unchanged["spec"]
    yard.apply(unchanged)
    yard.wait_phase("unchanged", "Running")
    (device,) = mounted(yard, "unchanged")
    body = yard.get("pod", "unchanged")
    assert body is not None
    name = body["status"]["extendedResourceClaimStatus"]["resourceClaimName"]
    claim = yard.get("resourceclaim", name)
    assert claim is not None
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert result["driver"] == PLUGINS
    assert yard.devices()[device.removeprefix("/tmp/")]["name"] == result["device"]
    # The capacity may still include devices that an earlier page moved away from the kubelet.
    allocatable = yard.cluster.get("node", yard.node)["status"]["allocatable"]
    assert allocatable.get(SAMPLE, "0") == "0", "the kubelet's own device manager has no part in it"
    yard.delete("pod", "unchanged")
    wait_for("the claim to be gone", lambda: yard.get("resourceclaim", name) is None)


def test_a_container_has_the_device_node_and_the_variables_that_a_plugin_returns(yard):
    devices = yard.of(FUSE)
    assert set(devices) == set(FUSE_DEVICES)
    numa = {
        given: d["attributes"]["resource.kubernetes.io/numaNode"] for given, d in devices.items()
    }
    assert numa == {given: {"int": said["numa"]} for given, said in FUSE_DEVICES.items()}
    before = yard.calls(NODES_SET, "PreStartContainer")
    wanting = container("main", command=["sh", "-c", STAY], resources={"limits": {FUSE: 1}})
    yard.apply(pod("fuse", containers=[wanting]))
    yard.wait_phase("fuse", "Running")
    (variable,) = yard.inside("fuse", "env | grep ^FUSE_")
    assert variable in ("FUSE_0=here", "FUSE_1=here")
    # Opening it for reading and writing requires permission in the container's device cgroup.
    yard.inside("fuse", "test -c /dev/fuse && exec 3<>/dev/fuse")
    assert yard.calls(NODES_SET, "PreStartContainer") == before + 1
    (without,) = [container("main", command=["sh", "-c", "test ! -e /dev/fuse"])]
    yard.apply(pod("without", containers=[without]))
    yard.wait_phase("without", "Succeeded")
    assert "annotation" in yard.node_event(FUSE, "annotation")


# ------------------------------------------------------------ plugins that stop and return


@pytest.mark.disruptive
@pytest.mark.serial
def test_a_plugin_that_is_killed_and_returns_within_the_grace_period_loses_nothing(yard):
    with_device(yard, "user", "Dev-1")
    before = yard.published()
    yard.kill(SAMPLE_SET)
    yard.wait_untainted()
    assert yard.published() == before
    with_device(yard, "next", "Dev-2")
    assert mounted(yard, "next") == {"/tmp/Dev-2"}
    assert mounted(yard, "user") == {"/tmp/Dev-1"}
    assert allocations(yard) == 1, "that of the new claim: a prepared one needs no second"
    assert restarts(yard.get("pod", "user")) == 0


@pytest.mark.disruptive
@pytest.mark.serial
def test_the_node_plugin_is_killed_and_its_plugins_register_again(yard):
    with_device(yard, "user", "Dev-1")
    before, allocated = yard.published(), allocations(yard)
    programs = SAMPLE_SET, NVIDIA_SET, NODES_SET
    started = [restarts(yard.program(name)) for name in programs]
    watched = yard.calls(SAMPLE_SET, "ListAndWatch")
    registered = yard.logged(NVIDIA_SET, REGISTERED)
    with written(yard.cluster, BLINKERS, LOCAL, PLUGINS):
        yard.kill_plugin()
        # NVIDIA's plugin watches the directory, and sees the new kubelet.sock.
        wait_for(
            "NVIDIA's plugin to have registered again",
            lambda: yard.logged(NVIDIA_SET, REGISTERED) > registered,
            seconds=5,
            period=0.5,
        )
        with_device(yard, "next-gpu", "tegra::0", GPU_CLASS)
        # Kubernetes' stub waits 10 s before it registers again.
        wait_for(
            "the sample to be watched again",
            lambda: yard.calls(SAMPLE_SET, "ListAndWatch") > watched,
            period=0.5,
        )
        with_device(yard, "next", "Dev-2")
    assert yard.published() == before
    assert mounted(yard, "next") == {"/tmp/Dev-2"}
    assert mounted(yard, "user") == {"/tmp/Dev-1"}
    assert allocations(yard) == allocated + 1, "that of the new claim"
    assert visible(yard, "next-gpu") == [UUID]
    assert [restarts(yard.program(name)) for name in programs] == started


@pytest.mark.disruptive
@pytest.mark.serial
def test_a_plugin_that_is_gone_past_the_grace_period_loses_its_devices_and_no_other_does(yard):
    with_device(yard, "user", "Dev-1")
    yard.remove(SAMPLE_SET)
    stopped_at = time.monotonic()
    wait_for("its devices to be tainted", lambda: yard.tainted() == {STOPPED}, seconds=10)
    assert not any(device.get("taints") for device in yard.of(FUSE).values())
    wait_for("its devices to go", lambda: not yard.of(SAMPLE))
    seconds = time.monotonic() - stopped_at
    print(f"the devices were removed {seconds:.1f} s after the stop")
    assert STOP_GRACE_SECONDS - 3 < seconds < STOP_GRACE_SECONDS + 5
    assert set(yard.of(FUSE)) == set(FUSE_DEVICES)
    assert mounted(yard, "user") == {"/tmp/Dev-1"}
    yard.delete("pod", "user")
    yard.place(SAMPLE_SET)
    wait_for("its devices to be back", lambda: set(yard.of(SAMPLE)) == {"Dev-1", "Dev-2"})
    with_device(yard, "again", "Dev-1")


# ------------------------------------------------------------ NVIDIA's plugin


def test_the_devices_of_nvidias_unmodified_plugin_go_to_pods_with_and_without_claims(yard):
    devices = yard.of(GPU)
    assert set(devices) == GPU_IDS
    for given, device in devices.items():
        assert device["attributes"] == {"resource": {"string": GPU}, "id": {"string": given}}
    wanting = container("main", command=["sh", "-c", STAY], resources={"limits": {GPU: 1}})
    yard.apply(pod("unchanged", containers=[wanting]))
    with_device(yard, "claiming", "tegra::2", GPU_CLASS)
    assert visible(yard, "claiming") == [UUID]
    (result,) = results_of(yard, "claiming")
    assert (result["driver"], result["device"]) == (PLUGINS, devices["tegra::2"]["name"])
    yard.wait_phase("unchanged", "Running")
    assert visible(yard, "unchanged") == [UUID]
    (other,) = results_of(yard, "unchanged")
    assert other["driver"] == PLUGINS
    assert other["device"] != result["device"]
    capacity = yard.cluster.get("node", yard.node)["status"]["capacity"]
    assert GPU not in capacity, "the kubelet's own device manager has no part in it"


def test_a_refusal_of_nvidias_plugin_keeps_its_own_text(yard):
    both: dict[str, Any] = {"deviceClassName": GPU_CLASS, "count": 2}
    yard.apply(
        template("both", {"name": "both", "exactly": both}),
        stay("both", ("d", from_template("both"))),
    )
    yard.event("both", GPU, "maximum request size for shared resources is 1")
    assert yard.phase("both") == "Pending"


@pytest.mark.slow
@pytest.mark.disruptive
@pytest.mark.serial
def test_nvidias_plugin_is_killed_and_its_devices_are_given_out_again(yard):
    with_device(yard, "user", "tegra::0", GPU_CLASS)
    before = yard.published()
    yard.kill(NVIDIA_SET)
    yard.wait_untainted()
    assert yard.published() == before
    with_device(yard, "next", "tegra::1", GPU_CLASS)
    assert visible(yard, "next") == visible(yard, "user") == [UUID]
    assert restarts(yard.get("pod", "user")) == 0


# ------------------------------------------------------------ the allow list

STRANGER = "nodes.test/stranger"


def registration_socket(yard: Yard, entry: str) -> Path:
    """Return the registration socket in a device plugin's own directory."""
    return yard.cluster.node_path(yard.node, OURS) / entry / "kubelet.sock"


def test_each_device_plugin_registers_at_a_socket_of_its_own(yard):
    sockets = [registration_socket(yard, entry) for entry in ("sample", "nvidia", NODES_SET)]
    assert all(socket.is_socket() for socket in sockets)
    assert len({socket.stat().st_ino for socket in sockets}) == 3
    assert not (sockets[0].parents[1] / "kubelet.sock").exists()


@pytest.mark.parametrize(
    ("resource", "remedy"),
    [
        pytest.param(STRANGER, "add it to resources", id="of-no-entry"),
        pytest.param(SAMPLE, f"its directory is {OURS}/sample", id="of-another-device-plugin"),
    ],
)
def test_a_resource_that_the_entry_of_the_directory_does_not_list_is_refused(
    yard, resource, remedy
):
    before = {given: device["name"] for given, device in yard.of(SAMPLE).items()}
    yard.plan({resource: {"devices": {"thief-0": {"node": "/dev/fuse"}}}}, "thief")
    with with_set(yard, nodes_set("thief", plan="thief")):
        message = yard.node_event("RegistrationRefused", resource, "plugins.thief does not list")
        assert remedy in message
        assert "thief-0" not in yard.devices()
        # The device plugin of the resource is not affected.
        with_device(yard, "user", "Dev-1")
        assert mounted(yard, "user") == {"/tmp/Dev-1"}
    assert {given: device["name"] for given, device in yard.of(SAMPLE).items()} == before


def test_a_claim_gets_two_of_ten_devices_that_have_one_device_node(yard):
    devices = {
        f"fuse-{number}": {"node": "/dev/fuse", "env": {f"COUNT_{number}": "yes"}}
        for number in range(10)
    }
    yard.plan({COUNT: {"devices": devices}}, "count")
    with with_set(yard, nodes_set("count", plan="count")):
        wait_for("its devices to be published", lambda: len(yard.of(COUNT)) == 10)
        for name in ("two", "others"):
            request: dict[str, Any] = {"deviceClassName": COUNT_CLASS, "count": 2}
            yard.apply(
                template(name, {"name": "two", "exactly": request}),
                stay(name, ("d", from_template(name))),
            )
        taken: set[str] = set()
        for name in ("two", "others"):
            yard.wait_phase(name, "Running")
            yard.inside(name, "test -c /dev/fuse && exec 3<>/dev/fuse")
            taken |= set(yard.inside(name, "env | grep ^COUNT_"))
        assert len(taken) == 4
        # Their claims are unprepared while their program is still running.
        yard.delete("pod", "two")
        yard.delete("pod", "others")


def test_a_device_node_that_the_entry_does_not_name_is_not_given_to_a_pod(yard):
    modest = {"node": "/dev/fuse", "mount": BLINKERS_DIRECTORY}
    devices = {"greedy-0": {"node": "/dev/kmsg"}, "modest-0": modest}
    yard.plan({GREEDY: {"devices": devices}}, "greedy")
    with with_set(yard, nodes_set("greedy", plan="greedy")):
        wait_for("its devices to be published", lambda: set(yard.of(GREEDY)) == set(devices))
        for given in devices:
            yard.apply(
                template(given, ("device", "greedy.nodes.test", by_id(given))),
                stay(given, ("d", from_template(given))),
            )
        yard.wait_phase("modest-0", "Running")
        yard.inside("modest-0", "test -c /dev/fuse")
        (mount,) = yard.inside("modest-0", f"grep ' {BLINKERS_DIRECTORY} ' /proc/self/mountinfo")
        assert mount.split()[5].split(",")[0] == "ro"
        message = yard.event("greedy-0", "/dev/kmsg", "is not allowed")
        assert "extend devices in devicePlugins.plugins.greedy" in message
        assert yard.phase("greedy-0") == "Pending"
        # The claim is unprepared while its program is still running.
        yard.delete("pod", "greedy-0")
        yard.delete("pod", "modest-0")


# ------------------------------------------------------------ in addition to the kubelet's own


@pytest.mark.slow
def test_a_resource_that_the_kubelets_own_device_manager_serves_is_refused(yard):
    devices = {"clash-0": {"node": "/dev/fuse"}}
    yard.plan({CLASH: {"devices": devices}}, "clash")
    with with_set(yard, nodes_set("clash-kubelet", directory=KUBELETS, plan="clash")):
        wait_for(
            "the kubelet to have the resource",
            lambda: yard.cluster.get("node", yard.node)["status"]["allocatable"].get(CLASH) == "1",
        )
        with with_set(yard, nodes_set("clash", plan="clash")):
            message = yard.node_event("ResourceServedByKubelet", CLASH)
            assert "kubelet" in message
            assert not yard.of(CLASH)
            assert set(yard.of(FUSE)) == set(FUSE_DEVICES), "other resources are untouched"


def moved_set(directory: str) -> dict[str, Any]:
    """Return a DaemonSet for a move as in docs/admin/device-plugins.md: only deleted pods are
    replaced."""
    body = nodes_set("moved", directory=directory, plan="moved")
    body["spec"]["updateStrategy"] = {"type": "OnDelete"}
    return body


def move(yard: Yard, directory: str) -> None:
    """Change the path of an existing DaemonSet, and delete its pod."""
    body = moved_set(directory)
    body["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": yard.node}
    before = yard.program("moved")
    assert before is not None
    yard.cluster.apply(json.dumps(body))
    name = before["metadata"]["name"]
    still = yard.program("moved")
    assert still is not None
    assert still["metadata"]["name"] == name, "nothing happens before its pod is deleted"
    yard.cluster.kubectl("-n", FOREIGN.namespace, "delete", "pod", name)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_plugin_is_moved_from_the_kubelet_to_the_node_plugin_and_back_and_its_pods_are_the_same(
    yard,
):
    yard.plan({MOVED: {"devices": {"moved-0": {"node": "/dev/fuse"}}}}, "moved")

    def wait_allocatable(count: str) -> None:
        wait_for(
            "the node's capacity to be right",
            lambda: (
                yard.cluster.get("node", yard.node)["status"]["allocatable"].get(MOVED, "0")
                == count
            ),
        )

    def use(name: str, *, by_claim: bool) -> None:
        main = container("main", command=["sh", "-c", STAY], resources={"limits": {MOVED: 1}})
        yard.apply(pod(name, containers=[main]))
        yard.wait_phase(name, "Running")
        yard.inside(name, "test -c /dev/fuse")
        body = yard.get("pod", name)
        assert body is not None
        assert ("extendedResourceClaimStatus" in body["status"]) == by_claim

    with with_set(yard, moved_set(KUBELETS)):
        wait_allocatable("1")
        use("before", by_claim=False)

        # The pod that has the device from the kubelet was forgotten.
        move(yard, f"{OURS}/moved")
        wait_allocatable("0")
        yard.node_event("ResourceServedByKubelet", MOVED, "still hold")
        assert not yard.of(MOVED)
        yard.delete("pod", "before")
        # The program exits when it is rejected, and restarts with increasing delays. In addition,
        # the kubelet must have been without the resource for two minutes.
        wait_for("the device to be published", lambda: yard.of(MOVED), seconds=330)
        use("meanwhile", by_claim=True)
        yard.delete("pod", "meanwhile")

        move(yard, KUBELETS)
        wait_allocatable("1")
        use("after", by_claim=False)
        yard.delete("pod", "after")


@pytest.mark.slow
@pytest.mark.disruptive
@pytest.mark.serial
@pytest.mark.timeout(400)
@pytest.mark.needs(Capability.REBOOT)
def test_after_a_reboot_the_devices_of_a_pod_are_allocated_again(yard):
    yard.apply(
        template("d", ("device", SAMPLE_CLASS, by_id("Dev-1"))),
        stay("user", ("d", from_template("d")), restart="Always"),
    )
    yard.wait_phase("user", "Running")
    yard.cluster.reboot_node(yard.node)
    yard.cluster.wait_for_nodes()
    wait_for(
        "the pod to run again",
        lambda: restarts(yard.get("pod", "user")) > 0 and yard.phase("user") == "Running",
        seconds=180,
    )
    wait_for("the device to be in the container", lambda: mounted(yard, "user"), seconds=60)
    assert mounted(yard, "user") == {"/tmp/Dev-1"}
    assert allocations(yard) == 1
