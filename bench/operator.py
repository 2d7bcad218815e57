"""
The operator's times and memory in a large cluster.

The operator runs in a separate process against the real API server. The controller manager and the
scheduler are frozen, so that nothing else changes the cluster: no node becomes unreachable, and the
figures are those of the operator. :mod:`.scene` has the objects.

* ``operator-sync``: from the start of the process until each waiting pod has its Event.
* ``operator-quiet``: claims and slices change only in their labels, so there is nothing to report.
  The operator's writes, except its Lease, are counted in the API server's audit log.
* ``operator-slice-change``: from the write of a slice until the number of evaluated pods equals
  that of waiting ones (``drakit_operator_reconcile_duration_seconds``). Each pod is queued once.
* ``operator-claims``: allocated claims lose their allocation, and their class does not exist: each
  gets an Event. Each change affects all waiting pods, because a device is free again. The time
  lasts from before the write of the claim until a watch of Events has its Event, so the write of
  the Event is included.
* ``operator-relist``: the API server restarts. The operator loses its watches, and reads everything
  again. The row has the peak of the whole run, including the helper, and the longest pause of the
  main loop (:mod:`.watched`), as `operator-sync` does.
* ``operator-acting``: another process, with policies, drivers and maintenances (:mod:`.acting`):
  until each of them has its status, and each device in maintenance its DeviceTaintRule.
* ``operator-acting-quiet``: ``operator-quiet`` with them.
* ``operator-acting-changes``: devices of the drivers come and go. The figure is the largest number
  of updates of the status of one object within 5 s.
* ``kubectl-drakit``: one process for each command, with its helper.

:mod:`.hostile` measures how one tenant can affect the operator.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from bench.acting import Acting, most_updates, writes_of_operator
from bench.apiserver import ApiServer, Body, each_of
from bench.claims import report
from bench.machine import folders, memory_mib
from bench.plugin import environment, stop
from bench.rows import Row, median_ms, percentile
from bench.scene import NAMESPACE, Scene
from bench.watched import longest_pause
from drakit_daemon.kube import Session, UnavailableError, resource_path
from drakit_formats import crds
from drakit_formats.resource.objects import children
from e2e.cluster.api import CONTROL_PLANE, Cluster, Component
from e2e.images.go import cel_program

START_SECONDS = 20.0

MEMORY_MIB = 320.0
"""Budget of the peak: the memory limit that the chart sets."""

SYNC_BUDGET_SECONDS = 60.0
SLICE_BUDGET_SECONDS = 10.0
CLAIM_BUDGET_MS = 1000.0
PAUSE_BUDGET_MS = 300.0

EVENT_SECONDS = 180.0
"""The longest wait until all pods have an Event."""

SETTLE_SECONDS = 35.0
"""How long to wait until new pods are settled: the operator evaluates each of them again after 30
s."""

QUIET_SECONDS = 20.0
QUIET_CHANGES = 200
EXPLAIN_SECONDS = 120.0
CHANGES = {5: 100, 100: 2_000}
"""The number of changes, by the number per second."""

CHANGES_SHARE = 0.95
"""The share of these changes per second that a run must reach to be valid."""

ANSWER_SECONDS = 30.0
"""How long to wait for the last Event."""

RELIST_SECONDS = 180.0

ACTING_SECONDS = 300.0
"""How long to wait until the operator has acted on all objects. It writes more than 8,000
objects."""

STATUS_SECONDS = 5.0
"""The period in which an object gets at most one status update."""

DEVICE_CHANGES, DEVICE_CHANGES_PER_SECOND = 300, 10

EVALUATION_SECONDS = 10.0
"""Within this time after a relist, the operator evaluates all pods again, and memory reaches its
peak."""

_KINDS = Path(__file__).parent.parent / "charts/drakit/crds"
_CLAIMS = resource_path("resource.k8s.io/v1", "resourceclaims", namespace=NAMESPACE)
_SLICES = resource_path("resource.k8s.io/v1", "resourceslices")
_EVENTS = resource_path("events.k8s.io/v1", "events", namespace=NAMESPACE)
_NODES = resource_path("v1", "nodes")
_FREED = {"status": {"allocation": None, "reservedFor": None}}
_EVALUATED = "drakit_operator_reconcile_duration_seconds_count"


_PROBES_PORT = re.compile(r'"probes_port": ?(\d+)')
_METRICS_PORT = re.compile(r'"metrics_port": ?(\d+)')


def measure_operator(api: ApiServer, cluster: Cluster) -> Iterator[Row]:
    """Return all rows of the operator and of ``kubectl drakit``."""
    with frozen(cluster):
        scene = Scene()
        report(f"operator: {scene.facts()}")
        create_scene(api, scene)
        yield from measure_scene(api, cluster, scene)
        yield from _measure_acting(api, cluster, Acting())
        yield from _measure_kubectl(cluster.kubeconfig, pod=scene.a_pod)


@contextmanager
def frozen(cluster: Cluster) -> Generator[None]:
    """Freeze the components that would change the scene."""
    components = (Component.CONTROLLER_MANAGER, Component.SCHEDULER)
    for component in components:
        cluster.freeze(CONTROL_PLANE, component)
    try:
        yield
    finally:
        for component in components:
            cluster.thaw(CONTROL_PLANE, component)


def create_scene(api: ApiServer, scene: Scene) -> None:
    """Create all objects of the scene."""
    api.create_all("deviceclasses", scene.class_bodies())
    api.create_all("nodes", scene.node_bodies())
    api.create_all("resourceslices", scene.slice_bodies())
    api.create_all("resourceclaims", scene.pending_claim_bodies())
    api.create_all("pods", scene.pod_bodies())

    async def finish(session: Session) -> None:
        async def allocate(each: tuple[Body, Body | None]) -> None:
            body, status = each
            path = f"{_CLAIMS}/{body['metadata']['name']}"
            created = await session.create(_CLAIMS, body)
            if status is not None:
                await session.replace(f"{path}/status", {**created, "status": status})

        async def make_ready(body: Body) -> None:
            # Admission taints each new node.
            name = body["metadata"]["name"]
            await session.patch(f"{_NODES}/{name}", {"spec": {"taints": None}})

        await each_of(scene.other_claims(), allocate)
        await each_of(scene.node_bodies(), make_ready)

    api.run(finish)


def measure_scene(api: ApiServer, cluster: Cluster, scene: Scene) -> Iterator[Row]:
    """Return the rows of one process over the scene."""
    began = time.monotonic()
    with running_operator(cluster.kubeconfig) as operator:
        yield _measure_sync(api, operator, scene, began)
        time.sleep(SETTLE_SECONDS)
        yield _measure_quiet(api, operator, cluster)
        yield _measure_slice_change(api, operator, scene)
        first = QUIET_CHANGES
        for per_second, changes in CHANGES.items():
            yield _measure_claims(api, operator, first, changes, per_second)
            first += changes
        yield _measure_relist(api, operator, cluster)


def _measure_sync(api: ApiServer, operator: OperatorProcess, scene: Scene, began: float) -> Row:
    seconds = _wait(
        operator,
        EVENT_SECONDS,
        # Pods share causes, so there are fewer Events than pods.
        lambda: api.has_events() and operator.metric(_EVALUATED, 'concern="pod"') >= scene.pods,
        began=began,
    )
    return Row(
        f"operator-sync {scene.facts()}",
        {
            "seconds": seconds,
            "cpu_seconds": operator.cpu_seconds(),
            "rss_mib": operator.rss_mib(),
            "rss_peak_mib": operator.peak_mib(),
            "pause_ms": operator.longest_pause_ms(began),
        },
        at_most={"seconds": SYNC_BUDGET_SECONDS, "pause_ms": PAUSE_BUDGET_MS},
    )


def _measure_quiet(api: ApiServer, operator: OperatorProcess, cluster: Cluster) -> Row:
    before, cpu, began = _writes(cluster), operator.cpu_seconds(), time.monotonic()

    async def change(session: Session) -> None:
        labels = {"metadata": {"labels": {"bench.drakit.dev/round": "1"}}}
        for number in range(QUIET_CHANGES // 2):
            await session.patch(f"{_CLAIMS}/holds-{number:05}", labels)
            await session.patch(f"{_SLICES}/explain-{number:04}", labels)

    api.run(change)
    time.sleep(max(0.0, began + QUIET_SECONDS - time.monotonic()))
    seconds = time.monotonic() - began
    return Row(
        "operator-quiet",
        {
            "seconds": seconds,
            "changes": QUIET_CHANGES,
            "writes": _writes(cluster) - before,
            "cpu_percent": (operator.cpu_seconds() - cpu) / seconds * 100,
        },
        at_most={"writes": 0},
    )


def _measure_slice_change(api: ApiServer, operator: OperatorProcess, scene: Scene) -> Row:
    before = operator.metric(_EVALUATED, 'concern="pod"')

    async def change(session: Session) -> None:
        body = scene.slice_body(7, generation=2)
        path = f"{_SLICES}/{body['metadata']['name']}"
        there = await session.get(path)
        await session.replace(path, {**there, "spec": body["spec"]})

    began = time.monotonic()
    api.run(change)
    seconds = _wait(
        operator,
        EXPLAIN_SECONDS,
        lambda: operator.metric(_EVALUATED, 'concern="pod"') >= before + scene.pods,
        began=began,
    )
    return Row(
        f"operator-slice-change pods={scene.pods}",
        {"seconds": seconds},
        at_most={"seconds": SLICE_BUDGET_SECONDS},
    )


@dataclass(kw_only=True)
class _Changes:
    """The times at which claims were changed, and at which their Events arrived, keyed by claim
    name."""

    written: dict[str, float] = field(default_factory=dict[str, float])
    answered: dict[str, float] = field(default_factory=dict[str, float])


def _measure_claims(
    api: ApiServer, operator: OperatorProcess, first: int, number: int, per_second: int
) -> Row:
    cpu, began = operator.cpu_seconds(), time.monotonic()
    pods = operator.metric(_EVALUATED, 'concern="pod"')
    changes, writing_seconds = api.run(
        lambda session: _change_claims(session, range(first, first + number), per_second)
    )
    spent = operator.cpu_seconds() - cpu
    seconds = [
        at - changes.written[name]
        for name, at in changes.answered.items()
        if name in changes.written
    ]
    return Row(
        f"operator-claims per_second={per_second}",
        {
            "changes": len(changes.written),
            "changes_per_second": len(changes.written) / writing_seconds,
            "p50_ms": median_ms(seconds) if seconds else None,
            "p99_ms": percentile(seconds, 0.99) * 1000 if seconds else None,
            "unanswered": len(changes.written) - len(seconds),
            "pods_evaluated": int(operator.metric(_EVALUATED, 'concern="pod"') - pods),
            "cpu_percent": spent / (time.monotonic() - began) * 100,
            "rss_peak_mib": operator.peak_mib(),
            "pause_ms": operator.longest_pause_ms(began),
        },
        at_least={"changes_per_second": per_second * CHANGES_SHARE},
        at_most={"unanswered": 0, "p99_ms": CLAIM_BUDGET_MS},
    )


async def _change_claims(
    session: Session, numbers: Sequence[int], per_second: int
) -> tuple[_Changes, float]:
    """Remove the allocation from claims, at an even pace, until each has its Event."""
    changes = _Changes()
    there = await session.get(_EVENTS, params={"limit": "1"})
    watching = asyncio.create_task(
        _watch_events(session, changes, there["metadata"]["resourceVersion"])
    )
    writing: set[asyncio.Task[Any]] = set()
    began = time.monotonic()
    for count, number in enumerate(numbers):
        await asyncio.sleep(began + count / per_second - time.monotonic())
        name = f"holds-{number:05}"
        changes.written[name] = time.monotonic()
        writing.add(asyncio.create_task(session.patch(f"{_CLAIMS}/{name}/status", _FREED)))
    await asyncio.gather(*writing)
    seconds = time.monotonic() - began
    until = time.monotonic() + ANSWER_SECONDS
    while not changes.written.keys() <= changes.answered.keys() and time.monotonic() < until:
        await asyncio.sleep(0.1)
    watching.cancel()
    await asyncio.wait({watching})
    return changes, seconds


async def _watch_events(session: Session, changes: _Changes, version: str) -> None:
    stream = session.watch(_EVENTS, resource_version=version)
    async with aclosing(stream):
        async for event in stream:
            regarding: Body = event.object.get("regarding") or {}
            if event.type == "ADDED" and regarding.get("kind") == "ResourceClaim":
                changes.answered.setdefault(regarding["name"], time.monotonic())


def _measure_relist(api: ApiServer, operator: OperatorProcess, cluster: Cluster) -> Row:
    """Restart the API server, which then has no history, and wait for the Event of a new change."""
    stopped = time.monotonic()
    cluster.stop_api_server()
    cluster.start_api_server()
    name = f"holds-{QUIET_CHANGES + sum(CHANGES.values()):05}"

    async def change(session: Session) -> None:
        await session.patch(f"{_CLAIMS}/{name}/status", _FREED)

    async def is_answered(session: Session) -> bool:
        selector = {"fieldSelector": f"regarding.kind=ResourceClaim,regarding.name={name}"}
        return bool((await session.get(_EVENTS, params=selector))["items"])

    began = time.monotonic()
    with suppress(UnavailableError):  # a connection to the server before the restart
        api.run(change)
    api.run(change)
    seconds = _wait(operator, RELIST_SECONDS, lambda: api.run(is_answered), began=began)
    time.sleep(EVALUATION_SECONDS)
    return Row(
        "operator-relist",
        {
            "seconds": seconds,
            "rss_mib": operator.rss_mib(),
            "rss_peak_mib": operator.peak_mib(),
            "helper_peak_mib": operator.helper_peak_mib(),
            "pause_ms": operator.longest_pause_ms(stopped),
        },
        at_most={
            "seconds": RELIST_SECONDS,
            "rss_peak_mib": MEMORY_MIB,
            "pause_ms": PAUSE_BUDGET_MS,
        },
    )


def _wait(
    operator: OperatorProcess, limit_seconds: float, is_done: Callable[[], bool], *, began: float
) -> float | None:
    """Return the seconds until a condition is met, or None if that is too late."""
    while time.monotonic() - began < limit_seconds:
        operator.check_running()
        if is_done():
            return time.monotonic() - began
        time.sleep(0.2)
    return None


def _writes(cluster: Cluster) -> int:
    """Return how often the operator has written anything except its Lease."""
    return sum(1 for _ in writes_of_operator(cluster.audit()))


def _measure_acting(api: ApiServer, cluster: Cluster, acting: Acting) -> Iterator[Row]:
    """Return the rows of a process that acts on objects in addition to the scene."""
    cluster.kubectl("apply", "-f", str(_KINDS))
    plurals = (crds.POLICIES, crds.DRIVERS, crds.MAINTENANCES, crds.REPORTS)
    definitions = [f"crd/{plural}.{crds.GROUP}" for plural in plurals]
    cluster.kubectl("wait", "--for=condition=Established", *definitions, "--timeout=30s")
    settings = {"election": LONG_LEASE, "deviceMaintenance": True, "driverTaints": True}
    api.create_all("resourceslices", acting.slice_bodies())
    with running_operator(cluster.kubeconfig, settings=settings) as operator:
        began = time.monotonic()
        api.run(lambda session: _create_acting(session, acting))
        seconds = _wait(
            operator,
            ACTING_SECONDS,
            lambda: api.run(lambda session: _has_acted(session, acting)),
            began=began,
        )
        yield Row(
            f"operator-acting {acting.facts()}",
            {
                "seconds": seconds,
                "cpu_seconds": operator.cpu_seconds(),
                "rss_peak_mib": operator.peak_mib(),
                "pause_ms": operator.longest_pause_ms(began),
            },
            at_most={
                "seconds": ACTING_SECONDS,
                "rss_peak_mib": MEMORY_MIB,
                "pause_ms": PAUSE_BUDGET_MS,
            },
        )
        # Wait for the next count of devices, and for statuses of policies, which can take a minute.
        time.sleep(2 * SETTLE_SECONDS)
        quiet = _measure_quiet(api, operator, cluster)
        yield replace(quiet, name="operator-acting-quiet")
        yield _measure_device_changes(api, operator, cluster, acting)


async def _create_acting(session: Session, acting: Acting) -> None:
    for plural, bodies in (
        (crds.POLICIES, acting.policy_bodies()),
        (crds.DRIVERS, acting.driver_bodies()),
        (crds.MAINTENANCES, acting.maintenance_bodies()),
    ):
        path = resource_path(crds.API_VERSION, plural)

        async def create(body: Body, path: str = path) -> None:
            await session.create(path, body)

        await each_of(bodies, create)


async def _has_acted(session: Session, acting: Acting) -> bool:
    """Return whether all objects have a status, and the devices in maintenance have a taint. No
    node reports hostdev, so policies cannot be accepted."""
    await asyncio.sleep(1.0)
    for plural, condition, number in (
        (crds.MAINTENANCES, ("Tainted", "Tainted"), acting.maintenances),
        (crds.DRIVERS, ("Ready", "Ready"), acting.drivers),
        (crds.POLICIES, ("Accepted", "NoNodes"), acting.policies),
    ):
        items = (await session.list(resource_path(crds.API_VERSION, plural))).items
        conditions = [
            each
            for item in items
            for each in children(item, "status", "conditions")
            if (each["type"], each["reason"]) == condition
        ]
        if len(conditions) < number:
            return False
    return True


def _measure_device_changes(
    api: ApiServer, operator: OperatorProcess, cluster: Cluster, acting: Acting
) -> Row:
    since, began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"), time.monotonic()
    cpu = operator.cpu_seconds()

    async def change(session: Session) -> None:
        for count in range(DEVICE_CHANGES):
            await asyncio.sleep(began + count / DEVICE_CHANGES_PER_SECOND - time.monotonic())
            driver, generation = count % acting.drivers, 2 + count // acting.drivers
            node = driver * acting.nodes_per_driver
            body = acting.slice_body(driver, node, generation=generation)
            path = f"{_SLICES}/{body['metadata']['name']}"
            await session.replace(path, {**await session.get(path), "spec": body["spec"]})

    api.run(change)
    time.sleep(SETTLE_SECONDS)
    writes = list(writes_of_operator(cluster.audit(), since=since))
    return Row(
        f"operator-acting-changes per_second={DEVICE_CHANGES_PER_SECOND}",
        {
            "changes": DEVICE_CHANGES,
            "writes": len(writes),
            "most_updates_in_5_s": most_updates(writes, seconds=STATUS_SECONDS),
            "cpu_percent": (operator.cpu_seconds() - cpu) / (time.monotonic() - began) * 100,
            "rss_peak_mib": operator.peak_mib(),
            "pause_ms": operator.longest_pause_ms(began),
        },
        at_most={
            "most_updates_in_5_s": 1,
            "rss_peak_mib": MEMORY_MIB,
            "pause_ms": PAUSE_BUDGET_MS,
        },
    )


# ---------------------------------------------------------------- the operator's process


@dataclass(kw_only=True)
class OperatorProcess:
    """A running operator."""

    process: subprocess.Popen[bytes]
    probes_port: int
    metrics_port: int
    log: Path
    pauses: Path

    def check_running(self) -> None:
        if self.process.poll() is not None:
            raise SystemExit(f"the operator ended by itself, with {self.process.returncode}")

    def rss_mib(self) -> float:
        """Return VmRSS of the operator and its helper."""
        return self._memory("VmRSS")

    def peak_mib(self) -> float:
        """Return the sum of the peaks (VmHWM) of the operator and its helper."""
        return self._memory("VmHWM")

    def helper_peak_mib(self) -> float:
        return sum(memory_mib(pid, "VmHWM") for pid in self._helpers())

    def longest_pause_ms(self, since: float) -> float:
        """Return the longest time since `since` in which the main loop did not run."""
        return longest_pause(self.pauses, since=since) * 1000

    def cpu_seconds(self) -> float:
        """Return the CPU time of the operator and its helper."""
        ticks = 0
        for pid in (self.process.pid, *self._helpers()):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def metric(self, name: str, labels: str = "") -> float:
        """Return the sum of a metric's values whose labels contain a string."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as response:
            text = response.read().decode()
        sample = re.compile(rf"^{name}(?:\{{([^}}]*)\}})? (\S+)$", re.MULTILINE)
        return sum(float(found[2]) for found in sample.finditer(text) if labels in (found[1] or ""))

    def _memory(self, name: str) -> float:
        return sum(memory_mib(pid, name) for pid in (self.process.pid, *self._helpers()))

    def _helpers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for each in children for pid in each.read_text().split()]


