"""Pods get real devices, and do real input and output on them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from e2e.fixtures import HOTPLUGGED
from e2e.kit import (
    cdi_files,
    claim,
    from_claim,
    from_template,
    holds_for,
    hotplugged_loop,
    plugin_log,
    pod,
    published,
    template,
    wait_for,
)

pytestmark = [pytest.mark.e2e, pytest.mark.feature("devices", "hostdev")]


def test_a_pod_with_a_template_claim_writes_and_reads_a_block_device(space, release):
    space.apply(
        template("disk", ("disk", "zram.test")),
        pod(
            "writer",
            ("disk", from_template("disk")),
            command=["sh", "-c", "blockio $HOSTDEV_DISK && blockio $HOSTDEV_DISK"],
        ),
    )
    space.wait_phase("writer", "Succeeded")

    assert space.logs("writer").splitlines()[-1].endswith("ok")
    node = release.nodes[0]
    wait_for("the CDI file to be removed", lambda: not cdi_files(release, node))


@pytest.mark.skipif(not Path("/dev/kvm").exists(), reason="this machine has no /dev/kvm")
def test_a_pod_asks_kvm_for_its_version(space):
    space.apply(
        template("kvm", ("kvm", "kvm.drakit.dev")),
        pod("asks", ("kvm", from_template("kvm")), command=["kvm-version"]),
    )
    space.wait_phase("asks", "Succeeded")
    assert "12" in space.logs("asks").split()


def test_a_pod_without_the_claim_has_no_device(space, zram):
    space.apply(pod("bare", command=["sh", "-c", f"test ! -e /dev/{zram.first[0]}"]))
    space.wait_phase("bare", "Succeeded")


def test_the_second_of_two_pods_runs_once_the_first_is_gone(space, zram):
    wanted = f'device.attributes["hostdev.drakit.dev"].path == "/dev/{zram.first[0]}"'
    space.apply(template("disk", ("disk", "zram.test", wanted)))
    space.apply(pod("first", ("disk", from_template("disk"))))
    space.wait_phase("first", "Running")
    space.apply(pod("second", ("disk", from_template("disk"))))

    holds_for("second waits", lambda: space.phase("second") == "Pending", seconds=4)
    space.delete("pod", "first")
    space.wait_phase("second", "Running")


def test_two_pods_share_one_claim_until_the_last_is_gone(space, release):
    node = release.nodes[0]
    space.apply(claim("shared", ("disk", "zram.test")))
    for name in ("one", "two"):
        space.apply(pod(name, ("disk", from_claim("shared"))))
        space.wait_phase(name, "Running")

    space.delete("pod", "one")
    holds_for("the claim stays prepared", lambda: len(cdi_files(release, node)) == 1, seconds=3)
    space.delete("pod", "two")
    wait_for("the claim to be unprepared", lambda: not cdi_files(release, node))


def test_three_claims_of_a_pod_are_one_batch(space, release):
    space.apply(template("disk", ("disk", "zram.test")))
    names = ("a", "b", "c")
    space.apply(pod("three", *((name, from_template("disk")) for name in names)))
    space.wait_phase("three", "Running")

    claims = {space.claim_of("three", name)["metadata"]["name"] for name in names}
    calls = [
        line
        for line in plugin_log(release, release.nodes[0])
        if line.get("method") == "v1.NodePrepareResources" and any(n in str(line) for n in claims)
    ]
    assert len(calls) == 1, "one call for all three claims"
    assert all(name in str(calls[0]) for name in claims)
    assert re.fullmatch(r"[0-9a-f]{8}", calls[0]["request_id"])


def test_a_zram_device_that_is_mounted_on_the_node_is_not_published(space, release, zram):
    node, disk = release.nodes[0], zram.first[-1]

    def is_published() -> bool:
        return any(name.endswith(disk) for name in published(release, node))

    mount = f"mkfs.ext2 -q /dev/{disk} && mkdir -p /run/disk && mount /dev/{disk} /run/disk"
    release.exec_on_node(node, ["sh", "-c", mount])
    try:
        wait_for("the disk to be withdrawn", lambda: not is_published())
    finally:
        release.exec_on_node(node, ["umount", "/run/disk"])
    wait_for("the disk to be published again", is_published)


def test_a_pod_starts_when_its_device_is_plugged_in_which_is_published_at_once(space, release):
    """The pod runs as a non-root user that owns the device node at the policy's path."""
    name = f"hotplug-loop{HOTPLUGGED}"
    opens = "stat -c '%u %a %n' $HOSTDEV_DISK && head -c 1 $HOSTDEV_DISK && echo opened"
    body = pod("waits", ("disk", from_template("plugged")), command=["sh", "-c", opens])
    body["spec"]["securityContext"] = {"runAsUser": 1000, "runAsGroup": 1000}
    space.apply(template("plugged", ("disk", "hotplug.drakit.dev")), body)
    holds_for("the pod waits", lambda: space.phase("waits") == "Pending", seconds=2)
    with hotplugged_loop(HOTPLUGGED):
        plugged = time.monotonic()
        space.wait_phase("waits", "Running", "Succeeded")
        print(f"the pod ran {time.monotonic() - plugged:.1f} s after the device was plugged in")
        space.wait_phase("waits", "Succeeded")
        assert space.logs("waits").splitlines()[-2:] == ["1000 400 /dev/plugged", "opened"]
        space.delete("pod", "waits")
    wait_for("the device to be removed", lambda: name not in published(release))
    # With scans every 3 s, it would be unlikely to be this fast each time.
    for _ in range(3):
        with hotplugged_loop(HOTPLUGGED):
            wait_for("the device", lambda: name in published(release), seconds=2, period=0.1)
        wait_for("its removal", lambda: name not in published(release), seconds=2, period=0.1)
