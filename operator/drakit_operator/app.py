"""
The composition root: starts and stops the parts, in order.

Start: session, probes, election; on the leader, sources and Kopf, then the workers. Stop (SIGTERM):
first the leader's work ends, then the Lease is released, so that the next replica does not have to
wait until the Lease expires.

The election thread serves the probes. The main loop updates their results in advance, so that a
probe does not wait for the work on a tenant's object. The election thread also detects a main loop
that hangs.

A replica is the leader at most once: if a part ends, or the Lease may be lost, the process exits.
The kubelet restarts the container.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from drakit_daemon import tasks
from drakit_daemon.kube import ApiError, Session, connect
from drakit_daemon.kube.discovery import minor_release
from drakit_daemon.kube.events import EventRecorder
from drakit_daemon.logs import ProblemLog
from drakit_daemon.metrics import text_of
from drakit_daemon.probes import StatusServers
from drakit_explain.cel.allocator import Allocator
from drakit_explain.cel.gates import (
    GatesUnknownError,
    allocator_gates,
    gates_of,
    read_all_gates,
    rules_work,
)
from drakit_explain.kinds import (
    CLASSES,
    DRIVERS,
    KINDS,
    MAINTENANCES,
    POLICIES,
    RULES,
    UNREADABLE,
    Kind,
)
from drakit_explain.projection import project_template
from drakit_explain.selectors import Selectors
from drakit_formats.resource.objects import Object, text
from drakit_operator.admission import Admission
from drakit_operator.affected import DRIVER, MAINTENANCE, POLICY, REPORT
from drakit_operator.allocating import AllocatorQueries
from drakit_operator.announcing import CONTROLLER, Announcer, EventWriter
from drakit_operator.config import Config
from drakit_operator.drivers import DriverController
from drakit_operator.handlers import Controller, Handlers
from drakit_operator.leadership import Leadership
from drakit_operator.maintenance import MaintenanceController
from drakit_operator.metrics import Metrics
from drakit_operator.outdated_reports import OutdatedReports
from drakit_operator.policies.controller import PolicyController
from drakit_operator.reconciler import Reconciler, Refresh, new_queue
from drakit_operator.sources import LoadWatch, Sources
from drakit_operator.store import Store

logger = logging.getLogger(__name__)

USER_AGENT = "drakit-operator"

SILENT_LIMIT_SECONDS = 35.0
"""If a replica has received no response about the Lease for this long, it is not ready. Retries
take additional time."""

STOP_SECONDS = 4.0
"""How long to wait for the leader's work to stop: Kopf takes up to 2 s, and the rest is a
margin."""

RETRY_LIMIT_SECONDS = 30.0
"""Maximum pause between two attempts to write an Event."""

HEALTH_SECONDS = 1.0
"""How often to update the probe results."""

HANGING_LIMIT_SECONDS = 60.0
"""Maximum time between two updates by the main loop. If it is longer, the main loop is hanging. One
object can take seconds."""

MEASURE_SECONDS = 1.0
"""How long a scrape waits for the main loop. After that, the scrape returns some outdated
gauges."""

LOADS_SECONDS = 10.0
"""How long to wait for the free resources of nodes. Without them, some pods get no Event."""

STALLED_LIMIT_SECONDS = 300.0
"""How long the queue can go without progress before it is considered to be hanging. It must not be
considered to be hanging while the API server is temporarily unavailable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Health:
    """The probe results. Immutable, because another thread reads them."""

    at: float
    """The time of the update (``time.monotonic``)."""

    liveness_problem: str | None = None
    """The reason why the process must be restarted. A replica that is not the leader is healthy."""

    readiness_problem: str | None = None
    """The reason why the leader cannot do its work."""


