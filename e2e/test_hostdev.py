"""HostDevicePolicies on a real cluster: their life, classes and status, and the disk helper."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.cluster.api import Cluster, CommandError
from e2e.fixtures import HOTPLUGGED, release_values, wait_settled
from e2e.kit import (
    DRIVER,
    Space,
    devices_of,
    from_template,
    holds_for,
    hotplugged_loop,
    plugin_pod,
    pod,
    published,
    ready,
    taints,
    template,
    wait_for,
    zram_devices,
)
from e2e.release import install

pytestmark = [pytest.mark.e2e, pytest.mark.feature("hostdev")]

LAMP, SPARE = HOTPLUGGED + 1, HOTPLUGGED + 2
SECRET = "data-of-the-first-claim"


def policy(name: str, cluster: Cluster, path: str, **spec: Any) -> dict[str, Any]:
    """A policy of the first node for one block device."""
    return {
        "apiVersion": "drakit.dev/v1alpha1",
        "kind": "HostDevicePolicy",
        "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": cluster.nodes[0]},
            "match": [{"subsystem": "block", "paths": [path]}],
            **spec,
        },
    }


@contextmanager
def applied(cluster: Cluster, *bodies: dict[str, Any]) -> Iterator[None]:
    cluster.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": list(bodies)}))
    try:
        yield
    finally:
        names = [body["metadata"]["name"] for body in bodies]
        cluster.kubectl("delete", "hdp", *names, "--ignore-not-found")


def change(cluster: Cluster, name: str, spec: dict[str, Any]) -> None:
    cluster.kubectl("patch", "hdp", name, "--type=merge", "-p", json.dumps({"spec": spec}))


def status(cluster: Cluster, name: str) -> dict[str, Any]:
    return json.loads(cluster.kubectl("get", "hdp", name, "-o", "json").stdout).get("status", {})


def condition(cluster: Cluster, name: str) -> tuple[str, str, str]:
    """Return status, reason and message of the condition Ready."""
    for each in status(cluster, name).get("conditions", []):
        return each["status"], each["reason"], each["message"]
    return "", "", ""


def is_ready(cluster: Cluster, name: str, *, generation: int | None = None) -> bool:
    found = status(cluster, name)
    return condition(cluster, name)[:2] == ("True", "Applied") and (
        generation is None or found["observedGeneration"] == generation
    )


def has_class(cluster: Cluster, name: str) -> bool:
    return bool(cluster.kubectl("get", "deviceclass", name, "--ignore-not-found").stdout)


def run_pod(space: Space, name: str, script: str) -> str:
    """Run a script with the claimed device, and return its output."""
    command = ["sh", "-c", script]
    space.apply(pod(name, ("disk", from_template("disk")), command=command))
    space.wait_phase(name, "Succeeded")
    output = space.logs(name)
    space.delete("pod", name)
    return output


def test_a_policy_is_applied_changed_broken_mended_and_deleted_while_a_pod_runs(space, release):
    device = f"lamp-loop{LAMP}"
    lamp = policy("lamp", release, f"/dev/loop{LAMP}", container={"path": "/dev/lamp"})
    with hotplugged_loop(LAMP), applied(release, lamp):
        wait_for("the policy to be ready", lambda: is_ready(release, "lamp"))
        found = status(release, "lamp")
        assert (found["nodes"], found["matched"], found["devices"]) == (1, 1, 1)
        assert found["deviceClass"] == "lamp.drakit.dev"

        space.apply(template("disk", ("disk", "lamp.drakit.dev")))
        space.apply(pod("holder", ("disk", from_template("disk"))))
        space.wait_phase("holder", "Running")
        assert devices_of(space.claim_of("holder", "disk")) == [device]
        wait_for("the allocation to be counted", lambda: status(release, "lamp")["allocated"] == 1)

        # The API server rejects most mistakes, the node the rest: the last valid version stays.
        with pytest.raises(CommandError, match=r"must end in '/'|not supported for block devices"):
            change(release, "lamp", {"group": "Unit"})
        change(release, "lamp", {"match": [{"subsystem": "mem", "paths": ["/dev/mem"]}]})
        wait_for(
            "the mistake to be reported",
            lambda: condition(release, "lamp")[:2] == ("False", "NodeProblems"),
        )
        assert "gives a container control of the node" in condition(release, "lamp")[2]
        holds_for("the device stays", lambda: device in published(release), seconds=2)

        change(release, "lamp", {"match": lamp["spec"]["match"], "container": {"path": "/dev/lit"}})
        wait_for("the policy to be ready again", lambda: is_ready(release, "lamp", generation=3))
        assert space.phase("holder") == "Running"
        space.delete("pod", "holder")
        assert "/dev/lit" in run_pod(space, "second", "echo $HOSTDEV_DISK; stat $HOSTDEV_DISK")

        # A younger policy for the same device: both say so, and the older one keeps it.
        with applied(release, policy("rival", release, f"/dev/loop{LAMP}")):
            wait_for("the conflict", lambda: status(release, "rival").get("conflicts"))
            wait_for("the conflict of the other", lambda: status(release, "lamp")["conflicts"])
            (conflict,) = status(release, "rival")["conflicts"]
            assert (conflict["device"], conflict["policy"]) == (f"/dev/loop{LAMP}", "lamp")
            assert device in published(release)

        space.apply(pod("last", ("disk", from_template("disk"))))
        space.wait_phase("last", "Running")
        release.kubectl("delete", "hdp", "lamp")
        wait_for("the class to go", lambda: not has_class(release, "lamp.drakit.dev"))
        wait_for("the taint", lambda: "drakit.dev/gone:NoSchedule" in taint_of(release, device))
        assert space.phase("last") == "Running"
        space.delete("pod", "last")
        wait_for("the device to go", lambda: device not in published(release))


def taint_of(cluster: Cluster, device: str) -> dict[str, str]:
    return taints(cluster, DRIVER).get(device, {})


def test_a_class_of_somebody_else_is_reported_and_not_changed(release):
    name = "spare.drakit.dev"
    theirs = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": 'device.driver == "theirs"'}}]},
    }
    release.apply(json.dumps(theirs))
    try:
        with applied(release, policy("spare", release, f"/dev/loop{SPARE}")):
            wait_for(
                "the conflict",
                lambda: condition(release, "spare")[:2] == ("False", "DeviceClassConflict"),
            )
            kept = json.loads(release.kubectl("get", "deviceclass", name, "-o", "json").stdout)
            assert kept["spec"]["selectors"] == theirs["spec"]["selectors"]
            release.kubectl("delete", "deviceclass", name)
            wait_for("its own class", lambda: has_class(release, name))
            wait_for("no conflict", lambda: condition(release, "spare")[1] != "DeviceClassConflict")
        wait_for("its class to go", lambda: not has_class(release, name))
    finally:
        release.kubectl("delete", "deviceclass", name, "--ignore-not-found")


@pytest.fixture
def disk_helper(release, zram, disks):
    """The release with the disk helper, until the test ends."""
    values = release_values(release, zram, disks)
    hostdev = {**values["hostdev"], "diskHelper": {"enabled": True}}
    before = plugin_pod(release, release.nodes[0])
    install(release, values={**values, "hostdev": hostdev})
    wait_for("the new plugin", lambda: is_new(release, before))
    wait_settled(release, zram)
    yield
    before = plugin_pod(release, release.nodes[0])
    install(release, values=values)
    wait_for("the old plugin", lambda: is_new(release, before))
    wait_settled(release, zram)


def is_new(cluster: Cluster, before: dict[str, Any] | None) -> bool:
    found = plugin_pod(cluster, cluster.nodes[0])
    return (
        found is not None
        and before is not None
        and found["metadata"]["uid"] != before["metadata"]["uid"]
        and ready(found)
    )


def test_a_policy_that_wipes_disks_is_refused_without_the_disk_helper(release):
    with zram_devices(1) as (disk,):
        wiped = policy("wiped", release, f"/dev/{disk}", onRelease="Wipe")
        with applied(release, wiped):
            report = f"{release.nodes[0]}.{DRIVER}"

            def reason() -> str:
                out = (
                    release.kubectl("get", "ndr", report, "-o", "json", check=False).stdout or "{}"
                )
                listed = json.loads(out).get("status", {}).get("leftOut", [])
                return next((each["message"] for each in listed if disk in each["device"]), "")

            wait_for("the reason", lambda: "needs the disk helper" in reason(), seconds=30)
            assert f"wiped-{disk}" not in published(release)


def test_a_disk_is_wiped_between_claims_and_refused_while_a_program_has_it_open(
    space, release, disk_helper
):
    write = f"printf {SECRET} | dd of=$HOSTDEV_DISK bs=4096 conv=sync,fsync 2>/dev/null"
    read = f"head -c {len(SECRET)} $HOSTDEV_DISK | tr '\\0' '0'"
    with zram_devices(1) as (disk,), applied(release, policy("wiped", release, f"/dev/{disk}")):
        wait_for("the class", lambda: has_class(release, "wiped.drakit.dev"))
        wait_for("the disk", lambda: f"wiped-{disk}" in published(release))
        space.apply(template("disk", ("disk", "wiped.drakit.dev")))
        run_pod(space, "keeps", write)
        assert run_pod(space, "sees", read).strip() == SECRET, "onRelease: Keep keeps content"

        change(release, "wiped", {"onRelease": "Wipe"})
        wait_for("the change", lambda: is_ready(release, "wiped", generation=2))
        run_pod(space, "writes", write)
        assert run_pod(space, "reads", read).strip() == "0" * len(SECRET)

        holder = os.open(f"/dev/{disk}", os.O_RDONLY | os.O_EXCL)
        try:
            space.apply(pod("waits", ("disk", from_template("disk")), command=["true"]))
            space.event("waits", "another program has it open exclusively")
            assert space.phase("waits") == "Pending"
        finally:
            os.close(holder)
        space.nudge("waits")
        space.wait_phase("waits", "Succeeded")
