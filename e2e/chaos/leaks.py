"""
Counts leaks: traces of claims, sockets, slices and taints that should not exist.

Collecting is separate from counting, which uses pure functions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drakit_nodeplugin.kubelet.sockets import socket_paths
from e2e.cluster.api import Cluster
from e2e.kit import cdi_files, plugin_pods

KUBELET = "/var/lib/kubelet"
HOME = f"{KUBELET}/plugins/drakit.dev"

DRAKIT = str(Path(sys.executable).with_name("drakit"))
"""The command of this clone. Nodes share the machine's programs."""

KINDS = ("checkpoint", "cdi", "unprepared", "sockets", "slices", "reservations", "taints")


@dataclass(frozen=True, kw_only=True)
class NodeTraces:
    """The traces of a node plugin on its node."""

    entries: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """The UIDs of claims in the checkpoint, by driver."""

    files: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """The UIDs of claims that have a CDI file, by driver."""

    sockets: frozenset[str] = frozenset()
    """The sockets by which the kubelet discovers and calls the drivers."""

    own_sockets: frozenset[str] = frozenset()
    """The sockets of the node plugin's existing pods."""


@dataclass(frozen=True, kw_only=True)
class Traces:
    """The traces of drakit's devices in a cluster."""

    nodes: Mapping[str, NodeTraces]
    claims: tuple[dict[str, Any], ...]
    pods: tuple[dict[str, Any], ...]
    slices: tuple[dict[str, Any], ...]
    rules: tuple[str, ...] = ()
    """The names of DeviceTaintRules."""


Pools = Mapping[tuple[str, str], frozenset[str]]
"""The names of the devices of each pool, by driver and pool."""


def collect(cluster: Cluster, drivers: tuple[str, ...], namespace: str) -> Traces:
    """Collect the traces. Raises ClusterError while a node or the API server is unavailable."""
    slices = [
        item for item in cluster.get("resourceslices")["items"] if item["spec"]["driver"] in drivers
    ]
    return Traces(
        nodes={node: _node(cluster, node, drivers) for node in cluster.nodes},
        claims=tuple(cluster.get("resourceclaims", "-n", namespace)["items"]),
        pods=tuple(cluster.get("pods", "-n", namespace)["items"]),
        slices=tuple(slices),
        rules=tuple(each["metadata"]["name"] for each in cluster.get("devicetaintrules")["items"]),
    )


def _node(cluster: Cluster, node: str, drivers: tuple[str, ...]) -> NodeTraces:
    entries: dict[str, frozenset[str]] = {}
    files: dict[str, frozenset[str]] = {}
    sockets: set[str] = set()
    own: set[str] = set()
    # Run this in the node's mount namespace, because SQLite resolves the paths of `node_path` to
    # those of this machine.
    show = [DRAKIT, "node", "checkpoint", "show", "--json", f"--kubelet-root={KUBELET}"]
    shown = json.loads(cluster.exec_on_node(node, show, timeout=60).stdout)
    claims = {each["driver"]: each["claims"] for each in shown["checkpoints"]}
    for driver in drivers:
        folder = cluster.node_path(node, f"{HOME}/drivers/{driver}")
        entries[driver] = frozenset(claim["uid"] for claim in claims[driver])
        files[driver] = frozenset(
            name.rpartition("_")[2].removesuffix(".json")
            for name in cdi_files(cluster, node, driver=driver)
        )
        registry = cluster.node_path(node, f"{KUBELET}/plugins_registry")
        sockets |= {path.name for path in registry.glob(f"{driver}-*.sock")}
        sockets |= {f"{driver}/{path.name}" for path in folder.glob("*.sock")}
        for pod in plugin_pods(cluster, node):
            uid = pod["metadata"]["uid"]
            paths = socket_paths(driver, kubelet_root=Path(KUBELET), instance_uid=uid)
            own |= {paths.registration.name, f"{driver}/{paths.dra.name}"}
    return NodeTraces(
        entries=entries,
        files=files,
        sockets=frozenset(sockets),
        own_sockets=frozenset(own),
    )


def pools(slices: tuple[dict[str, Any], ...]) -> Pools:
    """Return the devices of each pool."""
    found: dict[tuple[str, str], set[str]] = {}
    for item in slices:
        names = found.setdefault((item["spec"]["driver"], item["spec"]["pool"]["name"]), set())
        names |= {device["name"] for device in item["spec"].get("devices") or ()}
    return {key: frozenset(names) for key, names in found.items()}


