"""
Drivers like those of vendors: the lamps of docs/vendors/driver-contract.md and packaging.md,
examples/driver, and a Go project from `drakit new`.

The images, the values of the releases, the drivers and the manifests are those of the page or
example. Only the names of images differ.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.api import Cluster
from e2e.images import vendor_image
from e2e.images.build import TAG
from e2e.images.cache import run
from e2e.images.go import ENVIRONMENT, LINKED
from e2e.images.vendor import driver_image, repository_name
from e2e.kit import TEST_IMAGE, Space, devices_of, plugin_pod, ready, taints, wait_for
from e2e.release import Release, install, only_on, uninstall
from tests.unit.docs.listings import listing

pytestmark = [pytest.mark.e2e, pytest.mark.feature("vendors")]

LAMPS = "lamps.example.com"
ROTORS = "rotors.example.com"
UNHEALTHY = "drakit.dev/unhealthy:NoSchedule"
ROOT = Path(__file__).parents[1]
CONTRACT, PACKAGING = "docs/vendors/driver-contract.md", "docs/vendors/packaging.md"
EXAMPLE = ROOT / "examples" / "driver"


def objects_of(text: str) -> list[dict[str, Any]]:
    """Return a manifest of a page, example or project, with an image that the nodes have."""
    text = text.replace("image: busybox:1.37\n", f"image: {TEST_IMAGE}\n")
    return list(yaml.safe_load_all(text))


@contextmanager
def installed(
    cluster: Cluster, vendor: str, folder: Path, *, values: str, images: list[Path]
) -> Generator[Path]:
    """Install a vendor's driver, and yield the directory of its devices on the first node."""
    archive = vendor_image(vendor, folder, nodeplugin=images[0])
    cluster.load_image(archive)
    given = yaml.safe_load(values)
    given["image"] = {"repository": repository_name(vendor), "tag": TAG}
    (driver,) = given["nodeplugin"]["drivers"]
    node = cluster.nodes[0]
    directory = cluster.node_path(node, driver["config"]["directory"])
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    release = Release(name=vendor, namespace=vendor)
    install(cluster, release, values=given, build=archive.parent.name)
    wait_for(
        f"the {vendor} on {node} to be ready",
        lambda: ready(plugin_pod(cluster, node, release=release)),
    )
    yield directory
    uninstall(cluster, release)


@pytest.fixture(scope="module")
def lamps(cluster: Cluster, images: list[Path], tmp_path_factory) -> Iterator[Path]:
    """The page's driver, installed. Yields the directory of lamps on the first node."""
    folder = tmp_path_factory.mktemp("lamps")
    (folder / "Dockerfile").write_text(listing(PACKAGING, "Dockerfile"))
    (folder / "lamp.py").write_text(listing(CONTRACT, "lamp.py"))
    values = listing(PACKAGING, "values.yaml")
    with installed(cluster, "lamps", folder, values=values, images=images) as directory:
        (directory / "desk").touch()
        yield directory


@pytest.fixture(scope="module")
def rotors(cluster: Cluster, images: list[Path]) -> Iterator[Path]:
    """The example, installed. Yields the directory of rotors on the first node."""
    values = (EXAMPLE / "values.yaml").read_text()
    with installed(cluster, "rotors", EXAMPLE, values=values, images=images) as directory:
        (directory / "west").mkdir()
        device_class, *_ = objects_of((EXAMPLE / "claim.yaml").read_text())
        cluster.apply(json.dumps(device_class))
        yield directory


def end(room: Space, pod: str) -> None:
    """Delete a pod of a page or example, because its shell would let the kubelet wait for half a
    minute."""
    room.kubectl("delete", "pod", pod, "--grace-period=1")


