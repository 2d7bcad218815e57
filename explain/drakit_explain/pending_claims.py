"""
Finds a pod's claims, in the state that the scheduler sees, and the problems that are known without
a query.

A claim may be missing, not created yet, created for another pod, or being deleted. Its class may be
missing. Extended resources that a DeviceClass provides are treated as claims, because the scheduler
creates one.

:mod:`.pending` determines whether devices are available. Does not depend on clients, clocks, or
Events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice

from drakit.quantity import quantity_units
from drakit_explain.allocation import AskedClaim
from drakit_explain.codes import Code, Finding, Reason
from drakit_explain.evidence import NO_EVENTS, NOT_CREATED, Events
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    NamespaceFacts,
    NodeFacts,
    PodClaim,
    PodFacts,
    QuotaFacts,
    ReportFacts,
    Request,
    TemplateFacts,
    exact_of,
    exact_requests,
)
from drakit_explain.projection import ADMIN_ACCESS
from drakit_explain.selectors import only_driver
from drakit_explain.unmatched import why_unmatched
from drakit_explain.world import Name, World

_OF_CLASS = "deviceclass.resource.kubernetes.io/"
"""The prefix of the implicit extended resource that each DeviceClass provides, which is followed by
the name of the class."""

_QUOTA_OF_CLASS = ".deviceclass.resource.k8s.io/devices"
_QUOTA_OF_CLAIMS = "count/resourceclaims.resource.k8s.io"

_QUOTA_OF_ALL = 32
"""How many devices a quota assumes in a request for all devices: the maximum per claim."""

_UNIT = 10**9

_USERS = 3
"""Maximum number of a claim's consumers to list in a message."""

_COMPARED = 8
"""Maximum number of names to compare letter by letter. Comparing two names of 253 letters takes 6
ms, and tenants choose the names."""

