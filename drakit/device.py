"""
The data types of the driver contract: devices and their health, allocated devices, container edits.

A vendor's driver creates these plain objects, and the node plugin converts them to ResourceSlices
and CDI specs. They are validated where they are used (API limits in :mod:`drakit_formats.resource`,
CDI rules in :mod:`drakit_formats.cdi`), so that an invalid device does not affect the others.

Does not depend on Kubernetes clients, gRPC, files, or either daemon.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal

from typing_extensions import TypeVar

ParametersT_co = TypeVar("ParametersT_co", covariant=True, default=Any)
"""The type of `AllocatedDevice.parameters`: the driver's validated parameters."""


@dataclass(frozen=True, slots=True)
class Version:
    """A semantic version (2.0.0) as an attribute. CEL compares it as a version."""

    text: str


AttributeScalar = str | int | bool | Version

AttributeValue = (
    AttributeScalar | tuple[str, ...] | tuple[int, ...] | tuple[bool, ...] | tuple[Version, ...]
)
"""The types of an attribute value (API: ``DeviceAttribute``). A string has at most 64 bytes. A
tuple is a list attribute (DRAListTypeAttributes). It has at least one value, and all values have
the same type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRange:
    """The amounts of a capacity that a claim can consume, as quantities. With
    DRAFractionalCapacityRange (Kubernetes 1.37), fractions of up to 3 decimal places are possible,
    such as ``500m``. Otherwise, Kubernetes rounds up to integers before it counts steps."""

    min: str

    max: str | None = None
    """The maximum amount. By default, the whole capacity."""

    step: str | None = None
    """The increment between consecutive valid amounts. If None, any amount is valid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """
    A capacity that claims can share (DRAConsumableCapacity).

    The fields other than `value` have an effect only if the device sets
    `allow_multiple_allocations`.
    """

    value: str
    """The whole capacity, as a quantity."""

    default: str | None = None
    """The amount for a claim that requests none. By default, the whole capacity. Required with
    `valid_values` or `valid_range`, which must allow it."""

    valid_values: tuple[str, ...] = ()
    """The amounts that a claim can consume, in ascending order, at most 10. Requests are rounded
    up."""

    valid_range: CapacityRange | None = None
    """The valid amounts as a range. Do not set both `valid_values` and `valid_range`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAllocatableResource:
    """
    The amount of one of the node's own resources, such as ``cpu``, that an allocation of the device
    takes (API: ``NodeAllocatableResource``; DRANodeAllocatableResources, Kubernetes 1.37). The
    scheduler treats it like the requests of pods. All amounts are quantities.

    If the device provides the resource itself, set either `device_multiplier`, or `capacity_key`
    with `capacity_multiplier`. Pods cannot share a claim with such a device. Set the overheads for
    resources that the device needs in addition, such as the host's memory.
    """

    device_multiplier: str | None = None
    """The amount for each allocated device."""

    capacity_key: str | None = None
    """The capacity of the device from which the amount is calculated."""

    capacity_multiplier: str | None = None
    """The amount for each unit of that capacity that the claim consumes."""

    overhead_per_pod: str | None = None
    """The additional amount for each pod that uses the claim."""

    overhead_per_container: str | None = None
    """The additional amount for each container that uses the claim."""


TaintEffect = Literal["None", "NoSchedule", "NoExecute"]
"""The effect of a taint. ``None`` has no effect. ``NoSchedule`` keeps new pods from getting the
device. ``NoExecute`` also evicts running pods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taint:
    """A reason not to use a device (DRADeviceTaints). Claims can tolerate it. The node plugin sets
    ``timeAdded``."""

    key: str
    """A label key with the driver's domain as prefix (``camera.example.com/lens``)."""

    effect: TaintEffect

    value: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The location of a device in the machine. The node plugin publishes it as standard attributes,
    which allow one claim to request devices of several drivers that are close to each other."""

    numa_node: int | None = None
    """Published as ``resource.kubernetes.io/numaNode`` (KEP-6072)."""

    pcie_root: str | None = None
    """Published as ``resource.kubernetes.io/pcieRoot``, such as ``pci0000:00``."""

    pci_bus_id: str | None = None
    """Published as ``resource.kubernetes.io/pciBusID``, such as ``0000:01:00.0``."""


@dataclass(frozen=True, slots=True)
class Health:
    """
    The health of a device. Use :meth:`healthy`, :meth:`unhealthy` and :meth:`unknown` to create it.

    The node plugin taints an unhealthy device immediately, and removes the taint when the device
    has been healthy for a while. After a restart of the node plugin, report the health of every
    device, even if it is unknown. Otherwise, the node plugin removes the taint of a device after
    about a minute. For eviction and recovery, see docs/reference/device-health.md.
    """

    status: Literal["healthy", "unhealthy", "unknown"]

    message: str = ""
    """The reason, as a sentence of at most 1,024 bytes, without times or counters."""

    evict_pods: bool = False
    """Whether the failure prevents the pods that use the device from working. If the driver reports
    this continuously for the configured ``evictionDelay``, the node plugin evicts the pods."""

    @classmethod
    def healthy(cls) -> Health:
        """The device works."""
        return cls("healthy")

    @classmethod
    def unhealthy(cls, message: str, *, evict_pods: bool = False) -> Health:
        """The device does not work, or new pods must not use it."""
        return cls("unhealthy", message, evict_pods)

    @classmethod
    def unknown(cls, message: str = "") -> Health:
        """The health of the device is currently unknown. The taints of the device do not change."""
        return cls("unknown", message)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceNode:
    """A device node in the container (CDI: ``deviceNodes[]``)."""

    path: str

    host_path: str | None = None
    """The path on the host, which must not be a symbolic link. By default, `path`."""

    type: str | None = None
    """The type: ``b``, ``c``, ``u`` or ``p``. By default, the runtime reads the type and the device
    numbers from the host path."""

    major: int | None = None

    minor: int | None = None

    permissions: str | None = None
    """Any combination of ``r``, ``w`` and ``m``, or ``none`` for no access. By default, ``rwm``."""

    file_mode: int | None = None
    """The mode in the container. By default, the mode on the host, or 0666 with older runtimes."""

    uid: int | None = None
    """The user ID of the owner in the container. By default, the user that the container runs as,
    and for `gid`, that user's group."""

    gid: int | None = None

    identity: str | None = None
    """The identity of the hardware behind the device node, such as a serial number: at most 256
    characters that do not change when the kernel gives the hardware a different number. It must be
    unique among hardware of that kind. Set `type`, `major` and `minor` with it. If another claim
    holds the same number for different hardware, the claim fails. Do not set an identity for a node
    that several devices share, such as ``/dev/vfio/vfio``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A mount of a host path, or of a file system, into the container (CDI: ``mounts[]``)."""

    host_path: str

    container_path: str

    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "bind")

    type: str | None = None
    """The file system type, such as ``tmpfs``. Not needed for a bind mount."""


