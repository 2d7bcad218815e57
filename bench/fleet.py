"""
Measures how 500 node plugins that start at the same time publish their slices, with an API server
that throttles them.

Each has its own session, device manager and publisher. All are in this process, without drivers,
kubelets and checkpoints. They have one ServiceAccount, as in a cluster, and therefore one flow of
API Priority and Fairness, which gets few seats and short queues: most requests of a start are
rejected with 429.

* ``fleet-publish``: the first start, until every node's pool is complete.
* ``fleet-restart``: all restart, and their slices still exist.
* ``fleet-wiped``: all restart, and in the meantime each node's slices are deleted, as its kubelet
  deletes them when it starts.

https://github.com/kubernetes/kubernetes/issues/140011 reports 20 of 6,000 slices that another
publisher lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from bench.apiserver import ApiServer, each_of
from bench.claims import report
from bench.machine import memory_mib
from bench.rows import Row
from drakit import Device
from drakit.device import Inventory
from drakit_daemon.kube import Session, connect, resource_path
from drakit_nodeplugin.config import Devices
from drakit_nodeplugin.devices.manager import DeviceManager
from drakit_nodeplugin.slices.publisher import SlicePublisher
from drakit_nodeplugin.state.checkpoint import Checkpoint
from drakit_nodeplugin.state.records import StoredEndpoint
from e2e.cluster.api import Cluster
from e2e.kit import write_kubeconfig

NODES = 500
SLICES_PER_NODE = 12
DEVICES = SLICES_PER_NODE * 56
"""The number of devices per node. A slice has 56."""

DRIVER = "fleet.bench.drakit.dev"
ACCOUNT = "fleet"

PUBLISHED_SECONDS = 900.0
"""How long to wait until all slices exist."""

SETTLED_SECONDS = 20.0
"""How long after that no slice may disappear. Deleted slices are restored within 2 s."""

_SLICES = resource_path("resource.k8s.io/v1", "resourceslices")
_NODES = resource_path("v1", "nodes")
_REJECTED = re.compile(
    rf'^apiserver_flowcontrol_rejected_requests_total\{{[^}}]*priority_level="{ACCOUNT}"[^}}]*\}} '
    r"(?P<count>\S+)$",
    re.MULTILINE,
)


def measure_fleet(api: ApiServer, cluster: Cluster) -> Iterator[Row]:
    """Return all rows."""
    report(f"fleet: {NODES} node plugins, {NODES * SLICES_PER_NODE} slices")
    with tempfile.TemporaryDirectory() as scratch:
        kubeconfig = Path(scratch, "kubeconfig")
        _prepare(cluster, kubeconfig)
        rows = api.run(lambda session: _measured(session, api, kubeconfig))
    yield from rows
    api.delete_slices(DRIVER)


def _prepare(cluster: Cluster, kubeconfig: Path) -> None:
    """Create the ServiceAccount with its permissions, and the limits of its requests."""
    rules = [
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["*"]},
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
    ]
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": "default"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": ACCOUNT}
    queuing = {"queues": 64, "handSize": 6, "queueLengthLimit": 5}
    limited = {
        "nominalConcurrencyShares": 5,
        "borrowingLimitPercent": 0,
        "limitResponse": {"type": "Queue", "queuing": queuing},
    }
    every = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": True}
    account = {"name": ACCOUNT, "namespace": "default"}
    matched = {"kind": "ServiceAccount", "serviceAccount": account}
    schema = {
        "priorityLevelConfiguration": {"name": ACCOUNT},
        "matchingPrecedence": 500,
        "distinguisherMethod": {"type": "ByUser"},
        "rules": [{"subjects": [matched], "resourceRules": [every]}],
    }
    flow, rbac = "flowcontrol.apiserver.k8s.io/v1", "rbac.authorization.k8s.io/v1"
    objects: list[dict[str, Any]] = [
        _object("v1", "ServiceAccount"),
        _object(rbac, "ClusterRole", rules=rules),
        _object(rbac, "ClusterRoleBinding", roleRef=role, subjects=[subject]),
        _object(flow, "PriorityLevelConfiguration", spec={"type": "Limited", "limited": limited}),
        _object(flow, "FlowSchema", spec=schema),
    ]
    cluster.apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    token = cluster.kubectl("create", "token", ACCOUNT, "--duration=2h").stdout.strip()
    write_kubeconfig(cluster, kubeconfig, token=token)


def _object(version: str, kind: str, **fields: Any) -> dict[str, Any]:
    metadata = {"name": ACCOUNT} | ({"namespace": "default"} if kind == "ServiceAccount" else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


# ------------------------------------------------------------ the node plugins


class _Memory:
    """The endpoints of a checkpoint, which survive a restart."""

    def __init__(self) -> None:
        self._rows: dict[str, StoredEndpoint] = {}

    async def endpoints(self) -> Collection[StoredEndpoint]:
        return list(self._rows.values())

    async def write_endpoints(self, endpoints: Collection[StoredEndpoint]) -> None:
        self._rows |= {each.name: each for each in endpoints}

    async def forget_endpoints(self, names: Collection[str]) -> None:
        for name in names:
            self._rows.pop(name, None)


@dataclass(frozen=True, slots=True)
class _Node:
    """A node whose plugin can be restarted."""

    name: str
    memory: _Memory = field(default_factory=_Memory)

    async def run(self, kubeconfig: Path, inventory: Inventory) -> None:
        """Run the plugin until it is canceled."""
        session = await connect(kubeconfig, user_agent="drakit-bench")
        connected: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        connected.set_result(session)
        manager = DeviceManager(
            DRIVER,
            node=self.name,
            endpoints=[DRIVER],
            settings=Devices(),
            store=cast("Checkpoint", self.memory),
            reports_health=False,
            on_rejected=_unexpected,
        )
        publisher = SlicePublisher(
            manager=manager,
            session=connected,
            node=self.name,
            on_rejected=_unexpected,
            on_name_taken=_unexpected,
            on_dropped=_unexpected,
            on_write=lambda verb, seconds, succeeded: None,
        )
        try:
            await manager.restore()
            async with asyncio.TaskGroup() as group:
                group.create_task(manager.run())
                group.create_task(publisher.run())
                manager.replaced(DRIVER, inventory)
                await publisher.listed.wait()
                manager.set_sources_ready()
        finally:
            await session.close()


def _unexpected(what: Any) -> None:
    raise SystemExit(f"a publisher reports {what}")


@asynccontextmanager
async def _running(nodes: Collection[_Node], kubeconfig: Path) -> AsyncGenerator[None]:
    """Run all node plugins, which start at the same time."""
    devices = [
        Device(name=f"device-{number:03}", attributes={"model": "bench", "index": number})
        for number in range(DEVICES)
    ]
    inventory = Inventory(devices=devices)
    tasks = [asyncio.create_task(node.run(kubeconfig, inventory)) for node in nodes]
    try:
        yield
        if failed := [task for task in tasks if task.done()]:
            await asyncio.gather(*failed)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


# ------------------------------------------------------------ the measurement


async def _measured(session: Session, api: ApiServer, kubeconfig: Path) -> list[Row]:
    nodes = [_Node(f"fleet-{number:03}") for number in range(NODES)]

    async def create(node: _Node) -> None:
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node.name}}
        await session.create(_NODES, body)

    async def wipe(node: _Node) -> None:
        query = {"fieldSelector": f"spec.nodeName={node.name}"}
        found = await session.read_list(_SLICES, _name, params=query)
        for name in found.items:
            await session.delete(f"{_SLICES}/{name}")

    await each_of(nodes, create)
    rows: list[Row] = []
    for what in ("publish", "restart", "wiped"):
        writes, rejected = await api.count_slice_writes(), await _rejected(session)
        began = time.monotonic()
        async with _running(nodes, kubeconfig):
            if what == "wiped":
                await each_of(nodes, wipe)
            if what == "restart":
                await asyncio.sleep(SETTLED_SECONDS)
            await _wait_published(session)
            seconds = time.monotonic() - began
            await asyncio.sleep(SETTLED_SECONDS)
        missing = await _missing(session, nodes)
        figures: dict[str, float | None] = {
            "nodes": NODES,
            "slices": NODES * SLICES_PER_NODE,
            "missing": missing,
            "throttled": await _rejected(session) - rejected,
            "writes": await api.count_slice_writes() - writes,
            "seconds": seconds,
            "rss_mib": memory_mib(os.getpid(), "VmRSS"),
        }
        at_most = {"missing": 0.0} | ({"writes": 0.0} if what == "restart" else {})
        rows.append(Row(f"fleet-{what}", figures, at_most=at_most))
        report(rows[-1].line())
    return rows


def _name(body: dict[str, Any]) -> str:
    return body["metadata"]["name"]


async def _wait_published(session: Session) -> None:
    """Wait until the API server has the expected number of slices, or until the timeout."""
    until = time.monotonic() + PUBLISHED_SECONDS
    while time.monotonic() < until:
        page = await session.get(_SLICES, params={"limit": "1"})
        count = len(page["items"]) + page["metadata"].get("remainingItemCount", 0)
        if count >= NODES * SLICES_PER_NODE:
            return
        await asyncio.sleep(1)


async def _missing(session: Session, nodes: Collection[_Node]) -> int:
    """Count the slices that are missing, or that do not belong to a complete pool."""

    def keep(body: dict[str, Any]) -> tuple[str, int, int, int]:
        spec = body["spec"]
        pool = spec["pool"]
        devices = len(spec.get("devices") or ())
        return pool["name"], pool["generation"], pool["resourceSliceCount"], devices

    query = {"fieldSelector": f"spec.driver={DRIVER}"}
    listing = await session.read_list(_SLICES, keep, params=query)
    pools: dict[str, list[tuple[int, int, int]]] = {}
    for name, generation, count, devices in listing.items:
        pools.setdefault(name, []).append((generation, count, devices))
    missing = 0
    for node in nodes:
        of = pools.get(node.name, [])
        complete = (
            len({generation for generation, _, _ in of}) == 1
            and all(count == len(of) for _, count, _ in of)
            and sum(devices for _, _, devices in of) == DEVICES
        )
        missing += 0 if complete else max(1, SLICES_PER_NODE - len(of))
    return missing


async def _rejected(session: Session) -> int:
    """Return how many of the node plugins' requests the API server has rejected."""
    async with session.http.get(f"{session.server}/metrics") as response:
        response.raise_for_status()
        text = await response.text()
    return sum(int(float(found["count"])) for found in _REJECTED.finditer(text))
