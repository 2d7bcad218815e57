"""
The facts of a cluster that are needed to explain a pending claim, or for the status of a
HostDevicePolicy, as small frozen types instead of raw objects.

They contain a small part of each object, because the operator stores one for every claim and device
of the cluster. :mod:`.projection` reads them from JSON.

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
"""How many of a requirement's values take as long to compare as the rest of the requirement, about
a microsecond."""

LOWEST_PRIORITY = -(2**31)
"""The lowest pod priority. For a pod with this priority, the requests of all other pods are
included."""


class PoolID(NamedTuple):
    """Identifies a pool in a cluster, by its driver and name."""

    driver: str
    pool: str


class DeviceID(NamedTuple):
    """Identifies a device in a cluster, by its driver, pool and name."""

    driver: str
    pool: str
    device: str

    @property
    def of_pool(self) -> PoolID:
        return PoolID(self.driver, self.pool)


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """A reference to the object that an Event is about."""

    kind: str
    name: str
    uid: str
    namespace: str = ""
    api_version: str = "resource.k8s.io/v1"

    def body(self) -> dict[str, str]:
        """Return the reference as a ``core/v1 ObjectReference``."""
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
    """An API object with its identity."""

    kind: ClassVar[str] = ""
    api_version: ClassVar[str] = "resource.k8s.io/v1"
    name: str
    uid: str

    @property
    def in_namespace(self) -> str:
        """The namespace of the object. Empty for cluster-scoped objects."""
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
    """A pod's claim: either an existing one, or one that is created for the pod from a template."""

    name: str
    """The name of the pod's entry for the claim (API: ``spec.resourceClaims[].name``)."""

    claim: str | None = None
    template: str | None = None
    generated: str | None = None
    """The name of the claim that was created from the template. None until it is created."""

    needless: bool = False
    """Whether a claim is not needed for the template, in which case the pod's status has the entry
    without a claim name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Toleration:
    """A toleration: it allows a device to be allocated, or a pod to run on a node, despite a taint.
    An empty key or effect matches all keys or effects."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""
    seconds: int | None = None
    """How long a taint with the effect NoExecute is tolerated. None means forever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """A pod's rules for nodes, apart from its devices. The pods of a Deployment share one Placement
    object."""

    node_selector: tuple[tuple[str, str], ...] = ()
    affinity: NodeSelector | None = None
    """The field ``requiredDuringSchedulingIgnoredDuringExecution`` of the node affinity."""

    tolerations: tuple[Toleration, ...] = ()
    unread: str = ""
    """The reason why the content is missing, in which case it is uncertain whether the pod can use
    a node. Empty if the content is present."""

    @property
    def steps(self) -> int:
        """How many comparisons the rules require for one node."""
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
    """A pod's container that is not running although it should be."""

    container: str
    reason: str
    """The kubelet's reason, such as CreateContainerError, or the reason why the container ended."""

    message: str