HookName = Literal[
    "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"
]
"""The point in the container lifecycle at which an OCI hook runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """A program that the runtime runs during the container lifecycle (CDI: ``hooks[]``)."""

    name: HookName
    """The lifecycle point: ``prestart``, ``createRuntime``, ``createContainer``,
    ``startContainer``, ``poststart`` or ``poststop``."""

    path: str
    """The absolute path of the program on the host."""

    args: tuple[str, ...] = ()
    """All arguments, including the program name as the first."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])

    timeout_seconds: int | None = None
    """The timeout in seconds. If None, the runtime decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetDevice:
    """A host network interface that the runtime moves into the container (CDI:
    ``netDevices[]``)."""

    host_interface_name: str

    name: str
    """The name of the interface in the container."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntelRdt:
    """The cache and memory bandwidth allocation of the container (CDI: ``intelRdt``)."""

    clos_id: str | None = None
    """The class of service."""

    l3_cache_schema: str | None = None

    mem_bw_schema: str | None = None

    schemata: tuple[str, ...] = ()
    """The schemata, in the kernel's format."""

    enable_monitoring: bool = False
    """Whether to create a monitoring group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edits:
    """
    The edits to the containers that use the device: the ``containerEdits`` of a CDI device. For the
    generated files, see docs/reference/cdi.md.

    A container with several devices gets the edits of all of them. If two devices set the same
    variable, the last value is used: include the request and the device in the variable name. If
    edits violate the rules of CDI, the claim fails.
    """

    env: Mapping[str, str] = field(default_factory=dict[str, str])

    device_nodes: tuple[DeviceNode, ...] = ()

    mounts: tuple[Mount, ...] = ()

    hooks: tuple[Hook, ...] = ()

    net_devices: tuple[NetDevice, ...] = ()

    additional_gids: tuple[int, ...] = ()
    """Supplementary group IDs of the container process."""

    intel_rdt: IntelRdt | None = None

    cdi_devices: tuple[str, ...] = ()
    """Qualified names (``vendor.example/class=name``) of CDI devices from other CDI files on the
    node, which the container gets as well."""

    @classmethod
    def of_device_nodes(cls, *paths: str) -> Edits:
        """Return edits that add host device nodes to the container, at the same paths."""
        return cls(device_nodes=tuple([DeviceNode(path=path) for path in paths]))


ConditionStatus = Literal["True", "False", "Unknown"]
"""The status of a condition, as in the API."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A condition of an allocated device (API: ``status.devices[].conditions[]``). The node plugin
    sets ``lastTransitionTime``."""

    type: str
    """The condition type in CamelCase, such as ``Ready``, optionally with a domain prefix. It must
    be unique for the device."""

    status: ConditionStatus

    reason: str
    """A machine-readable CamelCase word, without variable data."""

    message: str = ""
    """A human-readable sentence. The node plugin truncates it to 1,024 characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkData:
    """The network interface of an allocated device (API: ``status.devices[].networkData``)."""

    interface_name: str = ""
    """The interface name in the pod, at most 256 bytes."""

    ips: tuple[str, ...] = ()
    """The IP addresses, at most 16, in canonical CIDR notation, such as ``192.0.2.5/24``."""

    hardware_address: str = ""
    """The hardware (MAC) address, at most 128 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedDevice:
    """
    The result of preparing a device: the edits, and information about the device for others.

    `conditions`, `data` and `network_data` are for the status of the claim (KEP-4817). If the chart
    value ``nodeplugin.claimStatus.enabled`` is set, the node plugin writes them to
    ``status.devices`` after it has responded to the kubelet, and removes them when the claim is
    unprepared. An API server failure neither fails nor delays the pod. If the node plugin restarts
    before it has written an entry, the entry can be missing until the next `prepare`. Claims for
    network devices that are not allocated to a single node get no entries.

    `network_data` and `attributes` are for metadata files, which containers can read (KEP-5304).

    If a value violates the rules of the API, the claim fails.
    """

    edits: Edits = Edits()

    conditions: tuple[Condition, ...] = ()
    """The conditions of the device, at most 8, each with a different type."""

    data: Mapping[str, Any] | None = None
    """A JSON object whose content the driver defines, at most 10 KiB as JSON, and at most 16 levels
    deep."""

    network_data: NetworkData | None = None

    attributes: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    """Attributes for metadata files, in addition to those that the driver published. Together, a
    device can have at most 32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device that can be allocated (API: ``ResourceSlice.spec.devices[]``)."""

    name: str
    """A DNS label of at most 63 characters, unique in its pool. It must refer to the same device
    after a restart, because allocations contain it."""

    pool: str = ""
    """The pool name: a DNS label, or several joined by dots. ``gpus`` is published as the pool
    ``<node>/gpus``. If empty, the pool is named after the node. Most drivers do not need other
    pools."""

    attributes: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    """Attributes that CEL selectors can match. An attribute name is a C identifier of at most 32
    characters, optionally with a domain prefix (``resource.kubernetes.io/pciBusID``). The values
    must be the same after a restart."""

    capacity: Mapping[str, str | Capacity] = field(default_factory=dict[str, "str | Capacity"])
    """The capacities, keyed by name: Kubernetes quantities (``"8Gi"``), or :class:`Capacity` for
    capacities that claims can share."""

    topology: Topology = Topology()

    edits: Edits = field(default=Edits(), compare=False)
    """The container edits, if the driver does not override `prepare`. The node plugin does not
    publish them, so two devices that differ only in their edits are equal."""

    consumes: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict[str, "Mapping[str, str]"]
    )
    """The amounts that the device consumes while it is allocated, keyed by :class:`CounterSet` in
    its pool and by counter (DRAPartitionableDevices). Devices that together exceed a counter are
    never allocated at the same time."""

    compatibility_groups: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict[str, "tuple[str, ...]"]
    )
    """The compatibility groups of the device, keyed by the counter set from which it consumes. At
    most 2 groups for each. Devices that consume from the same set are allocated at the same time
    only if they all have a group in common, or if none of them has a group
    (DRADeviceCompatibilityGroups, Kubernetes 1.37). A group is a DNS label that the driver
    chooses."""

    allow_multiple_allocations: bool = False
    """Whether claims can share the device, each with a part of its capacity
    (DRAConsumableCapacity)."""

    binding_conditions: tuple[str, ...] = ()
    """The conditions that must be true before a pod is bound to the node, at most 4. Needed, for
    example, if the device must be attached first (DRADeviceBindingConditions). A controller of the
    driver sets them in the claim's ``status.devices``, because the node plugin is called only after
    the pod is bound. The scheduler waits for 10 minutes by default, and prefers pools without such
    devices."""

    binding_failure_conditions: tuple[str, ...] = ()
    """Conditions, any one of which means that the device is not available. At most 4. The scheduler
    then allocates again. Required with `binding_conditions`."""

    binds_to_node: bool = False
    """Whether the allocation applies only to the node that the scheduler has chosen. For node-local
    devices, this is always the case."""

    node_allocatable_resources: Mapping[str, NodeAllocatableResource] = field(
        default_factory=dict[str, NodeAllocatableResource]
    )
    """The node resources that an allocation of the device takes, keyed by resource name: ``cpu``,
    ``memory`` or ``hugepages-<size>``."""

    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """
    API fields of the device that drakit does not know, as JSON, with at most 4,096 bytes and 5
    levels. Do not include fields that drakit sets. The API server validates them.

    If the API server drops one of them, the node plugin publishes the fallback of the inventory.
    Without a fallback, it omits the devices with such fields. To publish a device without them,
    list it in `Inventory.fallback`.
    """

    taints: tuple[Taint, ...] = ()
    """The driver's own taints, at most 12."""

    health: Health | None = None
    """The health of the device. If the driver is notified of failures, set this field and
    `reports_health` instead of defining `Driver.health`."""

    evict_if_gone: bool = False
    """Whether pods that use the device are evicted when the driver has not listed it for a few
    seconds. See docs/reference/device-health.md."""

    prepare_again: bool = False
    """Whether the edits of the claims that hold the device are outdated, for example because the
    kernel gave the device a different number. The node plugin then calls `prepare` again for these
    claims, without `unprepare`, with a backoff of 1 s to 60 s, and rewrites their CDI files.
    Running containers keep the old edits, and can still open whichever device now has the old
    number. Therefore, their claims continue to hold the old number as well. Keep this field set
    until the nodes in `Driver.held_devices` show that the claims have the new edits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterSet:
    """Counters shared by the partitions of one piece of hardware."""

    name: str
    """A DNS label, unique in its pool."""

    counters: Mapping[str, str]
    """The quantity of each counter, keyed by counter name, which is a DNS label. At most 32
    counters."""

    pool: str = ""
    """The pool whose devices consume the counters, as in `Device.pool`."""


RejectionReason = Literal[
    "Dangerous",
    "InUse",
    "Invalid",
    "NoIdentity",
    "NotSupported",
    "Other",
    "Refused",
    "TooMany",
    "Unreadable",
    "WrongKind",
]
"""The reason why a driver does not publish a device. docs/reference/slices.md#rejected-devices
describes each reason. drakit itself sets ``Invalid`` and ``Refused``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedDevice:
    """A device on the node that the driver does not publish, with the reason."""

    device: str
    """A name that users recognize, such as the path of the device. At most 256 characters."""

    reason: RejectionReason

    message: str = ""
    """The cause and the remedy, as a sentence of at most 512 characters, without times or
    counters."""

    policy: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConflict:
    """A device that two policies match. Report the conflict for both policies."""

    device: str
    """A name that users recognize, such as the path of the device."""

    policy: str
    """The name of the other policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOutcome:
    """The result of a policy on this node: how many devices the policy matches, and how many the
    driver publishes for it."""

    policy: str

    matched: int = 0

    published: int = 0

    in_use: int = 0
    """Number of devices that claims hold although the policy no longer offers them in this form.
    Until these claims are released, the operator does not report the policy as applied."""

    in_use_by: str = ""
    """One of the devices counted in `in_use` and the claim that holds it, as a clause of at most
    512 characters."""

    problem: str = ""
    """The problem with the policy and its remedy, as a sentence of at most 1,024 characters that
    names the field."""

    conflicts: tuple[PolicyConflict, ...] = ()
    """Devices that another policy also matches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """All devices of a driver, with the counter sets that its partitions consume. The node plugin
    shows `rejected` and `policies` in the driver's NodeDeviceReport, and truncates long strings and
    lists."""

    devices: Collection[Device]

    counter_sets: Collection[CounterSet] = ()

    ordered: bool = False
    """
    Whether the order of `devices` matters: the scheduler takes the first device that fits.

    If not, each ResourceSlice lists its devices by name (``gpu-9`` before ``gpu-10``), and a new
    device can go into any slice. Changing the order of `devices` then causes no writes.

    An ordered inventory is published in exactly its order. A change to the order inside one slice
    causes a write of that slice. If several slices change, or a device moves to another slice, all
    slices of the pool are written, at most once a second. A pool of up to 56 devices has one slice.
    Do not sort by values that change often.

    Kubernetes tries the slices of a pool in this order since 1.36. Earlier versions keep the order
    only inside each slice. Pools are tried in name order, but those with binding conditions last.
    """

    partition_type_attribute: str = ""
    """The attribute that contains the type of a partition, with its domain, such as
    ``gpu.example.com/profile`` (DRAPartitionableDevicesType, Kubernetes 1.37). Each device that
    consumes counters must have this attribute as a string. Devices of one type must consume the
    same amounts."""

    fallback: Collection[Device] | None = None
    """The devices to publish instead if the API server drops a field that `devices` use, for
    example whole devices instead of partitions. Use the same name for the same hardware. Without a
    fallback, the node plugin omits the devices that are unsafe without the field."""

    rejected: Collection[RejectedDevice] = ()

    policies: Collection[PolicyOutcome] = ()

    withdrawn: Collection[str] = ()
    """Held devices that are still present, but that the driver no longer lists, for example because
    no policy matches them. They stay published with the taint ``drakit.dev/gone``, and their pods
    are not evicted. ``pool/name`` matches the device in that pool (``/name`` in the default pool),
    and ``name`` matches devices in all pools. Repeat them in each inventory: a device that is
    neither listed nor named here is treated as unplugged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimReference:
    """The identity of a ResourceClaim. A later claim can reuse the name, but not the UID."""

    namespace: str

    name: str

    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimOwner:
    """An owner of a claim (API: ``metadata.ownerReferences[]``). A claim from a template is owned
    by its pod."""

    api_version: str

    kind: str

    name: str

    uid: str

    controller: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimConsumer:
    """An object that may use a claim (API: ``status.reservedFor[]``): usually a pod, in the
    claim's namespace."""

    resource: str
    """The type in the API, such as ``pods``."""

    name: str

    uid: str

    api_group: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimConfig:
    """Opaque parameters for this driver, with their origin (API:
    ``status.allocation.devices.config[]``)."""

    source: Literal["FromClass", "FromClaim"]
    """Where the parameters come from: ``FromClass`` is the DeviceClass, which an admin writes.
    ``FromClaim`` is the claim or its template."""

    parameters: Mapping[str, Any]
    """The parameters exactly as the author wrote them."""

    requests: tuple[str, ...] = ()
    """The requests that the parameters apply to: ``main``, or ``main/small`` for a subrequest. If
    empty, they apply to all requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherDevice:
    """A device of another driver in the same claim (API:
    ``status.allocation.devices.results[]``)."""

    driver: str

    pool: str
    """The full pool name in the API."""

    name: str

    request: str

    share_id: str | None = None

    admin_access: bool = False

    consumed_capacity: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimData:
    """
    The part of a ResourceClaim that most drivers do not need. A driver that sets
    `Driver.claim_data` gets it in `AllocatedDevice.claim_data`.

    Labels, annotations and names come from users and can have any content. The API server checks
    their format, but not their meaning. To decide what a user may do, use DeviceClass configs
    instead (`ClaimConfig.source`).

    The node plugin reads the claim before `prepare`, and stores this data with the claim on the
    node. All later calls for the claim get the same data. If the node plugin has to prepare the
    claim again after a reboot, it reads the claim again. A claim whose data exceeds 64 KiB or 1,024
    entries is not prepared, and the error names the limit.
    """

    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    annotations: Mapping[str, str] = field(default_factory=dict[str, str])
    """The annotations, except ``kubectl.kubernetes.io/last-applied-configuration``."""

    owners: tuple[ClaimOwner, ...] = ()

    reserved_for: tuple[ClaimConsumer, ...] = ()
    """The consumers when the node plugin read the claim. Pods that later start to use the prepared
    claim are missing."""

    configs: tuple[ClaimConfig, ...] = ()
    """The opaque parameters for this driver's devices in the claim, in ascending order of
    precedence. `AllocatedDevice.configs` contains only those for that device."""

    other_devices: tuple[OtherDevice, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldNode:
    """A device node that is held by claims and has a `DeviceNode.identity`."""

    type: str

    major: int | None
    """The major number. None, like `minor`, if the claim was prepared before the last boot: no
    container still uses the number, and other hardware may have it now."""

    minor: int | None

    identity: str

    current: bool = True
    """Whether the CDI file of a claim contains this number. If not, the device now has a different
    number, and only containers that started earlier can still use this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldDevice:
    """A device that claims hold, with its device nodes that have an identity."""

    claims: tuple[ClaimReference, ...]

    nodes: tuple[HeldNode, ...] = ()

    shares: tuple[Mapping[str, str], ...] = ()
    """The consumed capacity of each share that claims hold, as in
    `AllocatedDevice.consumed_capacity`. Empty if a claim holds the whole device, or if the driver
    runs in its own container."""