QUOTA_SECONDS = 5.0
"""Maximum time until a claim that a quota already counts becomes visible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted(AskedClaim):
    """A claim of a pod that must be allocated. The allocator reads only its requests and
    constraints."""

    claim: str = field(default="", compare=False)
    """The name of the ResourceClaim, if it has been created."""

    template: str = field(default="", compare=False)
    """The name of the ResourceClaimTemplate from which the claim will be created."""


def resolve(
    pod: PodFacts,
    each: PodClaim,
    world: World,
    *,
    settled: bool,
    events: Events = NO_EVENTS,
    name_all: bool = False,
) -> Wanted | Finding | ClaimFacts | None:
    """
    Find a claim of a pod. Return None if the pod does not need it.

    :param settled: whether the pod is old enough that a missing claim is a problem.
    :param name_all: whether the reader may see the names of claims in other namespaces.
    """
    if each.needless:
        return None
    # The pod is from a manifest that the API server did not check.
    if not (each.claim or each.template):
        return Finding(
            code=Code.RESOURCE_CLAIM_MISSING,
            what=f'pod claim "{each.name}" names no claim; set resourceClaimName or '
            f"resourceClaimTemplateName",
        )
    name = each.claim or each.generated
    claim = world.claim(pod.namespace, name) if name is not None else None
    if claim is not None and (problem := of_other_pod(claim, each, pod)):
        return problem
    if claim is not None and claim.deleting:
        return Finding(
            code=Code.CLAIM_BEING_DELETED,
            what=f'ResourceClaim "{claim.name}" {_for(each)} is being deleted'
            + (f", and it is reserved for {', '.join(claim.users[:_USERS])}" if claim.users else "")
            + (f", and finalizer {claim.held_by[0]} blocks the deletion" if claim.held_by else "")
            + "; when the deletion ends, create the claim or the pod again",
        )
    if claim is not None and claim.allocated:
        return claim
    if each.template is None:
        if claim is not None:
            return _wanted(f'claim "{claim.name}"', claim)
        return Finding(
            code=Code.RESOURCE_CLAIM_MISSING,
            what=f'ResourceClaim "{each.claim}" {_for(each)} does not exist in '
            f'namespace "{pod.namespace}"; create it or correct resourceClaimName'
            + ((name_all and _elsewhere(each.claim, world)) or "")
            + _likely(each.claim, world.of(ClaimFacts), pod.namespace),
        )
    template = world.template(pod.namespace, each.template)
    # The template may have been deleted, and the claim may not exist yet, so use whichever exists.
    source = claim or template
    if source is None:
        return Finding(
            code=Code.RESOURCE_CLAIM_TEMPLATE_MISSING,
            what=f'ResourceClaimTemplate "{each.template}" {_for(each)} '
            f'does not exist in namespace "{pod.namespace}"; create it (if the API server rejects '
            f"it, correct the reported error), or correct resourceClaimTemplateName"
            + _likely(each.template, world.of(TemplateFacts), pod.namespace),
        )
    if claim is None and template is not None and each.generated is None:
        problem = _not_created(pod, each, template, world, settled=settled, events=events)
        if problem is not None:
            return problem
    return _wanted(f'claim template "{each.template}"', source)


def of_other_pod(claim: ClaimFacts, each: PodClaim, pod: PodFacts) -> Finding | None:
    """Return a problem if a claim that should be created for this pod was created for another
    one."""
    if each.generated is None or claim.owner_uid in ("", pod.uid):
        return None
    return Finding(
        code=Code.CLAIM_OF_OTHER_POD,
        what=f'ResourceClaim "{claim.name}" {_for(each)} was created for another pod '
        f'with the name "{claim.owner_pod}"; delete that claim and create the pod again',
    )


def _elsewhere(name: str | None, world: World) -> str:
    """Return the namespace of a claim with this name, in parentheses."""
    found = sorted(each.namespace for each in world.of(ClaimFacts) if each.name == name)
    if not found:
        return ""
    return f' (namespace "{found[0]}" has one, but a pod only uses claims of its own namespace)'


def _likely(name: str | None, known: Iterable[Name], namespace: str = "") -> str:
    """Return the existing name that was most likely intended, in parentheses."""
    wrong = name or ""
    half = len(wrong) // 2  # a single typo leaves one half unchanged
    alike = (
        each.name
        for each in known
        if each.namespace == namespace
        and (each.name.startswith(wrong[:half]) or each.name.endswith(wrong[-half:]))
    )
    close = get_close_matches(wrong, islice(alike, _COMPARED), n=1, cutoff=0.8)
    return f' ("{close[0]}" exists)' if close else ""


def _for(each: PodClaim) -> str:
    return f'for pod claim "{each.name}"'


def _not_created(
    pod: PodFacts,
    each: PodClaim,
    template: TemplateFacts,
    world: World,
    *,
    settled: bool,
    events: Events,
) -> Finding | None:
    """Return the reason why a template's claim has not been created, or None if it may be created
    at any moment."""
    namespace = world.of(NamespaceFacts).get(Name("", template.namespace))
    asks = any(exact.admin_access for exact in exact_of(template.requests))
    if asks and namespace is not None and not namespace.admin_access:
        return Finding(
            code=Code.ADMIN_ACCESS_DENIED,
            what=f'claim template "{template.name}" {_for(each)} asks for admin '
            f'access, which namespace "{template.namespace}" does not allow; ask an admin to set '
            f'the label {ADMIN_ACCESS}: "true" on the namespace',
        )
    for quota in world.of(QuotaFacts).values():
        of_namespace = quota.namespace == template.namespace
        if of_namespace and (what := _exceeded(quota, template)) and not _is_counted(pod, world):
            return Finding(
                code=Code.QUOTA_EXCEEDED,
                transient=Code.QUOTA_EXCEEDED,  # a quota may count a claim before it is visible
                patience_seconds=QUOTA_SECONDS,
                what=f'no ResourceClaim can be created from claim template "{template.name}" '
                f"{_for(each)}, because {what}; delete claims that are not needed, or ask an admin "
                f"for more",
            )
    event = events.latest([pod.uid], (NOT_CREATED,))
    if event is None and not settled:
        return None
    cause = "an exceeded ResourceQuota"
    if asks and namespace is None:
        cause += f', or a namespace without the label {ADMIN_ACCESS}: "true" for admin access'
    read = (
        f"the Event FailedResourceClaimCreation of the pod has the cause, such as {cause}; if "
        f"there is no such Event, check that the kube-controller-manager is running"
    )
    return Finding(
        code=Code.RESOURCE_CLAIM_NOT_CREATED,
        what=f'no ResourceClaim has been created from claim template "{template.name}" '
        f"{_for(each)}; {events.instead_of(read, event)}",
    )


def _is_counted(pod: PodFacts, world: World) -> bool:
    """Return whether a quota may count a claim of the pod that the pod's status does not name
    yet."""
    return any(each.owner_uid == pod.uid for each in world.waiting_claims())


def _exceeded(quota: QuotaFacts, template: TemplateFacts) -> str:
    """Return the first limit of a quota that a claim of this template would exceed, as a clause.
    Empty if there is no such limit."""
    used = {amount.name: quantity_units(amount.quantity) for amount in quota.used}
    usage = _usage(template.requests)
    for hard in quota.hard:
        needed = usage.get(hard.name, 0)
        taken = used.get(hard.name, 0)
        if needed and taken + needed * _UNIT > quantity_units(hard.quantity):
            return (
                f'ResourceQuota "{quota.name}" allows {hard.quantity} of {hard.name}, '
                f"the namespace uses {taken // _UNIT}, and the claim needs {needed}"
            )
    return ""


def quota_of(device_class: ClassFacts, devices: int) -> dict[str, str]:
    """Return the limits of a ResourceQuota that allows this number of devices of a class, whether
    pods request them with claims or as extended resources."""
    name = device_class.name
    limits = [f"{name}{_QUOTA_OF_CLASS}", f"requests.{_OF_CLASS}{name}"]
    if device_class.extended_resource:
        limits.append(f"requests.{device_class.extended_resource}")
    return dict.fromkeys(limits, str(devices))


def _usage(requests: Sequence[Request]) -> dict[str, int]:
    """Return a claim's usage in quotas. For alternatives, the largest usage of each class
    applies."""
    usage = {_QUOTA_OF_CLAIMS: 1}
    for request in requests:
        largest: dict[str, int] = {}
        for exact in exact_of([request]):
            name = f"{exact.device_class}{_QUOTA_OF_CLASS}"
            count = _QUOTA_OF_ALL if exact.every else exact.count
            largest[name] = max(largest.get(name, 0), count)
        for name, count in largest.items():
            usage[name] = usage.get(name, 0) + count
    return usage


# ---- extended resources


def extended(pod: PodFacts, world: World) -> tuple[list[Wanted], list[str]]:
    """Return claims for the extended resources that a DeviceClass provides, and the reasons why the
    result is undecided."""
    wanted: list[Wanted] = []
    unknown: list[str] = []
    if pod.placement.unread:
        unknown.append(pod.placement.unread)
    if pod.extended_claim is not None:
        return wanted, unknown
    for resource in sorted({each.resource for each in pod.extended}):
        device_class = class_of_resource(resource, world)
        if device_class is None:
            continue  # a device plugin provides the resource, or nothing does
        requests = [each for each in pod.extended if each.resource == resource]
        if any(each.init for each in requests):
            unknown.append(f"extended resource {resource} of init containers")
        elif _is_listed(resource, world):
            unknown.append(
                f"extended resource {resource}, which device plugins on nodes also provide"
            )
        else:
            wanted.append(
                Wanted(
                    origin=f'extended resource "{resource}"',
                    requests=tuple(
                        Request(
                            name=each.container, device_class=device_class.name, count=each.amount
                        )
                        for each in requests
                    ),
                )
            )
    return wanted, unknown


def misspelt_resources(pod: PodFacts, world: World) -> Iterator[Finding]:
    """Return findings about extended resources that nothing provides, but whose names resemble an
    existing one."""
    if not pod.extended or pod.extended_claim is not None or not world.of(NodeFacts):
        return
    provided = {each.extended_resource for each in world.of(ClassFacts).values()} - {""}
    for resource in sorted({each.resource for each in pod.extended})[:_COMPARED]:
        close = get_close_matches(resource, provided, n=1, cutoff=0.8)
        if (
            close
            and class_of_resource(resource, world) is None
            and not _is_listed(resource, world, even_none=True)
        ):
            yield Finding(
                code=Code.DEVICE_CLASS_MISSING,
                what=f'no node and no DeviceClass provides extended resource "{resource}"',
                advice=f'a DeviceClass provides "{close[0]}", so check the spelling in the limits '
                f"of the pod",
            )


def wanted_of(pod: PodFacts, world: World) -> list[Wanted]:
    """Return the known claims of a pod that are not allocated."""
    found = [resolve(pod, each, world, settled=False) for each in pod.claims]
    return [*(each for each in found if isinstance(each, Wanted)), *extended(pod, world)[0]]


def not_checked(pod: PodFacts, world: World) -> list[str]:
    """Return further conditions for the pod's node that are not checked, as phrases."""
    plugins = sorted({each.resource for each in pod.extended} if not pod.extended_claim else ())
    return [
        *pod.unchecked,
        *(
            f"extended resource {each}"
            for each in plugins
            if class_of_resource(each, world) is None
        ),
    ]


