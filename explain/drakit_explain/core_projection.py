"""
From raw objects of the core API (``v1``) to the facts of :mod:`.model`: pods, nodes, namespaces and
quotas, as far as claims and devices depend on them.

:mod:`.projection` reads ``resource.k8s.io``, and has what both share.

It must not know clients, or what is done with the facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from sys import intern

from drakit_explain.loads import requests_of_pod
from drakit_explain.model import (
    PREVENTING,
    ExtendedRequest,
    NamespaceFacts,
    NodeFacts,
    Placement,
    PodClaim,
    PodFacts,
    PodToleration,
    QuotaFacts,
    TaintFacts,
)
from drakit_explain.projection import amounts, finalizers, once
from drakit_formats.resource.raw import Object, child, children, text

__all__ = ("ADMIN_ACCESS", "project_namespace", "project_node", "project_pod", "project_quota")

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"

ADMIN_ACCESS = "resource.kubernetes.io/admin-access"
"""The label of namespaces that may have claims with admin access."""

_SANDBOX = {"True": True, "False": False}


def project_pod(body: Object) -> PodFacts:
    """Project a Pod."""
    metadata, spec, status = child(body, "metadata"), child(body, "spec"), child(body, "status")
    made = {entry["name"]: entry for entry in children(status, "resourceClaimStatuses")}
    conditions = {each.get("type"): each for each in children(status, "conditions")}
    return PodFacts(
        namespace=intern(text(metadata, "namespace")),
        name=metadata["name"],
        uid=metadata["uid"],
        claims=tuple(
            _pod_claim(claim, made.get(claim["name"])) for claim in children(spec, "resourceClaims")
        ),
        node=spec.get("nodeName") or None,
        phase=intern(text(status, "phase")),
        gated=bool(spec.get("schedulingGates")),
        deleting=bool(metadata.get("deletionTimestamp")),
        finalizers=finalizers(metadata),
        sandbox=_SANDBOX.get(text(conditions.get("PodReadyToStartContainers", {}), "status")),
        disruption=_disruption(conditions.get("DisruptionTarget", {})),
        scheduling_message=text(conditions.get("PodScheduled", {}), "message"),
        extended=tuple(_extended_requests(spec)),
        extended_claim=text(status, "extendedResourceClaimStatus", "resourceClaimName") or None,
        placement=_placement(spec),
        requests=requests_of_pod(spec),
        priority=int(spec.get("priority") or 0),
    )


def _extended_requests(spec: Object) -> Iterator[ExtendedRequest]:
    for kind in ("initContainers", "containers"):
        for container in children(spec, kind):
            init = kind == "initContainers" and container.get("restartPolicy") != "Always"
            for resource, amount in child(container, "resources", "limits").items():
                if "/" in resource and str(amount).isdecimal() and int(amount):
                    yield ExtendedRequest(
                        text(container, "name"), intern(resource), int(amount), init
                    )


def _disruption(condition: Object) -> str:
    return intern(text(condition, "reason")) if text(condition, "status") == "True" else ""


def _placement(spec: Object) -> Placement:
    affinity = child(spec, "affinity", "nodeAffinity").get(_REQUIRED)
    placement = Placement(
        node_selector=tuple(sorted(child(spec, "nodeSelector").items())),
        affinity=affinity,
        tolerations=tuple(
            PodToleration(
                key=text(each, "key"),
                operator=text(each, "operator") or "Equal",
                value=text(each, "value"),
                effect=text(each, "effect"),
            )
            for each in children(spec, "tolerations")
        ),
    )
    return placement if affinity is not None else once(placement)


def project_node(body: Object) -> NodeFacts:
    """Project a Node."""
    metadata, spec, status = child(body, "metadata"), child(body, "spec"), child(body, "status")
    conditions = {each.get("type"): each for each in children(status, "conditions")}
    return NodeFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        labels={intern(k): intern(v) for k, v in child(metadata, "labels").items()},
        taints=tuple(
            TaintFacts(key=text(each, "key"), effect=each["effect"], value=text(each, "value"))
            for each in children(spec, "taints")
            if each.get("effect") in PREVENTING
        ),
        unschedulable=bool(spec.get("unschedulable")),
        ready=text(conditions.get("Ready", {}), "status") == "True",
        allocatable=amounts(child(status, "allocatable")),
    )


def project_namespace(body: Object) -> NamespaceFacts:
    """Project a Namespace."""
    metadata = child(body, "metadata")
    return NamespaceFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        admin_access=child(metadata, "labels").get(ADMIN_ACCESS) == "true",
    )


def project_quota(body: Object) -> QuotaFacts:
    """Project a ResourceQuota; of one with scopes, no amounts."""
    metadata, spec, status = child(body, "metadata"), child(body, "spec"), child(body, "status")
    scoped = bool(spec.get("scopes") or spec.get("scopeSelector"))
    return QuotaFacts(
        namespace=intern(text(metadata, "namespace")),
        name=metadata["name"],
        uid=metadata["uid"],
        hard=() if scoped else amounts(child(status, "hard")),
        used=() if scoped else amounts(child(status, "used")),
    )


def _pod_claim(claim: Object, made: Object | None) -> PodClaim:
    generated = text(made, "resourceClaimName") if made is not None else ""
    return PodClaim(
        name=claim["name"],
        claim=claim.get("resourceClaimName") or None,
        template=claim.get("resourceClaimTemplateName") or None,
        generated=generated or None,
        needless=made is not None and not generated,
    )
