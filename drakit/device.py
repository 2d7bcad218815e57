"""
The values of the driver contract: devices and their health, allocated devices, container edits.

A vendor's driver makes these plain values; the node plugin turns them into ResourceSlices and CDI
specs. They are checked where they are used (limits of the API in :mod:`drakit.resource`, CDI's
rules in :mod:`drakit.cdi`), so that one bad device costs that device alone.

It must not know Kubernetes clients, gRPC, files, or either daemon.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal

from typing_extensions import TypeVar

__all__ = (
    "AllocatedClaim",
    "AllocatedDevice",
    "AttributeValue",
    "Capacity",
    "CapacityRange",
    "ClaimReference",
    "CounterSet",
    "Device",
    "DeviceNode",
    "Edits",
    "Health",
    "Hook",
    "IntelRdt",
    "Inventory",
    "Mount",
    "NetDevice",
    "Taint",
    "TaintEffect",
    "Topology",
    "Version",
)


ParametersT_co = TypeVar("ParametersT_co", covariant=True, default=Any)
"""The type of `AllocatedDevice.parameters`: the driver's parameters, checked."""


@dataclass(frozen=True, slots=True)
class Version:
    """A semantic version (2.0.0) as an attribute: CEL compares it as one, not as text."""

    text: str


AttributeScalar = str | int | bool | Version

AttributeValue = (
    AttributeScalar | tuple[str, ...] | tuple[int, ...] | tuple[bool, ...] | tuple[Version, ...]
)
"""The types of an attribute (API: ``DeviceAttribute``); strings up to 64 bytes. A tuple is a list
attribute (DRAListTypeAttributes): its values are of one type, and there is at least one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRange:
    """The amounts that a claim may take of a capacity (API: ``requestPolicy.validRange``)."""

    min: str
    max: str | None = None
    """The whole capacity, if none is given."""

    step: str | None = None
    """Amounts are the minimum plus any number of steps; any amount, if none is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """
    An amount that claims can share (API: ``DeviceCapacity``, DRAConsumableCapacity).

    It matters only where the device has `allow_multiple_allocations`.
    """

    value: str
    """The whole capacity, as a quantity."""

    default: str | None = None
    """The amount for a claim that requests none; all of it, if no default is given. Required with
    `valid_values` or a `valid_range`, which must allow it."""

    valid_values: tuple[str, ...] = ()
    """The amounts that a claim can take, ascending, at most 10. Requests are rounded up."""

    valid_range: CapacityRange | None = None
    """The same as a range; give only one of the two."""


