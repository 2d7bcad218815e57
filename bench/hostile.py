"""
Measures how tenants can affect others: `python -m bench.hostile`.

The operator runs as a process with the chart's limits against a real API server. It is started
again for each of the :mod:`.attacks`, from 1, 10 and 100 namespaces. For each number, the last row
is a start while the objects of all attacks exist.

During an attack, pods of other namespaces appear, the probes are called as by a kubelet, and the
Lease is read.

Prints one line for each attack. Exits with 1 if a figure exceeds its limit, and names it:

* the Lease has one holder, and is never older than its duration
* each probe responds in time, and with success
* the memory stays below the chart's limit (a cgroup with this limit, if one can be created)
* each innocent pod has its Event within 30 s
"""

from __future__ import annotations

import argparse
import asyncio
import os
import stat
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import yaml

from bench import REPOSITORY
from bench.apiserver import Body, each_of
from bench.attacks import ATTACKS, Attack, Item, innocent, scene
from bench.claims import report
from bench.machine import describe, folders
from bench.operator import OperatorProcess, frozen, running_operator
from bench.rows import Row
from drakit_daemon.kube import AlreadyExistsError, ApiError, Session, connect, resource_path
from drakit_daemon.kube.session import Timeouts
from drakit_formats import crds
from drakit_operator.announcing import CONTROLLER
from e2e.cluster.api import Cluster, Options
from e2e.cluster.choice import cluster as find_cluster
from e2e.images.go import cel_program

INNOCENT_SECONDS = 30.0
"""Maximum time between the creation of a pod and its Event."""

INNOCENT_PAUSE_SECONDS = 5.0

OBSERVED_SECONDS = 30.0
"""How long innocent pods are created after the last object of an attack."""

LEASE_SECONDS = 15.0
"""The default of ``election.leaseDuration``."""

PROBES = {"/healthz": 5.0, "/readyz": 3.0}
"""The timeouts of the chart's probes."""

READY_SECONDS = 60.0
REQUEST_SECONDS = 120.0

WRITERS = 3
"""Maximum number of objects to create concurrently, because the API server compiles thousands of
selectors."""

ATTEMPTS = 5
POLL_SECONDS = 0.5
INNOCENTS = tuple(f"innocent-{number}" for number in range(10))
"""The namespaces that innocent pods use in turn. If many pods in one namespace have the same cause,
the operator writes an Event about their class instead."""

_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.events"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.oom_control"),
)
"""For cgroup v2 and v1: the root, the file of the limit, and that of the kills."""

_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
_JSON = {"Content-Type": "application/json"}
_LEASE = resource_path(
    "coordination.k8s.io/v1", "leases", namespace="default", name="drakit-operator"
)


def main() -> None:
    arguments = _parser().parse_args()
    chosen = [each for each in ATTACKS if each.name in arguments.only]
    missed: list[str] = []
    print(describe(), flush=True)
    cluster = find_cluster(os.environ.get("CLUSTER_NAME", "hostile"))
    cluster.start(Options(nodes=0))
    try:
        for crd in sorted((REPOSITORY / "charts" / "drakit" / "crds").glob("*.yaml")):
            cluster.kubectl("apply", "-f", str(crd))
        with frozen(cluster):
            for number in arguments.namespaces:
                missed += asyncio.run(
                    _run(cluster, chosen, namespaces=number, together=arguments.together)
                )
    finally:
        cluster.stop()
    for sentence in missed:
        print(f"limit exceeded: {sentence}", file=sys.stderr)
    sys.exit(1 if missed else 0)


