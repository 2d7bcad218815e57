"""
Fixtures of the tests that need drakit installed: zram devices, the release, a namespace a test.

It must not know how a cluster is run, or how images are built.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from e2e.cluster.api import Cluster
from e2e.images import build_images
from e2e.kit import (
    NAMESPACE,
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

DEVICES_OF_FIRST_NODE = 4
DEVICES_OF_SECOND_NODE = 2


@dataclass(frozen=True)
class Zram:
    """The zram devices of the two nodes: /dev is shared, so policies part them."""

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


def policies(cluster: Cluster, zram: Zram) -> list[dict]:
    """The policies of the tests: zram of each node for itself, and three nodes that many share."""
    first, second = cluster.nodes[:2]
    return [
        {
            "name": "zram",
            "subsystem": "block",
            "paths": [f"/dev/{name}" for name in zram.first],
            "nodeSelector": {"kubernetes.io/hostname": first},
        },
        {
            "name": "zram-second",
            "subsystem": "block",
            "paths": [f"/dev/{name}" for name in zram.second],
            "nodeSelector": {"kubernetes.io/hostname": second},
        },
        {"name": "kvm", "subsystem": "misc", "paths": ["/dev/kvm"], "count": 4},
        {"name": "tun", "subsystem": "misc", "paths": ["/dev/net/tun"], "count": 4},
        {"name": "fuse", "subsystem": "misc", "paths": ["/dev/fuse"], "count": 4},
    ]


def release_values(cluster: Cluster, zram: Zram) -> dict:
    hostdev = {"policies": policies(cluster, zram), "rescanInterval": "3s"}
    return {"hostdev": hostdev, "operator": {"replicas": 2}}


@pytest.fixture(scope="session")
def release(cluster: Cluster, zram: Zram) -> Iterator[Cluster]:
    """A cluster of two nodes with drakit installed, its devices published, classes made."""
    for archive in build_images():
        cluster.load_image(archive)
    install(cluster, values=release_values(cluster, zram))
    classes = [device_class("zram.test", "zram"), device_class("zram-second.test", "zram-second")]
    listing = {"apiVersion": "v1", "kind": "List", "items": classes}
    cluster.apply(json.dumps(listing))
    wait_settled(cluster, zram)
    yield cluster
    if os.environ.get("KEEP_CLUSTER") == "1":
        return
    cluster.kubectl("delete", "-f", "-", "--ignore-not-found", input=json.dumps(listing))
    uninstall(cluster)


def wait_settled(cluster: Cluster, zram: Zram) -> None:
    """Wait until both plugins are ready and have published what the tests count on."""
    for node, names in zip(cluster.nodes[:2], (zram.first, zram.second), strict=True):
        wait_for(f"node plugin on {node} to be ready", lambda: ready(plugin_pod(cluster, node)))  # noqa: B023
        wait_for(
            f"the zram devices of {node} to be published",
            lambda: len([d for d in published(cluster, node) if "zram" in d]) == len(names),  # noqa: B023
        )


@pytest.fixture
def space(release: Cluster, zram: Zram, request: pytest.FixtureRequest) -> Iterator[Space]:
    """A namespace for one test, removed with all that is in it; what a test broke has healed."""
    wait_settled(release, zram)
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:50].strip(
        "-"
    )
    release.kubectl("create", "namespace", name)
    yield Space(release, name)
    if request.session.testsfailed:
        print(release.kubectl("-n", name, "get", "pods,resourceclaims", "-o", "wide").stdout)
        print(release.kubectl("-n", name, "get", "events", "--sort-by=.lastTimestamp").stdout)
        print(release.kubectl("-n", NAMESPACE, "get", "pods", "-o", "wide").stdout)
    release.kubectl("delete", "namespace", name, "--wait=true", "--timeout=120s", timeout=150)
