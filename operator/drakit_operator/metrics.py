"""
The operator's metrics. They are few, and each label has a fixed set of values.
"""

from __future__ import annotations

from functools import partial

from drakit_daemon.metrics import CollectorRegistry, Counter, Gauge, Histogram

SUPPRESSED = ("shared", "flapping", "namespace_deleted")
"""The reasons why an Event is not written: another Event about a shared cause contains the reason,
the object returned to an earlier reason too soon, or nobody could read the Event because its
namespace is deleted."""

NODE_STATES = ("desired", "registered", "publishing")
"""The states in which a driver's nodes are counted."""


class Metrics:
    """The metrics of one process or test, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        gauge = partial(Gauge, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        self.leader = gauge("drakit_operator_leader", "1 if this replica is the leader")
        self.queue_depth = gauge(
            "drakit_operator_queue_depth", "Objects that wait for reconciliation"
        )
        self.reconcile_seconds = Histogram(
            "drakit_operator_reconcile_duration_seconds",
            "Time to reconcile one object, including the time to write its Event",
            ["concern", "result"],
            buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10),
            registry=self.registry,
        )
        self.events = counter("drakit_operator_events", "Events written", ["reason"])
        self.suppressed_events = counter(
            "drakit_operator_events_suppressed",
            "Events of objects that were not written, by what replaced or prevented them",
            ["cause"],
        )
        self.delayed_events = counter(
            "drakit_operator_events_delayed", "Events that waited because of the rate limit"
        )
        self.allocator_queries = counter(
            "drakit_operator_allocator_queries",
            "Queries of Kubernetes' allocator about claims on a node, by result",
            ["result"],
        )
        self.admission_requests = counter(
            "drakit_operator_admission_requests",
            "Requests of the admission webhook, by result; this replica's only",
            ["result"],
        )
        self.objects = gauge(
            "drakit_operator_objects",
            "Objects of a kind that the leader knows; of pods only those that wait and use devices",
            ["kind"],
        )
        self.pools = gauge(
            "drakit_operator_pools",
            "Published pools by their most serious state; only the leader reports them",
            ["state"],
        )
        self.devices = gauge(
            "drakit_operator_devices",
            "Devices of all drivers by state. Each device is counted in one state. Taints of "
            "DeviceTaintRules are included. Only the leader reports them, for the 100 drivers with "
            "the most devices; `(others)` is the sum of the others",
            ["driver", "state"],
        )
        self.class_devices = gauge(
            "drakit_operator_class_devices",
            "Devices that the selectors of a DeviceClass select, by state; a device can be in "
            "several classes. Only the leader reports them, for classes that it has evaluated, "
            "among the first 100 by name",
            ["device_class", "state"],
        )
        self.waiting_pods = gauge(
            "drakit_operator_waiting_pods",
            "Pods without a node that request devices of a DeviceClass, and whose claims are not "
            "allocated; a pod can be in several classes. Only the leader reports them, for the "
            "first 100 classes by name; `(others)` has the pods of all other names in requests",
            ["device_class"],
        )
        self.longest_wait_seconds = gauge(
            "drakit_operator_longest_wait_seconds",
            "For how long the leader has known the pod of drakit_operator_waiting_pods that has "
            "waited longest; 0 if none waits",
            ["device_class"],
        )
        self.policy_devices = gauge(
            "drakit_operator_policy_devices",
            "Devices of a HostDevicePolicy by state. Only the leader reports them, for the 100 "
            "policies with the most devices; `(others)` is the sum of the others",
            ["policy", "state"],
        )
        self.driver_nodes = gauge(
            "drakit_operator_driver_nodes",
            "Nodes of a driver: those on which its plugin must run, is registered, or publishes "
            "ResourceSlices. Only the leader reports them, for 100 drivers",
            ["driver", "state"],
        )
        self.driver_problems = gauge(
            "drakit_operator_driver_problems",
            "Problems of a driver at the moment, by the condition of its DeviceDriver. Only the "
            "leader reports them, for 100 drivers",
            ["driver", "condition"],
        )
        self.kind_listed = gauge(
            "drakit_operator_kind_listed",
            "1 if the last list of a kind succeeded, 0 if it failed or is forbidden",
            ["kind"],
        )
        self.skipped_objects = counter(
            "drakit_operator_skipped_objects",
            "Objects in lists and watches that are malformed or too large",
            ["kind"],
        )
