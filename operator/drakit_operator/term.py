"""
One term of leadership: the parts that run while this replica leads.

Store, queue and the record of Events begin empty with each term, because the actions of other
leaders are unknown. Within a term they outlive all other parts.

It must not know how leadership is won or lost, signals, or the probes' port.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Mapping

from drakit import tasks
from drakit.cel.gates import GatesUnknownError, read_gates
from drakit.explain.selectors import Selectors
from drakit.kube import ApiError, Session
from drakit.kube.queue import WorkQueue
from drakit.logs import ProblemLog
from drakit_operator.announcing import Announcer, Recorder, Timing
from drakit_operator.config import Config
from drakit_operator.intake import Intake
from drakit_operator.kinds import CLASSES, KINDS, Served
from drakit_operator.metrics import Metrics
from drakit_operator.policies.apply import PolicyWriter
from drakit_operator.policies.controller import PolicyController
from drakit_operator.store import Store
from drakit_operator.watching.census import Census, Swept
from drakit_operator.watching.loads import LoadWatch
from drakit_operator.watching.observer import Observer
from drakit_operator.watching.supervisor import Watcher
from drakit_operator.watching.thread import KopfThread
from drakit_operator.work import URGENT, Key, Work

__all__ = ("Term",)

logger = logging.getLogger(__name__)

SWEEP_RETRY_SECONDS = 5.0
"""Pause before a failed sweep is repeated."""

RETRY_LIMIT_SECONDS = 30.0
"""Longest pause between two attempts to write an Event."""

SILENT_LIMIT_SECONDS = 30.0
"""Kopf's loop sends a heartbeat every second; without one for this long it hangs."""

OLDEST_LIMIT_SECONDS = 300.0
"""Longest wait for a worker; a temporarily unavailable API server must not count as a hang."""


class Term:
    """Runs once, until it is canceled."""

    def __init__(
        self,
        *,
        config: Config,
        session: Session,
        connect: Callable[[], Awaitable[Session]],
        recorder: Recorder,
        metrics: Metrics,
        selectors: Selectors,
        may_write: Callable[[], bool],
    ) -> None:
        self._config = config
        self._session = session
        self._connect = connect
        self._metrics = metrics
        self._store = Store()
        self._observer = Observer(metrics)
        self._census = Census(session, self._store, KINDS, observer=self._observer)
        self._loads = LoadWatch(session)
        self._store.world.loads = self._loads.loads
        self._versions: Mapping[Served, str] = {}
        self._queue: WorkQueue[Key] = WorkQueue(
            capacity=config.queue_size,
            retry_limit_seconds=RETRY_LIMIT_SECONDS,
            is_urgent=lambda key: key.concern in URGENT,
        )
        self._policies = PolicyController(
            self._store,
            PolicyWriter(session, class_version=self._class_version, may_write=may_write),
        )
        timing = Timing(
            debounce_seconds=config.events.debounce,
            change_seconds=config.events.change_pause,
            repeat_seconds=config.events.repeat_pause,
            patience_seconds=config.events.patience,
        )
        self._work = Work(
            store=self._store,
            queue=self._queue,
            announcer=Announcer(
                recorder,
                timing=timing,
                on_announced=lambda code: metrics.events.labels(str(code)).inc(),
            ),
            metrics=metrics,
            debounce_seconds=config.events.debounce,
            selectors=selectors,
            name_all_holders=config.events.name_holders == "all",
            on_changes=self._policies.changed,
        )
        self._watcher = Watcher(
            prepare=self._relist,
            make_thread=self._make_thread,
            on_restart=metrics.kopf_restarts.inc,
        )

    async def run(self) -> None:
        """Watch, evaluate and sweep until canceled."""
        self._metrics.leader.set(1)
        self._metrics.queue_depth.set_function(lambda: len(self._queue))
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "watcher": self._watcher.run,
            "loads": self._loads.run,
            "sweeper": self._sweep_for_ever,
            "feature gates": self._follow_gates,
            "policies": self._policies.run,
        }
        workers = {f"worker {number}": self._work.work for number in range(self._config.workers)}
        try:
            await tasks.run(parts | workers)
        finally:
            self._queue.close()
            self._policies.close()
            self._metrics.leader.set(0)
            self._metrics.pools.clear()

    def measure(self) -> None:
        """Update the gauges that are computed from the store."""
        self._work.measure()

    def liveness_problem(self) -> str | None:
        """Return a problem that only a restart of the process solves."""
        if self._watcher.silent_seconds > SILENT_LIMIT_SECONDS:
            return "kopf's event loop hangs"
        if self._queue.oldest_seconds() > OLDEST_LIMIT_SECONDS:
            return "the work queue makes no progress"
        return None

    def readiness_problem(self) -> str | None:
        """Return why this replica, which leads, cannot explain anything."""
        return self._observer.problem()

    def _make_thread(self) -> KopfThread:
        return KopfThread(
            connect=self._connect,
            versions=self._versions,
            intake=Intake(asyncio.get_running_loop(), self._work.take),
            on_skipped=self._observer.skipped,
        )

    def _class_version(self) -> str:
        """Return the ``apiVersion`` of DeviceClasses that the API server serves."""
        served = (each.version for each in self._versions if each.kind is CLASSES)
        version = next(served, CLASSES.versions[0])
        return f"{CLASSES.group}/{version}"

    async def _relist(self) -> None:
        gc.unfreeze()
        relisted = await self._census.relist()
        self._versions = relisted.versions  # before changes: what follows from them needs it
        self._work.changed(relisted.changes)
        # Exclude the store from later full collections: they stop everything for 0.1 to 0.4 s with
        # 200,000 devices. Objects without cycles are still freed.
        gc.collect()
        gc.freeze()

    async def _follow_gates(self) -> None:
        """An upgrade of the cluster can change them while we lead."""
        problems = ProblemLog(
            logger,
            "the cluster's feature gates are unknown",
            recovered="the cluster's feature gates are known",
        )
        while True:
            try:
                gates = await read_gates(self._session)
            except (ApiError, GatesUnknownError) as error:
                problems.report(str(error))
                await self._work.use(None)
            else:
                problems.report(None)
                await self._work.use(gates)
            await asyncio.sleep(self._config.sweep_period)

    async def _sweep_for_ever(self) -> None:
        pause = self._config.sweep_period
        while True:
            await asyncio.sleep(pause)
            try:
                swept = await self._census.sweep()
            except ApiError as error:
                swept = Swept(changes=[], outdated=False, errors=[error])
            pause = self._config.sweep_period
            for error in swept.errors:
                logger.warning("missed deletions cannot be checked", extra={"error": str(error)})
                pause = min(SWEEP_RETRY_SECONDS, pause)
            self._metrics.missed_deletions.inc(len(swept.changes))
            self._work.changed(swept.changes)
            self._work.add_dropped()
            self._work.add_waiting()
            if swept.outdated:
                self._watcher.renew()
