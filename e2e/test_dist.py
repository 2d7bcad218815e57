"""
A release from its files only. These tests do not use the sources, except for the cluster.

`make e2e-release` builds `dist/` and runs this file. DRAKIT_DIST names another folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tarfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.cluster.api import Cluster, wait_until
from e2e.images.testimage import NAME as TEST_IMAGE
from e2e.images.testimage import test_image as build_test_image
from e2e.release import DRAKIT, cluster_values, uninstall

DIST = os.environ.get("DRAKIT_DIST", "")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.serial,
    pytest.mark.timeout(600),
    pytest.mark.feature("release"),
    pytest.mark.skipif(not DIST, reason="make e2e-release builds the files of a release first"),
]

DEVICES = {"fuse": "/dev/fuse", "tun": "/dev/net/tun"}
"""Predefined policies of the chart, and the device that a node must have for each."""

POD = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {{name: device}}
spec:
  spec:
    devices:
      requests:
        - name: device
          exactly: {{deviceClassName: {policy}.drakit.dev}}
---
apiVersion: v1
kind: Pod
metadata: {{name: user}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: {image}
      imagePullPolicy: Never
      command: [sh, -c, "ls -l {path} && sleep 3600"]
      resources:
        claims: [{{name: device}}]
  resourceClaims:
    - {{name: device, resourceClaimTemplateName: device}}
"""


@contextmanager
def timed(step: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"\n{step}: {time.monotonic() - began:.1f} s", flush=True)


