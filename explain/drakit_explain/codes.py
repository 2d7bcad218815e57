"""
The reasons in explanations: a fixed set of words for Events, metrics and scripts. The module also
determines which reasons remain certain if the objects of a kind may not be listed, and which
reasons have a common cause.

The operator and ``kubectl drakit`` drop uncertain reasons, because a missing permission could be
their cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    NodeFacts,
    ObjectReference,
    PoolID,
    SliceFacts,
    TaintRuleFacts,
    TemplateFacts,
)
from drakit_explain.selectors import selector_of
from drakit_explain.world import Fact, World

# ---------------------------------------------------------------- codes


class Code(StrEnum):
    """The reason why a pod is waiting, or an object's problem."""

    DEVICE_CLASS_MISSING = "DeviceClassMissing"
    RESOURCE_CLAIM_MISSING = "ResourceClaimMissing"
    RESOURCE_CLAIM_TEMPLATE_MISSING = "ResourceClaimTemplateMissing"
    NO_DEVICE_PUBLISHED = "NoDevicePublished"
    DEVICES_ALLOCATED = "DevicesAllocated"
    """The pod can be scheduled when claims release devices, hardware or capacity."""

    DEVICES_TAINTED = "DevicesTainted"
    """Too many devices are tainted, so even if other claims release their devices, that is not
    enough."""

    DEVICES_ON_OTHER_NODES = "DevicesOnOtherNodes"
    """Devices exist, but only on nodes that the pod cannot use."""

    SELECTOR_FAILED = "SelectorFailed"
    """A selector fails on a device, so the scheduler aborts the search on its node."""

    CONSTRAINT_NOT_MET = "ConstraintNotMet"
    """Enough devices are free on a node, but none that satisfy the claim's constraints."""

    POOL_INVALID = "PoolInvalid"
    """A pool contradicts itself, so the scheduler does not allocate devices from it."""

    POOL_INCOMPLETE = "PoolIncomplete"
    """Slices of a pool's newest generation are missing, or there are too many of them."""

    POOL_NAME_CONFLICT = "PoolNameConflict"
    """Several nodes publish pools with the same name, which the scheduler treats as one pool."""

    SLICES_OUTDATED = "ResourceSlicesOutdated"
    """Slices of an older pool generation remain alongside the newest one."""

    REQUESTS_COMPETE = "RequestsCompete"
    """Each request by itself could be allocated, but no node has devices for all of them."""

    SEARCH_FAILED = "SearchFailed"
    """The scheduler's search ends with an error, so the scheduler gives up on the pod, even if
    other nodes fit."""

    RESOURCE_CLAIM_NOT_CREATED = "ResourceClaimNotCreated"
    QUOTA_EXCEEDED = "QuotaExceeded"
    ADMIN_ACCESS_DENIED = "AdminAccessDenied"
    CLAIM_OF_OTHER_POD = "ClaimOfOtherPod"
    CLAIM_BEING_DELETED = "ClaimBeingDeleted"
    CLAIM_NOT_ALLOCATED = "ClaimNotAllocated"
    """A pod has a node, but its claim has no devices: the scheduler did not place the pod."""

    CLAIM_NOT_RESERVED = "ClaimNotReserved"
    """A pod has a node, but its claim is not reserved for the pod, so the kubelet rejects the
    claim."""

    BINDING_OUTSTANDING = "BindingConditionsOutstanding"
    BINDING_FAILED = "BindingConditionsFailed"
    NODE_GONE = "NodeGone"
    NODE_NOT_READY = "NodeNotReady"
    DRIVER_UNAVAILABLE = "DriverUnavailable"
    """The driver of an allocated device does not publish devices on the node, or has stopped
    there."""

    POOL_GONE = "PoolGone"
    DEVICE_GONE = "DeviceGone"
    DEVICE_UNHEALTHY = "DeviceUnhealthy"
    EVICTION_BY_TAINT = "EvictionByDeviceTaint"
    NOT_PREPARED = "ClaimsNotPrepared"
    """The kubelet has not prepared the claims. If the failure is known, the reason contains it."""

    POD_NOT_STARTED = "PodNotStarted"
    """A step of the pod's start other than preparing its claims has failed: its volumes, sandbox
    or a container."""

    POD_FAILED = "PodFailed"
    DEVICE_RENUMBERED = "DeviceRenumbered"
    """The kernel gave a device a different number after the containers started."""

    CLAIM_IN_USE = "ClaimInUse"
    """A claim is being deleted, but is still reserved or allocated, or Kubernetes has not removed
    its finalizer yet."""

    FINALIZER_HOLDS = "FinalizerHolds"
    """An object is being deleted, but a finalizer prevents it."""

    NOT_UNPREPARED = "ClaimsNotUnprepared"
    """A pod is being deleted, but the kubelet has not unprepared its claims."""