def leaks(traces: Traces, expected: Pools) -> dict[str, list[str]]:
    """Return a sentence for each leak, by kind. `expected` are the pools before all faults."""
    return {
        "checkpoint": list(_unclaimed(traces, "entry", lambda node: node.entries)),
        "cdi": list(_unclaimed(traces, "CDI file", lambda node: node.files)),
        "unprepared": list(_unprepared(traces)),
        "sockets": list(_sockets(traces)),
        "slices": list(_slices(traces, expected)),
        "reservations": list(_reservations(traces)),
        "taints": list(_taints(traces)),
    }


def _prepared_on(claim: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the nodes and drivers of an allocated claim. In this cluster, pools are named after
    nodes."""
    allocation = claim.get("status", {}).get("allocation") or {}
    results = allocation.get("devices", {}).get("results", ())
    return {(result["pool"].partition("/")[0], result["driver"]) for result in results}


def _unclaimed(traces: Traces, what: str, of: Any) -> Iterator[str]:
    """Yield traces of claims that are not allocated on their node."""
    held = {
        (node, driver, claim["metadata"]["uid"])
        for claim in traces.claims
        for node, driver in _prepared_on(claim)
    }
    for node, found in traces.nodes.items():
        for driver, uids in of(found).items():
            for uid in sorted(uids):
                if (node, driver, uid) not in held:
                    yield f"{node} has a {what} of {driver} for claim {uid}, which is not there"


def _unprepared(traces: Traces) -> Iterator[str]:
    """Yield claims of running pods that their node does not have."""
    running = {
        pod["metadata"]["uid"] for pod in traces.pods if pod["status"].get("phase") == "Running"
    }
    for claim in traces.claims:
        users = {user["uid"] for user in claim.get("status", {}).get("reservedFor", ())}
        if not users & running:
            continue
        uid = claim["metadata"]["uid"]
        for node, driver in _prepared_on(claim):
            found = traces.nodes[node]
            for what, uids in (("entry", found.entries), ("CDI file", found.files)):
                if uid not in uids.get(driver, ()):
                    yield f"a running pod uses claim {uid}, and {node} has no {what} of {driver}"


def _sockets(traces: Traces) -> Iterator[str]:
    for node, found in traces.nodes.items():
        for name in sorted(found.sockets - found.own_sockets):
            yield f"{node} has the socket {name} of no pod"
        for name in sorted(found.own_sockets - found.sockets):
            yield f"{node} has no socket {name}"


def _slices(traces: Traces, expected: Pools) -> Iterator[str]:
    now = pools(traces.slices)
    for key in sorted(expected.keys() | now.keys()):
        driver, pool = key
        if now.get(key) != expected.get(key):
            differing = (now.get(key) or frozenset()) ^ (expected.get(key) or frozenset())
            yield f"pool {pool} of {driver} differs in {', '.join(sorted(differing))}"
        of = [
            item["spec"]["pool"]
            for item in traces.slices
            if (item["spec"]["driver"], item["spec"]["pool"]["name"]) == key
        ]
        if len({each["generation"] for each in of}) > 1:
            yield f"pool {pool} of {driver} has slices of several generations"
        if any(each["resourceSliceCount"] != len(of) for each in of):
            yield f"pool {pool} of {driver} has {len(of)} slices, and announces others"


def _reservations(traces: Traces) -> Iterator[str]:
    alive = {
        pod["metadata"]["uid"]
        for pod in traces.pods
        if pod["status"].get("phase") in {"Pending", "Running"}
    }
    for claim in traces.claims:
        name = claim["metadata"]["name"]
        users = claim.get("status", {}).get("reservedFor") or ()
        for user in users:
            if user["uid"] not in alive:
                yield f"claim {name} is reserved for pod {user['name']}, which is not there"
        if _prepared_on(claim) and not users:
            yield f"claim {name} is allocated, and reserved for no pod"


def _taints(traces: Traces) -> Iterator[str]:
    for item in traces.slices:
        for device in item["spec"].get("devices") or ():
            for taint in device.get("taints") or ():
                pool = item["spec"]["pool"]["name"]
                yield f"device {pool}/{device['name']} has the taint {taint['key']}"
    for name in traces.rules:
        yield f"the DeviceTaintRule {name} exists"
