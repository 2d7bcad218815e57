"""
Fixtures of the tests that need drakit installed: zram devices, releases, a namespace per test.

Three releases share the first node: `release` with hostdev (and the operator), `scripted` with the
two scripted drivers, `foreign` with device plugins and a backend.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.closed_list import undocumented
from e2e.cluster.api import Capability, Cluster
from e2e.foreign import FOREIGN, Yard, install_foreign, remove_foreign, wait_foreign
from e2e.images import build_images, vendor_image
from e2e.images.backend import backend_image
from e2e.images.deviceplugins import device_plugins_image
from e2e.images.nvidia import nvidia_image
from e2e.kit import (
    DRIVER,
    ZRAM_CONTROL,
    Space,
    device_class,
    plugin_pod,
    published,
    ready,
    wait_for,
    zram_devices,
)
from e2e.release import install, uninstall
from e2e.scripted import IMAGE
from e2e.scripted.stage import SCRIPTED, Stage, install_scripted, scripted_classes, wait_scripted
from tests.unit.chart.class_writes import PREFIX

DEVICES_OF_FIRST_NODE = 4
DEVICES_OF_SECOND_NODE = 2


HOTPLUGGED = 1000 + os.getpid() % 50_000
"""The number of the loop device that tests plug in and out. It differs for each run."""


@dataclass(frozen=True)
class Zram:
    """The zram devices of the two nodes. Nodes share /dev, so policies separate the devices."""

    first: tuple[str, ...]
    second: tuple[str, ...]


@pytest.fixture(scope="session")
def zram() -> Iterator[Zram]:
    if not ZRAM_CONTROL.exists():
        pytest.skip("this machine's kernel has no zram: there are no block devices to give away")
    with zram_devices(DEVICES_OF_FIRST_NODE + DEVICES_OF_SECOND_NODE) as names:
        yield Zram(
            first=tuple(names[:DEVICES_OF_FIRST_NODE]), second=tuple(names[DEVICES_OF_FIRST_NODE:])
        )


def policies(cluster: Cluster, zram: Zram) -> dict[str, dict]:
    """Return the policies of the tests: separate zram devices for each node, and three shared
    nodes."""
    first, second = (
        {"matchLabels": {"kubernetes.io/hostname": name}} for name in cluster.nodes[:2]
    )
    return {
        "zram": {
            "match": [{"subsystem": "block", "paths": [f"/dev/{name}" for name in zram.first]}],
            "nodeSelector": first,
        },
        "zram-second": {
            "match": [{"subsystem": "block", "paths": [f"/dev/{name}" for name in zram.second]}],
            "nodeSelector": second,
        },
        "hotplug": {
            "match": [{"subsystem": "block", "paths": [f"/dev/loop{HOTPLUGGED}"]}],
            "nodeSelector": first,
            "container": {"path": "/dev/plugged", "uid": 1000, "mode": "0400"},
        },
        **{name: {"enabled": True, "sharing": {"users": 4}} for name in ("kvm", "tun", "fuse")},
    }


def policy_class(policy: str) -> dict:
    """Return the class of all hostdev devices of one policy."""
    of_policy = f'device.attributes["{DRIVER}"].policy == "{policy}"'
    return device_class(f"{policy}.test", DRIVER, of_policy)


def release_values(cluster: Cluster, zram: Zram) -> dict:
    hostdev = {
        "policies": policies(cluster, zram),
        "extendedResourcePrefixes": {PREFIX: True},
        "rescanInterval": "3s",
    }
    events = {"patience": "5s", "repeatPause": "10s"}
    maintenance = {"enabled": True}
    return {
        "hostdev": hostdev,
        "maintenance": maintenance,
        "metrics": {"podDevices": True},
        "operator": {"replicas": 2, "config": {"events": events}},
    }


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> list[Path]:
    """The images, which are loaded on the nodes, in the order of `build_images`: the node plugin
    first."""
    archives = build_images()
    for archive in archives:
        cluster.load_image(archive)
    return archives


def build_of(archives: list[Path]) -> str:
    """Return a name for the content of images. If it changes, the pods of a kept cluster are
    replaced."""
    return "_".join(archive.parent.name for archive in archives)


@pytest.fixture(scope="session")
def release(cluster: Cluster, zram: Zram, images: list[Path]) -> Iterator[Cluster]:
    """A cluster of two nodes with drakit installed, its devices published, and its classes
    created."""
    install(cluster, values=release_values(cluster, zram), build=build_of(images))
    classes = [policy_class("zram"), policy_class("zram-second")]
    listing = {"apiVersion": "v1", "kind": "List", "items": classes}
    cluster.apply(json.dumps(listing))
    wait_settled(cluster, zram)
    yield cluster
    if os.environ.get("KEEP_CLUSTER") != "1":
        cluster.kubectl("delete", "-f", "-", "--ignore-not-found", input=json.dumps(listing))
        uninstall(cluster)
    if Capability.AUDIT in cluster.capabilities:
        assert undocumented(cluster.audit()) == set(), "the closed list of the operator's writes"


def wait_settled(cluster: Cluster, zram: Zram) -> None:
    """Wait until both plugins are ready and have published the devices that the tests need."""
    for node, names in zip(cluster.nodes[:2], (zram.first, zram.second), strict=True):
        wait_for(f"node plugin on {node} to be ready", lambda: ready(plugin_pod(cluster, node)))  # noqa: B023
        wait_for(
            f"the zram devices of {node} to be published",
            lambda: len([d for d in published(cluster, node) if "zram" in d]) == len(names),  # noqa: B023
        )


@contextmanager
def namespace_of(cluster: Cluster, request: pytest.FixtureRequest) -> Generator[str]:
    """Create a namespace for one test, and remove it with all its objects."""
    words = request.node.name.removeprefix("test_").lower()
    # Use a new name each time, because deleting a namespace is slow, and tests do not wait for it.
    name = f"{re.sub(r'[^a-z0-9]+', '-', words)[:50].strip('-')}-{uuid.uuid4().hex[:6]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    if request.session.testsfailed:
        for arguments in (
            ("-n", name, "get", "pods,resourceclaims", "-o", "wide"),
            ("-n", name, "get", "events", "--sort-by=.lastTimestamp"),
            ("get", "pods", "-A", "-l", "app.kubernetes.io/part-of=drakit", "-o", "wide"),
        ):
            print(cluster.kubectl(*arguments).stdout)
    # Workloads come first, because they replace deleted pods. Claims come last, because Kubernetes
    # 1.34 keeps the claim for an extended resource if it is deleted before its pod.
    for kinds in ("deployments,statefulsets,daemonsets,jobs,replicasets,pods", "resourceclaims"):
        cluster.kubectl("-n", name, "delete", kinds, "--all", "--timeout=120s", timeout=150)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def room(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Space]:
    """A namespace for a test with its own drivers."""
    with namespace_of(cluster, request) as name:
        yield Space(cluster, name)


@pytest.fixture
def space(release: Cluster, zram: Zram, request: pytest.FixtureRequest) -> Iterator[Space]:
    """A namespace for a test, on a release that has recovered from the effects of the previous
    test."""
    wait_settled(release, zram)
    with namespace_of(release, request) as name:
        yield Space(release, name)


# ------------------------------------------------------------ the scripted drivers


@pytest.fixture(scope="session")
def scripted(cluster: Cluster, images: list[Path]) -> Iterator[Cluster]:
    """The scripted drivers on the first node, in a separate daemon, as a vendor would install
    them."""
    archive = vendor_image("scripted", IMAGE, nodeplugin=images[0])
    cluster.load_image(archive)
    install_scripted(cluster, build=build_of([archive]))
    classes = {"apiVersion": "v1", "kind": "List", "items": scripted_classes()}
    cluster.apply(json.dumps(classes))
    wait_scripted(cluster)
    yield cluster
    if os.environ.get("KEEP_CLUSTER") == "1":
        return
    cluster.kubectl("delete", "-f", "-", "--ignore-not-found", input=json.dumps(classes))
    uninstall(cluster, SCRIPTED)


@pytest.fixture
def stage(scripted: Cluster, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A namespace and the scripts of its drivers. At its end, no effects of the drivers remain."""
    with namespace_of(scripted, request) as name:
        stage = Stage(scripted, name)
        for script in stage.scripts:
            script.forget()
        wait_scripted(scripted)
        yield stage
        if request.session.testsfailed:
            stage.show()
        for script in stage.scripts:
            script.play()
            script.stock()
    stage.wait_empty()
    assert [script.overlaps() for script in stage.scripts] == [[], []]


# ------------------------------------------------------------ device plugins and backends


@pytest.fixture(scope="session")
def foreign(cluster: Cluster, images: list[Path]) -> Iterator[Cluster]:
    """Device plugins, a backend and the daemon that hosts them, on the first node."""
    archives = [device_plugins_image(), nvidia_image(), backend_image()]
    for archive in archives:
        cluster.load_image(archive)
    install_foreign(cluster, build=build_of(images), programs=build_of(archives))
    yield cluster
    if os.environ.get("KEEP_CLUSTER") == "1":
        return
    uninstall(cluster, FOREIGN)
    remove_foreign(cluster)


@pytest.fixture
def yard(foreign: Cluster, request: pytest.FixtureRequest) -> Iterator[Yard]:
    """A namespace for a test, in which all foreign programs run and their devices are healthy."""
    wait_foreign(foreign)
    with namespace_of(foreign, request) as name:
        yield Yard(foreign, name)
