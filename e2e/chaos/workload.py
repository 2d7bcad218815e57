"""
The release and the pods of a chaos run: 40 pods on two nodes, with devices of two drivers.

Deployments replace deleted or evicted pods, so all pods must run at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from e2e.chaos.leaks import HOME, KUBELET
from e2e.cluster.api import Cluster, ClusterError, run
from e2e.kit import DRIVER as HOSTDEV
from e2e.kit import claim as claim_body
from e2e.kit import container, from_claim, from_template, plugin_pod, ready, template
from e2e.release import NAMESPACE, install

SIMULATED = "simulated.drakit.dev"
DRIVERS = (HOSTDEV, SIMULATED)

SPACE = "chaos"
REPLICAS = 10
DISK_MIB = 16
CLOCKS = f"{KUBELET}/chaos"
"""The folder on a node with the file that steps the clock of drakit's processes."""

SLEEP_SOURCE = Path(__file__).with_name("sleep.c")
SLEEP_LIBRARY = f"{CLOCKS}/sleep.so"

CLOCK_LIBRARY = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
"""Debian's libfaketime. Nodes share /usr with the machine, and the images have Debian's libc."""


def values(*, upgrade: int) -> dict[str, Any]:
    """Return the chart's values. Each upgrade restarts all pods. Every other upgrade uses surge
    updates of the node plugin, two operators, and more logs."""
    surge = upgrade % 2 == 1
    rolling = {"maxSurge": 1, "maxUnavailable": 0} if surge else {"maxUnavailable": "100%"}
    cpus = {"count": 24, "grouping": "devices"}
    return {
        "hostdev": {
            "policies": {name: {"enabled": True} for name in ("tun", "fuse")},
            "rescanInterval": "3s",
        },
        "simulated": {"enabled": True, "config": {"gpu": {"count": 8}, "cpu": cpus}},
        "logging": {"level": "DEBUG" if surge else "INFO"},
        "nodeplugin": {
            "staleClaims": {"period": "5s", "gracePeriod": "15s"},
            "devices": {"health": {"recoveryPeriod": "2s"}},
            "updateStrategy": {"rollingUpdate": rolling},
        },
        "operator": {"replicas": 2 if surge else 1},
    }


def deploy(cluster: Cluster, *, build: str) -> None:
    """Install drakit with its state directory on a small disk, and with clocks that can be
    stepped."""
    for node in cluster.nodes:
        cluster.give_disk(node, HOME, mib=DISK_MIB)
        cluster.exec_on_node(node, ["mkdir", "-p", CLOCKS])
        library = str(cluster.node_path(node, SLEEP_LIBRARY))
        run(["gcc", "-shared", "-fPIC", "-o", library, str(SLEEP_SOURCE)])
        step_clock(cluster, node, seconds=0)
    upgrade(cluster, build=build, number=0)
    for kind, name in (("daemonset", "nodeplugin"), ("deployment", "operator")):
        patch = json.dumps(_with_clock(name))
        cluster.kubectl("-n", NAMESPACE, "patch", kind, f"drakit-{name}", "-p", patch)
        cluster.kubectl(
            *("-n", NAMESPACE, "rollout", "status", f"{kind}/drakit-{name}", "--timeout=120s"),
            timeout=130,
        )


def upgrade(cluster: Cluster, *, build: str, number: int, wait: bool = True) -> None:
    """Upgrade the release, which replaces all its pods, and wait until they are ready."""
    install(cluster, values=values(upgrade=number), build=f"{build}_{number}", wait=wait)


def step_clock(cluster: Cluster, node: str, *, seconds: int) -> None:
    """Set the difference between the real clock and the clock of drakit's processes on a node."""
    path = cluster.node_path(node, f"{CLOCKS}/clock")
    partial = path.with_suffix(".part")
    partial.write_text(f"{seconds:+d}\n")
    partial.replace(path)


