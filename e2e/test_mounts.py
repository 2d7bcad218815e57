"""The node plugin's mounts on its node: its own directories, but no volumes of other pods."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from e2e.kit import NAMESPACE, plugin_pod, ready, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.serial,
    pytest.mark.disruptive,
    pytest.mark.feature("release"),
]

KUBELET = "/var/lib/kubelet"
HOME = f"{KUBELET}/plugins/drakit.dev"
WRITABLE = {HOME, f"{KUBELET}/plugins_registry", "/var/run/cdi", "/run/cdi"}

SOURCE = "drakit-test-volume"
VOLUMES = (
    f"{KUBELET}/plugins/kubernetes.io/csi/csi.example.com/0/globalmount",
    f"{KUBELET}/plugins/csi.example.com/staging",
    f"{KUBELET}/pods/00000000-0000-0000-0000-000000000000/volumes/kubernetes.io~csi/0/mount",
)
"""Directories in which CSI drivers and the kubelet mount volumes."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    path: str
    root: str
    source: str
    file_system: str
    writable: bool


def parse(line: str) -> Mount:
    left, right = line.split(" - ")
    _, _, _, root, path, options, *_ = left.split()
    file_system, source, *_ = right.split()
    return Mount(
        path=path,
        root=root,
        source=source,
        file_system=file_system,
        writable="rw" in options.split(","),
    )


def mounts_of(cluster, pod: str) -> list[Mount]:
    """Return the mounts of the plugin's container, as the plugin sees them."""
    script = "print(end=open('/proc/self/mountinfo').read())"
    command = ("-n", NAMESPACE, "exec", pod, "--", "python3", "-c", script)
    return [parse(line) for line in cluster.kubectl(*command).stdout.splitlines()]


@pytest.fixture
def volumes(release):
    """Volumes of other components, mounted on the first node."""
    node = release.nodes[0]
    for path in VOLUMES:
        release.exec_on_node(node, ["mkdir", "-p", path])
        release.exec_on_node(node, ["mount", "-t", "tmpfs", SOURCE, path])
    yield VOLUMES
    for path in VOLUMES:
        release.exec_on_node(node, ["umount", path], check=False)
        release.exec_on_node(node, ["rmdir", path], check=False)


def new_plugin(release, node: str) -> str:
    """Replace the plugin's pod, so that its mounts are as recent as possible."""
    old = plugin_pod(release, node)
    release.kubectl("-n", NAMESPACE, "delete", "pod", old["metadata"]["name"], "--wait=true")

    def replaced() -> bool:
        new = plugin_pod(release, node)
        return ready(new) and new["metadata"]["uid"] != old["metadata"]["uid"]

    wait_for("a new plugin", replaced, seconds=90)
    return plugin_pod(release, node)["metadata"]["name"]


def test_the_plugin_has_no_volume_of_others_and_writes_to_its_own_directories_alone(
    release, volumes
):
    node = release.nodes[0]
    mounts = mounts_of(release, new_plugin(release, node))

    assert not [mount for mount in mounts if mount.source == SOURCE]
    below = {mount.path for mount in mounts if mount.path.startswith(f"{KUBELET}/")}
    assert below == {HOME, f"{KUBELET}/plugins_registry", f"{KUBELET}/pod-resources"}
    # The container's own mounts: its root, and those that the runtime and the kubelet always add.
    runtimes = ("/proc", "/sys", "/dev", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
    writable = {
        mount.path
        for mount in mounts
        if mount.writable
        and not any(mount.path == own or mount.path.startswith(f"{own}/") for own in runtimes)
    }
    assert writable <= WRITABLE
    assert {HOME, f"{KUBELET}/plugins_registry"} <= writable

    # A volume that the kubelet unmounts disappears immediately from every mount namespace.
    for path in volumes:
        release.exec_on_node(node, ["umount", path])
    found = release.exec_on_node(
        node, ["sh", "-c", f"grep -l {SOURCE} /proc/[0-9]*/mountinfo 2>/dev/null"], check=False
    )
    assert not found.stdout.split()
