"""
The page of metrics: names, types, labels and help strings of the objects that the daemons register.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, get_args

from drakit_daemon.metrics import Counter, Gauge, Histogram
from drakit_explain import kinds
from drakit_explain.drivers import CONDITIONS
from drakit_explain.pending import Explainer
from drakit_explain.poolchecks import PoolCondition
from drakit_explain.verdicts import VerdictOutcome
from drakit_nodeplugin.claims import errors, queue
from drakit_nodeplugin.claims.claim_status import WriteResult
from drakit_nodeplugin.claims.source import FetchResult
from drakit_nodeplugin.claims.stale import StaleReason
from drakit_nodeplugin.claims.work import Operation
from drakit_nodeplugin.devices.counts import DEVICE_STATES
from drakit_nodeplugin.metrics import Metrics as NodePluginMetrics
from drakit_nodeplugin.slices.api import Verb
from drakit_nodeplugin.state.records import STATES
from drakit_operator.affected import DRIVER, POLICY, REPORT
from drakit_operator.metrics import NODE_STATES, SUPPRESSED
from drakit_operator.metrics import Metrics as OperatorMetrics
from drakit_operator.reconciler import concerns_of
from drakit_operator.store import Store
from tools.reference import markdown

RESULTS = ("success", "error")

NODE_PLUGIN: Mapping[str, Collection[str]] = {
    "Claims": (
        "drakit_claims",
        "drakit_claims_stuck",
        "drakit_claim_operation_duration_seconds",
        "drakit_claim_prepare_step_duration_seconds",
        "drakit_claim_errors_total",
        "drakit_claim_fetch_duration_seconds",
        "drakit_stale_claims_collected_total",
        "drakit_claim_status_writes_total",
    ),
    "Checkpoint and CDI files": (
        "drakit_checkpoint_damaged",
        "drakit_checkpoint_unusable",
        "drakit_checkpoint_transaction_duration_seconds",
        "drakit_cdi_files_restored_total",
    ),
    "Devices and ResourceSlices": (
        "drakit_devices",
        "drakit_pod_devices",
        "drakit_rejected_devices",
        "drakit_pools_inactive",
        "drakit_slice_writes_total",
        "drakit_slices_failing",
        "drakit_slice_fields_dropped",
    ),
    "Drivers": (
        "drakit_driver_registered",
        "drakit_driver_running",
        "drakit_driver_blocked",
        "drakit_driver_slow_calls",
        "drakit_endpoint_diagnostics_total",
    ),
}

CLAIM_ERRORS = {
    each.reason
    for _, each in inspect.getmembers(errors, inspect.isclass)
    if issubclass(each, errors.ClaimError) and each not in (errors.ClaimError,)
} | {queue.NOT_DONE, "Malformed"}

STORE = Store()

VALUES: Mapping[tuple[str, str], Collection[str]] = {
    ("drakit_claims", "state"): STATES,
    ("drakit_claim_operation_duration_seconds", "operation"): get_args(Operation),
    ("drakit_claim_operation_duration_seconds", "result"): RESULTS,
    ("drakit_claim_errors_total", "operation"): get_args(Operation),
    ("drakit_claim_errors_total", "reason"): sorted(CLAIM_ERRORS),
    ("drakit_claim_fetch_duration_seconds", "result"): get_args(FetchResult),
    ("drakit_stale_claims_collected_total", "reason"): [str(each) for each in StaleReason],
    ("drakit_claim_status_writes_total", "result"): get_args(WriteResult),
    ("drakit_devices", "state"): DEVICE_STATES,
    ("drakit_slice_writes_total", "verb"): get_args(Verb),
    ("drakit_slice_writes_total", "result"): RESULTS,
    ("drakit_operator_reconcile_duration_seconds", "concern"): (
        *concerns_of(STORE, Explainer(STORE.world)),
        POLICY,
        REPORT,
        DRIVER,
    ),
    ("drakit_operator_reconcile_duration_seconds", "result"): ("success", "error"),
    ("drakit_operator_events_suppressed_total", "cause"): SUPPRESSED,
    ("drakit_operator_admission_requests_total", "result"): ("allowed", "rejected", "error"),
    ("drakit_operator_allocator_queries_total", "result"): [each.value for each in VerdictOutcome],
    ("drakit_operator_pools", "state"): [str(each) for each in PoolCondition],
    ("drakit_operator_devices", "driver"): [],
    ("drakit_operator_devices", "state"): DEVICE_STATES,
    ("drakit_operator_class_devices", "device_class"): [],
    ("drakit_operator_class_devices", "state"): DEVICE_STATES,
    ("drakit_operator_waiting_pods", "device_class"): [],
    ("drakit_operator_longest_wait_seconds", "device_class"): [],
    ("drakit_operator_policy_devices", "policy"): [],
    ("drakit_operator_policy_devices", "state"): DEVICE_STATES,
    ("drakit_operator_driver_nodes", "driver"): [],
    ("drakit_operator_driver_nodes", "state"): NODE_STATES,
    ("drakit_operator_driver_problems", "driver"): [],
    ("drakit_operator_driver_problems", "condition"): CONDITIONS,
    ("drakit_operator_kind_listed", "kind"): [],
    ("drakit_operator_objects", "kind"): [],
    ("drakit_claim_prepare_step_duration_seconds", "step"): [],
    ("drakit_devices", "pool"): [],
    ("drakit_pod_devices", "pool"): [],
    ("drakit_pod_devices", "device"): [],
    ("drakit_pod_devices", "pod_namespace"): [],
    ("drakit_pod_devices", "pod_name"): [],
    ("drakit_operator_skipped_objects_total", "kind"): [],
}
"""The values of labels with closed sets. :data:`LABELS` describes the empty ones."""

LABELS: Mapping[tuple[str, str], str] = {
    (
        "drakit_endpoint_diagnostics_total",
        "reason",
    ): "a reason of [Events about the Node](events.md#events-about-the-node)",
    ("drakit_operator_events_total", "reason"): "a reason of [the operator's Events]"
    "(events.md#events-about-pods-claims-and-templates)",
    ("drakit_devices", "pool"): "a pool of the driver's ResourceSlices. Beyond 16 pools, "
    "`(other pools)` is the sum of the others",
    ("drakit_claim_prepare_step_duration_seconds", "step"): "`queue` waits for earlier work on the "
    "claim, `fetch` reads it from the API server, `wait` waits for devices that the driver does not "
    "list yet or for calls for the same hardware, `driver` is the driver's call, `checkpoint` "
    "includes CDI files, and `undo` undoes an earlier allocation or a failed prepare",
    ("drakit_pod_devices", "pool"): "a pool of the driver's ResourceSlices",
    ("drakit_pod_devices", "device"): "a device in the pool",
    ("drakit_pod_devices", "pod_namespace"): "the namespace of the pod",
    ("drakit_pod_devices", "pod_name"): "the name of the pod. Beyond 256 devices of a driver on a "
    "node, `(others)` has the number of the others",
    ("drakit_operator_devices", "driver"): "the name of a driver",
    ("drakit_operator_class_devices", "device_class"): "the name of a DeviceClass",
    ("drakit_operator_waiting_pods", "device_class"): "the name of a DeviceClass",
    ("drakit_operator_longest_wait_seconds", "device_class"): "the name of a DeviceClass",
    ("drakit_operator_policy_devices", "policy"): "the name of a HostDevicePolicy",
    ("drakit_operator_driver_nodes", "driver"): "the name of a driver",
    ("drakit_operator_driver_problems", "driver"): "the name of a driver",
    ("drakit_operator_kind_listed", "kind"): f"resource and group, such as `{kinds.CLAIMS}`",
    ("drakit_operator_objects", "kind"): f"resource and group, such as `{kinds.CLAIMS}`",
    (
        "drakit_operator_skipped_objects_total",
        "kind",
    ): f"resource and group, such as `{kinds.CLAIMS}`",
}


def page() -> str:
    """Return the page."""
    return markdown.document(
        "Metrics",
        description="The Prometheus metrics of the node plugin and the operator, with their types and labels.",
        source="the metric objects of both daemons",
        body=[
            "Each daemon serves Prometheus metrics at `/metrics` on port 8080. [Monitor drakit](../admin/monitor.md) has alerts\n"
            "and a dashboard.",
            "No metric has a label for a claim, pod or device, so the number of series does not grow with the load. The only\n"
            "exception is `drakit_pod_devices`, which is disabled by default and limited to 256 series for each driver on a node.",
            *_node_plugin(),
            *_operator(),
        ],
    )


def _node_plugin() -> Iterator[str]:
    metrics = NodePluginMetrics()
    found = _by_name([*vars(metrics).values(), *metrics.gauges.values()])
    grouped = [name for names in NODE_PLUGIN.values() for name in names]
    if sorted(grouped) != sorted(found):
        raise SystemExit(f"metrics without a group: {set(found) ^ set(grouped)}")
    yield "## Node plugin"
    yield "Every metric has the label `driver`: the name of the driver."
    for title, names in NODE_PLUGIN.items():
        yield f"### {title}"
        yield _block(found[name] for name in names)


def _operator() -> Iterator[str]:
    yield "## Operator"
    yield _block(_by_name(vars(OperatorMetrics()).values()).values())


def _by_name(objects: Collection[Any]) -> dict[str, Any]:
    return {_name(each): each for each in objects if isinstance(each, Counter | Gauge | Histogram)}


def _name(metric: Any) -> str:
    return f"{metric._name}_total" if metric._type == "counter" else metric._name


def _block(metrics: Iterable[Any]) -> str:
    """Return metrics with their meanings and labels above them."""
    lines: list[str] = []
    for metric in metrics:
        name = _name(metric)
        labels = [each for each in metric._labelnames if each != "driver" or (name, each) in LABELS]
        lines += [""] if lines else []
        for text in (f"{metric._documentation}.", *(_label(name, each) for each in labels)):
            lines += markdown.comments(text.replace("`", ""), "#")
        lines.append(f"{name}{'{' + ', '.join(labels) + '}' if labels else ''}  # {metric._type}")
    return markdown.code_block("text", lines)


def _label(metric: str, label: str) -> str:
    text = LABELS.get((metric, label)) or ", ".join(VALUES[metric, label])
    return f"{label}: {text}"
