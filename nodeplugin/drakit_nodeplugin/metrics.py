"""
The node plugin's metrics. There are few of them, and their cardinality is low.

Only a limited number of pools per driver become label values, because backends choose pool names.
Pods and devices are labels of only one metric, which is limited, and which administrators must
enable.

Other parts of the plugin only call plain functions, which this module provides for each driver.
:mod:`drakit_nodeplugin.host.active_driver` sets gauges of the current state at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

from drakit.device import ClaimReference
from drakit_daemon.metrics import CollectorRegistry, Counter, Gauge, Histogram
from drakit_nodeplugin.claims.claim_status import WriteResult
from drakit_nodeplugin.claims.errors import FaultError
from drakit_nodeplugin.claims.source import FetchResult
from drakit_nodeplugin.claims.work import ClaimResult, Operation, Step
from drakit_nodeplugin.devices.counts import DEVICE_STATES, DeviceCounts, total
from drakit_nodeplugin.reasons import NodeReason
from drakit_nodeplugin.state.podresources import ListedDevice
from drakit_nodeplugin.state.records import STATES

_OPERATION_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
"""Bucket bounds for operations. The last bound exceeds the kubelet's timeout of 45 s, because the
work continues after that."""

_STEP_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2, 10, 45)
"""Bucket bounds for steps. There are few, because each driver has a series for each of the six
steps."""

_FETCH_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 3, 15)
"""Bucket bounds for reads of claims. The last two are the time limits for a known claim and for any
other claim."""

_TRANSACTION_SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)
"""Bucket bounds for transactions. A flush takes a fraction of a millisecond on a good disk, and
seconds on a failing one."""

MAX_POOLS = 16
"""Maximum number of pools per driver with their own series."""

OTHER_POOLS = "(other pools)"
"""The pool label of the series with the sum of a driver's other pools. No pool can have this
name."""

MAX_POD_DEVICES = 256
"""Maximum number of pod devices per driver with their own series."""

OTHER_PODS = "(others)"
"""The pod label of the series that counts the remaining devices. No pod can have this name."""

_GAUGES = {
    "claims_stuck": "Claims that have been preparing or unpreparing for a minute",
    "checkpoint_damaged": "1 if the checkpoint has lost entries since the driver became active",
    "checkpoint_unusable": "1 if the checkpoint is unusable, so that no claim can be prepared",
    "rejected_devices": (
        "Devices that cannot be published; their names are in Events about the Node"
    ),
    "pools_inactive": "Pools that are being removed, because their driver was stopped for too long",
    "driver_registered": "1 if the kubelet has accepted the driver's registration",
    "driver_running": "1 if the driver is running",
    "driver_blocked": "1 if the event loop of the driver is blocked",
    "driver_slow_calls": "Calls to which the driver has not responded for 5 s",
    "slices_failing": "1 if the last attempt to publish ResourceSlices failed",
    "slice_fields_dropped": "1 if the API server drops fields that devices use",
}
"""Gauges without labels: their names without the prefix, and their help strings."""


class Metrics:
    """All metrics of a process, in a separate registry. Every series has the label `driver`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.operation_seconds = self._histogram(
            "drakit_claim_operation_duration_seconds",
            "Time from the request to prepare or unprepare a claim until the work on it ends",
            ("operation", "result"),
            buckets=_OPERATION_SECONDS,
        )
        self.step_seconds = self._histogram(
            "drakit_claim_prepare_step_duration_seconds",
            "Time of each step of preparing a claim; the steps of one claim add up to its time in "
            "drakit_claim_operation_duration_seconds",
            ("step",),
            buckets=_STEP_SECONDS,
        )
        self.fetch_seconds = self._histogram(
            "drakit_claim_fetch_duration_seconds",
            "Time to read a claim from the API server",
            ("result",),
            buckets=_FETCH_SECONDS,
        )
        self.transaction_seconds = self._histogram(
            "drakit_checkpoint_transaction_duration_seconds",
            "Duration of a write transaction in the checkpoint",
            buckets=_TRANSACTION_SECONDS,
        )
        self.errors = self._counter(
            "drakit_claim_errors",
            "Failed attempts to prepare or unprepare a claim",
            ("operation", "reason"),
        )
        self.collected = self._counter(
            "drakit_stale_claims_collected",
            "Stale claims that the node plugin has unprepared, because the kubelet no longer "
            "lists them",
            ("reason",),
        )
        self.restored = self._counter(
            "drakit_cdi_files_restored",
            "CDI files of prepared claims that the node plugin has restored",
        )
        self.slice_writes = self._counter(
            "drakit_slice_writes", "Writes of ResourceSlices to the API server", ("verb", "result")
        )
        self.status_writes = self._counter(
            "drakit_claim_status_writes",
            "Writes of the status of claims. An error is tried again, and dropped is final",
            ("result",),
        )
        self.diagnostics = self._counter(
            "drakit_endpoint_diagnostics",
            "Problems with drivers, backends and device plugins, which Events about the Node also "
            "report",
            ("reason",),
        )
        self.claims = self._gauge("drakit_claims", "Claims in the checkpoint", ("state",))
        self.devices = self._gauge(
            "drakit_devices",
            "Devices by state. Each device is counted in one state. DeviceTaintRules are ignored",
            ("pool", "state"),
        )
        self.pod_devices = self._gauge(
            "drakit_pod_devices",
            "1 for each device that containers of a pod have from a claim, according to the "
            "kubelet's list of pods. Disabled by default; the chart's value metrics.podDevices "
            "enables it",
            ("pool", "device", "pod_namespace", "pod_name"),
        )
        self.gauges = {name: self._gauge(f"drakit_{name}", text) for name, text in _GAUGES.items()}

    def for_driver(self, name: str) -> DriverMetrics:
        """Return the metrics object of one driver."""
        return DriverMetrics(self, name)

    def forget(self, driver: str) -> None:
        """Remove the series of a driver that is no longer served. Otherwise, they would keep their
        last values."""
        for metric in (*vars(self).values(), *self.gauges.values()):
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
    The metrics of one driver. The methods are thread-safe.

    The claim series exist from the start, because looking up labels costs more than counting, and a
    rate needs an initial zero. Reasons come from a fixed set of words.
    """

    def __init__(self, metrics: Metrics, driver: str) -> None:
        self._metrics = metrics
        self._driver = driver
        self._operations = {
            (operation, result): metrics.operation_seconds.labels(driver, operation, result)
            for operation in ("prepare", "unprepare")
            for result in ("success", "error")
        }
        self._steps = {step: metrics.step_seconds.labels(driver, step) for step in get_args(Step)}
        self._fetches = {
            result: metrics.fetch_seconds.labels(driver, result)
            for result in ("success", "gone", "no_response", "error")
        }
        self.transaction: Callable[[float], None] = metrics.transaction_seconds.labels(
            driver
        ).observe
        """Observes the duration, in seconds, of a transaction that wrote to the checkpoint."""
        self._restored = metrics.restored.labels(driver)
        self._claims = {state: metrics.claims.labels(driver, state) for state in STATES}
        self._devices = metrics.devices
        self._pod_devices = metrics.pod_devices
        self._of_pods: set[tuple[str, str, str, str]] = set()
        """The label sets of the pod device series."""
        self._pools: dict[str, DeviceCounts] = {}
        """The current values of each pool's series."""
        self._gauges = {name: gauge.labels(driver) for name, gauge in metrics.gauges.items()}

    def set(self, **gauges: float) -> None:
        """Set gauges that have no labels. The arguments are their names without the prefix."""
        for name, value in gauges.items():
            self._gauges[name].set(value)

    def set_claims(self, counts: Mapping[str, int]) -> None:
        """Set the number of claims in the checkpoint, by state."""
        for state, gauge in self._claims.items():
            gauge.set(counts.get(state, 0))

    def set_devices(self, counts: Mapping[str, DeviceCounts]) -> None:
        """Set the number of the driver's devices in each pool, and delete the series of all other
        pools. If there are more than MAX_POOLS pools, pools that already have their own series keep
        them."""
        if len(counts) > MAX_POOLS:
            first = sorted(counts, key=lambda pool: (pool not in self._pools, pool))[:MAX_POOLS]
            others = total(each for pool, each in counts.items() if pool not in first)
            counts = {**{pool: counts[pool] for pool in first}, OTHER_POOLS: others}
        for pool in self._pools.keys() - counts.keys():
            for state in DEVICE_STATES:
                self._devices.remove(self._driver, pool, state)
        for pool, each in counts.items():
            if self._pools.get(pool) != each:
                for state in DEVICE_STATES:
                    self._devices.labels(self._driver, pool, state).set(getattr(each, state))
        self._pools = dict(counts)

    def set_pod_devices(self, devices: Iterable[ListedDevice]) -> None:
        """Set the devices that pods use, and delete the series of all others. Beyond the limit, a
        single series counts the remaining devices."""
        found = sorted({(each.pool, each.device, each.namespace, each.pod) for each in devices})
        values = dict.fromkeys(found[:MAX_POD_DEVICES], 1)
        if others := len(found[MAX_POD_DEVICES:]):
            values["", "", "", OTHER_PODS] = others
        for labels in self._of_pods - values.keys():
            self._pod_devices.remove(self._driver, *labels)
        for labels, number in values.items():
            self._pod_devices.labels(self._driver, *labels).set(number)
        self._of_pods = set(values)

    def prepared(self, seconds: Mapping[Step, float]) -> None:
        """Observe the seconds of each step of a prepare."""
        for step, duration in seconds.items():
            self._steps[step].observe(duration)

    def finished(
        self, claim: ClaimReference, operation: Operation, answer: ClaimResult, seconds: float
    ) -> None:
        """Count the result of a claim's operation."""
        if answer.error is None:
            self._operations[operation, "success"].observe(seconds)
            return
        self._operations[operation, "error"].observe(seconds)
        reason = answer.reason or FaultError.reason
        self._metrics.errors.labels(self._driver, operation, reason).inc()

    def lasts(self, claim: ClaimReference, operation: Operation) -> None:
        """Do nothing, because only finished operations are counted."""

    def fetched(self, seconds: float, result: FetchResult) -> None:
        """Count a read of a claim from the API server."""
        self._fetches[result].observe(seconds)

    def collected(self, reason: str) -> None:
        """Count a stale claim that was unprepared."""
        self._metrics.collected.labels(self._driver, reason).inc()

    def restored(self, files: int) -> None:
        """Count restored CDI files."""
        self._restored.inc(files)

    def wrote_status(self, result: WriteResult) -> None:
        """Count a write of a claim's status."""
        self._metrics.status_writes.labels(self._driver, result).inc()

    def diagnosed(self, reason: NodeReason) -> None:
        """Count a diagnostic of an endpoint."""
        self._metrics.diagnostics.labels(self._driver, reason).inc()

    def wrote_slice(self, verb: str, seconds: float, ok: bool) -> None:
        """Count a create, update or delete of a slice."""
        result = "success" if ok else "error"
        self._metrics.slice_writes.labels(self._driver, verb, result).inc()
