"""
The kinds that explanations use: their known versions, how their objects are read, what is assumed
about an unreadable object, and which parts of a result depend on the kind.

The operator and `kubectl drakit` use the same table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    DriverFacts,
    MaintenanceFacts,
    NamespaceFacts,
    NodeFacts,
    PodFacts,
    PolicyFacts,
    QuotaFacts,
    ReportFacts,
    SliceFacts,
    TaintRuleFacts,
    TemplateFacts,
)
from drakit_explain.projection import (
    UNREAD_CLAIM,
    project_claim,
    project_class,
    project_namespace,
    project_node,
    project_pod,
    project_quota,
    project_slice,
    project_taint_rule,
    project_template,
)
from drakit_explain.reports import (
    project_driver,
    project_maintenance,
    project_policy,
    project_report,
)
from drakit_explain.world import Fact
from drakit_formats import crds
from drakit_formats.resource.objects import GROUP, RULE_VERSIONS, VERSIONS, Object

UNREADABLE = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
"""The errors that the projection of a malformed object can raise."""


def problem_of(error: Exception) -> str:
    """Describe one of the errors in UNREADABLE, without the name of its Python exception."""
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    if isinstance(error, ValueError) and not isinstance(error, UnicodeError):
        return str(error)
    return "a field has a value of an unexpected type"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of object, with its names in API paths and in sentences."""

    group: str = GROUP
    plural: str
    word: str
    type: type[Fact]
    project: Callable[[Object, str], Fact]
    """Projects an object in a version. Raises one of UNREADABLE if the object is malformed."""

    versions: tuple[str, ...] = VERSIONS
    """The versions that can be read, the preferred one first."""

    namespaced: bool = False
    required: bool = False
    """Whether every cause is uncertain without the kind."""

    effect: str
    """The part of a result that is missing without this kind. Empty if the result is only less
    precise."""

    unknown: Object = field(default_factory=dict[str, Any], hash=False)
    """The content to assume for an object that cannot be read. It makes every result that depends
    on the object uncertain."""

    @property
    def is_ours(self) -> bool:
        """Whether it is one of drakit's own kinds, which a cluster does not have to serve."""
        return self.group == crds.GROUP

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


PODS = Kind(
    group="",
    plural="pods",
    word="pods",
    type=PodFacts,
    project=lambda body, _: project_pod(body),
    versions=("v1",),
    namespaced=True,
    required=True,
    effect="it is unknown which of them still exist",
)
CLAIMS = Kind(
    plural="resourceclaims",
    word="ResourceClaims",
    type=ClaimFacts,
    project=project_claim,
    namespaced=True,
    required=True,
    effect="devices of such claims are counted as free",
    unknown={"spec": UNREAD_CLAIM},
)
TEMPLATES = Kind(
    plural="resourceclaimtemplates",
    word="ResourceClaimTemplates",
    type=TemplateFacts,
    project=project_template,
    namespaced=True,
    effect="requests of claims that are not created yet are unknown",
    unknown={"spec": {"spec": UNREAD_CLAIM}},
)
CLASSES = Kind(
    plural="deviceclasses",
    word="DeviceClasses",
    type=ClassFacts,
    project=lambda body, _: project_class(body),
    required=True,
    effect="it is unknown which devices a class selects",
    # Without its CEL expression, a selector may match any device.
    unknown={"spec": {"selectors": [{}]}},
)
SLICES = Kind(
    plural="resourceslices",
    word="ResourceSlices",
    type=SliceFacts,
    project=project_slice,
    required=True,
    effect="devices are unknown",
    # Assume a device of an unknown driver, in a pool that is never complete.
    unknown={"spec": {"pool": {"resourceSliceCount": 2**31}, "devices": [{"name": ""}]}},
)
NODES = Kind(
    group="",
    plural="nodes",
    word="nodes",
    type=NodeFacts,
    project=lambda body, _: project_node(body),
    versions=("v1",),
    effect="node selectors, affinity, taints and resources of nodes are not checked",
)
RULES = Kind(
    plural="devicetaintrules",
    word="DeviceTaintRules",
    type=TaintRuleFacts,
    project=lambda body, _: project_taint_rule(body),
    versions=RULE_VERSIONS,
    effect="taints that they add are not checked",
)
REPORTS = Kind(
    group=crds.GROUP,
    plural=crds.REPORTS,
    word="NodeDeviceReports",
    type=ReportFacts,
    project=lambda body, _: project_report(body),
    versions=(crds.VERSION,),
    effect="problems that drivers report, and drivers that are not registered, are unknown",
)
POLICIES = Kind(
    group=crds.GROUP,
    plural=crds.POLICIES,
    word="HostDevicePolicies",
    type=PolicyFacts,
    project=lambda body, _: project_policy(body),
    versions=(crds.VERSION,),
    effect="",
)
DRIVERS = Kind(
    group=crds.GROUP,
    plural=crds.DRIVERS,
    word="DeviceDrivers",
    type=DriverFacts,
    project=lambda body, _: project_driver(body),
    versions=(crds.VERSION,),
    effect="the nodes on which drivers must run are unknown",
)
MAINTENANCES = Kind(
    group=crds.GROUP,
    plural=crds.MAINTENANCES,
    word="DeviceMaintenances",
    type=MaintenanceFacts,
    project=lambda body, _: project_maintenance(body),
    versions=(crds.VERSION,),
    effect="",
)
NAMESPACES = Kind(
    group="",
    plural="namespaces",
    word="namespaces",
    type=NamespaceFacts,
    project=lambda body, _: project_namespace(body),
    versions=("v1",),
    effect="it is unknown whether the namespace allows admin access",
)
QUOTAS = Kind(
    group="",
    plural="resourcequotas",
    word="ResourceQuotas",
    type=QuotaFacts,
    project=lambda body, _: project_quota(body),
    versions=("v1",),
    namespaced=True,
    effect="it is unknown whether a quota prevents the creation of a claim",
)

KINDS = (
    *(PODS, CLAIMS, TEMPLATES, CLASSES, SLICES, NODES, RULES, REPORTS, POLICIES),
    *(MAINTENANCES, DRIVERS, NAMESPACES, QUOTAS),
)
"""The kinds that the operator follows."""
