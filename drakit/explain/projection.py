"""
From raw objects of ``resource.k8s.io/v1`` and ``v1`` to the facts of :mod:`.model`.

Fields that the facts do not need are left; absent, null and empty are the same. Strings that repeat
in thousands of objects (names of drivers, pools, classes, attributes) are kept once.

It must not know clients, or what is done with the facts.
"""

from __future__ import annotations

from sys import intern
from typing import Any

from drakit.explain.model import (
    AttributeFact,
    ClaimFacts,
    ClassFacts,
    DeviceFacts,
    DeviceID,
    PodClaim,
    PodFacts,
    Request,
    SliceFacts,
    TemplateFacts,
)
from drakit.resource.raw import Object, child, children, text

__all__ = ("project_claim", "project_class", "project_pod", "project_slice", "project_template")


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
        scheduling_message=text(conditions.get("PodScheduled", {}), "message"),
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


def project_claim(body: Object) -> ClaimFacts:
    """Project a ResourceClaim."""
    metadata, status = child(body, "metadata"), child(body, "status")
    allocation = status.get("allocation")
    owner = next(
        (
            reference
            for reference in children(metadata, "ownerReferences")
            if reference.get("kind") == "Pod" and reference.get("controller")
        ),
        None,
    )
    return ClaimFacts(
        namespace=intern(text(metadata, "namespace")),
        name=metadata["name"],
        uid=metadata["uid"],
        requests=_requests(child(body, "spec")),
        allocated=allocation is not None,
        devices=tuple(
            DeviceID(intern(result["driver"]), intern(result["pool"]), intern(result["device"]))
            for result in children(allocation or {}, "devices", "results")
            if not result.get("adminAccess")
        ),
        reserved_for=tuple(
            consumer["name"]
            for consumer in children(status, "reservedFor")
            if consumer.get("resource") == "pods"
        ),
        owner_pod=text(owner, "name") if owner is not None else None,
    )


def project_template(body: Object) -> TemplateFacts:
    """Project a ResourceClaimTemplate."""
    metadata = child(body, "metadata")
    return TemplateFacts(
        namespace=intern(text(metadata, "namespace")),
        name=metadata["name"],
        uid=metadata["uid"],
        requests=_requests(child(body, "spec", "spec")),
    )


def project_class(body: Object) -> ClassFacts:
    """Project a DeviceClass."""
    metadata = child(body, "metadata")
    return ClassFacts(
        name=metadata["name"], uid=metadata["uid"], selectors=_selectors(child(body, "spec"))
    )


def project_slice(body: Object) -> SliceFacts:
    """Project a ResourceSlice."""
    metadata, spec = child(body, "metadata"), child(body, "spec")
    driver, pool = intern(text(spec, "driver")), child(spec, "pool")
    return SliceFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        driver=driver,
        pool=intern(text(pool, "name")),
        generation=int(pool.get("generation") or 0),
        pool_slices=int(pool.get("resourceSliceCount") or 1),
        node=spec.get("nodeName") or None,
        devices=tuple(_device(device, driver) for device in children(spec, "devices")),
    )


def _requests(spec: Object) -> tuple[Request, ...]:
    return tuple(_request(request) for request in children(spec, "devices", "requests"))


def _request(request: Object) -> Request:
    if alternatives := children(request, "firstAvailable"):
        return Request(
            name=request["name"],
            device_class="",
            alternatives=tuple(_exact(entry["name"], entry) for entry in alternatives),
        )
    return _exact(request["name"], child(request, "exactly"))


def _exact(name: str, body: Object) -> Request:
    every = body.get("allocationMode") == "All"
    return Request(
        name=name,
        device_class=intern(text(body, "deviceClassName")),
        count=0 if every else int(body.get("count") or 1),
        selectors=_selectors(body),
        admin_access=bool(body.get("adminAccess")),
    )


def _selectors(body: Object) -> tuple[str, ...]:
    # A selector of a later kind than CEL is the empty expression: unknown, hence nothing is said.
    return tuple(intern(text(entry, "cel", "expression")) for entry in children(body, "selectors"))


def _device(device: Object, driver: str) -> DeviceFacts:
    return DeviceFacts(
        name=intern(device["name"]),
        attributes={
            intern(name if "/" in name else f"{driver}/{name}"): _attribute(value)
            for name, value in child(device, "attributes").items()
        },
        shareable=bool(device.get("allowMultipleAllocations") or device.get("consumesCounters")),
    )


def _attribute(value: dict[str, Any]) -> AttributeFact:
    for kind in ("string", "int", "bool"):
        if kind in value:
            fact = value[kind]
            return intern(fact) if isinstance(fact, str) else fact
    return None