class Cause(NamedTuple):
    """A cause that many objects can share: a class, node or template, and its problem."""

    about: ObjectReference
    what: str
    """A clause that is the same for all of these objects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    code: Code
    advice: str = ""
    """General advice, as a clause. A proven remedy is more specific."""

    transient: str = ""
    """
    A constant key for the described state, if this state is normal for a short time.

    An Event reports such a state only if it lasts.
    """

    patience_seconds: float | None = None
    """How long the state is normal, in seconds. None means the default."""

    cause: Cause | None = None
    """The cause that other objects with the same problem may share. None if the problem is specific
    to this object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(_Problem):
    """A problem, as a clause of a sentence about an object."""

    what: str
    claims: tuple[str, ...] = ()
    """The names of the pod's ResourceClaims that the problem keeps from being allocated."""

    def about(self, regarding: ObjectReference, start: str = "") -> Reason:
        """Return the finding as a reason about an object. The reason's sentence begins with
        `start`."""
        return Reason(
            code=self.code,
            sentence=f"{start}{self.what}",
            regarding=regarding,
            advice=self.advice,
            transient=self.transient,
            patience_seconds=self.patience_seconds,
            cause=self.cause,
        )


def no_remedy() -> str:
    """Return an empty string instead of a remedy."""
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason(_Problem):
    """A reason, as a sentence for the Event of an object."""

    sentence: str
    regarding: ObjectReference
    find_remedy: Callable[[], str] = field(default=no_remedy, compare=False)
    """
    Searches for a sufficient remedy, and returns it as a clause, or an empty string.

    The search takes a long time. Therefore, only a caller that reports the reason calls this
    function, before the facts change. All reasons of one explanation share the result. Raises
    :class:`.QueriesPendingError`.
    """

    @property
    def text(self) -> str:
        """The sentence and the general advice. Together, they are the whole reason unless a remedy
        is proven."""
        return f"{self.sentence}; {self.advice}" if self.advice else self.sentence


# ---------------------------------------------------------------- certainty

_MISSING: dict[Code, type[Fact]] = {
    Code.DEVICE_CLASS_MISSING: ClassFacts,
    Code.RESOURCE_CLAIM_MISSING: ClaimFacts,
    Code.RESOURCE_CLAIM_TEMPLATE_MISSING: TemplateFacts,
}
"""For each reason that does not depend on devices, the kind without which the reason is
uncertain."""

_WITHOUT_SLICES = frozenset(
    {
        Code.RESOURCE_CLAIM_NOT_CREATED,
        Code.QUOTA_EXCEEDED,
        Code.ADMIN_ACCESS_DENIED,
        Code.CLAIM_OF_OTHER_POD,
        Code.CLAIM_BEING_DELETED,
        Code.CLAIM_NOT_ALLOCATED,
        Code.CLAIM_NOT_RESERVED,
        Code.BINDING_OUTSTANDING,
        Code.BINDING_FAILED,
        Code.NODE_GONE,
        Code.NODE_NOT_READY,
        Code.CLAIM_IN_USE,
        Code.FINALIZER_HOLDS,
        Code.NOT_PREPARED,
        Code.NOT_UNPREPARED,
        Code.POD_NOT_STARTED,
        Code.POD_FAILED,
        Code.DEVICE_RENUMBERED,
    }
)
"""Reasons that do not depend on slices."""

