"""
A project of `drakit new --container`: its chart runs the driver in a separate pod, or as a device
plugin of the kubelet.

The project is created, built and installed according to its README. Only the image of the pods and
the node differ, and images are not pulled.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.api import Cluster
from e2e.images.vendor import driver_image
from e2e.kit import TEST_IMAGE, Space, devices_of, plugin_pod, ready, restarts, wait_for
from e2e.release import Release, install, uninstall
from tests.unit.cli.projects import installed, write

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.feature("vendors"),
    # The test replaces the image and the chart of a driver, and restarts the kubelet.
    pytest.mark.slow,
    pytest.mark.disruptive,
    pytest.mark.serial,
]

TORCHES = "torches.example.com"
RESOURCE = f"{TORCHES}/device"
IMAGE = "localhost/drakit-torches"
DRAKIT = Release(name="container", namespace="container")
"""A release of drakit's chart that allows the driver."""


class Project:
    """The project `torches`, on the first node of a cluster."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.node = cluster.nodes[0]
        self.directory = cluster.node_path(self.node, f"/var/lib/{TORCHES}")

    def helm(self, **values: Any) -> None:
        """Install the project's chart, or upgrade it to these values."""
        given = {
            "image": {"pullPolicy": "Never"},
            "nodeSelector": {"kubernetes.io/hostname": self.node},
            **values,
        }
        file = self.folder / "e2e-values.json"
        file.write_text(json.dumps(given))
        self.cluster.helm(
            *("upgrade", "--install", "torches", str(self.folder / "chart"), f"--values={file}"),
            *("--namespace=torches", "--create-namespace", "--wait", "--timeout=60s"),
        )

    def objects(self, name: str) -> list[dict[str, Any]]:
        """Return a manifest of the project, with an image that the node has."""
        objects = list(yaml.safe_load_all((self.folder / name).read_text()))
        for body in objects:
            if body["kind"] == "Pod":
                body["spec"]["containers"][0]["image"] = TEST_IMAGE
                body["spec"]["nodeSelector"] = {"kubernetes.io/hostname": self.node}
        return objects

    def plug_in(self, name: str) -> None:
        """Create a device, as in the README."""
        self.cluster.kubectl(
            *("-n", "torches", "exec", "daemonset/torches", "--"),
            *("python3", "-c", f'open("/var/lib/{TORCHES}/{name}", "w")'),
        )

    def allocatable(self) -> str | None:
        """Return the number of devices that the kubelet offers."""
        return self.cluster.get("node", self.node)["status"]["allocatable"].get(RESOURCE)


@pytest.fixture(scope="module")
def project(cluster: Cluster, images: list[Path], tmp_path_factory) -> Iterator[Project]:
    """The project, created but not installed."""
    made = Project(cluster, tmp_path_factory.mktemp("new") / "torches")
    for name in ("first", "second"):
        (made.directory / name).unlink(missing_ok=True)
    yield made
    cluster.helm("uninstall", "torches", "--namespace=torches", "--ignore-not-found", "--wait")
    uninstall(cluster, DRAKIT)


def environment(room: Space, pod: str) -> dict[str, str]:
    """Return the driver's variables in the container of a pod."""
    text = room.kubectl("exec", pod, "--", "env")
    return dict(re.findall(r"^(TORCHES_\w+)=(.*)$", text, re.M))


def test_a_new_project_in_a_container_of_its_own_ends_with_a_pod_that_uses_a_device(
    project: Project, room: Space, images: list[Path]
) -> None:
    begun = time.monotonic()
    write(project.folder, "--name", "torches", "--image", IMAGE, "--container")
    installed(project.folder)
    archive = driver_image(f"{IMAGE}:0.1.0", project.folder, nodeplugin=images[0])
    project.cluster.load_image(archive)
    built = time.monotonic()
    allowed = yaml.safe_load((project.folder / "drakit-values.yaml").read_text())
    values = {
        **allowed,
        "hostdev": {"enabled": False},
        "operator": {"enabled": False},
        "nodeplugin": {"nodeSelector": {"kubernetes.io/hostname": project.node}},
    }
    install(project.cluster, DRAKIT, values=values, build=images[0].parent.name)
    project.helm()
    wait_for(
        "drakit's node plugin to be ready",
        lambda: ready(plugin_pod(project.cluster, project.node, release=DRAKIT)),
    )
    room.apply(*project.objects("deviceclass.yaml"))
    project.plug_in("first")
    room.apply(*project.objects("pod.yaml"))
    room.wait_phase("torches", "Running")
    print(
        f"from drakit new to the running pod: {time.monotonic() - begun:.1f} s, of which the image "
        f"took {built - begun:.1f} s"
    )
    assert environment(room, "torches") == {
        "TORCHES_MAIN__FIRST": f"/run/{TORCHES}/first",
        "TORCHES_LEVEL_MAIN__FIRST": "80",
    }
    room.kubectl("exec", "torches", "--", "ls", f"/run/{TORCHES}/first")
    assert devices_of(room.claim_of("torches", "device")) == ["first"]
    room.kubectl("delete", "pod", "torches")


def test_the_same_project_is_a_device_plugin_of_the_kubelet_also_after_its_restart(
    project: Project, room: Space
) -> None:
    begun = time.monotonic()
    project.helm(devicePlugin={"enabled": True})
    project.plug_in("second")
    (body,) = project.objects("device-plugin-pod.yaml")
    name = body["metadata"]["name"]
    wait_for("the kubelet to offer both devices", lambda: project.allocatable() == "2")
    room.apply(body)
    room.wait_phase(name, "Running")
    print(f"from helm upgrade to the running pod: {time.monotonic() - begun:.1f} s")
    (variable, path), *_ = sorted(environment(room, name).items())
    used = path.removeprefix(f"/run/{TORCHES}/")
    assert used in ("first", "second")
    assert environment(room, name) == {
        f"TORCHES_DEVICE__{used.upper()}": f"/run/{TORCHES}/{used}",
        f"TORCHES_LEVEL_DEVICE__{used.upper()}": "50",  # the default
    }
    room.kubectl("exec", name, "--", "ls", path)

    # The kubelet removes all sockets from its directory when it starts.
    project.cluster.restart_kubelet(project.node)
    wait_for("the kubelet to offer both devices again", lambda: project.allocatable() == "2")
    body["metadata"]["name"] = "next"
    room.apply(body)
    room.wait_phase("next", "Running")
    (other,) = {"first", "second"} - {used}
    assert f"TORCHES_DEVICE__{other.upper()}" in environment(room, "next")
    assert restarts(room.get("pod", name)) == 0
    assert variable in environment(room, name)

    # A broken device is not offered, but its pod keeps running.
    (project.directory / other).write_text("broken")
    wait_for("one device to be left", lambda: project.allocatable() == "1")
    assert room.phase("next") == "Running"
    room.kubectl("delete", "pod", name, "next")
