"""
`drakit new`, from an empty folder to a device in a pod: the steps of its README, in order.

Other than there are only the names of images, and where pip finds what it needs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from e2e.cluster.api import Cluster
from e2e.fixtures import namespace_of
from e2e.images import vendor_image
from e2e.images.build import TAG
from e2e.images.vendor import repository_name
from e2e.kit import TEST_IMAGE, Space, plugin_pod, ready, wait_for
from e2e.release import Release, install, uninstall

# Slow: the project's own tests, with all rules of the contract, take a minute; unit tests run some.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.feature("vendors")]

NAME = "rack-lamps"
DRIVER = f"{NAME}.example.com"
RELEASE = Release(name=NAME, namespace=NAME)

Timed = Callable[[str], object]


def run(*argv: str, cwd: Path) -> str:
    """Run one of the README's commands with this Python's programs."""
    done = subprocess.run(
        [sys.executable, "-B", *argv],
        cwd=cwd,
        # A vendor's environment has none of the plugins of this one.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{argv}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def timed(capsys: pytest.CaptureFixture[str]) -> Timed:
    """Say how long a step took, since the one before."""
    last = time.monotonic()

    def log(step: str) -> None:
        nonlocal last
        now = time.monotonic()
        with capsys.disabled():
            print(f"\ndrakit new: {step}: {now - last:.1f} s", end="", flush=True)
        last = now

    return log


@pytest.fixture
def project(images: list[Path], tmp_path: Path, timed: Timed) -> Path:
    """A new project, tested."""
    run("-m", "drakit_cli.main", "new", NAME, cwd=tmp_path)
    timed("the project is written")
    assert " passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path / NAME)
    timed("its tests have passed")
    return tmp_path / NAME


@pytest.fixture
def directory(cluster: Cluster, images: list[Path], project: Path, timed: Timed) -> Iterator[Path]:
    """The project's driver, installed; gives the directory of its devices on the first node."""
    target = ("--no-deps", "--no-compile", "--target", "build/driver", ".")
    # The clusters' machines need no index: what builds the package is installed already.
    run("-m", "pip", "install", "--quiet", "--no-build-isolation", *target, cwd=project)
    archive = vendor_image(NAME, project, nodeplugin=images[0])
    cluster.load_image(archive)
    timed("the image is built, and on the nodes")
    values = yaml.safe_load((project / "values.yaml").read_text())
    values["image"] = {"repository": repository_name(NAME), "tag": TAG}
    (driver,) = values["nodeplugin"]["drivers"]
    node = cluster.nodes[0]
    devices = cluster.node_path(node, driver["config"]["directory"])
    shutil.rmtree(devices, ignore_errors=True)
    install(cluster, RELEASE, values=values, build=archive.parent.name)
    wait_for("the plugin to be ready", lambda: ready(plugin_pod(cluster, node, release=RELEASE)))
    timed("the chart is installed")
    yield devices
    uninstall(cluster, RELEASE)
    cluster.kubectl("delete", "deviceclass", DRIVER, "--ignore-not-found")
    shutil.rmtree(devices, ignore_errors=True)


@pytest.fixture
def room(cluster: Cluster, request: pytest.FixtureRequest, directory: Path) -> Iterator[Space]:
    # After the release, so that pods go while there is somebody to unprepare their claims.
    with namespace_of(cluster, request) as name:
        yield Space(cluster, name)


@pytest.mark.timeout(600)
def test_a_new_project_gives_a_pod_its_device(project, directory, room, timed):
    room.kubectl("apply", "-f", str(project / "deviceclass.yaml"))
    (directory / "first").touch()
    template, pod = yaml.safe_load_all((project / "pod.yaml").read_text())
    (container,) = pod["spec"]["containers"]
    container["image"] = TEST_IMAGE
    room.apply(template, pod)
    room.wait_phase(NAME, "Running")
    wait_for("the pod to log its device", lambda: len(room.logs(NAME).split()) == 3)
    timed("the pod has its device")
    assert sorted(room.logs(NAME).split()) == [
        "RACK_LAMPS_LEVEL_MAIN__FIRST=80",
        f"RACK_LAMPS_MAIN__FIRST=/run/{DRIVER}/first",
        "first",
    ]
    room.kubectl("delete", "pod", NAME, "--grace-period=1")