_LIMITS: tuple[tuple[type[Fact], str], ...] = (
    (NodeFacts, "nodes"),
    (TaintRuleFacts, "DeviceTaintRules"),
)
"""The kinds that a reason about devices ignores while they are hidden, and their names in
sentences."""


def certain(reasons: Iterable[Reason], world: World) -> list[Reason]:
    """Return the reasons that hidden objects cannot refute."""
    return [each for each in reasons if _is_certain(each, world)]


def with_limits(reason: Reason, world: World) -> Reason:
    """If a reason is about devices, add to its sentence which facts it ignores."""
    if reason.code in _MISSING or reason.code in _WITHOUT_SLICES:
        return reason
    words = [word for kind, word in _LIMITS if kind in world.hidden]
    if not words:
        return reason
    named = " and ".join(words)
    limits = f"(not considered, because the operator lacks permission: {named})"
    return replace(reason, sentence=f"{reason.sentence} {limits}")


def _is_certain(reason: Reason, world: World) -> bool:
    if (kind := _MISSING.get(reason.code)) is not None:
        return kind not in world.hidden
    if reason.code in _WITHOUT_SLICES:
        return True
    if SliceFacts in world.hidden:
        return False
    # If nodes are hidden, only the devices in slices that set nodeName are found.
    return NodeFacts not in world.hidden or all(_names_node(each) for each in world.slices())


def _names_node(of: SliceFacts) -> bool:
    return of.place is not None and bool(of.place.node)


# ---------------------------------------------------------------- shared causes
#
# A cause is a class, a node or a template, and its problem. A caller that reports many reasons can
# report the cause once. The clause does not name anything that is specific to one pod, so that
# equal causes compare equal.

_IN_COMMON: Mapping[Code, str] = {
    Code.NO_DEVICE_PUBLISHED: "no node publishes the devices of the class that the requests need",
    Code.DEVICES_ALLOCATED: "other claims hold the devices of the class that match the requests",
    Code.DEVICES_TAINTED: "too many devices of the class that match the requests are tainted",
    Code.DEVICES_ON_OTHER_NODES: "the devices of the class that match the requests are on nodes "
    "that the pods cannot use",
    Code.REQUESTS_COMPETE: "no node has as many free devices of the class as the requests need",
    Code.SELECTOR_FAILED: "a selector of the class fails on a device",
}
"""The shared problem of requests for devices of one class."""


def cause_at_node(node: str | None, what: str, world: World) -> Cause | None:
    """Return a cause on a node, or None if there is no node. The cause can be about a node that no
    longer exists, because users find the Events about a node by its name."""
    if not node:
        return None
    facts = world.node(node)
    if facts is not None:
        return Cause(facts.reference, what)
    return Cause(ObjectReference("Node", node, "", api_version="v1"), what)


def cause_of_pool(pool: PoolID, problem: str, world: World) -> Cause | None:
    """Return the cause for a problem with a pool on one node. None for a pool on several nodes."""
    nodes = {place.node for each in world.slices_of_pool(pool) if (place := each.place)}
    node = nodes.pop() if len(nodes) == 1 else None
    what = f"no device can be allocated from pool {pool.pool} of driver {pool.driver}: {problem}"
    return cause_at_node(node, what, world)


def cause_of_class(name: str, code: Code, world: World) -> Cause | None:
    """Return the shared cause of requests for devices of a class."""
    found = world.device_class(name)
    return Cause(found.reference, _IN_COMMON[code]) if found is not None else None


def cause_of_selector(text: str, classes: Iterable[str], world: World) -> Cause | None:
    """Return the cause for the failure of a class's selector. None for a request's own selector."""
    failing = (name for name in sorted(classes) if f"{selector_of(f'class {name}')} " in text)
    return cause_of_class(next(failing, ""), Code.SELECTOR_FAILED, world)
