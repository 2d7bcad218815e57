"""
A driver as a vendor writes it from docs/drivers.md: the page's own text, in a real pod.

The image, the values of the release and the driver are what the page shows; nothing is added.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.cluster.api import Cluster
from e2e.fixtures import namespace_of
from e2e.images import vendor_image
from e2e.images.vendor import repository_name
from e2e.kit import (
    Space,
    from_template,
    plugin_pod,
    pod,
    ready,
    slices,
    template,
    wait_for,
)
from e2e.release import Release, install, uninstall
from e2e.scripted.stage import opaque

pytestmark = [pytest.mark.e2e, pytest.mark.feature("core")]

LAMPS = "lamps.example.com"
RELEASE = Release(name="lamps", namespace="lamps")
PAGE = Path(__file__).parents[1] / "docs" / "drivers.md"


def listing(language: str, containing: str) -> str:
    """A listing of the page."""
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (text,) = [text for text in found if containing in text]
    return text


@pytest.fixture(scope="module")
def lamps(cluster: Cluster, images: list[Path], tmp_path_factory) -> Iterator[Path]:
    """The page's driver, installed; gives the directory of lamps on the first node."""
    folder = tmp_path_factory.mktemp("lamps")
    (folder / "Dockerfile").write_text(listing("dockerfile", "lamp.py"))
    (folder / "lamp.py").write_text(listing("python", "class Lamps"))
    archive = vendor_image("lamps", folder, nodeplugin=images[0])
    cluster.load_image(archive)
    values = yaml.safe_load(listing("yaml", "helm install lamps"))
    values["image"]["repository"] = repository_name("lamps")
    (driver,) = values["nodeplugin"]["drivers"]
    directory = cluster.node_path(cluster.nodes[0], driver["config"]["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    (directory / "desk").touch()
    (directory / "floor").touch()
    install(cluster, RELEASE, values=values, build=archive.parent.name)
    wait_for(
        "the driver to be ready",
        lambda: ready(plugin_pod(cluster, cluster.nodes[0], release=RELEASE)),
    )
    yield directory
    uninstall(cluster, RELEASE)


@pytest.fixture
def room(cluster: Cluster, lamps: Path, request: pytest.FixtureRequest) -> Iterator[Space]:
    with namespace_of(cluster, request) as name:
        yield Space(cluster, name)


def test_the_driver_of_the_page_gives_a_lamp_to_a_pod(room, lamps):
    room.cluster.apply(
        yaml.safe_dump(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "DeviceClass",
                "metadata": {"name": "lamps.example.com"},
                "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{LAMPS}"'}}]},
            }
        )
    )
    room.apply(
        template("lamp", ("lamp", LAMPS), config=[opaque(LAMPS, {"brightness": 80})]),
        template("bright", ("lamp", LAMPS), config=[opaque(LAMPS, {"brightness": 800})]),
        pod("reader", ("lamp", from_template("lamp"))),
    )
    room.wait_phase("reader", "Running")
    environment = room.kubectl("exec", "reader", "--", "env")
    assert "BRIGHTNESS=80" in environment
    lamp = re.search(r"^LAMP=(/lamps/\w+)$", environment, re.M)[1]
    room.kubectl("exec", "reader", "--", "ls", lamp)

    room.apply(pod("dazzled", ("lamp", from_template("bright"))))
    assert "less than or equal to 100" in room.told("dazzled", "brightness")


def test_a_broken_lamp_of_the_page_is_tainted(room, lamps):
    (lamps / "floor").write_text("broken")
    node = room.cluster.nodes[0]

    def tainted() -> list[str]:
        return [
            device["name"]
            for item in slices(room.cluster, node, driver=LAMPS)
            for device in item["spec"]["devices"]
            if any(taint["key"] == "drakit.dev/unhealthy" for taint in device.get("taints", []))
        ]

    wait_for("the broken lamp to be tainted", lambda: tainted() == ["floor"])