def _parser() -> argparse.ArgumentParser:
    names = [each.name for each in ATTACKS]
    parser = argparse.ArgumentParser(prog="python -m bench.hostile", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these attacks")
    parser.add_argument(
        "--namespaces", nargs="+", type=int, default=[1, 10, 100], help="numbers of namespaces"
    )
    parser.add_argument(
        "--no-together", dest="together", action="store_false", help="without the last row"
    )
    return parser


async def _run(
    cluster: Cluster, attacks: Sequence[Attack], *, namespaces: int, together: bool
) -> list[str]:
    missed: list[str] = []
    async with await _connect(cluster) as session:
        await _create_scene(session, attacks, namespaces)
        for attack in attacks:
            row = await _measure(cluster, session, attack, namespaces)
            await _delete_all(session, attack, namespaces)
            missed += _print(row)
        if together:
            report(f"creating the objects of all attacks from {namespaces} namespaces each")
            for attack in attacks:
                await _create(session, attack.items_of(attack.namespaces(namespaces)))
            every = Attack(
                name="start",
                facts=f"attacks={len(attacks)}",
                items=lambda _: iter(()),
                helper_hangs=any(each.helper_hangs for each in attacks),
            )
            missed += _print(await _measure(cluster, session, every, namespaces))
            for attack in attacks:
                await _delete_all(session, attack, namespaces)
    return missed


async def _connect(cluster: Cluster) -> Session:
    timeouts = Timeouts(request_seconds=REQUEST_SECONDS)
    return await connect(cluster.kubeconfig, user_agent="drakit-hostile", timeouts=timeouts)


def _print(row: Row) -> list[str]:
    print(row.line(), flush=True)
    return list(row.missed())


# ---------------------------------------------------------------- one attack


class _Innocent(NamedTuple):
    namespace: str
    name: str


@dataclass(kw_only=True)
class _Observed:
    """The observations of the operator during an attack."""

    holders: set[str] = field(default_factory=set[str])
    transitions: set[int] = field(default_factory=set[int])
    lease_seconds: float = 0.0
    """The highest observed age of the Lease."""

    probes: int = 0
    unanswered: int = 0
    probe_seconds: float = 0.0
    peak_mib: float = 0.0
    created: dict[_Innocent, float] = field(default_factory=dict[_Innocent, float])
    """The times at which innocent pods were created."""

    explained: dict[_Innocent, float] = field(default_factory=dict[_Innocent, float])
    """How many seconds it took until each pod had its Event."""

    writes: int = 0
    no_answers: int = 0
    """The number of requests to which the API server did not respond. If there are any, it is the
    bottleneck."""


async def _measure(cluster: Cluster, session: Session, attack: Attack, namespaces: int) -> Row:
    seen = _Observed()
    with (
        _memory_limit() as group,
        _helper(hangs=attack.helper_hangs) as helper,
        running_operator(
            cluster.kubeconfig,
            settings={},
            prefix=group.prefix if group is not None else (),
            helper=helper,
        ) as operator,
    ):
        await _wait_until_ready(operator)
        began = time.monotonic()
        async with _observing(session, operator, seen):
            await _attack(cluster, session, attack, namespaces, seen)
        seconds = time.monotonic() - began
        kills = group.kills() if group is not None else None
        ended = operator.process.poll()
        cpu_seconds = 0.0 if ended is not None else operator.cpu_seconds()
        row = Row(
            f"{attack.name} {attack.facts} namespaces={namespaces}",
            {
                "seconds": seconds,
                "ended": 0 if ended is None else 1,
                "leaders": len(seen.holders),
                "transitions": len(seen.transitions) - 1,
                "lease_seconds": seen.lease_seconds,
                "probes": seen.probes,
                "unanswered": seen.unanswered,
                "probe_ms": seen.probe_seconds * 1000,
                "rss_peak_mib": seen.peak_mib,
                **({"oom_kills": kills} if kills is not None else {}),
                "innocent": len(seen.created),
                "unexplained": len(seen.created) - len(seen.explained),
                "innocent_seconds": max(seen.explained.values(), default=None),
                "cpu_percent": cpu_seconds / seconds * 100,
                "no_answers": seen.no_answers,
                **({"writes": seen.writes} if attack.rewrites else {}),
            },
            at_most={
                "ended": 0,
                "leaders": 1,
                "transitions": 0,
                "lease_seconds": LEASE_SECONDS,
                "unanswered": 0,
                "rss_peak_mib": _limit_mib(),
                "unexplained": 0,
                "innocent_seconds": INNOCENT_SECONDS,
                **({"oom_kills": 0} if kills is not None else {}),
            },
        )
        if any(row.missed()):
            report(f"the end of the operator's log: {operator.log.read_text()[-4000:]}")
        return row


async def _attack(
    cluster: Cluster, session: Session, attack: Attack, namespaces: int, seen: _Observed
) -> None:
    """Create the objects of an attack and, at the same time, innocent pods. Wait for their
    Events."""
    created, ended = threading.Event(), threading.Event()
    # Write in another thread, because encoding large objects would delay the probes.
    writing = _write(cluster, attack, namespaces, seen, created=created, ended=ended)
    attacking = asyncio.create_task(asyncio.to_thread(asyncio.run, writing))
    until: float | None = None
    number = 0
    try:
        while until is None or time.monotonic() < until:
            pod = _Innocent(INNOCENTS[number % len(INNOCENTS)], f"{attack.name}-{number}")
            number += 1
            await _create(session, innocent(*pod))
            seen.created[pod] = time.monotonic()
            await asyncio.sleep(INNOCENT_PAUSE_SECONDS)
            if until is None and (created.is_set() or attacking.done()):
                until = time.monotonic() + OBSERVED_SECONDS
        until = time.monotonic() + INNOCENT_SECONDS
        while seen.created.keys() - seen.explained.keys() and time.monotonic() < until:
            await asyncio.sleep(POLL_SECONDS)
    finally:
        ended.set()
        await attacking


async def _write(
    cluster: Cluster,
    attack: Attack,
    namespaces: int,
    seen: _Observed,
    *,
    created: threading.Event,
    ended: threading.Event,
) -> None:
    """Write the objects of an attack, and continue with changes until the attack ends."""
    async with await _connect(cluster) as session:
        names = attack.namespaces(namespaces)
        await _create(session, attack.items_of(names))
        created.set()
        while attack.rewrites and not ended.is_set():
            next_at = time.monotonic() + 1 / attack.rewrites
            first = next(attack.items(names[seen.writes % namespaces]))
            label = {"metadata": {"labels": {"round": str(seen.writes)}}}
            await session.patch(f"{_collection(first)}/{first.name}", label)
            seen.writes += 1
            await asyncio.sleep(next_at - time.monotonic())


@asynccontextmanager
async def _observing(
    session: Session, operator: OperatorProcess, seen: _Observed
) -> AsyncGenerator[None]:
    watching = [
        asyncio.create_task(_follow_lease(session, seen)),
        asyncio.create_task(_follow_events(session, seen)),
        asyncio.create_task(_follow_memory(operator, seen)),
        *(
            asyncio.create_task(_follow_probe(operator.probes_port, path, seconds, seen))
            for path, seconds in PROBES.items()
        ),
    ]
    try:
        yield
    finally:
        for task in watching:
            task.cancel()
        await asyncio.wait(watching)
    for task in watching:
        if not task.cancelled():
            task.result()


async def _follow_lease(session: Session, seen: _Observed) -> None:
    while True:
        await asyncio.sleep(POLL_SECONDS)
        asked = datetime.now(UTC)
        try:
            spec: Body = (await session.get(_LEASE))["spec"]
        except ApiError:
            seen.no_answers += 1
            continue
        seen.holders.add(spec["holderIdentity"])
        seen.transitions.add(spec.get("leaseTransitions", 0))
        renewed = datetime.fromisoformat(spec["renewTime"])
        seen.lease_seconds = max(seen.lease_seconds, (asked - renewed).total_seconds())


async def _follow_events(session: Session, seen: _Observed) -> None:
    while True:
        await asyncio.sleep(POLL_SECONDS)
        for pod in seen.created.keys() - seen.explained.keys():
            path = resource_path("events.k8s.io/v1", "events", namespace=pod.namespace)
            of_pod = {"fieldSelector": f"regarding.kind=Pod,regarding.name={pod.name}"}
            try:
                events = (await session.get(path, params=of_pod))["items"]
            except ApiError:
                seen.no_answers += 1
                continue
            if any(each.get("reportingController") == CONTROLLER for each in events):
                seen.explained[pod] = time.monotonic() - seen.created[pod]


async def _follow_memory(operator: OperatorProcess, seen: _Observed) -> None:
    while operator.process.poll() is None:
        with suppress(OSError, SystemExit):  # the helper has just ended
            seen.peak_mib = max(seen.peak_mib, operator.peak_mib())
        await asyncio.sleep(POLL_SECONDS)


async def _follow_probe(port: int, path: str, timeout_seconds: float, seen: _Observed) -> None:
    """Send requests once a second, with a new connection each time, as the kubelet does."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
        while True:
            began = time.monotonic()
            answered = await _is_ok(client, port, path, timeout_seconds)
            seconds = time.monotonic() - began
            seen.probes += 1
            seen.unanswered += not answered
            seen.probe_seconds = max(seen.probe_seconds, seconds)
            await asyncio.sleep(max(0.0, 1 - seconds))


async def _is_ok(
    client: aiohttp.ClientSession, port: int, path: str, timeout_seconds: float
) -> bool:
    try:
        async with (
            asyncio.timeout(timeout_seconds),
            client.get(f"http://127.0.0.1:{port}{path}") as answer,
        ):
            return answer.status == 200
    except (TimeoutError, aiohttp.ClientError):
        return False


async def _wait_until_ready(operator: OperatorProcess) -> None:
    """Wait until the operator is ready, and holds the Lease."""
    until = time.monotonic() + READY_SECONDS
    async with aiohttp.ClientSession() as client:
        while not await _is_ok(client, operator.probes_port, "/readyz", 5):
            operator.check_running()
            if time.monotonic() > until:
                raise SystemExit(f"the operator is not ready: {operator.log.read_text()[-4000:]}")
            await asyncio.sleep(0.2)
    while not operator.metric("drakit_operator_leader"):
        operator.check_running()
        if time.monotonic() > until:
            raise SystemExit(f"the operator does not lead: {operator.log.read_text()[-4000:]}")
        await asyncio.sleep(0.2)


# ---------------------------------------------------------------- objects


async def _create_scene(session: Session, attacks: Sequence[Attack], namespaces: int) -> None:
    """Create the objects that exist before each attack, unless they exist already."""
    hostile = [name for each in attacks for name in each.namespaces(namespaces)]
    for name in (*INNOCENTS, *hostile):
        body = {"metadata": {"name": name}}
        # Create the service account, because the controller manager, which normally does so, is
        # frozen.
        account = {"metadata": {"name": "default"}}
        with suppress(AlreadyExistsError):
            await session.create(resource_path("v1", "namespaces"), body)
            await session.create(resource_path("v1", "serviceaccounts", namespace=name), account)
    await _create(session, scene(), may_exist=True)
    for item in scene():
        if item.resource == "nodes":  # an admission plugin taints each new node
            path = resource_path("v1", "nodes", name=item.name)
            await session.patch(path, {"spec": {"taints": None}})


async def _create(session: Session, items: Iterator[Item], *, may_exist: bool = False) -> None:
    async def create(item: Item) -> None:
        body = item.text.encode()
        stored = b""
        for attempt in range(ATTEMPTS):
            status, stored = await _post(session, _collection(item), body)
            if status in (HTTPStatus.OK, HTTPStatus.CREATED):
                if len(stored) < len(body):
                    raise RuntimeError(f"the API server drops a part of {item.name}")
                return
            if status == HTTPStatus.CONFLICT and (attempt or may_exist):
                return  # the API server took too long, but created the object
            if status not in _BUSY:
                break
        raise RuntimeError(f"{item.name} is refused: {stored[:1000]!r}")

    await each_of(items, create, writers=WRITERS)


async def _post(session: Session, path: str, body: bytes) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with session.http.post(
        session.server + path, data=body, headers=_JSON, timeout=timeout
    ) as answer:
        return answer.status, await answer.read()


async def _delete_all(session: Session, attack: Attack, namespaces: int) -> None:
    """Delete the objects of an attack, and the innocent pods, because the next operator would see
    them."""
    paths = {
        _collection(item) if item.namespace else f"{_collection(item)}/{item.name}"
        for item in (
            *attack.items_of(attack.namespaces(namespaces)),
            *(item for namespace in INNOCENTS for item in innocent(namespace, "")),
        )
    }
    for path in sorted(paths):
        # Don't use the session's methods, because the responses contain all deleted objects.
        async with session.http.delete(session.server + path) as answer:
            answer.raise_for_status()


def _collection(item: Item) -> str:
    return _path(item.resource, item.namespace)


def _path(resource: str, namespace: str) -> str:
    versions = {"pods": "v1", "nodes": "v1", "nodedevicereports": crds.API_VERSION}
    version = versions.get(resource, "resource.k8s.io/v1")
    return resource_path(version, resource, namespace=namespace or None)


# ---------------------------------------------------------------- the process


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A cgroup with the chart's memory limit."""

    folder: Path
    kills_file: str

    @property
    def prefix(self) -> list[str]:
        """A command that joins the group, and then executes another program."""
        return ["/bin/sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    def kills(self) -> int:
        """Return how many processes the kernel has killed because of the limit."""
        words = [line.split() for line in (self.folder / self.kills_file).read_text().splitlines()]
        return sum(int(value) for key, value in words if key == "oom_kill")


@contextmanager
def _memory_limit() -> Generator[_Group | None]:
    """Create a cgroup with the limit, or return None if this machine does not allow it."""
    for root, limit_file, kills_file in _CGROUPS:
        folder = root / f"drakit-hostile-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if not (folder / limit_file).exists():
                continue
            (folder / limit_file).write_text(str(int(_limit_mib()) << 20))
            yield _Group(folder=folder, kills_file=kills_file)
            return
        finally:
            _remove(folder)
    report("no cgroup can be made: the memory is measured, but not limited")
    yield None


def _remove(group: Path) -> None:
    for _ in range(50):  # its last process may not be gone yet
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


def _limit_mib() -> float:
    values: Any = yaml.safe_load((REPOSITORY / "charts" / "drakit" / "values.yaml").read_text())
    text: str = values["operator"]["resources"]["limits"]["memory"]
    return float(text.removesuffix("Mi"))


@contextmanager
def _helper(*, hangs: bool) -> Generator[Path]:
    """Return the program that evaluates selectors, which may hang."""
    if not hangs:
        yield cel_program()
        return
    with folders() as places:
        script = places.root / cel_program().name  # a release's name: only those allocate
        script.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -m bench.hanging "{cel_program()}" "$@"\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        yield script


if __name__ == "__main__":
    main()
