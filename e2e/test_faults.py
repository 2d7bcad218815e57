"""Faults in a cluster, and the components that they must not affect."""

from __future__ import annotations

import time

import pytest

from drakit_nodeplugin.host.driver_devices import UNPREPARING_SECONDS
from e2e.cluster.api import Capability, Component
from e2e.fixtures import HOTPLUGGED
from e2e.kit import (
    DRIVER,
    cdi_files,
    devices,
    devices_of,
    from_template,
    hotplugged_loop,
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
    pytest.mark.disruptive,
    pytest.mark.serial,
    pytest.mark.timeout(300),
    pytest.mark.feature("faults"),
]


@pytest.fixture
def node(release):
    return release.nodes[0]


def run_pod(space, name="holder", **options):
    """Return a running pod with a zram device, after its claim's CDI file exists."""
    space.apply(
        template(f"{name}-disk", ("disk", "zram.test")),
        pod(name, ("disk", from_template(f"{name}-disk")), **options),
    )
    space.wait_phase(name, "Running")
    return space.claim_of(name, "disk")


def uid_of(claim):
    return claim["metadata"]["uid"]


def cdi_file(release, node, claim):
    return release.node_path(node, "/var/run/cdi") / f"{DRIVER}-claim_{uid_of(claim)}.json"


def kill_plugin(release, node):
    """Send SIGKILL to the plugin's process, and wait until the kubelet has restarted it."""
    before = plugin_pod(release, node)
    release.exec_on_node(node, ["pkill", "-KILL", "-f", "--", "drakit-nodeplugin --config"])
    wait_for(
        "the plugin to be started again",
        lambda: restarts(plugin_pod(release, node)) > restarts(before),
        seconds=90,
    )
    wait_for("the plugin to be ready", lambda: ready(plugin_pod(release, node)), seconds=90)


@pytest.mark.needs(Capability.CUT)
def test_a_force_deleted_pods_claim_is_unprepared_without_the_api_server(space, release, node):
    claim = run_pod(space)
    (device,) = devices_of(claim)
    address = plugin_pod(release, node)["status"]["podIP"]
    release.cut_pod(node, address)
    try:
        space.delete("pod", "holder", force=True)
        wait_for(
            "the claim to be unprepared from the checkpoint",
            lambda: not cdi_file(release, node, claim).exists(),
            seconds=120,
        )
    finally:
        release.heal_pod(node, address)

    path = f'device.attributes["{DRIVER}"].path == "/dev/{device.rpartition("-")[2]}"'
    space.apply(
        template("again", ("disk", "zram.test", path)),
        pod("next", ("disk", from_template("again")), command=["true"]),
    )
    space.wait_phase("next", "Succeeded")


def test_a_killed_plugin_unprepares_what_it_prepared_before(space, release, node):
    claim = run_pod(space)
    kill_plugin(release, node)

    assert space.phase("holder") == "Running"
    assert cdi_file(release, node, claim).exists()
    space.delete("pod", "holder")
    wait_for("the claim to be unprepared", lambda: not cdi_files(release, node))


def test_a_kubelet_restart_leaves_the_pod_alone_and_the_slices_come_back(space, release, node):
    claim = run_pod(space)
    started = space.get("pod", "holder")["status"]["containerStatuses"][0]["state"]
    before = {item["metadata"]["uid"] for item in slices(release, node)}
    assert before

    release.restart_kubelet(node)
    wait_for(
        "the kubelet's wipe",
        lambda: not before & {item["metadata"]["uid"] for item in slices(release, node)},
        period=0.05,
        seconds=60,
    )
    wiped = time.monotonic()
    wait_for("the slices to be back", lambda: slices(release, node), period=0.05)
    seconds = time.monotonic() - wiped
    print(f"slices were back {seconds:.2f} s after the kubelet's wipe")
    assert seconds < 2

    wait_for("the plugin to be ready", lambda: ready(plugin_pod(release, node)), seconds=90)
    assert space.get("pod", "holder")["status"]["containerStatuses"][0]["state"] == started
    space.delete("pod", "holder")
    wait_for(
        "the claim to be unprepared",
        lambda: not cdi_file(release, node, claim).exists(),
        seconds=60,
    )


