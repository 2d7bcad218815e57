"""
Why a pod's claim is pending: pure functions over pods, claims, templates, classes and slices.

:mod:`.model` is what is known of the cluster, :mod:`.projection` reads it out of raw objects,
:mod:`.selectors` evaluates the simple part of CEL, :mod:`.pending` says what is the matter. How the
facts are gathered, and who is told, is the caller's business: the operator writes Events.

It must not know Kubernetes clients, clocks, or the operator.
"""

from drakit.explain.model import (
    ClaimFacts,
    ClassFacts,
    DeviceFacts,
    DeviceID,
    ObjectReference,
    PodClaim,
    PodFacts,
    Request,
    SliceFacts,
    TemplateFacts,
)
from drakit.explain.pending import (
    ClusterFacts,
    Code,
    Reason,
    explain,
    missing_classes_of_claim,
    missing_classes_of_template,
)
from drakit.explain.selectors import Matches, Published, current_devices, match_devices

__all__ = (
    "ClaimFacts",
    "ClassFacts",
    "ClusterFacts",
    "Code",
    "DeviceFacts",
    "DeviceID",
    "Matches",
    "ObjectReference",
    "PodClaim",
    "PodFacts",
    "Published",
    "Reason",
    "Request",
    "SliceFacts",
    "TemplateFacts",
    "current_devices",
    "explain",
    "match_devices",
    "missing_classes_of_claim",
    "missing_classes_of_template",
)
