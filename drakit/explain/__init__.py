"""
Why a pod's claim is pending: pure functions over pods, claims, templates, classes and slices.

:mod:`.model` holds the facts of the cluster, :mod:`.projection` reads them from raw objects,
:mod:`.pools` puts slices together, :mod:`.selectors` evaluates the simple part of CEL,
:mod:`.availability` counts the available devices, :mod:`.pending` names the problem, in the words
of :mod:`.wording`. The caller gathers the facts and reports the result: the operator writes Events.

It must not know Kubernetes clients, clocks, or the operator.
"""

from drakit.explain.availability import Availability, availability
from drakit.explain.model import (
    Amount,
    CapacityFacts,
    CapacityPolicy,
    ClaimFacts,
    ClassFacts,
    CounterSetFacts,
    DeviceFacts,
    DeviceID,
    ObjectReference,
    PodClaim,
    PodFacts,
    PoolID,
    Request,
    Share,
    SliceFacts,
    TaintFacts,
    TemplateFacts,
    Toleration,
)
from drakit.explain.pending import (
    ClusterFacts,
    Code,
    Reason,
    explain,
    missing_classes_of_claim,
    missing_classes_of_template,
)
from drakit.explain.pools import PoolCounters, Published, current_counters, current_devices
from drakit.explain.selectors import Matches, match_devices

__all__ = (
    "Amount",
    "Availability",
    "CapacityFacts",
    "CapacityPolicy",
    "ClaimFacts",
    "ClassFacts",
    "ClusterFacts",
    "Code",
    "CounterSetFacts",
    "DeviceFacts",
    "DeviceID",
    "Matches",
    "ObjectReference",
    "PodClaim",
    "PodFacts",
    "PoolCounters",
    "PoolID",
    "Published",
    "Reason",
    "Request",
    "Share",
    "SliceFacts",
    "TaintFacts",
    "TemplateFacts",
    "Toleration",
    "availability",
    "current_counters",
    "current_devices",
    "explain",
    "match_devices",
    "missing_classes_of_claim",
    "missing_classes_of_template",
)