def call(*argv: str | Path, cwd: Path, seconds: float = 300, **environment: str) -> str:
    """Run a program like a user of the release, without the environment of the tests."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in argv],
        cwd=cwd,
        env={**outside, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{argv}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist() -> Path:
    folder = Path(DIST).absolute()
    assert (folder / "SHA256SUMS").exists(), f"{folder} is not a release: run make release-dry-run"
    return folder


def repository(dist: Path) -> str:
    """The prefix of the image names in the packaged chart."""
    (chart,) = dist.glob("*.tgz")
    with tarfile.open(chart) as tar:
        stream = tar.extractfile("drakit/values.yaml")
        assert stream is not None
        lines = stream.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("  repository: ")]
    return json.loads(line.partition(": ")[2])


def load(cluster: Cluster, node: str, layout: Path, name: str) -> None:
    """Import an OCI layout on a node, with the name and the digest to which pods refer."""
    place = cluster.node_path(node, "/run/layout.tar")
    with tarfile.open(place, "w") as tar:
        tar.add(layout, arcname=".")
    cluster.exec_on_node(
        node,
        [
            *("ctr", "--namespace", "k8s.io", "images", "import", "--base-name", name),
            *("--digests", "/run/layout.tar"),
        ],
        timeout=300,
    )
    place.unlink()


@pytest.fixture(scope="module")
def installed(cluster: Cluster, dist: Path) -> Iterator[Cluster]:
    """The packaged chart, installed with the images of the release."""
    node = cluster.nodes[0]
    present = [
        policy
        for policy, path in DEVICES.items()
        if cluster.exec_on_node(node, ["test", "-c", path], check=False).returncode == 0
    ]
    assert present, "the node has no device for a pod"
    prefix = repository(dist)
    with timed("load the images on each node"):
        for component in ("nodeplugin", "operator"):
            for each in cluster.nodes:
                load(
                    cluster, each, dist / "images" / f"drakit-{component}", f"{prefix}-{component}"
                )
    values = cluster_values(cluster, "")
    values["image"] = {"pullPolicy": "Never"}
    values["hostdev"] = {"policies": {policy: {"enabled": True} for policy in present}}
    (chart,) = dist.glob("*.tgz")
    with timed("helm install"):
        cluster.helm(
            *("install", DRAKIT.name, str(chart), "--namespace", DRAKIT.namespace),
            *(
                "--create-namespace",
                "--wait",
                "--timeout=180s",
            ),
            *(f"--set-json={key}={json.dumps(value)}" for key, value in values.items()),
            timeout=240,
        )
    yield cluster
    cluster.kubectl("delete", "pod", "user", "--ignore-not-found", "--wait=true")
    cluster.kubectl("delete", "resourceclaimtemplate", "device", "--ignore-not-found")
    uninstall(cluster)


@pytest.fixture(scope="module")
def user(installed: Cluster) -> str:
    """Start a pod with a device, and return the path of the device."""
    installed.load_image(build_test_image())
    classes = {body["metadata"]["name"] for body in installed.get("deviceclasses")["items"]}
    policy = next(policy for policy in DEVICES if f"{policy}.drakit.dev" in classes)
    path = DEVICES[policy]
    with timed("a pod with a device"):
        installed.apply(POD.format(policy=policy, path=path, image=TEST_IMAGE))
        wait_until(
            "the pod lists its device",
            lambda: path in installed.kubectl("logs", "user", check=False).stdout,
            timeout_seconds=90,
        )
    return path


def test_the_files_have_the_checksums(dist):
    for line in (dist / "SHA256SUMS").read_text().splitlines():
        digest, _, name = line.partition("  ")
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest, name


def test_a_pod_gets_a_device_from_the_packaged_chart_and_the_images(installed, user, dist):
    layouts = {path.name: path for path in (dist / "images").iterdir()}
    running = {
        status["image"]
        for pod in installed.get("pods", "-n", DRAKIT.namespace)["items"]
        for status in pod["spec"]["containers"]
    }
    digests = {
        f"{repository(dist)}-{name.removeprefix('drakit-')}@"
        + json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
        for name, layout in layouts.items()
    }
    assert running == digests
    assert installed.kubectl("logs", "user").stdout.rstrip().endswith(user)


def test_kubectl_drakit_runs_from_the_krew_archive(installed, user, dist, tmp_path):
    (archive,) = dist.glob("kubectl-drakit-*-linux-amd64.tar.gz")
    programs = tmp_path / "bin"
    programs.mkdir()
    with timed("kubectl drakit from the archive"):
        with tarfile.open(archive) as tar:
            tar.extractall(tmp_path / "store", filter="data")
        # krew links the plugin, and so does a user.
        (programs / "kubectl-drakit").symlink_to(tmp_path / "store/kubectl-drakit")
        (programs / "kubectl").symlink_to(installed.program("kubectl"))
        path = f"{programs}:{os.environ['PATH']}"
        arguments = {"cwd": tmp_path, "PATH": path, "KUBECONFIG": str(installed.kubeconfig)}
        devices = call("kubectl", "drakit", "devices", **arguments)
        explained = call("kubectl", "drakit", "explain", "pod/user", **arguments)
        version = call("kubectl", "drakit", "version", **arguments)
    assert "hostdev.drakit.dev" in devices
    assert "user" in explained
    (packages,) = dist.glob("drakit-*-py3-none-any.whl")
    assert packages.name.split("-")[1] in version


def test_a_driver_is_made_and_tested_with_the_wheel(dist, tmp_path):
    """Needs a package index, for the dependencies of drakit and of a driver's tests."""
    (wheel,) = dist.glob("drakit-*x86_64.whl")
    with timed("pip install of the wheel"):
        venv.create(tmp_path / "venv", with_pip=True)
        python = tmp_path / "venv" / "bin" / "python"
        call(python, "-m", "pip", "install", "--quiet", f"{wheel}[testing]", cwd=tmp_path)
    path = f"{python.parent}:/usr/bin:/bin"
    with timed("a driver with it"):
        call("drakit", "new", "lamps", "--image", "localhost/lamps", cwd=tmp_path, PATH=path)
        project = tmp_path / "lamps"
        call(python, "-m", "pip", "install", "--quiet", "--editable", ".[dev]", cwd=project)
        output = call("pytest", "-q", cwd=project, seconds=400, PATH=path)
    assert " passed" in output
    assert "failed" not in output