def class_of_resource(resource: str, world: World) -> ClassFacts | None:
    """Return the class that provides a resource. If there are several, return the newest one, and
    if several are equally new, the first one by name."""
    classes = [one for one in world.of(ClassFacts).values() if one.extended_resource == resource]
    if classes:
        youngest = max(one.created for one in classes)
        return min((one for one in classes if one.created == youngest), key=lambda one: one.name)
    if resource.startswith(_OF_CLASS):
        return world.device_class(resource.removeprefix(_OF_CLASS))
    return None


def _is_listed(resource: str, world: World, *, even_none: bool = False) -> bool:
    """Return whether nodes list a resource, which means that a device plugin provides it."""
    return any(
        amount.name == resource and (even_none or amount.quantity != "0")
        for node in world.of(NodeFacts).values()
        for amount in node.allocatable
    )


# ---- requests


def classes_missing(
    origin: str, request: Request, world: World, *, claim: ClaimFacts | None = None
) -> Iterator[Finding]:
    """Return findings about the classes of a request that do not exist. `claim` is the claim with
    the request, if it has been created."""
    for name, each in exact_requests(request):
        if each.device_class and world.device_class(each.device_class) is None:
            yield Finding(
                code=Code.DEVICE_CLASS_MISSING,
                what=f'DeviceClass "{each.device_class}" of {origin}, request "{name}", does not '
                f"exist",
                advice="create it or correct deviceClassName"
                + _likely(each.device_class, world.of(ClassFacts))
                if claim is None or not claim.for_extended
                else _advice_on_resource(each.device_class, claim, world),
            )