class App:
    """One replica of the operator. Run it once; set ``stop`` to stop it."""

    def __init__(
        self,
        *,
        config: Config,
        kubeconfig: Path | None,
        name: str,
        namespace: str,
        selectors: Selectors,
    ) -> None:
        """
        :param name: the name of this replica, which must be different for each replica.
        :param namespace: the namespace of the Lease.
        """
        self._config = config
        self._kubeconfig = kubeconfig
        self._name = name
        self._selectors = selectors
        self._metrics = Metrics()
        self._leader: _Leader | None = None
        self.stop = asyncio.Event()
        self.servers = StatusServers(
            listen=config.listen, probed=self, metrics=partial(text_of, self._metrics.registry)
        )
        self._health = _Health(at=time.monotonic())
        self.admission = self._admission() if config.admission.enabled else None
        self._leadership = Leadership(
            self._connect,
            config.election,
            namespace=namespace,
            identity=name,
            companion=self._serve_probes,
        )

    async def run(self) -> None:
        """Run until stopped. Raise an error if the replica ends for any other reason."""
        self._loop = asyncio.get_running_loop()
        self._handle_signals()
        async with await self._connect() as session:
            logger.info("started", extra={"server": session.server})
            await self._run_parts(session)
        logger.info("stopped")

    def _admission(self) -> Admission:
        policy_type = None
        if self._config.host_device_policies:
            # Import lazily to save memory: the driver's model takes 15 MiB.
            from drakit_drivers.hostdev.policy import HostDevicePolicySpec

            policy_type = HostDevicePolicySpec
        return Admission(
            self._config.admission,
            connect=self._connect,
            warn=self._warn,
            policy_type=policy_type,
            count=lambda result: self._metrics.admission_requests.labels(result).inc(),
        )

    def _handle_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop.set)

    async def _run_parts(self, session: Session) -> None:
        election = asyncio.create_task(self._leadership.run(), name="election")
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "leader": lambda: self._lead(session),
            "health": self._follow_health,
        }
        if self.admission is not None:
            parts["admission"] = self.admission.run
        working = asyncio.create_task(tasks.run(parts), name="parts")
        stopping = asyncio.create_task(self.stop.wait(), name="stop")
        running = {election, working, stopping}
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Release the Lease only after the leader's work has ended.
            for task in (stopping, working, election):
                task.cancel()
                await asyncio.wait({task}, timeout=STOP_SECONDS)
        for task in (working, election):
            if not task.done():
                logger.error("a component did not stop in time", extra={"part": task.get_name()})
            elif not task.cancelled():
                task.result()

    async def _lead(self, session: Session) -> None:
        await self._leadership.won.wait()
        self._leader = _Leader(
            config=self._config,
            session=session,
            connect=self._connect,
            writer=EventWriter(
                session, instance=self._name, may_write=lambda: self._leadership.is_leader
            ),
            name=self._name,
            metrics=self._metrics,
            selectors=self._selectors,
            on_kopf_started=self._handle_signals,
        )
        await self._leader.run()

    async def _connect(self) -> Session:
        """Open a session in the running loop: that of the main, election or webhook thread."""
        return await connect(self._kubeconfig, user_agent=USER_AGENT)

    async def _follow_health(self) -> None:
        while True:
            self._health = _Health(
                at=time.monotonic(),
                liveness_problem=self._leader and self._leader.liveness_problem(),
                readiness_problem=self._leader and self._leader.readiness_problem(),
            )
            await asyncio.sleep(HEALTH_SECONDS)

    # ------------------------------------------------------------ called in the webhook thread

    async def _warn(self, template: Object) -> list[str]:
        """Return the reasons why claims of a template can never be allocated. Only the leader can
        determine them."""
        if self._leader is None:
            return []
        try:
            facts = project_template(template, text(template, "apiVersion").rpartition("/")[2])
        except UNREADABLE:
            return []
        found = self._leader.reconciler.never_allocated(facts)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(found, self._loop))

    # ------------------------------------------------------------ called in the election thread

    @contextlib.asynccontextmanager
    async def _serve_probes(self) -> AsyncGenerator[None]:
        await self.servers.start()
        try:
            yield
        finally:
            await self.servers.stop()

    async def liveness_problems(self) -> Sequence[str]:
        """Return the reasons to restart the process."""
        return self._with_hang(self._health.liveness_problem)

    async def readiness_problems(self) -> Sequence[str]:
        """Return the reasons why this replica is not ready to be the leader."""
        limit_seconds = SILENT_LIMIT_SECONDS + self._config.election.retry_period
        if self._leadership.silent_seconds() > limit_seconds:
            return ["the API server does not respond"]
        if self.admission is not None and not self.admission.port:
            return ["the admission webhook is not served"]
        return self._with_hang(self._health.readiness_problem)

    def _with_hang(self, problem: str | None) -> Sequence[str]:
        if time.monotonic() - self._health.at > HANGING_LIMIT_SECONDS:
            problem = "the main loop makes no progress"
        return [problem] if problem else []

    async def measure(self) -> None:
        """Update the leader's gauges. All other metrics are always up to date."""
        measured = asyncio.run_coroutine_threadsafe(self._measure(), self._loop)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEASURE_SECONDS):
                await asyncio.wrap_future(measured)

    async def _measure(self) -> None:
        if self._leader is not None:
            self._leader.reconciler.measure()


