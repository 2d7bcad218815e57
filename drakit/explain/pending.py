"""
What a pending pod waits for: a sentence that says what is the matter and what to do.

Only what is certain is said. A selector that we cannot read, a device that can be shared, a free
device on whichever node: then there is no reason to give, and the scheduler's own words must do.
The same situation gives the same sentence (no time, no counter of attempts), so that whoever writes
it into Events can deduplicate.

It must not know Kubernetes clients, clocks, or what has been said before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from drakit.explain.model import (
    ClaimFacts,
    ClassFacts,
    DeviceID,
    ObjectReference,
    PodClaim,
    PodFacts,
    Request,
    TemplateFacts,
)
from drakit.explain.selectors import Matches

__all__ = (
    "ClusterFacts",
    "Code",
    "Reason",
    "explain",
    "missing_classes_of_claim",
    "missing_classes_of_template",
)

NAMED_HOLDERS = 3
"""Holders named in a sentence: it must be read at a glance, and a note holds 1,024 bytes."""


class Code(StrEnum):
    """The reasons of Events: a closed set of words."""

    DEVICE_CLASS_MISSING = "DeviceClassMissing"
    RESOURCE_CLAIM_MISSING = "ResourceClaimMissing"
    RESOURCE_CLAIM_TEMPLATE_MISSING = "ResourceClaimTemplateMissing"
    NO_DEVICE_PUBLISHED = "NoDevicePublished"
    DEVICES_ALLOCATED = "DevicesAllocated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    code: Code
    sentence: str
    regarding: ObjectReference


class ClusterFacts(Protocol):
    """What must be known of the cluster; all kinds must have been listed before it is asked."""

    def claim(self, namespace: str, name: str) -> ClaimFacts | None: ...
    def template(self, namespace: str, name: str) -> TemplateFacts | None: ...
    def device_class(self, name: str) -> ClassFacts | None: ...
    def matches(self, expressions: tuple[str, ...]) -> Matches: ...
    def holder(self, device: DeviceID) -> ClaimFacts | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Blocked:
    code: Code
    what: str


def explain(pod: PodFacts, cluster: ClusterFacts) -> list[Reason]:
    """Say why a pod's claims are not allocated; empty if they are, or if we cannot tell."""
    if pod.node is not None or pod.gated or pod.deleting or pod.phase != "Pending":
        return []
    found = [blocked for claim in pod.claims for blocked in _claim(pod, claim, cluster)]
    return [
        Reason(
            code=blocked.code,
            sentence=f"pod {pod.namespace}/{pod.name} waits: {blocked.what}",
            regarding=pod.reference,
        )
        for blocked in dict.fromkeys(found)
    ]


def missing_classes_of_template(template: TemplateFacts, cluster: ClusterFacts) -> list[Reason]:
    """Warn of a template whose claims nobody could ever allocate."""
    origin = f"ResourceClaimTemplate {template.namespace}/{template.name}"
    return _missing_classes(origin, template.requests, template.reference, cluster)


def missing_classes_of_claim(claim: ClaimFacts, cluster: ClusterFacts) -> list[Reason]:
    """Warn of a claim that nobody can allocate; a generated one is its template's fault."""
    if claim.allocated or claim.owner_pod is not None:
        return []
    origin = f"ResourceClaim {claim.namespace}/{claim.name}"
    return _missing_classes(origin, claim.requests, claim.reference, cluster)


def _missing_classes(
    origin: str, requests: Sequence[Request], regarding: ObjectReference, cluster: ClusterFacts
) -> list[Reason]:
    return [
        Reason(code=blocked.code, sentence=blocked.what, regarding=regarding)
        for request in requests
        for blocked in _classes_missing(origin, request, cluster)
    ]


def _claim(pod: PodFacts, wanted: PodClaim, cluster: ClusterFacts) -> Iterator[_Blocked]:
    if wanted.needless:
        return
    name = wanted.claim or wanted.generated
    claim = cluster.claim(pod.namespace, name) if name is not None else None
    if claim is not None and claim.allocated:
        return
    if wanted.template is not None:
        template = cluster.template(pod.namespace, wanted.template)
        if claim is None and template is None:
            yield _Blocked(
                code=Code.RESOURCE_CLAIM_TEMPLATE_MISSING,
                what=f'ResourceClaimTemplate "{wanted.template}" of its claim "{wanted.name}" does '
                f'not exist in namespace "{pod.namespace}"; create it or correct '
                f"resourceClaimTemplateName",
            )
            return
        # The claim may outlive its template, and may not be made yet: take the one that is there.
        requests = claim.requests if claim is not None else template.requests if template else ()
        origin = f'claim template "{wanted.template}"'
    elif claim is not None:
        requests, origin = claim.requests, f'claim "{claim.name}"'
    else:
        yield _Blocked(
            code=Code.RESOURCE_CLAIM_MISSING,
            what=f'ResourceClaim "{wanted.claim}" of its claim "{wanted.name}" does not exist in '
            f'namespace "{pod.namespace}"; create it or correct resourceClaimName',
        )
        return
    for request in requests:
        yield from _request(origin, request, cluster)


