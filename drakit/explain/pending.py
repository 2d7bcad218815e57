"""
Why a pod is pending: a sentence that names the problem and the remedy.

Only certain problems are reported. With a selector that we cannot read, or a free device on any
node, no reason is returned, and only the scheduler's own message remains.
The same situation gives the same sentence (no time, no counter of attempts), so that Events can be
deduplicated.

:mod:`.availability` counts the available devices; :mod:`.wording` phrases the result.

It must not know Kubernetes clients, clocks, or earlier reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from drakit.explain.availability import Availability, needed
from drakit.explain.model import (
    ClaimFacts,
    ClassFacts,
    ObjectReference,
    PodClaim,
    PodFacts,
    Request,
    TemplateFacts,
)
from drakit.explain.selectors import Matches
from drakit.explain.wording import remedy, state

__all__ = (
    "ClusterFacts",
    "Code",
    "Reason",
    "explain",
    "missing_classes_of_claim",
    "missing_classes_of_template",
)


class Code(StrEnum):
    """The reasons of Events: a closed set of words."""

    DEVICE_CLASS_MISSING = "DeviceClassMissing"
    RESOURCE_CLAIM_MISSING = "ResourceClaimMissing"
    RESOURCE_CLAIM_TEMPLATE_MISSING = "ResourceClaimTemplateMissing"
    NO_DEVICE_PUBLISHED = "NoDevicePublished"
    DEVICES_ALLOCATED = "DevicesAllocated"
    """The pod continues when claims release devices."""

    DEVICES_TAINTED = "DevicesTainted"
    """The pod does not continue while devices are tainted, even if claims release devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    code: Code
    sentence: str
    regarding: ObjectReference


class ClusterFacts(Protocol):
    """The facts of the cluster; all kinds must have been listed before the first query."""

    def claim(self, namespace: str, name: str) -> ClaimFacts | None: ...
    def template(self, namespace: str, name: str) -> TemplateFacts | None: ...
    def device_class(self, name: str) -> ClassFacts | None: ...
    def matches(self, expressions: tuple[str, ...]) -> Matches: ...
    def available(self, request: Request, expressions: tuple[str, ...]) -> Availability | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Blocked:
    code: Code
    what: str


def explain(
    pod: PodFacts, cluster: ClusterFacts, *, name_all_holders: bool = False
) -> list[Reason]:
    """
    Return why a pod's claims are not allocated; empty if they are, or if that is uncertain.

    The reasons appear in an Event that the pod's owner reads, so claims of other namespaces that
    hold devices are named only if ``name_all_holders`` is set.
    """
    if pod.node is not None or pod.gated or pod.deleting or pod.phase != "Pending":
        return []
    reader = None if name_all_holders else pod.namespace
    found = [blocked for claim in pod.claims for blocked in _claim(pod, claim, cluster, reader)]
    return [
        Reason(
            code=blocked.code,
            sentence=f"pod {pod.namespace}/{pod.name} waits: {blocked.what}",
            regarding=pod.reference,
        )
        for blocked in dict.fromkeys(found)
    ]


def missing_classes_of_template(template: TemplateFacts, cluster: ClusterFacts) -> list[Reason]:
    """Warn of a template whose claims can never be allocated."""
    origin = f"ResourceClaimTemplate {template.namespace}/{template.name}"
    return _missing_classes(origin, template.requests, template.reference, cluster)


def missing_classes_of_claim(claim: ClaimFacts, cluster: ClusterFacts) -> list[Reason]:
    """Warn of a claim that cannot be allocated; for a generated one, its template is warned of."""
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


def _claim(
    pod: PodFacts, wanted: PodClaim, cluster: ClusterFacts, reader: str | None
) -> Iterator[_Blocked]:
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
        yield from _request(origin, request, cluster, reader)


def _request(
    origin: str, request: Request, cluster: ClusterFacts, reader: str | None
) -> Iterator[_Blocked]:
    missing = list(_classes_missing(origin, request, cluster))
    if missing:  # one missing class stops the claim, even if it is an alternative's
        yield from missing
        return
    if not request.alternatives:
        blocked = _devices(origin, f'request "{request.name}"', request, cluster, reader)
        if blocked is not None:
            yield blocked
        return
    found = [
        _devices(origin, f'request "{request.name}/{each.name}"', each, cluster, reader)
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


def _devices(
    origin: str, name: str, request: Request, cluster: ClusterFacts, reader: str | None
) -> _Blocked | None:
    """Return why all devices of a request are unavailable; None if that is not certain."""
    device_class = cluster.device_class(request.device_class)
    if device_class is None:
        return None
    expressions = device_class.selectors + request.selectors
    matches = cluster.matches(expressions)
    nothing = not matches.certain and not matches.possible
    if nothing and not request.admin_access:
        return _Blocked(
            code=Code.NO_DEVICE_PUBLISHED,
            what=f'no node publishes a device of DeviceClass "{request.device_class}" that '
            f"{name} of {origin} could use; check that the driver runs and publishes "
            f"ResourceSlices, and the selectors of class and request",
        )
    found = cluster.available(request, expressions)
    if found is None or (request.admin_access and not found.tainted.devices):
        return None
    if found.total < needed(request) and not request.admin_access:
        return _too_few(origin, name, request, found)
    released = found.free + found.releasable >= needed(request)
    devices = f'DeviceClass "{request.device_class}" that {name} of {origin} could use'
    return _Blocked(
        code=Code.DEVICES_ALLOCATED if released else Code.DEVICES_TAINTED,
        what=f"{state(found, of=devices, reader=reader)}; {remedy(found, released=released)}",
    )


def _too_few(origin: str, name: str, request: Request, found: Availability) -> _Blocked:
    if found.total == 0:
        what = (
            f'no published device of DeviceClass "{request.device_class}" that {name} of {origin} '
            f"selects has the capacity that it asks for; lower capacity.requests or add devices"
        )
    else:
        verb = "is" if found.total == 1 else "are"
        what = (
            f"{name} of {origin} asks for {request.count} devices of DeviceClass "
            f'"{request.device_class}", but only {found.total} {verb} published that it could use; '
            f"lower count or add devices"
        )
    return _Blocked(code=Code.NO_DEVICE_PUBLISHED, what=what)