def test_the_driver_of_the_page_gives_a_lamp_to_a_pod(room, lamps):
    objects = objects_of(listing(CONTRACT, "lamp-pod.yaml"))
    room.apply(*objects)
    (pod,) = [body for body in objects if body["kind"] == "Pod"]
    name = pod["metadata"]["name"]
    room.wait_phase(name, "Running")
    environment = room.kubectl("exec", name, "--", "env")
    assert re.search(r"^LAMP_BRIGHTNESS_\w+__DESK=80$", environment, re.M)
    (lamp,) = re.findall(r"^LAMP_\w+__DESK=(/lamps/\w+)$", environment, re.M)
    room.kubectl("exec", name, "--", "ls", lamp)
    end(room, name)

    (template,) = [body for body in objects if body["kind"] == "ResourceClaimTemplate"]
    (config,) = template["spec"]["spec"]["devices"]["config"]
    config["opaque"]["parameters"]["brightness"] = 800
    template["metadata"]["name"] = "bright"
    pod["metadata"]["name"] = "dazzled"
    pod["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] = "bright"
    room.apply(template, pod)
    assert "less than or equal to 100" in room.event("dazzled", "brightness")


def test_a_broken_lamp_of_the_page_is_tainted(room, lamps):
    (lamps / "floor").write_text("broken")
    wait_for(
        "the broken lamp to be tainted",
        lambda: (
            {name: set(found) for name, found in taints(room.cluster, LAMPS).items()}
            == {"floor": {UNHEALTHY}}
        ),
    )


def rotor_pod(name: str, *, rpm: int, speed: int) -> list[dict[str, Any]]:
    """Return the example's claim and pod, with another name and other amounts."""
    _, template, pod = objects_of((EXAMPLE / "claim.yaml").read_text())
    devices = template["spec"]["spec"]["devices"]
    (request,), (config,) = devices["requests"], devices["config"]
    request["exactly"]["capacity"]["requests"]["rpm"] = str(rpm)
    config["opaque"]["parameters"]["speed"] = speed
    template["metadata"]["name"] = pod["metadata"]["name"] = name
    pod["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] = name
    return [template, pod]


@pytest.mark.slow
def test_pods_share_a_rotor_of_the_example_and_each_undoes_its_own(room, rotors):
    speed = rotors / "west" / "speed"
    room.apply(*objects_of((EXAMPLE / "claim.yaml").read_text()))
    room.wait_phase("rotor", "Running")
    wait_for("the pod to log its device", lambda: "speed: " in room.logs("rotor"))
    assert room.logs("rotor").splitlines() == ["ROTOR_SPEED_ROTOR__WEST=1200", "speed: 1200"]
    assert speed.read_text() == "1200"

    room.apply(*rotor_pod("fast", rpm=1800, speed=1500))
    room.wait_phase("fast", "Running")
    assert speed.read_text() == "1500"
    claims = [room.claim_of(pod, "rotor") for pod in ("rotor", "fast")]
    assert [devices_of(claim) for claim in claims] == [["west"], ["west"]]
    assert len(list(speed.parent.glob("speed.*"))) == 2

    end(room, "fast")
    wait_for("the slower share alone to count", lambda: speed.read_text() == "1200")
    end(room, "rotor")
    wait_for("the rotor to stand still", lambda: speed.read_text() == "0")
    assert not list(speed.parent.glob("speed.*"))


@pytest.mark.slow
def test_a_pod_that_wants_a_rotor_of_the_example_faster_than_it_claimed_is_reported(room, rotors):
    room.apply(*rotor_pod("greedy", rpm=1200, speed=1201))
    message = room.event("greedy", "speed 1201 is more than the claim's")
    assert "claim more" in message
    assert not list((rotors / "west").glob("speed.*"))


@pytest.mark.slow
def test_a_rotor_of_the_example_with_a_fault_is_tainted(room, rotors):
    (rotors / "east").mkdir()
    (rotors / "east" / "fault").write_text("it squeaks\n")
    wait_for(
        "the rotor with a fault to be tainted",
        lambda: (
            {name: set(found) for name, found in taints(room.cluster, ROTORS).items()}
            == {"east": {UNHEALTHY}}
        ),
    )


TORCHES = "torches.example.com"
TORCH_RELEASE = Release(name="torches-drakit", namespace="torches-system")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("go") is None, reason="the project is built with Go")
def test_a_new_project_in_go_ends_with_a_pod_that_uses_a_device(room, cluster, images, tmp_path):
    """Runs on the second node, whose directory of backends no other release uses."""
    node = cluster.nodes[-1]
    image, project = "localhost/torches:0.1.0", tmp_path / "torches"
    new = [sys.executable, "-m", "drakit_cli.main", "new", "torches", "--language", "go"]
    paths = [f"--checkout={ROOT}", "--image=localhost/torches", f"--directory={project}"]
    subprocess.run([*new, *paths], check=True, timeout=60)
    build = ["go", "build", LINKED, "-o", "build/torches", "."]
    run(build, what="building the project", timeout_seconds=600, cwd=project, env=ENVIRONMENT)
    cluster.load_image(driver_image(image, project, nodeplugin=images[0]))
    template = project / "chart" / "templates" / "daemonset.yaml"
    template.write_text(template.read_text().replace("busybox:1.37", TEST_IMAGE))
    values = yaml.safe_load((project / "drakit-values.yaml").read_text())
    values |= {"hostdev": {"enabled": False}, "operator": {"enabled": False}}
    values["nodeplugin"] = {"affinity": only_on([node])}
    torches = ("daemonset/torches", "--namespace=torches")
    try:
        cluster.helm(
            *("install", "torches", str(project / "chart"), "--namespace=torches"),
            *("--create-namespace", f"--set=nodeSelector.kubernetes\\.io/hostname={node}"),
        )
        # No release of drakit contains the backend's entry.
        wait_for(
            "the backend to log its missing entry",
            lambda: "to backends.allowed" in cluster.kubectl("logs", *torches, check=False).stdout,
        )
        assert not cluster.get(*torches)["status"]["numberReady"]
        install(cluster, TORCH_RELEASE, values=values, build=images[0].parent.name)
        cluster.kubectl("rollout", "status", *torches, "--timeout=60s", timeout=90)
        # During an update, the new process is ready while the node plugin uses the old one.
        cluster.kubectl("rollout", "restart", *torches)
        cluster.kubectl("rollout", "status", *torches, "--timeout=90s", timeout=120)
        cluster.kubectl("apply", "-f", str(project / "deviceclass.yaml"))
        room.apply(*objects_of((project / "pod.yaml").read_text()))
        room.wait_phase("torches", "Running")
        wait_for("the pod to log its device", lambda: "first\n" in room.logs("torches"))
        assert sorted(room.logs("torches").splitlines()) == [
            "TORCHES_LEVEL_MAIN__FIRST=80",
            f"TORCHES_MAIN__FIRST=/run/{TORCHES}/first",
            "first",
        ]
        directory = cluster.node_path(node, f"/var/lib/{TORCHES}")
        (directory / "first").write_text("broken")
        wait_for(
            "the broken torch to be tainted",
            lambda: set(taints(cluster, TORCHES).get("first", {})) == {UNHEALTHY},
        )
        end(room, "torches")
    finally:
        cluster.kubectl("delete", "namespace", "torches", "--ignore-not-found", timeout=120)
        cluster.kubectl("delete", "deviceclass", TORCHES, "--ignore-not-found")
        uninstall(cluster, TORCH_RELEASE)
        shutil.rmtree(cluster.node_path(node, f"/var/lib/{TORCHES}"), ignore_errors=True)
