"""
From raw objects of ``resource.k8s.io/v1`` and ``v1`` to the facts of :mod:`.model`.

Fields that the facts do not need are ignored; absent, null and empty are the same. Strings that
repeat in thousands of objects (names of drivers, pools, classes, attributes) are kept once, and so
is what devices that are alike have in common: capacities, counters, taints.

It must not know clients, or what is done with the facts.
"""

from __future__ import annotations

from functools import lru_cache
from sys import intern
from typing import Any

from drakit.explain.model import (
    Amount,
    AttributeFact,
    CapacityFacts,
    CapacityPolicy,
    ClaimFacts,
    ClassFacts,
    CounterSetFacts,
    DeviceFacts,
    DeviceID,
    PodClaim,
    PodFacts,
    Request,
    Share,
    SliceFacts,
    TaintFacts,
    TemplateFacts,
    Toleration,
)
from drakit.explain.selectors import parse
from drakit.resource.raw import Object, child, children, text

__all__ = ("project_claim", "project_class", "project_pod", "project_slice", "project_template")

MAX_EXPRESSION = 512
"""Characters of a selector; one that tests a handful of attributes has fewer."""

PREVENTING = ("NoSchedule", "NoExecute")
"""Effects of taints that the scheduler obeys; it ignores all others."""


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
    results = children(allocation or {}, "devices", "results")
    taken = [result for result in results if not result.get("adminAccess")]
    return ClaimFacts(
        namespace=intern(text(metadata, "namespace")),
        name=metadata["name"],
        uid=metadata["uid"],
        requests=_requests(child(body, "spec")),
        allocated=allocation is not None,
        devices=tuple(_device_id(result) for result in taken if not result.get("shareID")),
        shares=tuple(
            Share(
                device=_device_id(result),
                consumed=_amounts(child(result, "consumedCapacity"), text(result, "driver")),
            )
            for result in taken
            if result.get("shareID")
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
        counter_sets=tuple(
            _counter_set(text(counters, "name"), counters)
            for counters in children(spec, "sharedCounters")
        ),
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
        tolerations=tuple(_toleration(entry) for entry in children(body, "tolerations")),
        capacity=_amounts(child(body, "capacity", "requests")),
    )


def _toleration(body: Object) -> Toleration:
    return Toleration(
        key=text(body, "key"),
        operator=text(body, "operator") or "Equal",
        value=text(body, "value"),
        effect=text(body, "effect"),
    )


def _selectors(body: Object) -> tuple[str, ...]:
    return tuple(
        _readable(text(entry, "cel", "expression")) for entry in children(body, "selectors")
    )


def _readable(expression: str) -> str:
    """
    Return an expression that this version can evaluate, else the empty one: its result is unknown.

    Only short ones are kept, because a tenant can fill 1.5 MiB of a claim with expressions.
    """
    if len(expression) > MAX_EXPRESSION or parse(expression) is None:
        return ""
    return intern(expression)


def _device_id(result: Object) -> DeviceID:
    return DeviceID(intern(result["driver"]), intern(result["pool"]), intern(result["device"]))


def _device(device: Object, driver: str) -> DeviceFacts:
    return DeviceFacts(
        name=intern(device["name"]),
        attributes={
            _full(name, driver): _attribute(value)
            for name, value in child(device, "attributes").items()
        },
        taints=_once(
            tuple(
                TaintFacts(
                    key=text(taint, "key"), effect=taint["effect"], value=text(taint, "value")
                )
                for taint in children(device, "taints")
                if taint.get("effect") in PREVENTING
            )
        ),
        capacity=_once(
            tuple(
                _capacity(_full(name, driver), value)
                for name, value in child(device, "capacity").items()
            )
        ),
        consumes=_once(
            tuple(
                _counter_set(text(counters, "counterSet"), counters)
                for counters in children(device, "consumesCounters")
            )
        ),
        shareable=bool(device.get("allowMultipleAllocations")),
    )


def _full(name: str, driver: str) -> str:
    return intern(name if "/" in name else f"{driver}/{name}")


@lru_cache(maxsize=1024)
def _once(facts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first of all equal tuples: devices of a kind share it."""
    return facts


def _capacity(name: str, body: Object) -> CapacityFacts:
    policy = child(body, "requestPolicy")
    span = child(policy, "validRange")
    return CapacityFacts(
        name=name,
        value=text(body, "value"),
        policy=CapacityPolicy(
            default=text(policy, "default") or None,
            valid_values=tuple(str(value) for value in children(policy, "validValues")),
            min=text(span, "min") or None,
            max=text(span, "max") or None,
            step=text(span, "step") or None,
        )
        if policy
        else None,
    )


def _counter_set(name: str, body: Object) -> CounterSetFacts:
    return CounterSetFacts(
        name=intern(name),
        counters=tuple(
            Amount(intern(counter), intern(text(value, "value")))
            for counter, value in child(body, "counters").items()
        ),
    )


def _amounts(body: Object, driver: str | None = None) -> tuple[Amount, ...]:
    """Read a map of quantities, with full names if a driver is given."""
    return tuple(
        Amount(intern(name) if driver is None else _full(name, driver), intern(str(quantity)))
        for name, quantity in body.items()
    )


def _attribute(value: dict[str, Any]) -> AttributeFact:
    for kind in ("string", "int", "bool"):
        if kind in value:
            fact = value[kind]
            return intern(fact) if isinstance(fact, str) else fact
    return None
