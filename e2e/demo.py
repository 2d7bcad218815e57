"""
`make demo`: from no cluster to a pod that uses a device of its node.

It starts a cluster, builds the images, installs the chart, and runs a pod of `examples/`. Then it
prints the allocation and the container's output. The cluster keeps running.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.api import Cluster, ClusterError, Options, wait_until
from e2e.cluster.choice import cluster as this_cluster
from e2e.images import ImageError, build_images, download_parts
from e2e.images.testimage import NAME as TEST_IMAGE
from e2e.release import CHART, DRAKIT, NAMESPACE, VALUES, cluster_values, install

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "examples"
DEMO_VALUES = REPOSITORY / "build" / "demo-values.yaml"
"""The values of the release that are not in `values.yaml`."""

DEMO_NAMESPACE = "drakit-demo"
STAY = " && echo done && exec sleep 86400"
"""Keeps the pod running, because the claim of a terminated pod shows no device."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A file in `examples/`, and the device that it needs on a node."""

    name: str
    device: str
    also: str = ""
    """Additional commands of the container, after the example's own command, with the test image's
    programs."""

    @property
    def file(self) -> Path:
        return EXAMPLES / f"{self.name}-pod.yaml"

    def values(self) -> dict[str, Any]:
        """Return the chart's values that publish the device, because a plain install publishes
        none."""
        return {"hostdev": {"policies": {self.name: {"enabled": True}}}}

    def objects(self) -> list[dict[str, Any]]:
        """Return the objects in the example's file, with an image that the node already has."""
        objects = list(yaml.safe_load_all(self.file.read_text()))
        for body in objects:
            for container in body["spec"].get("containers", []):
                shell, option, script = container["command"]
                container["command"] = [shell, option, f"{script}{self.also}{STAY}"]
                container |= {"image": TEST_IMAGE, "imagePullPolicy": "Never"}
                body["spec"]["terminationGracePeriodSeconds"] = 1
        return objects


CHOICES = (
    Example(
        name="kvm",
        device="/dev/kvm",
        also=' && echo "KVM reports its API version: $(kvm-version)"',
    ),
    Example(name="fuse", device="/dev/fuse"),
    Example(name="tun", device="/dev/net/tun"),
)


class Steps:
    """Numbered steps with their times, as progress for the user."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._number = 0
        self._began = time.monotonic()

    @contextmanager
    def step(self, title: str) -> Generator[None]:
        self._number += 1
        print(f"\n[{self._number}/{self._count}] {title}", flush=True)
        began = time.monotonic()
        yield
        print(f"      {time.monotonic() - began:.1f} s", flush=True)

    def total_seconds(self) -> float:
        return time.monotonic() - self._began


def main() -> None:
    steps = Steps(5)
    try:
        cluster = this_cluster()
        # Run this in parallel: downloads mostly wait for the network, while the compiler uses the
        # CPUs.
        with ThreadPoolExecutor(1) as beside:
            parts = beside.submit(download_parts)
            with steps.step(f"a Kubernetes cluster (CLUSTER={cluster.provider})"):
                cluster.start(Options(kept=True))
        with steps.step("the images of the node plugin, the operator and a test pod"):
            parts.result()
            archives = build_images(
                lambda text: print(f"      {text}", flush=True), minors=[cluster.minor]
            )
            for archive in archives:
                cluster.load_image(archive)
        example = _choose(cluster)
        build = "_".join(archive.parent.name for archive in archives)
        values = {**cluster_values(cluster, build), **example.values()}
        with steps.step(helm_command(values)):
            install(cluster, values=values, build=build)
        with steps.step(f"a pod that requests {example.device} (examples/{example.file.name})"):
            _run(cluster, example)
        with steps.step("the allocated device, and the output of the container"):
            _show(cluster, example)
    except (ClusterError, ImageError) as error:
        sys.exit(f"\nmake demo: {error}")
    print(f"\nDone in {steps.total_seconds():.0f} s. To inspect the cluster, run:")
    print(f"  export CLUSTER={cluster.provider}")
    print('  eval "$(make -s cluster-env)"')
    for arguments in (
        "get resourceslices",
        f"-n {NAMESPACE} logs ds/drakit-nodeplugin",
        f"-n {DEMO_NAMESPACE} get pods,resourceclaims",
        f"drakit explain -n {DEMO_NAMESPACE} pod/{example.name}",
        "drakit devices",
    ):
        print(f"  kubectl {arguments}")
    print("To remove the cluster and its files, run:\n  make cluster-down")


def helm_command(values: Mapping[str, Any], file: Path = DEMO_VALUES) -> str:
    """Write the values to a file, and return the command that installs the release with them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(dict(values), sort_keys=False))
    chart, *files = (os.path.relpath(path, REPOSITORY) for path in (CHART, VALUES, file))
    given = " ".join(f"-f {path}" for path in files)
    return f"helm upgrade --install {DRAKIT.name} {chart} -n {NAMESPACE} --create-namespace {given}"


def _choose(cluster: Cluster) -> Example:
    """Return the first example whose device the node has."""
    node = cluster.nodes[0]
    for example in CHOICES:
        if cluster.exec_on_node(node, ["test", "-c", example.device], check=False).returncode == 0:
            return example
    raise ClusterError(
        f"node {node} has none of {', '.join(example.device for example in CHOICES)}: "
        "there is no device for a pod"
    )


def _run(cluster: Cluster, example: Example) -> None:
    """Apply the example in a separate namespace, and wait until its pod has done its work."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": DEMO_NAMESPACE}}
    cluster.apply(json.dumps(namespace))
    _in_demo(cluster, "delete", "pod", example.name, "--ignore-not-found", "--wait=true")
    for body in example.objects():
        body["metadata"]["namespace"] = DEMO_NAMESPACE
        cluster.apply(json.dumps(body))
    wait_until(
        f"the pod {example.name} has used {example.device}",
        lambda: _finished(cluster, example),
        timeout_seconds=90,
    )


def _finished(cluster: Cluster, example: Example) -> bool:
    phase = _in_demo(cluster, "get", "pod", example.name, "-o", "jsonpath={.status.phase}")
    if phase == "Pending":
        return False
    log = _in_demo(cluster, "logs", example.name)
    if phase == "Failed":
        raise ClusterError(f"the example's pod failed: {log}")
    return "done" in log.splitlines()


def _show(cluster: Cluster, example: Example) -> None:
    """Print the device that the scheduler allocated, and the output of the container."""
    for claim in cluster.get("resourceclaims", "-n", DEMO_NAMESPACE)["items"]:
        print(f"      claim      {claim['metadata']['name']}")
        for result in claim["status"]["allocation"]["devices"]["results"]:
            for key in ("driver", "pool", "device"):
                print(f"      {key:<10} {result[key]}")
    for line in _in_demo(cluster, "logs", example.name).splitlines()[:-1]:
        print(f"      container  {line}")


def _in_demo(cluster: Cluster, *arguments: str) -> str:
    return cluster.kubectl("-n", DEMO_NAMESPACE, *arguments, timeout=120).stdout


if __name__ == "__main__":
    main()
