"""
Unmodified manifests of other projects: those of Kubernetes' example driver run with our driver,
which declares the example's parameters.

The manifests come from the release of its Go module, whose content Go verifies. The image that they
name is a busybox in these tests.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.api import Cluster
from e2e.fixtures import namespace_of
from e2e.images import vendor_image
from e2e.images.build import TAG
from e2e.images.cache import run
from e2e.images.vendor import repository_name
from e2e.kit import Space, claim, device_class, from_claim, pod
from e2e.release import Release, install, uninstall

pytestmark = [pytest.mark.e2e, pytest.mark.feature("vendors"), pytest.mark.timeout(600)]

MODULE = "sigs.k8s.io/dra-example-driver"
VERSION, SUM = "v0.4.0", "h1:JaJJvAHPULxJNLD6LKTJY8NrS45eyqHSJWd8Q5dmS5k="

EXAMPLES = (
    "basic-resourceclaimtemplate",
    "basic-multiple-requests",
    "basic-shared-claim-across-containers",
    "basic-shared-claim-across-pods",
    "basic-resourceclaim-opaque-config",
    "cel-selector",
    "initcontainer-shared-gpu",
    "prioritized-alternatives",
    "admin-access",
)
"""The examples for whole GPUs. The others need partitions, shares, binding conditions or names of
extended resources, which have separate tests."""

FOLDER = Path(__file__).with_name("example_gpus")
GPUS = Release(name="gpus", namespace="gpus-system")
CLASS = "gpu.example.com"
COUNT = 16


@pytest.fixture(scope="module")
def examples() -> Path:
    """The folder with the examples of the release."""
    if shutil.which("go") is None:
        pytest.skip("the manifests are downloaded with Go")
    command = ["go", "mod", "download", "-json", f"{MODULE}@{VERSION}"]
    module = json.loads(run(command, what="downloading the manifests", timeout_seconds=120))
    assert module["Sum"] == SUM
    return Path(module["Dir"]) / "demo" / "examples"


@pytest.fixture(scope="module")
def gpus(cluster: Cluster, images: list[Path]) -> Iterator[Cluster]:
    """The driver on the first node, and the class of its devices."""
    archive = vendor_image("gpus", FOLDER, nodeplugin=images[0])
    cluster.load_image(archive)
    values = {
        "image": {"repository": repository_name("gpus"), "tag": TAG},
        "hostdev": {"enabled": False},
        "operator": {"enabled": False},
        "nodeplugin": {
            "drivers": [{"driver": "example_gpus:Gpus", "config": {"count": COUNT}}],
            "nodeSelector": {"kubernetes.io/hostname": cluster.nodes[0]},
        },
    }
    install(cluster, GPUS, values=values, build=archive.parent.name)
    cluster.apply(json.dumps(device_class(CLASS, CLASS)))
    yield cluster
    cluster.kubectl("delete", "deviceclass", CLASS)
    uninstall(cluster, GPUS)


@pytest.fixture(scope="module")
def applied(gpus: Cluster, examples: Path) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The pods of each example by namespace, applied all at once and running."""
    pods: dict[str, list[dict[str, Any]]] = {}
    paths = [path for name in EXAMPLES for path in sorted((examples / name).glob("*.yaml"))]
    try:
        for path in paths:
            gpus.kubectl("apply", "-f", str(path))
            for body in yaml.safe_load_all(path.read_text()):
                if body is not None and body["kind"] == "Pod":
                    pods.setdefault(body["metadata"]["namespace"], []).append(body)
        for namespace, bodies in pods.items():
            for body in bodies:
                Space(gpus, namespace).wait_phase(body["metadata"]["name"], "Running", seconds=120)
        yield pods
    except Exception:
        for what in ("pods", "events"):
            print(gpus.kubectl("get", what, "-A", "-o", "wide", check=False).stdout[-6000:])
        raise
    finally:
        # Delete them all at once, because a pod takes seconds to end, and there are 13.
        for waiting in ("false", "true"):
            for namespace in pods:
                delete = ("delete", "pods", "--all", "--grace-period=1", f"--wait={waiting}")
                gpus.kubectl("-n", namespace, *delete, timeout=150)
        for namespace in pods:
            gpus.kubectl("delete", "namespace", namespace, "--wait=false")