def _with_clock(name: str) -> dict[str, Any]:
    """Return the patch that preloads libfaketime. Upgrades keep it."""
    env = {
        "LD_PRELOAD": f"{SLEEP_LIBRARY}:{CLOCK_LIBRARY}",
        "FAKETIME_TIMESTAMP_FILE": f"{CLOCKS}/clock",
        "FAKETIME_CACHE_DURATION": "1",
        # A step of a real clock does not change these.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }
    paths = {"clocks": CLOCKS, "clock-library": CLOCK_LIBRARY}
    mounts = [
        {"name": volume, "mountPath": path, "readOnly": True} for volume, path in paths.items()
    ]
    patched = {
        "name": name,
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "volumeMounts": mounts,
    }
    volumes = [{"name": volume, "hostPath": {"path": path}} for volume, path in paths.items()]
    return {"spec": {"template": {"spec": {"containers": [patched], "volumes": volumes}}}}


# ------------------------------------------------------------ the pods


def deployments() -> list[dict[str, Any]]:
    """Return four Deployments with their claims: of each driver, of both, and one shared claim."""
    cpu = ("cpu", f"cpu.{SIMULATED}")
    part = ("part", f"partition.{SIMULATED}", f'device.attributes["{SIMULATED}"].profile == "1g"')
    tun, fuse = (("node", f"{name}.drakit.dev") for name in ("tun", "fuse"))
    nic = ("nic", f"nic.{SIMULATED}")
    return [
        template("cpu", cpu),
        template("part", part),
        template("tun", tun),
        template("fuse", fuse),
        claim_body("nic", nic),
        _deployment("cpus", ("cpu", from_template("cpu"))),
        _deployment("fuses", ("fuse", from_template("fuse"))),
        _deployment("both", ("part", from_template("part")), ("tun", from_template("tun"))),
        _deployment("shared", ("nic", from_claim("nic"))),
    ]


def _deployment(name: str, *claims: tuple[str, dict[str, str]]) -> dict[str, Any]:
    labels = {"app": name}
    spec = {
        "terminationGracePeriodSeconds": 1,
        "containers": [
            container("main", *(each for each, _ in claims), command=["sleep", "86400"])
        ],
        "resourceClaims": [{"name": each, **source} for each, source in claims],
        "automountServiceAccountToken": False,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": REPLICAS,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def start(cluster: Cluster) -> None:
    """Create the pods."""
    cluster.kubectl("create", "namespace", SPACE)
    bodies = {"apiVersion": "v1", "kind": "List", "items": deployments()}
    cluster.kubectl("-n", SPACE, "apply", "-f", "-", input=json.dumps(bodies))


def scale_down(cluster: Cluster) -> None:
    """Delete all pods of the Deployments."""
    cluster.kubectl("-n", SPACE, "scale", "deployment", "--all", "--replicas=0")


def problems(cluster: Cluster) -> list[str]:
    """Return a sentence for each Deployment or pod that does not run."""
    try:
        return list(_problems(cluster))
    except ClusterError as error:
        return [str(error)]


def running(cluster: Cluster) -> int:
    """Return the number of ready pods of the Deployments."""
    items = cluster.get("deployments", "-n", SPACE)["items"]
    return sum(item["status"].get("readyReplicas", 0) for item in items)


def _problems(cluster: Cluster) -> Iterator[str]:
    cluster.wait_for_nodes(timeout_seconds=1)
    for node in cluster.nodes:
        if not ready(plugin_pod(cluster, node)):
            yield f"the node plugin on {node} is not ready"
    for namespace in (NAMESPACE, SPACE):
        for item in cluster.get("deployments", "-n", namespace)["items"]:
            name, wanted = item["metadata"]["name"], item["spec"]["replicas"]
            status = item["status"]
            counts = [status.get(f"{key}Replicas", 0) for key in ("ready", "updated")]
            if [status.get("replicas", 0), *counts] != [wanted] * 3:
                yield f"{name}: {counts[0]} of {wanted} pods are ready"
        for item in cluster.get("pods", "-n", namespace)["items"]:
            if "deletionTimestamp" in item["metadata"]:
                yield f"pod {item['metadata']['name']} is terminating"