_NONE: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedDevice(Generic[ParametersT_co]):
    """A device that is allocated to a claim (API: ``status.allocation.devices.results[]``). Generic
    in the parameters type: ``AllocatedDevice[LampParameters]``."""

    name: str
    """The device name that the driver published."""

    pool: str
    """The pool name that the driver published."""

    request: str
    """The full request name: ``main``, or ``main/small`` for a subrequest."""

    share_id: str | None = None
    """The ID of the claim's share of the device: a UUID. None if the device is not shared. Include
    it in the key of any state that `prepare` stores."""

    admin_access: bool = False
    """Whether the claim has admin access, to monitor a device that another claim may hold. If so,
    do not change the device."""

    consumed_capacity: Mapping[str, str] = field(default_factory=dict[str, str])
    """The claim's share of the capacity, as quantities. The scheduler may write an amount in a
    different form from the request, so use `parse_quantity` for calculations."""

    consumes: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict[str, "Mapping[str, str]"]
    )
    """The amounts that the device consumes from counter sets, as the driver reported them when the
    device was prepared. Empty for admin access."""

    configs: tuple[Mapping[str, Any], ...] = ()
    """The opaque parameters exactly as users wrote them, those of the DeviceClass first. They can
    have any content."""

    parameters: ParametersT_co = _NONE
    """The configs, merged by key and validated, as an object of the driver's parameters type. In
    `unprepare` and `reset`, it is None if a newer version of the driver rejects the parameters. If
    the checkpoint was damaged, it can be None, and `configs`, `consumes` and `consumed_capacity`
    can be empty."""

    edits: Edits | None = field(default=None, compare=False)
    """The device's `Device.edits`, as last yielded by the driver. None if the driver no longer
    lists the device."""

    published: Device | None = field(default=None, compare=False)
    """The device as last yielded by the driver, with its attributes and capacity. None if the
    driver no longer lists the device."""

    claim_data: ClaimData | None = field(default=None, compare=False)
    """The rest of the claim, if the driver sets `Driver.claim_data`. All devices of a claim have
    the same object. It is None for claims that were prepared by an earlier driver version without
    `Driver.claim_data`. In `unprepare` and `reset`, it can also be None if the checkpoint was
    damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedClaim(Generic[ParametersT_co]):
    """A claim, and this driver's devices that are allocated to it, in the order of the
    allocation."""

    claim: ClaimReference

    devices: tuple[AllocatedDevice[ParametersT_co], ...]
