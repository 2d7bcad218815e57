"""
What a driver says of its devices, and what a container gets of them.

Plain values: a vendor's driver makes them, the node plugin turns them into ResourceSlices and CDI
specs. What is allowed in them is checked where they are used (limits of the API in
:mod:`drakit.resource`, CDI's rules in :mod:`drakit.cdi`), so that one bad device costs that
device alone.

It must not know Kubernetes clients, gRPC, files, or either daemon.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
    """All that there is, if none is given."""

    step: str | None = None
    """Amounts are the minimum and any number of steps; any amount, if none is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """
    An amount that claims can share (API: ``DeviceCapacity``, DRAConsumableCapacity).

    It matters only where the device has `allow_multiple_allocations`.
    """

    value: str
    """All that there is, as a quantity."""

    default: str | None = None
    """What a claim takes that asks for no amount; all of it, if none is given. Needed where there
    are `valid_values` or a `valid_range`, and must be one that those allow."""

    valid_values: tuple[str, ...] = ()
    """The amounts that can be taken, ascending, at most 10; what is asked for is rounded up."""

    valid_range: CapacityRange | None = None
    """The same as a range; only one of the two."""


TaintEffect = Literal["None", "NoSchedule", "NoExecute"]
"""``None`` only tells, ``NoSchedule`` keeps new pods away, ``NoExecute`` ends running ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taint:
    """A reason not to use a device (API: ``DeviceTaint``, DRADeviceTaints); claims can tolerate it.

    When it was added is seen to by the node plugin, and stays the same for as long as it is there.
    """

    key: str
    """A label's name, with the driver's domain before it (``camera.example.com/lens``)."""

    effect: TaintEffect
    value: str = ""
    """A label's value: at most 63 characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """
    Where a device sits in the machine; becomes the standard attributes that other drivers use, too,
    so that one claim can ask for devices that are close to each other.
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
    How a device is. Made by :meth:`ok`, :meth:`bad` and :meth:`unknown`.

    What is bad is tainted at once, so that no new pod gets it, and shown in the status of the pods
    that have it; when it has been well for a while the taint goes by itself. After a restart of the
    node plugin say of every device how it is, be it :meth:`unknown`: the taint of a device of which
    nothing at all is said goes after a minute or so.
    """

    status: Literal["healthy", "unhealthy", "unknown"]
    message: str = ""
    """Why, for people: a sentence without times and counters, at most 1,024 characters."""

    broken: bool = False
    """Running work is certainly broken: if it stays so, pods that use the device are evicted."""

    @classmethod
    def ok(cls) -> Health:
        """The device works."""
        return cls("healthy")

    @classmethod
    def bad(cls, message: str, *, broken: bool = False) -> Health:
        """The device does not work, or not well enough for new pods."""
        return cls("unhealthy", message, broken)

    @classmethod
    def unknown(cls, message: str = "") -> Health:
        """Nobody can tell at the moment; changes no taint."""
        return cls("unknown", message)


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device that can be allocated (API: ``ResourceSlice.spec.devices[]``)."""

    name: str
    """A DNS label of at most 63 characters, unique in its pool. It must be the same after a
    restart: it is what an allocation names."""

    pool: str = ""
    """The pool that it is in: a DNS label, or several joined by dots. Empty is the pool that has
    the node's name; ``gpus`` is published as the pool ``<node>/gpus``. A driver with devices of one
    kind needs one pool."""

    attributes: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    """What CEL selectors can ask for. A name is a C identifier of at most 32 characters, or one
    with a domain before it (``resource.kubernetes.io/pciBusID``)."""

    capacity: Mapping[str, str | Capacity] = field(default_factory=dict[str, "str | Capacity"])
    """Amounts as Kubernetes quantities (``"8Gi"``), or how claims can share them."""

    topology: Topology = Topology()
    node_paths: tuple[str, ...] = ()
    """Device nodes of the host (``/dev/camera0``): what a container gets where the driver has no
    `prepare` of its own. They are not published."""

    consumes: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict[str, "Mapping[str, str]"]
    )
    """What the device takes while it is allocated: amounts by counter, by :class:`CounterSet` of
    its pool (API: ``consumesCounters``, DRAPartitionableDevices). Two devices that take more than
    there is are never allocated together."""

    allow_multiple_allocations: bool = False
    """Whether claims can share it by its capacity (DRAConsumableCapacity); each gets a share."""

    taints: tuple[Taint, ...] = ()
    """Reasons of the driver's own not to use it, besides its health; at most 12, as the node plugin
    needs some of the API's 16."""

    health: Health | None = None
    """How it is, for a driver that is told of it; one that has to look defines `Driver.health`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterSet:
    """Amounts that partitions of one piece of hardware share (API: ``sharedCounters[]``)."""

    name: str
    """A DNS label, unique in its pool."""

    counters: Mapping[str, str]
    """Quantities by name, which is a DNS label; at most 32."""

    pool: str = ""
    """The pool whose devices consume them, as in :class:`Device`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """All that a driver has, where a collection of devices alone does not say it."""

    devices: Collection[Device]
    counter_sets: Collection[CounterSet] = ()
    fallback: Collection[Device] | None = None
    """What to publish instead where the API server does not know a field that `devices` use (it
    drops what it does not know): whole devices instead of partitions, for example. If none is
    given, devices that would not be safe without the field are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceNode:
    """A device node in the container (CDI: ``deviceNodes[]``)."""

    path: str
    """Absolute path in the container."""

    host_path: str | None = None
    """Path on the host, no symbolic link; the same as `path` if none is given."""

    type: str | None = None
    """``b``, ``c``, ``u`` or ``p``; the runtime looks at the host path if none is given."""

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
    """A file system type (``tmpfs``); none is needed for a bind mount."""


HookName = Literal[
    "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"
]
"""When an OCI hook runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """A program that the runtime runs at a moment of the container's life (CDI: ``hooks[]``)."""

    name: HookName
    path: str
    """Absolute path on the host."""

    args: tuple[str, ...] = ()
    """All arguments, that of the program's own name included."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_seconds: int | None = None
    """After which the runtime ends it; None leaves that to the runtime."""


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
    """What a container gets for a device (CDI 1.1: ``containerEdits``); empty is allowed."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    net_devices: tuple[NetDevice, ...] = ()
    additional_gids: tuple[int, ...] = ()
    """Groups that the container's process is in besides its own."""

    intel_rdt: IntelRdt | None = None
    cdi_devices: tuple[str, ...] = ()
    """Qualified names (``vendor.example/class=name``) of CDI devices that somebody else describes
    in a CDI file on the node: the container gets those as well. The runtime looks them up when it
    makes the container, and fails if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimReference:
    """A ResourceClaim by its identity. At unprepare nothing else of it may exist any more."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedDevice:
    """One result of a claim's allocation (API: ``status.allocation.devices.results[]``)."""

    name: str
    """The device's name, as its driver published it."""

    pool: str
    """The pool's name in the driver's own words: empty for the one that has the node's name."""

    request: str
    """The request's name in full; ``main/small`` for a subrequest."""

    share_id: str | None = None
    """Set where the device may be allocated several times (DRAConsumableCapacity)."""

    admin_access: bool = False
    """The claim looks at the device beside its holder: do nothing exclusive, reset nothing."""

    consumed_capacity: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the claim has of the device's capacity, as quantities (DRAConsumableCapacity). The
    scheduler may write an amount in another way than it was asked for: 40G as ``39062500Ki``."""

    consumes: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict[str, "Mapping[str, str]"]
    )
    """What the device consumes from the pool's counter sets, from the inventory at the time of
    prepare; empty with admin access. Calls for devices that consume from one counter set never
    overlap."""

    configs: tuple[Mapping[str, Any], ...] = ()
    """The opaque parameters that are meant for this driver and request, the weakest first: those
    of the DeviceClass come before those of the claim, so a later one has the last word. Users write
    them: they can hold anything that JSON can."""

    parameters: Any = None
    """The configs put together, key by key, and checked: an object of the driver's
    `parameters_type`, if it has one. In `unprepare` it is None where they cannot be had any more,
    or do not fit a newer version of the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedClaim:
    """A claim and the driver's devices of it."""

    claim: ClaimReference
    devices: tuple[AllocatedDevice, ...]