class ExtendedRequest(NamedTuple):
    """An extended resource that a pod's container requests, and its amount."""

    container: str
    resource: str
    amount: int
    init: bool = False
    """Whether the container is an init container that ends before the others start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts(Identified):
    kind = "Node"
    api_version = "v1"
    labels: Mapping[str, str]
    taints: tuple[TaintFacts, ...] = ()
    """The taints that pods must tolerate: those with the effects NoSchedule and NoExecute."""

    unschedulable: bool = False
    ready: bool = True
    allocatable: tuple[Amount, ...] = ()
    kubelet: str = ""
    """The version of the kubelet, such as ``v1.36.3``."""

    runtime: str = ""
    """The container runtime and its version, such as ``containerd://2.1.4``."""

    declared: tuple[str, ...] = ()
    """The field ``declaredFeatures``. The allocator compares these features with those that a
    device requires."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaintRuleFacts(Identified):
    """A DeviceTaintRule: a taint that an admin adds to devices."""

    taint: TaintFacts
    driver: str = ""
    pool: str = ""
    device: str = ""
    """The name of the device. Driver, pool and device are conditions of the rule, unless they are
    empty."""

    owner: str = ""
    """The UID of the owner that controls the rule, such as a DeviceDriver."""

    selective: bool = True
    """Whether the rule has a selector (API: ``deviceSelector``). A rule without a selector selects
    no devices."""

    unsupported: bool = False
    """Whether the selector uses a class or CEL, as in ``v1alpha3``. Such a selector is not
    evaluated."""

    @property
    def adds_taints(self) -> bool:
        """Whether the rule adds taints that matter to the scheduler, and this version can evaluate
        the rule."""
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
    """Whether scheduling gates hold back the pod, so that the scheduler does not search for devices
    yet."""

    gates: tuple[str, ...] = ()
    scheduler: str = ""
    """The name of the pod's scheduler, if it is not the default one."""

    group: str = ""
    """The PodGroup to which the pod belongs."""

    health: tuple[tuple[str, str], ...] = ()
    """Messages about unhealthy devices, keyed by ``claim:NAME/REQUEST``. NAME is the name of the
    claim's entry in the pod (API: ``allocatedResourcesStatus``)."""

    unchecked: tuple[str, ...] = ()
    """The pod's rules that can exclude nodes but that drakit does not check, as phrases."""

    deleting: bool = False
    finalizers: tuple[str, ...] = ()
    sandbox: bool | None = None
    """The condition PodReadyToStartContainers: whether the pod's claims are prepared. None if it is
    not reported."""

    containers: tuple[ContainerProblem, ...] = ()
    """The first containers that cannot be created or started, or that ended with an error."""

    running_since: str = ""
    """The time at which the first running container started, without a time zone."""

    failure: str = ""
    """The pod's own reason and message, such as UnexpectedAdmissionError."""

    disruption: str = ""
    """The reason of the condition DisruptionTarget, such as DeletionByDeviceTaintManager."""

    scheduling_message: str = ""
    """The scheduler's message in the condition PodScheduled."""

    tried: bool = True
    """Whether the pod has the condition PodScheduled, which is set after a scheduling attempt or
    for a scheduling gate."""

    nominated: str = ""
    """The node on which other pods are preempted for this one."""

    extended: tuple[ExtendedRequest, ...] = ()
    extended_claim: str | None = None
    """The claim that the scheduler created for the pod's extended resources."""

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
        """The priority threshold for preemption: the scheduler can preempt pods with a lower
        priority for this pod."""
        return self.priority if self.preempts else LOWEST_PRIORITY


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request of a claim, or one alternative in a prioritized list."""

    name: str
    device_class: str
    count: int = 1
    """The number of devices. 0 means all devices that match (allocation mode All)."""

    selectors: tuple[str, ...] = ()
    """CEL expressions that a device must match, in addition to those of its class."""

    admin_access: bool = False
    tolerations: tuple[Toleration, ...] = ()
    capacity: tuple[Amount, ...] = ()
    """The amount of each capacity that a device must have left (API: ``capacity.requests``)."""

    alternatives: tuple[Request, ...] = ()
    """The alternatives (API: ``firstAvailable``). If there are any, one of them is allocated, and
    the other fields are unused."""

    unsupported: str = ""
    """The part of the request that drakit does not support. If it is not empty, every verdict about
    the request is uncertain."""

    extra: bytes = b""
    """The fields that this version does not know, as JSON for the allocator."""

    @property
    def every(self) -> bool:
        """Whether the request is for all devices that match (API: allocation mode ``All``)."""
        return self.count == 0


def exact_of(requests: Iterable[Request]) -> list[Request]:
    """Return the requests, with each prioritized list replaced by its alternatives."""
    return [exact for each in requests for exact in each.alternatives or (each,)]


def exact_requests(request: Request) -> list[tuple[str, Request]]:
    """Return the request, or its alternatives if it has any, each with its full name
    (``request/alternative``)."""
    if not request.alternatives:
        return [(request.name, request)]
    return [(f"{request.name}/{each.name}", each) for each in request.alternatives]


def without_content(requests: tuple[Request, ...], why: str) -> tuple[Request, ...]:
    """Return the requests with only their names, classes, counts and admin access, so that every
    verdict about them is uncertain."""
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
    """A constraint that the values of an attribute must be either equal or distinct for the devices
    of some requests."""

    attribute: str
    """The full name, ``domain/identifier``. Empty if this version does not know the constraint."""

    distinct: bool = False
    """Whether the values must be distinct (``distinctAttribute``) instead of equal
    (``matchAttribute``)."""

    requests: tuple[str, ...] = ()
    """The names of the requests, such as ``request`` or ``request/subrequest``. Empty means all
    requests."""

    extra: bytes = b""
    """The same as :attr:`Request.extra`."""

    @property
    def kind(self) -> str:
        return "distinctAttribute" if self.distinct else "matchAttribute"


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A claim's share of a device. Other claims may have other shares of it."""

    device: DeviceID
    consumed: tuple[Amount, ...] = ()
    """The consumed amount of each capacity, under the capacity's name in the ResourceSlice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One allocated device (API: ``results[]``). Devices with admin access and shares of devices
    are included."""

    request: str
    """The name of the request, such as ``request`` or ``request/subrequest``."""

    device: DeviceID
    tolerations: tuple[Toleration, ...] = ()
    outstanding: tuple[str, ...] = ()
    """The binding conditions that are not true in ``status.devices``."""

    failed: tuple[str, ...] = ()
    """The binding failure conditions that are true."""


