"""
The facts of a cluster that explain a pending claim: small frozen types, no raw objects.

They hold a fraction of an object, because the operator keeps one for every claim and device of the
cluster. :mod:`.projection` reads them from JSON.

It must not know clients, JSON, or any decision that is taken over these facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = (
    "Amount",
    "CapacityFacts",
    "CapacityPolicy",
    "ClaimFacts",
    "ClassFacts",
    "CounterSetFacts",
    "DeviceFacts",
    "DeviceID",
    "ObjectReference",
    "PodClaim",
    "PodFacts",
    "PoolID",
    "Request",
    "Share",
    "SliceFacts",
    "TaintFacts",
    "TemplateFacts",
    "Toleration",
)


class PoolID(NamedTuple):
    """A pool by the two names that make it unique in a cluster."""

    driver: str
    pool: str


class DeviceID(NamedTuple):
    """A device by the three names that make it unique in a cluster."""

    driver: str
    pool: str
    device: str

    @property
    def of_pool(self) -> PoolID:
        return PoolID(self.driver, self.pool)


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of a capacity or a counter, as a quantity."""

    name: str
    quantity: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectReference:
    """The object that an Event regards."""

    api_version: str
    kind: str
    name: str
    uid: str
    namespace: str = ""

    def body(self) -> dict[str, str]:
        """Write it as ``core/v1 ObjectReference``."""
        body = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "namespace": self.namespace,
            "name": self.name,
            "uid": self.uid,
        }
        return {key: value for key, value in body.items() if value}


@dataclass(frozen=True, kw_only=True, slots=True)
class PodClaim:
    """A claim of a pod: by name, or made for the pod from a template."""

    name: str
    """The pod's own name for it (API: ``spec.resourceClaims[].name``)."""

    claim: str | None = None
    template: str | None = None
    generated: str | None = None
    """The claim that was made from the template; None until it is made."""

    needless: bool = False
    """The template's claim is not needed (a status without a claim's name)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodFacts:
    namespace: str
    name: str
    uid: str
    claims: tuple[PodClaim, ...] = ()
    node: str | None = None
    phase: str = "Pending"
    gated: bool = False
    """Scheduling gates hold it: the scheduler does not search for devices yet."""

    deleting: bool = False
    scheduling_message: str = ""
    """The scheduler's message in condition PodScheduled."""

    @property
    def reference(self) -> ObjectReference:
        return ObjectReference(
            api_version="v1", kind="Pod", namespace=self.namespace, name=self.name, uid=self.uid
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Toleration:
    """A taint in spite of which a device may be allocated; an empty key or effect means all."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request of a claim, or one alternative of a request that is a prioritized list."""

    name: str
    device_class: str
    count: int = 1
    """How many devices; 0 means all that match (allocation mode All)."""

    selectors: tuple[str, ...] = ()
    """CEL expressions that a device must fulfil besides those of its class."""

    admin_access: bool = False
    tolerations: tuple[Toleration, ...] = ()
    capacity: tuple[Amount, ...] = ()
    """The amounts that each device must have left (API: ``capacity.requests``), by name."""

    alternatives: tuple[Request, ...] = ()
    """If not empty (API: ``firstAvailable``), one of these is allocated, and the rest is unused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A part of a device that other claims may have parts of, too."""

    device: DeviceID
    consumed: tuple[Amount, ...] = ()
    """By full name, ``domain/identifier``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimFacts:
    namespace: str
    name: str
    uid: str
    requests: tuple[Request, ...] = ()
    allocated: bool = False
    devices: tuple[DeviceID, ...] = ()
    """The devices that the allocation takes from others; none of admin access, none of `shares`."""

    shares: tuple[Share, ...] = ()
    """Its shares of devices; a device may occur more than once."""

    reserved_for: tuple[str, ...] = ()
    """Names of the pods that may use it; they live in the claim's namespace."""

    owner_pod: str | None = None
    """The pod for which it was made from a template."""

    @property
    def reference(self) -> ObjectReference:
        return ObjectReference(
            api_version="resource.k8s.io/v1",
            kind="ResourceClaim",
            namespace=self.namespace,
            name=self.name,
            uid=self.uid,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateFacts:
    namespace: str
    name: str
    uid: str
    requests: tuple[Request, ...] = ()

    @property
    def reference(self) -> ObjectReference:
        return ObjectReference(
            api_version="resource.k8s.io/v1",
            kind="ResourceClaimTemplate",
            namespace=self.namespace,
            name=self.name,
            uid=self.uid,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFacts:
    name: str
    uid: str
    selectors: tuple[str, ...] = ()


AttributeFact = str | int | bool | None
"""A string, an integer or a bool; None for a type that the simple selectors do not compare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaintFacts:
    """
    A taint that repels new pods; its age does not matter.

    Taints that only inform (effect None, or an unknown effect) are left out.
    """

    key: str
    effect: str
    value: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPolicy:
    """Which amounts a claim can take of a capacity; a request is rounded up to one."""

    default: str | None = None
    valid_values: tuple[str, ...] = ()
    min: str | None = None
    max: str | None = None
    step: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityFacts:
    name: str
    """In full, ``domain/identifier``: the driver's name where the slice names no domain."""

    value: str
    policy: CapacityPolicy | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterSetFacts:
    """Amounts that partitions of one piece of hardware share, or what one of them takes of them."""

    name: str
    counters: tuple[Amount, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    name: str
    attributes: Mapping[str, AttributeFact]
    """By full name, ``domain/identifier``: the driver's name where the slice names no domain."""

    taints: tuple[TaintFacts, ...] = ()
    capacity: tuple[CapacityFacts, ...] = ()
    consumes: tuple[CounterSetFacts, ...] = ()
    """The amounts that it takes of its pool's counters while it is allocated: it is a partition."""

    shareable: bool = False
    """Claims can have shares of it (API: ``allowMultipleAllocations``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceFacts:
    name: str
    uid: str
    driver: str
    pool: str
    generation: int = 1
    pool_slices: int = 1
    """How many slices of this generation make the pool complete."""

    node: str | None = None
    devices: tuple[DeviceFacts, ...] = ()
    counter_sets: tuple[CounterSetFacts, ...] = ()
