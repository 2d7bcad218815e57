"""HostDevicePolicies on a real cluster: their life cycle, classes, status and rejections."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from drakit_formats import crds
from e2e.cluster.api import Cluster, CommandError
from e2e.fixtures import HOTPLUGGED
from e2e.kit import (
    DRIVER,
    Space,
    device_class,
    devices_of,
    from_template,
    holds_for,
    hotplugged_loop,
    loop_devices,
    plugin_pod,
    pod,
    published,
    restarts,
    taints,
    template,
    wait_for,
    zram_devices,
)
from tests.unit.chart.class_writes import PREFIX

pytestmark = [pytest.mark.e2e, pytest.mark.feature("hostdev")]

LAMP, SPARE = HOTPLUGGED + 1, HOTPLUGGED + 2


def policy(name: str, cluster: Cluster, *paths: str, **spec: Any) -> dict[str, Any]:
    """Return a policy of the first node for block devices."""
    return {
        "apiVersion": crds.API_VERSION,
        "kind": "HostDevicePolicy",
        "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"matchLabels": {"kubernetes.io/hostname": cluster.nodes[0]}},
            "match": [{"subsystem": "block", "paths": list(paths)}],
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


def condition(cluster: Cluster, name: str, which: str = "Applied") -> tuple[str, str, str]:
    """Return status, reason and message of a condition."""
    for each in status(cluster, name).get("conditions", []):
        if each["type"] == which:
            return each["status"], each["reason"], each["message"]
    return "", "", ""


WRITTEN_SECONDS = 90
"""The operator writes a status of the same generation at most every 60 s."""


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
        assert (found["appliedNodes"], found["nodes"], found["devices"]) == (1, 1, 1)
        assert found["deviceClass"] == "lamp.drakit.dev"

        space.apply(template("disk", ("disk", "lamp.drakit.dev")))
        space.apply(pod("holder", ("disk", from_template("disk"))))
        space.wait_phase("holder", "Running")
        assert devices_of(space.claim_of("holder", "disk")) == [device]

        # The API server rejects most mistakes, and the node the rest. The last valid version
        # remains.
        with pytest.raises(CommandError, match=r"must end in '/'|not supported for block devices"):
            change(release, "lamp", {"group": "Unit"})
        change(release, "lamp", {"match": [{"subsystem": "mem", "paths": ["/dev/mem"]}]})
        wait_for(
            "the mistake to be reported",
            lambda: condition(release, "lamp", "Accepted")[:2] == ("False", "Refused"),
        )
        assert "/dev/mem is dangerous" in condition(release, "lamp", "Accepted")[2]
        holds_for("the device stays", lambda: device in published(release), seconds=2)

        change(release, "lamp", {"match": lamp["spec"]["match"], "container": {"path": "/dev/lit"}})
        wait_for("the policy to be ready again", lambda: is_ready(release, "lamp", generation=3))
        assert space.phase("holder") == "Running"
        space.delete("pod", "holder")
        assert "/dev/lit" in run_pod(space, "second", "echo $HOSTDEV_DISK; stat $HOSTDEV_DISK")

        # If a younger policy matches the same device, the older one keeps it.
        with applied(release, policy("rival", release, f"/dev/loop{LAMP}")):
            wait_for("the conflict", lambda: status(release, "rival").get("conflicts"))
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


@pytest.mark.slow
def test_a_policy_that_is_in_effect_reports_a_conflict_within_a_minute(space, release):
    older, younger = (policy(name, release, f"/dev/loop{LAMP}") for name in ("older", "younger"))
    with hotplugged_loop(LAMP), applied(release, older):
        wait_for(
            "the policy to be ready", lambda: is_ready(release, "older"), seconds=WRITTEN_SECONDS
        )
        with applied(release, younger):
            wait_for(
                "the conflict",
                lambda: condition(release, "older", "Conflicting")[0] == "True",
                seconds=WRITTEN_SECONDS,
            )
            (conflict,) = status(release, "older")["conflicts"]
            assert (conflict["device"], conflict["policy"]) == (f"/dev/loop{LAMP}", "younger")


@pytest.mark.slow
def test_pods_are_evicted_only_from_a_device_that_stays_unplugged(space, release):
    numbers = {"torn": LAMP, "kept": SPARE}
    devices = {name: f"{name}-loop{number}" for name, number in numbers.items()}
    gone, evicting = "drakit.dev/gone:NoSchedule", "drakit.dev/gone:NoExecute"

    def phases() -> set[str]:
        return {space.phase(name) for name in numbers}

    evict = [
        policy(name, release, f"/dev/loop{number}", onVanish="Evict")
        for name, number in numbers.items()
    ]
    with applied(release, *evict), hotplugged_loop(SPARE):
        with hotplugged_loop(LAMP):
            for name, device in devices.items():
                wait_for("the class", lambda name=name: has_class(release, f"{name}.drakit.dev"))
                wait_for("the device", lambda device=device: device in published(release))
                space.apply(template(name, ("disk", f"{name}.drakit.dev")))
                # A grace period that is long enough to observe the stop.
                space.apply(pod(name, ("disk", from_template(name)), grace=4))
                space.wait_phase(name, "Running")
        wait_for("the taint", lambda: gone in taint_of(release, devices["torn"]), seconds=8)
        with hotplugged_loop(LAMP):
            wait_for("the device to return", lambda: not taint_of(release, devices["torn"]))
            # The device of a deleted policy still exists.
            release.kubectl("delete", "hdp", "kept")
            wait_for("the other taint", lambda: gone in taint_of(release, devices["kept"]))
            space.event("kept", "is running, but device", "is gone", seconds=30)
            holds_for("both pods run", lambda: phases() == {"Running"}, seconds=13)
            assert evicting not in taint_of(release, devices["kept"])
        reason = wait_for("the eviction", lambda: space.eviction("torn"), seconds=30)
        assert reason == "DeletionByDeviceTaintManager"
        assert space.phase("kept") == "Running"
        assert space.eviction("kept") is None
        space.delete("pod", "kept")
        for device in devices.values():
            wait_for("the device to go", lambda device=device: device not in published(release))


def taint_of(cluster: Cluster, device: str) -> dict[str, str]:
    return taints(cluster, DRIVER).get(device, {})


def test_a_class_of_somebody_else_is_reported_and_not_changed(release):
    name = "spare.drakit.dev"
    theirs = device_class(name, "theirs")
    release.apply(json.dumps(theirs))
    try:
        with applied(release, policy("spare", release, f"/dev/loop{SPARE}")):
            wait_for(
                "the conflict",
                lambda: condition(release, "spare", "Accepted")[1] == "DeviceClassConflict",
            )
            kept = json.loads(release.kubectl("get", "deviceclass", name, "-o", "json").stdout)
            assert kept["spec"]["selectors"] == theirs["spec"]["selectors"]
            release.kubectl("delete", "deviceclass", name)
            wait_for("its own class", lambda: has_class(release, name))
            wait_for(
                "no conflict",
                lambda: condition(release, "spare", "Accepted")[1] == "Accepted",
                seconds=WRITTEN_SECONDS,
            )
        wait_for("its class to go", lambda: not has_class(release, name))
    finally:
        release.kubectl("delete", "deviceclass", name, "--ignore-not-found")


def test_an_extended_resource_needs_a_prefix_in_the_values(release):
    body = policy("spare", release, f"/dev/loop{SPARE}")
    body["spec"]["deviceClass"] = {"extendedResourceName": "lab.test/spare"}
    with applied(release, body):
        wait_for(
            "the refusal",
            lambda: condition(release, "spare", "Accepted")[1] == "DeviceClassConflict",
        )
        message = condition(release, "spare", "Accepted")[2]
        assert "the extended resource 'lab.test/spare' does not begin with a prefix" in message
        assert "hostdev.extendedResourcePrefixes; add its prefix to the value" in message
        allowed = f"{PREFIX}spare"
        change(release, "spare", {"deviceClass": {"extendedResourceName": allowed}})
        wait_for("the class", lambda: has_class(release, "spare.drakit.dev"))
        made = release.get("deviceclass", "spare.drakit.dev")
        assert made["spec"]["extendedResourceName"] == allowed


def refused(cluster: Cluster) -> dict[str, tuple[str, str]]:
    """Return reason and message of each device of the first node that is not published."""
    report = f"{cluster.nodes[0]}.{DRIVER}"
    output = cluster.kubectl("get", "ndr", report, "-o", "json", check=False).stdout
    listed = json.loads(output or "{}").get("status", {}).get("rejectedDevices", [])
    return {each["device"]: (each["reason"], each["message"]) for each in listed}


def test_a_policy_alone_cannot_publish_a_dangerous_device(release):
    """The values of the release do not set hostdev.allowDangerous."""
    allow = {"dangerous": "Always"}
    named = policy("named", release, "/dev/kmsg", allow=allow)
    globbed = policy("globbed", release, "/dev/k[lm]*", "/dev/zer?", allow=allow)
    for body in (named, globbed):
        body["spec"]["match"][0]["subsystem"] = "mem"
    with applied(release, named):
        wait_for("the problem", lambda: condition(release, "named")[1] == "NodeProblems")
        assert (
            "hostdev.allowDangerous: true in the chart's values" in condition(release, "named")[2]
        )
        wait_for("its reason", lambda: "/dev/kmsg" in refused(release), seconds=30)
        assert refused(release)["/dev/kmsg"][0] == "Dangerous"
    with applied(release, globbed):
        wait_for("the harmless device", lambda: "globbed-zero" in published(release))
        wait_for("the reason", lambda: "/dev/kmsg" in refused(release), seconds=30)
        assert not {"named-kmsg", "globbed-kmsg"} & set(published(release))


def test_a_disk_is_refused_with_a_pointer_to_csi_and_the_zram_device_beside_it_is_published(
    release, tmp_path
):
    files = [tmp_path / name for name in ("one", "other")]
    for file in files:
        with file.open("wb") as opened:
            opened.truncate(1024 * 1024)
    with loop_devices(files) as loops, zram_devices(1) as (free,):
        paths = [f"/dev/{name}" for name in (*loops, free)]
        with applied(release, policy("mixed", release, *paths)):
            wait_for("the zram device", lambda: f"mixed-{free}" in published(release))
            wait_for("both reasons", lambda: refused(release).keys() >= set(paths[:2]), seconds=30)
            for reason, message in (refused(release)[path] for path in paths[:2]):
                assert reason == "NotSupported"
                assert "a loop device with a backing file; use a CSI driver" in message
            assert paths[2] not in refused(release)
            assert not {f"mixed-{name}" for name in loops} & set(published(release))


@pytest.mark.slow
def test_fewer_shares_of_a_held_device_wait_for_its_holders_and_restart_no_node_plugin(
    space, release
):
    name, first = "fewer-shares", release.nodes[0]
    shares = policy(name, release, sharing={"mode": "Capacity", "users": 4})
    shares["spec"]["match"] = [{"subsystem": "mem", "paths": ["/dev/full"]}]
    del shares["spec"]["nodeSelector"]  # both nodes have the device, because they share /dev

    def nodes() -> int:
        return sum(
            any(device.startswith(name) for device in published(release, node))
            for node in release.nodes[:2]
        )

    def plugins() -> dict[str, int]:
        found = (plugin_pod(release, node) for node in release.nodes[:2])
        return {each["metadata"]["name"]: restarts(each) for each in found if each is not None}

    with applied(release, shares):
        wait_for("the device on both nodes", lambda: nodes() == 2, seconds=30)
        before = plugins()
        assert len(before) == 2
        space.apply(template("share", ("disk", f"{name}.drakit.dev")))
        for holder in ("one", "two"):
            space.apply(pod(holder, ("disk", from_template("share")), node=first))
            space.wait_phase(holder, "Running")
        for sharing in (
            {"mode": "Capacity", "users": 2},
            {"mode": "Users", "users": 2},
            {"mode": "Exclusive", "users": None},
        ):
            change(release, name, {"sharing": sharing})
            body = json.loads(release.kubectl("get", "hdp", name, "-o", "json").stdout)
            wait_for(
                "the nodes to answer",
                lambda wanted=body["metadata"]["generation"]: (
                    status(release, name).get("observedGeneration") == wanted
                    and condition(release, name)[1] not in ("", "Progressing", "Pending")
                ),
                seconds=WRITTEN_SECONDS,
            )
        *waits, message = condition(release, name)
        assert waits == ["False", "DevicesInUse"]
        assert f"claim {space.name}/" in message
        space.apply(pod("alone", ("disk", from_template("share")), node=first))
        space.refused("alone")
        for holder in ("one", "two"):
            space.delete("pod", holder)
        space.wait_phase("alone", "Running")
        space.delete("pod", "alone")
        wait_for("the device on both nodes", lambda: nodes() == 2, seconds=30)
    wait_for("the device to be withdrawn", lambda: nodes() == 0, seconds=60)
    assert plugins() == before