class _Leader:
    """Does the leader's work. It runs once, until canceled."""

    def __init__(
        self,
        *,
        config: Config,
        session: Session,
        connect: Callable[[], Awaitable[Session]],
        writer: EventWriter,
        name: str,
        metrics: Metrics,
        selectors: Selectors,
        on_kopf_started: Callable[[], None],
    ) -> None:
        self._config = config
        self._session = session
        self._connect = connect
        self._metrics = metrics
        self._on_kopf_started = on_kopf_started
        self._store = Store()
        self._release_read = asyncio.Event()
        self._release_problems = ProblemLog(
            logger,
            "the release of Kubernetes cannot be read",
            recovered="the release of Kubernetes is known",
        )
        self._gates_problems = ProblemLog(
            logger,
            "the cluster's feature gates are unknown",
            recovered="the cluster's feature gates are known",
        )
        self._allocator = Allocator()
        self._queue = new_queue(retry_limit_seconds=RETRY_LIMIT_SECONDS)
        self._policies = PolicyController(
            session,
            self._store.world,
            class_version=lambda: self.sources.version_of(CLASSES),
            restricts_namespaces=config.restrict_namespaces,
        )
        recorder = EventRecorder(session, controller=CONTROLLER, instance=name)
        self._rules_work = True
        self._maintenances = MaintenanceController(
            session,
            self._store.world,
            rules_version=self._rules_version,
            working_rules_version=self._working_rules_version,
            recorder=recorder,
            is_followed=lambda: (
                config.device_maintenance and not self.sources.is_absent(MAINTENANCES)
            ),
        )
        self._drivers = DriverController(
            session,
            self._store.world,
            recorder=recorder,
            metrics=metrics,
            devices=lambda: self.reconciler.driver_devices,
            is_current=lambda: self.sources.is_current and not self.sources.is_absent(DRIVERS),
            rules_version=self._working_rules_version if config.driver_taints else None,
        )
        self._concerns: dict[Kind, tuple[str, Controller]] = {
            POLICIES: (POLICY, self._policies),
            MAINTENANCES: (MAINTENANCE, self._maintenances),
        }
        unwanted = {
            *(() if config.host_device_policies else (POLICIES,)),
            *(() if config.device_maintenance else (MAINTENANCES,)),
        }
        self.reconciler = Reconciler(
            store=self._store,
            queue=self._queue,
            announcer=Announcer(writer, timing=config.events, metrics=metrics),
            metrics=metrics,
            debounce_seconds=config.events.debounce,
            selectors=selectors,
            allocator=AllocatorQueries(self._allocator, metrics),
            name_all_holders=config.events.name_holders == "all",
            refresh={
                POLICY: Refresh(call=self._policies.refresh),
                REPORT: Refresh(call=OutdatedReports(session, self._store.world).refresh),
                MAINTENANCE: Refresh(
                    call=self._maintenances.refresh, expressions=self._maintenances.expressions
                ),
                DRIVER: Refresh(call=self._drivers.refresh),
            },
            is_current=lambda: self.sources.is_current,
        )
        self.sources = Sources(
            session,
            self._store,
            [kind for kind in KINDS if kind not in unwanted],
            metrics=metrics,
            take=self.reconciler.changed,
            recheck_seconds=config.resync_period,
        )
        self._loads = LoadWatch(session)
        self._store.world.loads = self._loads.loads

    def _rules_version(self) -> str:
        """Return the ``apiVersion`` of DeviceTaintRules. Empty if the cluster does not serve
        them."""
        return "" if self.sources.is_absent(RULES) else self.sources.version_of(RULES)

    def _working_rules_version(self) -> str:
        """Return the ``apiVersion`` of DeviceTaintRules, or an empty string if the scheduler
        ignores them. Up to 1.36, an API server can serve them even if their feature gate is
        disabled."""
        return self._rules_version() if self._rules_work else ""

    async def run(self) -> None:
        """Watch and reconcile until canceled. If a part fails, raise its error."""
        self._metrics.leader.set(1)
        self._metrics.queue_depth.set_function(lambda: len(self._queue))
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "sources": self.sources.run,
            "loads": self._loads.run,
            "kopf": self._serve_kinds,
            "cluster": self._follow_cluster,
            "device counts": partial(self._once_listed, self.reconciler.count_devices),
            "selectors": self.reconciler.evaluate,
        }
        for number in range(self._config.workers):
            for name, urgent in (("worker", False), ("worker of claims", True)):
                work = partial(self.reconciler.work, urgent=urgent)
                parts[f"{name} {number}"] = partial(self._once_listed, work)
        try:
            await tasks.run(parts)
        finally:
            self._queue.close()
            self._allocator.close()

    def liveness_problem(self) -> str | None:
        """Return a problem that only a process restart can solve."""
        if self._queue.stalled_seconds() > STALLED_LIMIT_SECONDS and self.sources.complete.is_set():
            return "the work queue makes no progress"
        return None

    def readiness_problem(self) -> str | None:
        """Return the reason why the leader cannot do its work."""
        controllers = (self.sources, self._policies, self._maintenances, self._drivers)
        return next(filter(None, (each.problem() for each in controllers)), None)

    async def _once_listed(self, work: Callable[[], Awaitable[None]]) -> None:
        await self.sources.complete.wait()
        await self._release_read.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOADS_SECONDS):
                await self._loads.listed.wait()
        await work()

    async def _serve_kinds(self) -> None:
        async with await self._connect() as session:
            handlers = Handlers(
                session,
                self.sources,
                {
                    kind: controller
                    for kind, (_, controller) in self._concerns.items()
                    if kind in self.sources.kinds
                },
                check=self._check,
                on_started=self._on_kopf_started,
            )
            await handlers.run()

    def _check(self, kind: Kind, name: str, seconds: float) -> None:
        self.reconciler.check(self._concerns[kind][0], name, seconds)

    async def _follow_cluster(self) -> None:
        """Periodically read the cluster's version and feature gates, and check the waiting pods. A
        cluster upgrade can change the scheduler's rules while this replica is the leader."""
        while True:
            await asyncio.gather(self._read_release(), self._read_gates())
            await asyncio.sleep(self._config.resync_period)

    async def _read_release(self) -> None:
        world = self._store.world
        try:
            world.use_release(await minor_release(self._session))
        except ApiError as error:
            assumed = "the newest one" if world.minor is None else f"1.{world.minor}"
            self._release_problems.report(str(error), assumed=assumed)
        else:
            self._release_problems.report(None)
        self._release_read.set()
        self.reconciler.add_waiting()

    async def _read_gates(self) -> None:
        try:
            gates = await read_all_gates(self._session)
        except (ApiError, GatesUnknownError) as error:
            self._gates_problems.report(str(error))
            await self.reconciler.use(None)
        else:
            self._gates_problems.report(None)
            self._rules_work = rules_work(gates)
            if self._allocator.use(allocator_gates(gates)):
                self.reconciler.verdicts.clear()
            await self.reconciler.use(gates_of(gates))