def wait_restarted(space, *, seconds: float = 60) -> None:
    """Wait until the container of the pod has restarted and is ready."""
    wait_for(
        "the container to be started again",
        lambda: restarts(space.get("pod", "holder")) > 0,
        seconds=seconds,
    )
    wait_for("the pod to be ready", lambda: ready(space.get("pod", "holder")), seconds=seconds)


def test_cdi_files_deleted_under_a_running_plugin_are_back_within_two_seconds(space, release, node):
    claim = run_pod(space, command=["sleep", "3601"], restart="Always")
    cdi_file(release, node, claim).unlink()
    deleted = time.monotonic()
    wait_for("the CDI file", cdi_file(release, node, claim).exists, period=0.05, seconds=10)
    seconds = time.monotonic() - deleted
    print(f"the CDI file was back after {seconds:.2f} s")
    assert seconds < 2

    release.exec_on_node(node, ["pkill", "-KILL", "-f", "--", "^sleep 3601$"])
    wait_restarted(space)


@pytest.mark.parametrize("kubelet_too", [False, True], ids=["plugin", "plugin-and-kubelet"])
def test_cdi_files_deleted_under_a_stopped_plugin_are_back_at_its_start(
    space, release, node, kubelet_too
):
    claim = run_pod(space, command=["sleep", "3602"], restart="Always")
    release.freeze(node, Component.KUBELET)  # otherwise, it would restart the plugin immediately
    try:
        release.exec_on_node(node, ["pkill", "-KILL", "-f", "--", "drakit-nodeplugin --config"])
        cdi_file(release, node, claim).unlink()
    finally:
        release.thaw(node, Component.KUBELET)
    if kubelet_too:
        release.restart_kubelet(node)
    wait_for("the CDI file", cdi_file(release, node, claim).exists, seconds=90)

    release.exec_on_node(node, ["pkill", "-KILL", "-f", "--", "^sleep 3602$"])
    wait_restarted(space, seconds=90)


@pytest.mark.needs(Capability.REBOOT)
def test_after_a_reboot_the_pod_comes_up_with_its_device_again(space, release, node):
    claim = run_pod(
        space,
        command=["sh", "-c", "blockio $HOSTDEV_DISK && exec sleep 3603"],
        restart="Always",
    )
    release.reboot_node(node)
    wait_restarted(space, seconds=150)
    assert cdi_file(release, node, claim).exists()
    assert space.logs("holder").strip().endswith("ok")


@pytest.mark.timeout(600)
@pytest.mark.needs(Capability.REBOOT)
def test_a_held_device_that_is_absent_after_a_reboot_breaks_no_selector(space, release, zram):
    """In this state, only the checkpoint has its attributes. The class of the other node reads an
    attribute without checking for it, and its pod requests all devices, so the allocator evaluates
    all of them."""
    first, second = release.nodes[:2]
    name = f"hotplug-loop{HOTPLUGGED}"
    with hotplugged_loop(HOTPLUGGED):
        space.apply(template("plugged", ("disk", "hotplug.drakit.dev")))
        space.apply(pod("holder", ("disk", from_template("plugged")), restart="Always"))
        space.wait_phase("holder", "Running")
        before = devices(release, first)[name]
        time.sleep(UNPREPARING_SECONDS + 2)  # until the checkpoint contains it
    wait_for("the device to be gone", lambda: devices(release, first)[name].get("taints"))
    release.reboot_node(first)
    wait_for(
        "the device to be published as it was",
        lambda: devices(release, first).get(name, {}).get("attributes") == before["attributes"],
        seconds=150,
    )
    every = {"deviceClassName": "zram-second.test", "allocationMode": "All"}
    space.apply(template("every", {"name": "disk", "exactly": every}))
    space.apply(pod("every", ("disk", from_template("every"))))
    space.wait_phase("every", "Running")
    assert len(devices_of(space.claim_of("every", "disk"))) == len(zram.second)
    assert space.get("pod", "every")["spec"]["nodeName"] == second