def environments(cluster: Cluster, namespace: str, body: dict[str, Any]) -> dict[str, list[str]]:
    """Return the driver's variables in each container, from its log."""
    space = Space(cluster, namespace)
    spec, name = body["spec"], body["metadata"]["name"]
    found: dict[str, list[str]] = {}
    for each in (*spec.get("initContainers", ()), *spec["containers"]):
        log = space.logs(name, each["name"])
        lines = re.findall(
            r"^(?:declare -x |export )?((?:GPU|DRA)_\w+)='?\"?([^'\"\n]*)", log, re.M
        )
        found[each["name"]] = sorted({f"{key}={value}" for key, value in lines})
    return found


def devices_in(environment: list[str]) -> set[str]:
    return {
        value
        for each in environment
        if (value := each.partition("=")[2]).startswith("gpu-")
        and re.fullmatch(r"GPU_DEVICE_\d+", each.partition("=")[0])
    }


@pytest.mark.slow
def test_the_examples_of_another_project_run_unchanged(gpus, applied, capsys):
    assert set(applied) == set(EXAMPLES)
    seen = {
        namespace: [environments(gpus, namespace, body) for body in bodies]
        for namespace, bodies in applied.items()
    }
    with capsys.disabled():
        for namespace, pods in seen.items():
            print(
                f"\n{namespace}: "
                + "; ".join(
                    f"{name} {' '.join(each)}" for pod in pods for name, each in pod.items()
                ),
                end="",
            )
    counts = {
        namespace: [sorted({len(devices_in(each)) for each in pod.values()}) for pod in pods]
        for namespace, pods in seen.items()
    }
    assert counts == {
        "basic-resourceclaimtemplate": [[1], [1]],
        "basic-multiple-requests": [[2]],
        "basic-shared-claim-across-containers": [[1]],
        "basic-shared-claim-across-pods": [[1], [1]],
        "basic-resourceclaim-opaque-config": [[1]],
        "cel-selector": [[1]],
        "initcontainer-shared-gpu": [[1]],
        "prioritized-alternatives": [[1], [1]],
        "admin-access": [[COUNT]],
    }
    (sharing,) = seen["basic-resourceclaim-opaque-config"]
    for name, values in sharing.items():
        text = " ".join(values)
        if name.startswith("ts-"):
            assert "_SHARING_STRATEGY=TimeSlicing" in text
            assert "_TIMESLICE_INTERVAL=Long" in text
        else:
            assert "_SHARING_STRATEGY=SpacePartitioning" in text
            assert "_PARTITION_COUNT=10" in text
    first, second = seen["basic-shared-claim-across-pods"]
    assert devices_in(first["ctr0"]) == devices_in(second["ctr0"])
    assert "DRA_ADMIN_ACCESS=true" in seen["admin-access"][0]["ctr0"]
    assert "GPU_CONSUMER=pod0" in seen["cel-selector"][0]["ctr0"], (
        "the driver knows the claim's consumer"
    )


@pytest.mark.slow
def test_an_unknown_version_is_refused_in_an_event_that_names_the_known_ones(gpus, request):
    parameters = {"apiVersion": "gpu.resource.example.com/v9", "kind": "GpuConfig"}
    config = [{"opaque": {"driver": CLASS, "parameters": parameters}}]
    with namespace_of(gpus, request) as name:
        space = Space(gpus, name)
        space.apply(
            claim("gpu", ("main", CLASS), config=config), pod("user", ("gpu", from_claim("gpu")))
        )
        space.event(
            "user",
            "have apiVersion and kind gpu.resource.example.com/v9 GpuConfig",
            "known: gpus.drakit.test/v1 GpuParameters, gpu.resource.example.com/v1alpha1 GpuConfig",
        )
        space.delete("pod", "user", force=True)