DELETE_PROTECTION = "resource.kubernetes.io/delete-protection"
"""Kubernetes' own finalizer for claims in use."""


class Consumer(NamedTuple):
    """An entry of ``status.reservedFor``."""

    resource: str
    """The plural name of the kind, such as ``pods`` or ``podgroups``."""

    name: str
    uid: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimFacts(Namespaced):
    kind = "ResourceClaim"
    requests: tuple[Request, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    allocated: bool = False
    devices: tuple[DeviceID, ...] = ()
    """The devices that the allocation holds exclusively. Devices with admin access, and devices in
    `shares`, are not included."""

    shares: tuple[Share, ...] = ()
    """The claim's shares of devices. A device may occur more than once."""

    results: tuple[Result, ...] = ()
    """All results, in the order of the allocation."""

    consumers: tuple[Consumer, ...] = ()
    """All objects in the claim's namespace for which the claim is reserved."""

    owner_pod: str | None = None
    """The pod for which the claim was created, from a template or for extended resources."""

    owner_uid: str = ""
    for_extended: bool = False
    """Whether the scheduler created the claim for extended resources."""

    deleting: bool = False
    finalizers: tuple[str, ...] = ()

    nodes: NodeSelector | str | None = None
    """The nodes that can use the allocation (API: ``status.allocation.nodeSelector``). For a single
    node, as in most allocations, this is its name. None means all nodes."""

    @property
    def users(self) -> list[str]:
        """The kinds and names of the objects that may use the claim, such as ``pod train`` or
        ``podgroup trains``."""
        return sorted(f"{each.resource.removesuffix('s')} {each.name}" for each in self.consumers)

    @property
    def held_by(self) -> tuple[str, ...]:
        """The finalizers that delay the deletion of the claim, except for Kubernetes' own one."""
        others = (each for each in self.finalizers if each != DELETE_PROTECTION)
        return tuple(others) if self.deleting else ()

    @property
    def reserved_for(self) -> tuple[str, ...]:
        """Return the names of the pods for which the claim is reserved."""
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
    """The field ``creationTimestamp``. If several classes have the same extended resource, the
    newest one applies."""

    owner: str = ""
    """The UID of the owner that controls the class, such as a HostDevicePolicy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamespaceFacts(Identified):
    admin_access: bool = False
    """Whether the namespace's label allows claims with admin access."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaFacts(Namespaced):
    """A ResourceQuota. `hard` and `used` are empty for a quota with scopes, because it applies to
    pods, and does not limit claims."""

    hard: tuple[Amount, ...] = ()
    used: tuple[Amount, ...] = ()


PREVENTING = ("NoSchedule", "NoExecute")
"""The taint effects that the scheduler respects. It ignores all others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceFacts(Identified):
    kind = "ResourceSlice"
    driver: str
    pool: str
    generation: int = 1
    pool_slices: int = 1
    """The number of slices of this generation that make the pool complete."""

    place: Place | None = None
    """The nodes that can use the slice. None if each device has its own node selection, or if this
    version does not know the field."""

    by_device: bool = False
    """Whether each device has its own nodes (API: ``perDeviceNodeSelection``)."""

    devices: Devices = NO_DEVICES
    """The devices. The constructor also accepts a tuple of DeviceFacts."""

    unread: bool = False
    """Whether the devices were dropped because they exceed the memory limit of their node, so that
    the slice may contain any devices."""

    counter_sets: tuple[CounterSetFacts, ...] = ()
    raw: bytes = b""
    """The spec as compressed JSON, if it contains fields that this version does not know."""

    def __post_init__(self) -> None:
        if not isinstance(self.devices, Devices):  # pyright: ignore[reportUnnecessaryIsInstance]
            object.__setattr__(self, "devices", Devices.of(self.devices))

    @property
    def of_pool(self) -> PoolID:
        return PoolID(self.driver, self.pool)


# ---- drakit's own resources


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFacts(Identified):
    """The parts of a HostDevicePolicy that are needed for its DeviceClass and status."""

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
    in mode ``Users``). 0 in the other modes."""

    restricted: bool = False
    """Whether only some namespaces can use its DeviceClass (API: ``allowedNamespaces``)."""

    evicts: bool = False
    """Whether Kubernetes evicts the pods of a device that is gone (API: ``onVanish: Evict``)."""

    node_selector: Object | None = None
    """A raw LabelSelector."""

    status: Object = field(default_factory=dict[str, Any])
    """The raw status."""

    version: str = ""
    """API: ``resourceVersion``."""


class DeviceSelection(NamedTuple):
    """The names of the driver, pool, device, node and DeviceClass that devices must have. An empty
    name matches all."""

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
    """The time at which the maintenance starts, in seconds since 1970."""

    end: float = float("inf")
    """The time at which the maintenance ends, unless it is deleted earlier."""

    limit_seconds: float = float("inf")
    """The time limit for evicting pods, in seconds."""

    devices: tuple[DeviceID, ...] = ()
    """The devices that were selected when the maintenance was accepted (API:
    ``status.devices``)."""

    drain_start: float = 0.0
    """The time at which the evictions started, in seconds since 1970. 0 before that."""

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
    """The version of the driver, as set by the author of the DeviceDriver."""

    node_selector: Object | None = None
    """A raw LabelSelector."""

    taint_after_seconds: int | None = None
    """How long the driver's plugin must be unavailable before its devices are tainted, in seconds.
    None means never."""

    is_generated: bool = False
    """Whether the operator created the object, and nobody has set its spec."""

    status: Object = field(default_factory=dict[str, Any])
    """The raw status."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConflict:
    """A device that another policy also matches."""

    device: str
    policy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyReport:
    """A policy's result on one node."""

    name: str
    uid: str
    observed_generation: int
    matched: int
    published: int
    generation: int = 0
    """The generation that is in effect. 0 if no generation is in effect."""

    problem: str = ""
    in_use: int = 0
    """The number of devices that claims hold although the policy no longer offers them."""

    in_use_by: str = ""
    """One of these devices and the claim that holds it, as a clause."""

    conflicts: tuple[DeviceConflict, ...] = ()
    rejected: int = 0
    """The number of devices in the report that the policy matches, but that are not published. A
    report lists at most 100 rejected devices."""

    rejected_example: str = ""
    """An example of a rejected device, with the reason."""


class DeviceWords(NamedTuple):
    """An unhealthy device in a report, with its driver's message, if any."""

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
    """Whether the report omits some policies, which have neither a problem nor devices."""

    refused: str = ""
    """The reason why the driver rejected its policies."""

    published: int = 0
    """The number of devices in the driver's slices."""

    updated: float = 0.0
    """The time at which the report was written, in seconds since 1970. 0 if unknown."""

    outdated: bool = False
    """Whether the operator has found that the node plugin is gone."""

    registration: str = ""
    """If the driver is not registered with the kubelet, its state and the kubelet's message."""

    stopped: str = ""
    """The reason why the driver's endpoint is not running."""

    progress: str = ""
    """The reason why claims do not make progress: calls that the driver has not completed, or stuck
    claims."""

    stuck: int = 0
    """The number of claims that have been preparing or unpreparing for more than a minute."""

    unhealthy: tuple[DeviceWords, ...] = ()
    """The first unhealthy devices."""

    dropped: tuple[DroppedField, ...] = ()
    rejected: int = 0
    """The number of devices that are not published."""

    rejected_example: str = ""
    """An example of a rejected device, with the reason."""

    faulty_example: str = ""
    """An example of a rejected device that violates a rule of the API, with the reason. Empty if
    there is no such device."""