LONG_LEASE = {"leaseDuration": "120s", "renewDeadline": "100s"}
"""A leader exits if it cannot renew its Lease, but must survive the restart of the API server."""


@contextmanager
def running_operator(
    kubeconfig: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    prefix: Sequence[str] = (),
    helper: Path | None = None,
) -> Generator[OperatorProcess]:
    """
    Run the operator.

    :param settings: keys of its configuration file. The default has a long Lease.
    :param prefix: a program that starts the operator, with arguments.
    :param helper: the program that evaluates selectors. By default, the one of this repository.
    """
    with folders() as places:
        config, log = places.root / "operator.yaml", places.root / "log"
        pauses = places.root / "pauses"
        listen = {"probes": "127.0.0.1:0", "metrics": "127.0.0.1:0"}
        chosen = {"election": LONG_LEASE} if settings is None else settings
        config.write_text(yaml.safe_dump({"listen": listen, **chosen}))
        argv = [*prefix, sys.executable, "-m", "bench.watched", str(pauses)]
        argv += ["--config", str(config)]
        cel = {"DRAKIT_CEL": str(helper or cel_program())}
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*argv, "--kubeconfig", str(kubeconfig)],
                env=environment() | {"POD_NAME": "bench", "POD_NAMESPACE": "default"} | cel,
                stdout=output,
                stderr=output,
            )
        try:
            probes, metrics = _ports(process, log)
            yield OperatorProcess(
                process=process,
                probes_port=probes,
                metrics_port=metrics,
                log=log,
                pauses=pauses,
            )
        finally:
            stop(process)