def _advice_on_resource(missing: str, claim: ClaimFacts, world: World) -> str:
    """Return the remedy for a missing class of a claim for extended resources. The resources are
    found in the pod, because the claim does not contain them."""
    pod = world.pod(claim.namespace, claim.owner_pod or "")
    found = sorted({each.resource for each in pod.extended}) if pod is not None else []
    create = "create the class"
    if (by_name := f"{_OF_CLASS}{missing}") in found:
        found = [by_name]
    else:
        create += " with this extendedResourceName"
        found = [
            each
            for each in found
            if not each.startswith(_OF_CLASS)
            and class_of_resource(each, world) is None
            and not _is_listed(each, world)
        ]
    resource = " or ".join(f'"{each}"' for each in found)
    named = f"extended resource {resource}" if resource else "an extended resource"
    return (
        f'the scheduler created the claim for {named} of pod "{claim.owner_pod}"; {create}, or '
        f"correct the resource name in the limits of the pod"
    )


def missing_classes(of: ClaimFacts | TemplateFacts, world: World) -> list[Reason]:
    """Return the reasons why no claim with these requests can be allocated, regardless of the pod
    that waits for it."""
    origin = f"{of.reference.kind} {of.namespace}/{of.name}"
    claim = of if isinstance(of, ClaimFacts) else None
    return [
        each.about(of.reference)
        for request in of.requests
        for each in classes_missing(origin, request, world, claim=claim)
    ]


def what_to_check(request: Request, world: World, *, owners: str = "class and request") -> str:
    """Return advice on what to check if no device matches. It names the driver in the selectors, if
    there is one."""
    if why := why_unmatched(request, world):
        return why
    drivers = {only_driver(expression) for _, expression in world.expressions(request)} - {None}
    published = {each.driver for each in world.slices() if each.devices}
    if absent := sorted(each for each in drivers - published if each):
        reports = world.of(ReportFacts).values()
        for report in sorted(reports, key=lambda each: each.name):
            if report.driver == absent[0] and report.rejected:
                return (
                    f"driver {report.driver} publishes no device, and rejects "
                    f"{report.rejected} on node {report.node}, such as {report.rejected_example}"
                )
        return f"no slice of driver {absent[0]} has devices, so check that the driver is running"
    if not published:
        return "no ResourceSlice has devices, so check that the driver is running"
    return f"check the selectors of {owners}, and the attributes of the devices"


def _wanted(origin: str, source: ClaimFacts | TemplateFacts) -> Wanted:
    return Wanted(
        origin=origin,
        requests=source.requests,
        constraints=source.constraints,
        claim=source.name if isinstance(source, ClaimFacts) else "",
        template=source.name if isinstance(source, TemplateFacts) else "",
    )