def _request(origin: str, request: Request, cluster: ClusterFacts) -> Iterator[_Blocked]:
    missing = list(_classes_missing(origin, request, cluster))
    if missing:  # one missing class stops the claim, even if it is an alternative's
        yield from missing
        return
    if not request.alternatives:
        blocked = _devices(origin, f'request "{request.name}"', request, cluster)
        if blocked is not None:
            yield blocked
        return
    found = [
        _devices(origin, f'request "{request.name}/{each.name}"', each, cluster)
        for each in request.alternatives
    ]
    if all(found):
        yield from (blocked for blocked in found if blocked is not None)


def _classes_missing(origin: str, request: Request, cluster: ClusterFacts) -> Iterator[_Blocked]:
    for name, each in _exact_requests(request):
        if each.device_class and cluster.device_class(each.device_class) is None:
            yield _Blocked(
                code=Code.DEVICE_CLASS_MISSING,
                what=f'DeviceClass "{each.device_class}" of {origin}, request "{name}", does not '
                f"exist; create it or correct deviceClassName",
            )


def _exact_requests(request: Request) -> Iterator[tuple[str, Request]]:
    if not request.alternatives:
        yield request.name, request
    for each in request.alternatives:
        yield f"{request.name}/{each.name}", each


def _devices(origin: str, name: str, request: Request, cluster: ClusterFacts) -> _Blocked | None:
    """Tell whether a request's devices are all away; None if not, or if that is not certain."""
    device_class = cluster.device_class(request.device_class)
    if device_class is None or request.admin_access:
        return None
    matches = cluster.matches(device_class.selectors + request.selectors)
    if not matches.certain and not matches.possible:
        return _Blocked(
            code=Code.NO_DEVICE_PUBLISHED,
            what=f'no node publishes a device of DeviceClass "{request.device_class}" that '
            f"{name} of {origin} could use; check that the driver runs and publishes "
            f"ResourceSlices, and the selectors of class and request",
        )
    holders = _holders(matches, cluster)
    if matches.possible or holders is None:
        return None
    total = len(matches.certain)
    if total < request.count:
        return _Blocked(
            code=Code.NO_DEVICE_PUBLISHED,
            what=f"{name} of {origin} asks for {request.count} devices of DeviceClass "
            f'"{request.device_class}", but only {total} {"is" if total == 1 else "are"} '
            f"published that it could use; lower count or add devices",
        )
    if total - len(holders) >= max(request.count, 1):
        return None
    verb = "is" if len(holders) == 1 else "are"
    return _Blocked(
        code=Code.DEVICES_ALLOCATED,
        what=f'{_taken(total, len(holders))} of DeviceClass "{request.device_class}" that {name} '
        f"of {origin} could use {verb} allocated, to {_names(holders.values())}; it goes on when "
        f"enough of them are released",
    )


def _holders(matches: Matches, cluster: ClusterFacts) -> dict[DeviceID, ClaimFacts] | None:
    """Give the claims that hold devices; None if a held device may still be available."""
    if matches.shareable:
        return None
    held = ((device, cluster.holder(device)) for device in matches.certain)
    return {device: claim for device, claim in held if claim is not None}


def _taken(total: int, taken: int) -> str:
    if total == 1:
        return "the only device"
    return f"all {total} devices" if taken == total else f"{taken} of the {total} devices"


def _names(holders: Iterable[ClaimFacts]) -> str:
    claims = {(claim.namespace, claim.name): claim for claim in holders}
    told = [_holder(claims[key]) for key in sorted(claims)]
    rest = len(told) - NAMED_HOLDERS
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(told[:NAMED_HOLDERS]) + more


def _holder(claim: ClaimFacts) -> str:
    pods = sorted(claim.reserved_for)
    if not pods:
        return f"claim {claim.namespace}/{claim.name} (no pod)"
    more = f" and {len(pods) - 1} more" if len(pods) > 1 else ""
    return f"claim {claim.namespace}/{claim.name} (pod {pods[0]}{more})"
