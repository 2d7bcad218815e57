"""
The node plugin's metrics, few and of low cardinality: no claim, pod or device is ever a label.

Parts of the plugin know plain callables alone; here they are made for each driver, and put around
what the engine gives and takes. Gauges that say how things are now are set by
:mod:`drakit_nodeplugin.host.driver` when somebody asks.

It must not know what the numbers lead to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from drakit.device import ClaimReference
from drakit.resource.claim import Claim
from drakit_nodeplugin.claims.answers import Answer, ClaimService, Operation, PrepareAnswer
from drakit_nodeplugin.claims.checkpoint.records import STATES, State
from drakit_nodeplugin.claims.errors import ClaimError, ClaimGoneError, FaultError, NoAnswerError
from drakit_nodeplugin.claims.source import ClaimSource

__all__ = ("DriverMetrics", "MeteredClaims", "MeteredSource", "Metrics")

_OPERATION_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
"""Up to more than the 45 s that a kubelet waits: the work goes on."""

_FETCH_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 3, 15)
"""The last two are what is waited for a claim that is known, and for any other."""

_TRANSACTION_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)
"""A flush takes a fraction of a millisecond on a good disk, and seconds on one that is dying."""

FetchResult = Literal["success", "gone", "no_answer", "error"]


class Metrics:
    """All metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.operation_seconds = self._histogram(
            "drakit_claim_operation_duration_seconds",
            "Time to prepare or unprepare a claim, from the kubelet's call to its answer",
            ("operation", "result"),
            buckets=_OPERATION_SECONDS,
        )
        self.errors = self._counter(
            "drakit_claim_errors",
            "Claims that could not be prepared or unprepared, by the reason",
            ("operation", "reason"),
        )
        self.fetch_seconds = self._histogram(
            "drakit_claim_fetch_duration_seconds",
            "Time to read a claim from the API server",
            ("result",),
            buckets=_FETCH_SECONDS,
        )
        self.transaction_seconds = self._histogram(
            "drakit_checkpoint_transaction_duration_seconds",
            "Time of a transaction that writes to the checkpoint",
            buckets=_TRANSACTION_SECONDS,
        )
        self.collected = self._counter(
            "drakit_stale_claims_collected",
            "Claims that nobody would have unprepared any more, and that were unprepared",
            ("reason",),
        )
        self.restored = self._counter(
            "drakit_cdi_files_restored",
            "CDI files of prepared claims that were lost, and written again",
        )
        self.claims = self._gauge("drakit_claims", "Claims in the checkpoint", ("state",))
        self.checkpoint_damaged = self._gauge(
            "drakit_checkpoint_damaged",
            "1 if entries of the checkpoint were lost since this process started",
        )
        self.checkpoint_unusable = self._gauge(
            "drakit_checkpoint_unusable",
            "1 if the checkpoint cannot be read or written: no claim can be prepared",
        )
        self.devices = self._gauge(
            "drakit_devices",
            "Devices by state; an allocated one is also healthy or not",
            ("state",),
        )
        self.devices_left_out = self._gauge(
            "drakit_devices_left_out",
            "Devices that cannot be published: the log and Events of the Node say why",
        )
        self.pools_inactive = self._gauge(
            "drakit_pools_inactive",
            "Pools that are being removed: their driver was away for too long",
        )
        self.registered = self._gauge(
            "drakit_driver_registered", "1 if the kubelet has accepted the driver's registration"
        )
        self.running = self._gauge("drakit_driver_running", "1 if the driver runs")
        self.slices_failing = self._gauge(
            "drakit_slices_failing", "1 if the last attempt to publish ResourceSlices failed"
        )
        self.slice_writes = self._counter(
            "drakit_slice_writes", "Writes of ResourceSlices to the API server", ("verb", "result")
        )
        self.slice_fields_dropped = self._gauge(
            "drakit_slice_fields_dropped", "1 if the API server drops fields that devices use"
        )
        self.remarks = self._counter(
            "drakit_endpoint_remarks",
            "What was wrong with drivers, backends and device plugins: Events of the Node say more",
            ("reason",),
        )
        self.blocked = self._gauge(
            "drakit_driver_blocked", "1 if the driver's event loop does not answer"
        )

    def for_driver(self, name: str) -> DriverMetrics:
        """Give what the parts of one driver report to."""
        return DriverMetrics(self, name)

    def forget(self, driver: str) -> None:
        """A driver is not served any more: its series end, instead of staying as they were."""
        for metric in vars(self).values():
            if isinstance(metric, Counter | Gauge | Histogram):
                metric.remove_by_labels({"driver": driver})

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...] = (), *, buckets: Sequence[float]
    ) -> Histogram:
        return Histogram(name, text, ("driver", *labels), buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, ("driver", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(name, text, ("driver", *labels), registry=self.registry)


class DriverMetrics:
    """
    The metrics of one driver.

    Methods may be called in any thread. What happens with each claim has its series from the start:
    a lookup by labels costs more than the count itself, and a rate needs a zero to begin with.
    """

    def __init__(self, metrics: Metrics, driver: str) -> None:
        self._metrics = metrics
        self._driver = driver
        self._operations = {
            (operation, result): metrics.operation_seconds.labels(driver, operation, result)
            for operation in ("prepare", "unprepare")
            for result in ("success", "error")
        }
        self._fetches = {
            result: metrics.fetch_seconds.labels(driver, result)
            for result in ("success", "gone", "no_answer", "error")
        }
        self._transactions = metrics.transaction_seconds.labels(driver)
        self._restored = metrics.restored.labels(driver)
        # How things are now: set when somebody asks.
        self.checkpoint_damaged = metrics.checkpoint_damaged.labels(driver)
        self.checkpoint_unusable = metrics.checkpoint_unusable.labels(driver)
        self.devices_left_out = metrics.devices_left_out.labels(driver)
        self.pools_inactive = metrics.pools_inactive.labels(driver)
        self.slice_fields_dropped = metrics.slice_fields_dropped.labels(driver)
        self.blocked = metrics.blocked.labels(driver)
        self.registered = metrics.registered.labels(driver)
        self.running = metrics.running.labels(driver)
        self.slices_failing = metrics.slices_failing.labels(driver)
        self._claims = {state: metrics.claims.labels(driver, state) for state in STATES}
        self._devices = {
            state: metrics.devices.labels(driver, state)
            for state in ("healthy", "unhealthy", "allocated")
        }

    def answered(self, operation: Operation, seconds: float, *, reason: str | None) -> None:
        """A claim was answered; the reason is a word of a closed set, and None is success."""
        if reason is None:
            self._operations[operation, "success"].observe(seconds)
            return
        self._operations[operation, "error"].observe(seconds)
        self._metrics.errors.labels(self._driver, operation, reason).inc()

    def fetched(self, seconds: float, result: FetchResult) -> None:
        """A claim was asked for at the API server."""
        self._fetches[result].observe(seconds)

    def transaction(self, seconds: float) -> None:
        """A transaction was written to the checkpoint."""
        self._transactions.observe(seconds)

    def collected(self, reason: str) -> None:
        """A stale claim was unprepared; the reason is a word of a closed set."""
        self._metrics.collected.labels(self._driver, reason).inc()

    def restored(self, files: int) -> None:
        """CDI files were written again."""
        self._restored.inc(files)

    def remarked(self, reason: str) -> None:
        """Something is wrong with an endpoint; the reason is a word of a closed set."""
        self._metrics.remarks.labels(self._driver, reason).inc()

    def wrote_slice(self, verb: str, seconds: float, ok: bool) -> None:
        """A slice was created, updated or deleted, or could not be."""
        result = "success" if ok else "error"
        self._metrics.slice_writes.labels(self._driver, verb, result).inc()

    def devices(self, *, healthy: int, unhealthy: int, allocated: int) -> None:
        """The driver has so many devices."""
        self._devices["healthy"].set(healthy)
        self._devices["unhealthy"].set(unhealthy)
        self._devices["allocated"].set(allocated)

    def entries(self, state: State, count: int) -> None:
        """The checkpoint has so many claims in this state."""
        self._claims[state].set(count)


class MeteredClaims:
    """A :class:`ClaimService` that measures what another one does."""

    def __init__(self, claims: ClaimService, metrics: DriverMetrics) -> None:
        self._claims = claims
        self._metrics = metrics

    async def prepare(self, claims: Sequence[ClaimReference], answer: Answer) -> None:
        """Prepare, and measure each claim."""
        timer = _Timer("prepare", claims, answer, self._metrics)
        try:
            await self._claims.prepare(claims, timer.answer)
        except Exception:
            timer.failed()
            raise

    async def unprepare(self, claims: Sequence[ClaimReference], answer: Answer) -> None:
        """Unprepare, and measure each claim."""
        timer = _Timer("unprepare", claims, answer, self._metrics)
        try:
            await self._claims.unprepare(claims, timer.answer)
        except Exception:
            timer.failed()
            raise

    def abandon(self, uid: str) -> None:
        """Pass it on; the claim's preparing ends with an answer, and that is measured."""
        self._claims.abandon(uid)


class _Timer:
    """Measures the claims of one call: each when it is answered."""

    def __init__(
        self,
        operation: Operation,
        claims: Sequence[ClaimReference],
        answer: Answer,
        metrics: DriverMetrics,
    ) -> None:
        self._operation: Operation = operation
        self._left = {claim.uid for claim in claims}
        self._answer = answer
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    def answer(self, uid: str, said: PrepareAnswer) -> None:
        self._left.discard(uid)
        reason = None if said.error is None else said.reason or FaultError.reason
        self._metrics.answered(self._operation, self._seconds(), reason=reason)
        self._answer(uid, said)

    def failed(self) -> None:
        """The call raised: what it has not answered is answered by the front door."""
        for _ in self._left:
            self._metrics.answered(self._operation, self._seconds(), reason=FaultError.reason)

    def _seconds(self) -> float:
        return self._loop.time() - self._began


class MeteredSource:
    """A :class:`ClaimSource` that measures what another one does."""

    def __init__(self, source: ClaimSource, metrics: DriverMetrics) -> None:
        self._source = source
        self._metrics = metrics

    async def fetch(self, reference: ClaimReference, *, timeout_seconds: float) -> Claim:
        """Read a claim, and measure that; a read that the caller gives up is not counted."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            claim = await self._source.fetch(reference, timeout_seconds=timeout_seconds)
        except ClaimError as error:
            self._metrics.fetched(loop.time() - began, _fetch_result(error))
            raise
        self._metrics.fetched(loop.time() - began, "success")
        return claim


def _fetch_result(error: ClaimError) -> FetchResult:
    if isinstance(error, ClaimGoneError):
        return "gone"
    return "no_answer" if isinstance(error, NoAnswerError) else "error"
