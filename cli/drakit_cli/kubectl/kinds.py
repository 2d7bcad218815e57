"""
The kinds that the commands list: their paths, the facts that are kept, and what an answer lacks
without them.

It must not know sessions, or what may be listed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    NamespaceFacts,
    NodeFacts,
    PodFacts,
    QuotaFacts,
    SliceFacts,
    TaintRuleFacts,
    TemplateFacts,
)
from drakit_explain.projection import (
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
from drakit_explain.world import Fact
from drakit_formats.resource.raw import Object
from drakit_formats.resource.versions import GROUP

__all__ = (
    "CLAIMS",
    "CLASSES",
    "NAMESPACES",
    "NODES",
    "PODS",
    "QUOTAS",
    "RULES",
    "SLICES",
    "TEMPLATES",
    "Kind",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of objects, by the words of paths and of sentences."""

    plural: str
    word: str
    type: type[Fact]
    project: Callable[[Object, str], Fact]
    """From an object and its version."""

    group: str = GROUP
    namespaced: bool = False
    effect: str
    """The part of an answer that is missing without this kind."""

    unknown: Object = field(default_factory=dict[str, Any], hash=False)
    """The rest of an object that cannot be read: it allows no conclusion."""


PODS = Kind(
    plural="pods",
    word="pods",
    type=PodFacts,
    project=lambda body, _: project_pod(body),
    group="",
    namespaced=True,
    effect="it is unknown which of them still exist",
)
CLAIMS = Kind(
    plural="resourceclaims",
    word="ResourceClaims",
    type=ClaimFacts,
    project=project_claim,
    namespaced=True,
    effect="devices that such claims hold count as free",
)
TEMPLATES = Kind(
    plural="resourceclaimtemplates",
    word="ResourceClaimTemplates",
    type=TemplateFacts,
    project=project_template,
    namespaced=True,
    effect="requests of claims that are not created yet are unknown",
)
CLASSES = Kind(
    plural="deviceclasses",
    word="DeviceClasses",
    type=ClassFacts,
    project=lambda body, _: project_class(body),
    effect="it is unknown which devices a class selects",
    unknown={"spec": {"selectors": [{}]}},
)
SLICES = Kind(
    plural="resourceslices",
    word="ResourceSlices",
    type=SliceFacts,
    project=project_slice,
    effect="devices are unknown",
    unknown={"spec": {"pool": {"resourceSliceCount": 2**31}, "devices": [{"name": ""}]}},
)
NODES = Kind(
    plural="nodes",
    word="nodes",
    type=NodeFacts,
    project=lambda body, _: project_node(body),
    group="",
    effect="node selectors, affinity, taints and resources of nodes are not checked",
)
RULES = Kind(
    plural="devicetaintrules",
    word="DeviceTaintRules",
    type=TaintRuleFacts,
    project=lambda body, _: project_taint_rule(body),
    effect="taints that they add are not checked",
)
NAMESPACES = Kind(
    plural="namespaces",
    word="namespaces",
    type=NamespaceFacts,
    project=lambda body, _: project_namespace(body),
    group="",
    effect="it is unknown whether the namespace allows admin access",
)
QUOTAS = Kind(
    plural="resourcequotas",
    word="ResourceQuotas",
    type=QuotaFacts,
    project=lambda body, _: project_quota(body),
    group="",
    namespaced=True,
    effect="it is unknown whether a quota prevents the creation of a claim",
)