TaintEffect = Literal["None", "NoSchedule", "NoExecute"]
"""``None`` has no effect, ``NoSchedule`` keeps new pods away, ``NoExecute`` evicts running ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taint:
    """
    A reason not to use a device (API: ``DeviceTaint``, DRADeviceTaints); claims can tolerate it.

    The node plugin sets ``timeAdded``, which stays the same while the taint exists.
    """

    key: str
    """A label's name, with the driver's domain before it (``camera.example.com/lens``)."""

    effect: TaintEffect
    value: str = ""
    """A label's value: at most 63 characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """
    Where a device sits in the machine. It becomes the standard attributes that all drivers use, so
    that one claim can request devices of several drivers that are close to each other.
    """

    numa_node: int | None = None
    """``resource.kubernetes.io/numaNode`` (KEP-6072)."""

    pcie_root: str | None = None
    """``resource.kubernetes.io/pcieRoot``, as ``pci0000:00``."""

    pci_bus_id: str | None = None
    """``resource.kubernetes.io/pciBusID``, as ``0000:01:00.0``."""


@dataclass(frozen=True, slots=True)
class Health:
    """
    The health of a device. Made by :meth:`healthy`, :meth:`unhealthy` and :meth:`unknown`.

    The node plugin taints an unhealthy device at once, so that no new pod gets it, and shows its
    health in the status of the pods that have it. It removes the taint once the device has been
    healthy for a while. After a restart of the node plugin, report the health of every device, even
    if it is :meth:`unknown`: without any report, the node plugin removes the taint of a device
    after about a minute.
    """

    status: Literal["healthy", "unhealthy", "unknown"]
    message: str = ""
    """The reason, for people: a sentence without times and counters, at most 1,024 characters."""

    evict_pods: bool = False
    """Running work on the device is lost: if it stays unhealthy, the pods that use it are
    evicted."""

    @classmethod
    def healthy(cls) -> Health:
        """The device works."""
        return cls("healthy")

    @classmethod
    def unhealthy(cls, message: str, *, evict_pods: bool = False) -> Health:
        """The device does not work, or not well enough for new pods."""
        return cls("unhealthy", message, evict_pods)

    @classmethod
    def unknown(cls, message: str = "") -> Health:
        """The health cannot be determined at the moment; changes no taint."""
        return cls("unknown", message)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceNode:
    """A device node in the container (CDI: ``deviceNodes[]``)."""

    path: str
    """Absolute path in the container."""

    host_path: str | None = None
    """Path on the host, no symbolic link; the same as `path` if none is given."""

    type: str | None = None
    """``b``, ``c``, ``u`` or ``p``; the runtime reads it from the host path if none is given."""

    major: int | None = None
    minor: int | None = None
    permissions: str | None = None
    """Letters of ``rwm``, or ``none``; all of them if none is given."""

    file_mode: int | None = None
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A bind mount into the container (CDI: ``mounts[]``)."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "bind")
    type: str | None = None
    """A file system type (``tmpfs``); a bind mount needs none."""


HookName = Literal[
    "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"
]
"""The moment at which an OCI hook runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """A program that the runtime runs in the container's life cycle (CDI: ``hooks[]``)."""

    name: HookName
    path: str
    """Absolute path on the host."""

    args: tuple[str, ...] = ()
    """All arguments, including the program's own name."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_seconds: int | None = None
    """The runtime ends the hook after this time; None leaves that to the runtime."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetDevice:
    """A network interface that is moved into the container (CDI: ``netDevices[]``)."""

    host_interface_name: str
    name: str
    """The interface's name in the container."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntelRdt:
    """Cache and memory bandwidth of the container (CDI: ``intelRdt``)."""

    clos_id: str | None = None
    l3_cache_schema: str | None = None
    mem_bw_schema: str | None = None
    schemata: tuple[str, ...] = ()
    enable_monitoring: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Edits:
    """
    What a container gets for a device (CDI 1.1: ``containerEdits``). All of it is optional.

    :meth:`of_device_nodes` makes the most common one.
    """

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    net_devices: tuple[NetDevice, ...] = ()
    additional_gids: tuple[int, ...] = ()
    """Additional groups of the container's process."""

    intel_rdt: IntelRdt | None = None
    cdi_devices: tuple[str, ...] = ()
    """Qualified names (``vendor.example/class=name``) of CDI devices from other CDI files on the
    node, which the container gets as well. The runtime resolves them when it creates the container,
    and fails if it does not find one."""

    @classmethod
    def of_device_nodes(cls, *paths: str) -> Edits:
        """The device nodes of the host at these paths, at the same paths in the container."""
        return cls(device_nodes=tuple([DeviceNode(path=path) for path in paths]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device that can be allocated (API: ``ResourceSlice.spec.devices[]``)."""

    name: str
    """A DNS label of at most 63 characters, unique in its pool. It must be the same after a
    restart: it is what an allocation names."""

    pool: str = ""
    """The device's pool: a DNS label, or several joined by dots. Empty is the pool that has the
    node's name; ``gpus`` is published as the pool ``<node>/gpus``. A driver with devices of one
    kind needs one pool."""

    attributes: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    """What CEL selectors can match. A name is a C identifier of at most 32 characters, or one
    with a domain before it (``resource.kubernetes.io/pciBusID``)."""

    capacity: Mapping[str, str | Capacity] = field(default_factory=dict[str, "str | Capacity"])
    """Amounts as Kubernetes quantities (``"8Gi"``), or as :class:`Capacity` that claims share."""

    topology: Topology = Topology()
    edits: Edits = field(default=Edits(), compare=False)
    """What a container gets for the device if the driver has no `prepare` of its own. It is not
    published, and two devices that differ only in it are equal."""

    consumes: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict[str, "Mapping[str, str]"]
    )
    """What the device consumes while it is allocated: amounts by counter, by :class:`CounterSet` of
    its pool (API: ``consumesCounters``, DRAPartitionableDevices). Devices that together exceed a
    counter are never allocated at the same time."""

    allow_multiple_allocations: bool = False
    """Whether claims can share its capacity (DRAConsumableCapacity); each gets a share."""

    taints: tuple[Taint, ...] = ()
    """The driver's own taints, besides those for its health; at most 12, as the node plugin needs
    some of the API's 16."""

    health: Health | None = None
    """The device's health, for a driver that is notified of failures. A driver that must poll for
    them defines `Driver.health` instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterSet:
    """The counters that partitions of one piece of hardware share (API: ``sharedCounters[]``)."""

    name: str
    """A DNS label, unique in its pool."""

    counters: Mapping[str, str]
    """Quantities by name, which is a DNS label; at most 32."""

    pool: str = ""
    """The pool whose devices consume them, as in :class:`Device`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """All devices of a driver with their counter sets, for a driver that has partitions."""

    devices: Collection[Device]
    counter_sets: Collection[CounterSet] = ()
    fallback: Collection[Device] | None = None
    """What to publish instead if the API server does not know a field that `devices` use (it drops
    unknown fields): whole devices instead of partitions, for example. Without a fallback, devices
    that would not be safe without the field are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimReference:
    """The identity of a ResourceClaim. At unprepare the object may no longer exist."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


_NONE: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedDevice(Generic[ParametersT_co]):
    """
    One result of a claim's allocation (API: ``status.allocation.devices.results[]``).

    Generic in the type of the driver's parameters: ``AllocatedDevice[LampParameters]``.
    """

    name: str
    """The device's name, as its driver published it."""

    pool: str
    """The pool's name as in :class:`Device`: empty for the pool that has the node's name."""

    request: str
    """The request's name in full; ``main/small`` for a subrequest."""

    share_id: str | None = None
    """Set where the device may be allocated several times (DRAConsumableCapacity)."""

    admin_access: bool = False
    """The claim monitors a device that another claim may hold: do nothing exclusive, reset
    nothing."""

    consumed_capacity: Mapping[str, str] = field(default_factory=dict[str, str])
    """The claim's part of the device's capacity, as quantities (DRAConsumableCapacity). The
    scheduler may write an amount differently from the request: 40G as ``39062500Ki``."""

    consumes: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict[str, "Mapping[str, str]"]
    )
    """What the device consumes from the pool's counter sets, from the inventory at the time of
    prepare; empty with admin access. Calls for devices that consume from one counter set never
    overlap."""

    configs: tuple[Mapping[str, Any], ...] = ()
    """The opaque parameters for this driver and request as users wrote them: those of the
    DeviceClass before those of the claim, so that a later one takes precedence. They can hold
    anything that JSON can."""

    parameters: ParametersT_co = _NONE
    """The configs merged key by key and checked: an object of the driver's `parameters_type`, if it
    has one. In `unprepare` and `reset` it is None if the parameters were lost, or do not fit a
    newer version of the driver."""

    edits: Edits | None = field(default=None, compare=False)
    """The `Device.edits` of the device as the driver last yielded it; None if it no longer does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedClaim(Generic[ParametersT_co]):
    """A claim and the driver's devices that it was allocated."""

    claim: ClaimReference
    devices: tuple[AllocatedDevice[ParametersT_co], ...]