def _ports(process: subprocess.Popen[bytes], log: Path) -> tuple[int, int]:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        text = log.read_text(errors="replace")
        if (probes := _PROBES_PORT.search(text)) and (metrics := _METRICS_PORT.search(text)):
            return int(probes[1]), int(metrics[1])
        time.sleep(0.01)
    raise SystemExit(f"the operator did not start: {log.read_text(errors='replace')[-2000:]}")


# ---------------------------------------------------------------- kubectl drakit


def _measure_kubectl(kubeconfig: Path, *, pod: str) -> Iterator[Row]:
    """Return a row for each command."""
    for command in (f"explain pod/{pod}", "explain -A", "devices", "doctor"):
        yield _measure_command(command, kubeconfig)


def _measure_command(command: str, kubeconfig: Path) -> Row:
    argv = [sys.executable, "-m", "drakit_cli.kubectl.main", *command.split()]
    began = time.monotonic()
    process = subprocess.Popen(
        [*argv, "--kubeconfig", str(kubeconfig)],
        env=environment() | {"DRAKIT_CEL": str(cel_program())},
        stdout=subprocess.DEVNULL,
    )
    peak_mib = 0.0
    while process.poll() is None:
        peak_mib = max(peak_mib, _peak_mib(process.pid))
        time.sleep(0.02)
    return Row(
        f'kubectl-drakit command="{command}"',
        {"seconds": time.monotonic() - began, "rss_peak_mib": peak_mib, "code": process.returncode},
        at_least={"code": 0},
        at_most={"code": 1},
    )


def _peak_mib(pid: int) -> float:
    """Return VmHWM, or 0 if the process has just ended."""
    try:
        return memory_mib(pid, "VmHWM")
    except (OSError, SystemExit):
        return 0.0
