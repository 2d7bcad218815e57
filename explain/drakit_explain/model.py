"""
The facts of a cluster that explain a pending claim, or that the status of a HostDevicePolicy needs:
small frozen types, no raw objects.

They hold a fraction of an object, because the operator stores one for every claim and device of the
cluster. :mod:`.projection` reads them from JSON.

Does not depend on clients or JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from drakit_explain.devices import NO_DEVICES, Amount, CounterSetFacts, Devices, Place, TaintFacts
from drakit_formats import crds
from drakit_formats.resource.nodes import NodeSelector
from drakit_formats.resource.objects import Object

_VALUES_PER_STEP = 32
"""The number of values of a requirement that take as long as the rest of it, a microsecond."""

LOWEST_PRIORITY = -(2**31)
"""The lowest priority of a pod, for which the requests of all other pods are included."""


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
class ObjectReference:
    """The object that an Event regards."""

    kind: str
    name: str
    uid: str
    namespace: str = ""
    api_version: str = "resource.k8s.io/v1"

    def body(self) -> dict[str, str]:
        """Write the reference as ``core/v1 ObjectReference``."""
        body = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "namespace": self.namespace,
            "name": self.name,
            "uid": self.uid,
        }
        return {key: value for key, value in body.items() if value}


@dataclass(frozen=True, kw_only=True, slots=True)
class Identified:
    """An object of the API."""

    kind: ClassVar[str] = ""
    api_version: ClassVar[str] = "resource.k8s.io/v1"
    name: str
    uid: str

    @property
    def in_namespace(self) -> str:
        """The object's namespace. Empty for cluster-scoped objects."""
        return ""

    @property
    def reference(self) -> ObjectReference:
        return ObjectReference(
            self.kind, self.name, self.uid, self.in_namespace, api_version=self.api_version
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Namespaced(Identified):
    namespace: str

    @property
    def in_namespace(self) -> str:
        return self.namespace


@dataclass(frozen=True, kw_only=True, slots=True)
class PodClaim:
    """A claim of a pod: by name, or created for the pod from a template."""

    name: str
    """The name of the entry in the pod (API: ``spec.resourceClaims[].name``)."""

    claim: str | None = None
    template: str | None = None
    generated: str | None = None
    """The claim that was created from the template. None until it is created."""

    needless: bool = False
    """The template's claim is not needed (the status has no claim name)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Toleration:
    """A toleration, with which a device may be allocated or a pod may run on a node despite a
    taint. An empty key or effect means all."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""
    seconds: int | None = None
    """How long a taint with the effect NoExecute is tolerated. None means forever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The rules for the nodes on which a pod may run, apart from devices. Pods of a Deployment
    share one object."""

    node_selector: tuple[tuple[str, str], ...] = ()
    affinity: NodeSelector | None = None
    """API: ``requiredDuringSchedulingIgnoredDuringExecution`` of the node affinity."""

    tolerations: tuple[Toleration, ...] = ()
    unread: str = ""
    """Why the content is missing, so that no node is certain. Empty if the content is present."""

    @property
    def steps(self) -> int:
        """Return how many comparisons its rules take for one node."""
        terms = self.affinity or ()
        return (
            len(self.node_selector)
            + len(self.tolerations)
            + sum(
                1 + len(each.values) // _VALUES_PER_STEP
                for term in terms
                for requirements in term
                for each in requirements
            )
        )


class ContainerProblem(NamedTuple):
    """A container of a pod that does not run, although it should."""

    container: str
    reason: str
    """The kubelet's reason, such as CreateContainerError, or why the container ended."""

    message: str


class ExtendedRequest(NamedTuple):
    """A number of extended resources that a container of a pod requests."""

    container: str
    resource: str
    amount: int
    init: bool = False
    """The container is an init container that ends before the others start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts(Identified):
    kind = "Node"
    api_version = "v1"
    labels: Mapping[str, str]
    taints: tuple[TaintFacts, ...] = ()
    """Taints that repel pods, with the effects NoSchedule and NoExecute."""

    unschedulable: bool = False
    ready: bool = True
    allocatable: tuple[Amount, ...] = ()
    kubelet: str = ""
    """The version of the kubelet, such as ``v1.36.3``."""

    runtime: str = ""
    """The container runtime and its version, such as ``containerd://2.1.4``."""

    declared: tuple[str, ...] = ()
    """API: ``declaredFeatures``. The allocator compares them with those that a slice needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaintRuleFacts(Identified):
    """A DeviceTaintRule: a taint that an admin adds to devices."""

    taint: TaintFacts
    driver: str = ""
    pool: str = ""
    device: str = ""
    """The device. Driver, pool and device are conditions unless they are empty."""

    owner: str = ""
    """The UID of the owner that controls the rule, such as a DeviceDriver."""

    selective: bool = True
    """The rule has a selector (API: ``deviceSelector``). A rule without one selects no device."""

    unsupported: bool = False
    """The selector uses a class or CEL, as ``v1alpha3`` allowed. It is not evaluated."""

    @property
    def adds_taints(self) -> bool:
        """Whether the rule taints devices for the scheduler, in a form that this version knows."""
        return self.selective and not self.unsupported and self.taint.effect in PREVENTING

    def selects(self, device: DeviceID) -> bool:
        return (
            self.adds_taints
            and self.driver in ("", device.driver)
            and self.pool in ("", device.pool)
            and self.device in ("", device.device)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PodFacts(Namespaced):
    kind = "Pod"
    api_version = "v1"
    claims: tuple[PodClaim, ...] = ()
    node: str | None = None
    phase: str = "Pending"
    gated: bool = False
    """Scheduling gates hold the pod: the scheduler does not search for devices yet."""

    gates: tuple[str, ...] = ()
    scheduler: str = ""
    """The name of a scheduler that is not Kubernetes' own."""

    group: str = ""
    """The PodGroup with which the pod is scheduled."""

    health: tuple[tuple[str, str], ...] = ()
    """Messages about unhealthy devices, by ``claim:NAME/REQUEST``. NAME is that of the claim's
    entry in the pod (API: ``allocatedResourcesStatus``)."""

    unchecked: tuple[str, ...] = ()
    """Rules of the scheduler that exclude nodes, and that drakit does not check, as phrases."""

    deleting: bool = False
    finalizers: tuple[str, ...] = ()
    sandbox: bool | None = None
    """Condition PodReadyToStartContainers: the pod's claims are prepared. None if it is not
    reported."""

    containers: tuple[ContainerProblem, ...] = ()
    """The first of the containers that cannot be created or started, or ended with an error."""

    running_since: str = ""
    """When the first of the running containers started, without a time zone."""

    failure: str = ""
    """The pod's own reason and message, such as those of UnexpectedAdmissionError."""

    disruption: str = ""
    """The reason in condition DisruptionTarget, such as DeletionByDeviceTaintManager."""

    scheduling_message: str = ""
    """The scheduler's message in condition PodScheduled."""

    tried: bool = True
    """Whether the pod has condition PodScheduled, which a scheduler or a gate sets."""

    nominated: str = ""
    """The node where other pods are preempted for this one."""

    extended: tuple[ExtendedRequest, ...] = ()
    extended_claim: str | None = None
    """The claim that the scheduler created for extended resources."""

    placement: Placement = Placement()
    requests: tuple[tuple[str, int], ...] = ()
    """The pod's requests in billionths, added up by :mod:`.loads`."""

    priority: int = 0
    preempts: bool = True

    @property
    def is_starting(self) -> bool:
        """Whether the pod's claims may not be prepared yet, for example after a reboot of its
        node."""
        return not self.sandbox if self.phase == "Pending" else self.sandbox is False

    @property
    def displaces(self) -> int:
        """The priority below which pods are preempted for this one."""
        return self.priority if self.preempts else LOWEST_PRIORITY


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request of a claim, or an alternative of a request that is a prioritized list."""

    name: str
    device_class: str
    count: int = 1
    """The number of devices. 0 means all that match (allocation mode All)."""

    selectors: tuple[str, ...] = ()
    """CEL expressions that a device must match, in addition to those of its class."""

    admin_access: bool = False
    tolerations: tuple[Toleration, ...] = ()
    capacity: tuple[Amount, ...] = ()
    """The amounts that each device must have left (API: ``capacity.requests``), sorted by name."""

    alternatives: tuple[Request, ...] = ()
    """If not empty (API: ``firstAvailable``), one of these is allocated, and the other fields are
    unused."""

    unsupported: str = ""
    """The part of the request that drakit does not support. No verdict about the request is
    certain."""

    extra: bytes = b""
    """JSON with the fields that this version does not know, for the allocator."""

    @property
    def every(self) -> bool:
        """Whether the request is for all devices that match (API: allocation mode ``All``)."""
        return self.count == 0


def exact_of(requests: Iterable[Request]) -> list[Request]:
    """Return requests, or their alternatives."""
    return [exact for each in requests for exact in each.alternatives or (each,)]


def exact_requests(request: Request) -> list[tuple[str, Request]]:
    """Return a request, or its alternatives, sorted by full name."""
    if not request.alternatives:
        return [(request.name, request)]
    return [(f"{request.name}/{each.name}", each) for each in request.alternatives]


def without_content(requests: tuple[Request, ...], why: str) -> tuple[Request, ...]:
    """Return requests with only names, classes and numbers. No verdict about them is certain."""
    return tuple(
        Request(
            name=each.name,
            device_class=each.device_class,
            count=each.count,
            admin_access=each.admin_access,
            alternatives=without_content(each.alternatives, why),
            unsupported=why,
        )
        for each in requests
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """An attribute whose value the devices of requests must have in common, or must not."""

    attribute: str
    """The full name, ``domain/identifier``. Empty if this version does not know the constraint."""

    distinct: bool = False
    """API: ``distinctAttribute``. If false, ``matchAttribute``."""

    requests: tuple[str, ...] = ()
    """``request`` or ``request/subrequest``. Empty means all."""

    extra: bytes = b""
    """The same as :attr:`Request.extra`."""

    @property
    def kind(self) -> str:
        return "distinctAttribute" if self.distinct else "matchAttribute"


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A part of a device. Other claims may have other parts."""

    device: DeviceID
    consumed: tuple[Amount, ...] = ()
    """The amounts by their names in the slice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One allocated device, including admin access and shares (API: ``results[]``)."""

    request: str
    """``request`` or ``request/subrequest``."""

    device: DeviceID
    tolerations: tuple[Toleration, ...] = ()
    outstanding: tuple[str, ...] = ()
    """Binding conditions that are not true in ``status.devices``."""

    failed: tuple[str, ...] = ()
    """Binding failure conditions that are true."""


DELETE_PROTECTION = "resource.kubernetes.io/delete-protection"
"""Kubernetes' own finalizer of claims in use."""


class Consumer(NamedTuple):
    """An entry of ``status.reservedFor``."""

    resource: str
    """``pods``, or another plural, such as ``podgroups``."""

    name: str
    uid: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimFacts(Namespaced):
    kind = "ResourceClaim"
    requests: tuple[Request, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    allocated: bool = False
    devices: tuple[DeviceID, ...] = ()
    """The devices that the allocation holds exclusively, without those of admin access and of
    `shares`."""

    shares: tuple[Share, ...] = ()
    """The claim's shares of devices. A device may occur more than once."""

    results: tuple[Result, ...] = ()
    """All results in the order of the allocation."""

    consumers: tuple[Consumer, ...] = ()
    """All objects for which the claim is reserved, in its namespace."""

    owner_pod: str | None = None
    """The pod for which the claim was created from a template, or for extended resources."""

    owner_uid: str = ""
    for_extended: bool = False
    """The scheduler created the claim for extended resources."""

    deleting: bool = False
    finalizers: tuple[str, ...] = ()

    nodes: NodeSelector | str | None = None
    """The nodes that can use the allocation (API: ``status.allocation.nodeSelector``). If it is
    only one, as in most allocations, its name. None means all."""

    @property
    def users(self) -> list[str]:
        """Name the objects that may use the claim, such as ``pod train`` or ``podgroup trains``."""
        return sorted(f"{each.resource.removesuffix('s')} {each.name}" for each in self.consumers)

    @property
    def held_by(self) -> tuple[str, ...]:
        """The finalizers that keep the deleted claim, except for Kubernetes' own."""
        others = (each for each in self.finalizers if each != DELETE_PROTECTION)
        return tuple(others) if self.deleting else ()

    @property
    def reserved_for(self) -> tuple[str, ...]:
        """Return the names of the pods that may use the claim."""
        return tuple(each.name for each in self.consumers if each.resource == "pods")


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateFacts(Namespaced):
    kind = "ResourceClaimTemplate"
    requests: tuple[Request, ...] = ()
    constraints: tuple[Constraint, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFacts(Identified):
    kind = "DeviceClass"
    selectors: tuple[str, ...] = ()
    extended_resource: str = ""
    """The extended resource that the devices of the class provide."""

    created: str = ""
    """API: ``creationTimestamp``. Of several classes with the same extended resource, the youngest
    applies."""

    owner: str = ""
    """The UID of the owner that controls the class, such as a HostDevicePolicy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamespaceFacts(Identified):
    admin_access: bool = False
    """The namespace's label allows claims with admin access."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaFacts(Namespaced):
    """A ResourceQuota without scopes. Quotas with scopes are for pods, and do not limit claims."""

    hard: tuple[Amount, ...] = ()
    used: tuple[Amount, ...] = ()


PREVENTING = ("NoSchedule", "NoExecute")
"""Effects of taints that the scheduler obeys. It ignores all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceFacts(Identified):
    kind = "ResourceSlice"
    driver: str
    pool: str
    generation: int = 1
    pool_slices: int = 1
    """How many slices of this generation make the pool complete."""

    place: Place | None = None
    """None if each device has its own, or if this version does not know it."""

    by_device: bool = False
    """API: ``perDeviceNodeSelection``."""

    devices: Devices = NO_DEVICES
    """Also accepted as a tuple of DeviceFacts."""

    unread: bool = False
    """The slice may contain any devices, because they exceed the memory limit of its node."""

    counter_sets: tuple[CounterSetFacts, ...] = ()
    raw: bytes = b""
    """The spec as compressed JSON, if it has fields that this version does not know."""

    def __post_init__(self) -> None:
        if not isinstance(self.devices, Devices):  # pyright: ignore[reportUnnecessaryIsInstance]
            object.__setattr__(self, "devices", Devices.of(self.devices))

    @property
    def of_pool(self) -> PoolID:
        return PoolID(self.driver, self.pool)


# ---- drakit's own resources


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFacts(Identified):
    """The parts of a HostDevicePolicy that its DeviceClass and its status need."""

    kind = "HostDevicePolicy"
    api_version = crds.API_VERSION
    generation: int
    deleting: bool = False
    create_class: bool = True
    class_name: str = ""
    """The name of its DeviceClass."""

    extended_resource: str = ""
    shares: int = 0
    """The number of shares of each device that the policy offers as entries (API: ``sharing.users``
    in mode ``Users``). 0 in other modes."""

    restricted: bool = False
    """Only some namespaces can use its DeviceClass (API: ``allowedNamespaces``)."""

    evicts: bool = False
    """Kubernetes evicts the pods of a device that is gone (API: ``onVanish: Evict``)."""

    node_selector: Object | None = None
    """A raw LabelSelector."""

    status: Object = field(default_factory=dict[str, Any])
    """The raw status."""

    version: str = ""
    """API: ``resourceVersion``."""


class DeviceSelection(NamedTuple):
    """The names that devices must have. An empty name matches all."""

    driver: str = ""
    pool: str = ""
    device: str = ""
    node: str = ""
    device_class: str = ""

    def __str__(self) -> str:
        words = ("driver", "pool", "device", "node", "class")
        return ", ".join(f"{word} {name}" for word, name in zip(words, self, strict=True) if name)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaintenanceFacts(Identified):
    """A DeviceMaintenance: devices that are temporarily out of service."""

    kind = "DeviceMaintenance"
    api_version = crds.API_VERSION
    generation: int
    deleting: bool = False
    selection: DeviceSelection
    mode: str = ""
    reason: str = ""
    start: float = 0.0
    """When it starts, in seconds since 1970."""

    end: float = float("inf")
    """When it ends if it is not deleted before."""

    limit_seconds: float = float("inf")
    """How long pods are evicted."""

    devices: tuple[DeviceID, ...] = ()
    """The devices that were selected when the maintenance was accepted (API:
    ``status.devices``)."""

    drain_start: float = 0.0
    """When the evictions started, in seconds since 1970. 0 before that."""

    status: Object = field(default_factory=dict[str, Any])
    """The raw status."""

    version: str = ""
    """API: ``resourceVersion``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverFacts(Identified):
    """A DeviceDriver, without the schemas of its parameters."""

    kind = "DeviceDriver"
    api_version = crds.API_VERSION
    generation: int = 0
    version: str = ""
    """The version of the driver, as set by the author of the object."""

    node_selector: Object | None = None
    """A raw LabelSelector."""

    taint_after_seconds: int | None = None
    """How long its plugin must be unavailable before its devices are tainted. None means never."""

    is_generated: bool = False
    """The operator created the object, and nobody has set its spec."""

    status: Object = field(default_factory=dict[str, Any])
    """The raw status."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConflict:
    """A device that another policy matches, too."""

    device: str
    policy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyReport:
    """The result of a policy on one node."""

    name: str
    uid: str
    observed_generation: int
    matched: int
    published: int
    generation: int = 0
    """The generation that is in effect. 0 if none is."""

    problem: str = ""
    in_use: int = 0
    """Devices that claims hold although the policy no longer offers them."""

    in_use_by: str = ""
    """One of these devices and the claim that holds it, as a clause."""

    conflicts: tuple[DeviceConflict, ...] = ()
    rejected: int = 0
    """Devices that the policy matches, but that are not published."""

    rejected_example: str = ""
    """One of these devices, and the reason."""


class DeviceWords(NamedTuple):
    """An unhealthy device in a report, with the message of its driver, if any."""

    pool: str
    device: str
    message: str


class DroppedField(NamedTuple):
    """A feature of devices that the API server does not support."""

    feature: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFacts(Identified):
    """A NodeDeviceReport."""

    node: str
    driver: str
    policies: tuple[PolicyReport, ...] = ()
    policies_omitted: bool = False
    """The report does not list all policies: some without a problem and without devices are left
    out."""

    refused: str = ""
    """Why the driver rejected its policies."""

    published: int = 0
    """The number of devices in its slices."""

    updated: float = 0.0
    """When the report was written, in seconds since 1970. 0 if unknown."""

    outdated: bool = False
    """The operator has found that the node plugin is gone."""

    registration: str = ""
    """The state of a driver that is not registered with the kubelet, and the kubelet's message."""

    stopped: str = ""
    """Why its endpoint does not run."""

    progress: str = ""
    """Why claims make no progress: calls that the driver has not completed, or stuck claims."""

    stuck: int = 0
    """Claims that have been preparing or unpreparing for more than a minute."""

    unhealthy: tuple[DeviceWords, ...] = ()
    """The first of the unhealthy devices."""

    dropped: tuple[DroppedField, ...] = ()
    rejected: int = 0
    """The number of devices that are not published."""

    rejected_example: str = ""
    """One of these devices, and the reason."""

    faulty_example: str = ""
    """One of those that violate a rule of the API, and the reason. Empty if there is none."""
