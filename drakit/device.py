"""
The values of the driver contract: devices and their health, allocated devices, container edits.

A vendor's driver makes these plain values; the node plugin turns them into ResourceSlices and CDI
specs. They are checked where they are used (limits of the API in :mod:`drakit.resource`, CDI's
rules in :mod:`drakit.cdi`), so that an invalid device does not affect the others.

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
    "HeldDevice",
    "HeldNode",
    "Hook",
    "IntelRdt",
    "Inventory",
    "LeftOut",
    "LeftOutReason",
    "Mount",
    "NetDevice",
    "PolicyConflict",
    "PolicyOutcome",
    "Taint",
    "TaintEffect",
    "Topology",
    "Version",
)


ParametersT_co = TypeVar("ParametersT_co", covariant=True, default=Any)
"""The type of `AllocatedDevice.parameters`: the driver's parameters, checked."""


@dataclass(frozen=True, slots=True)
class Version:
    """A semantic version (2.0.0) as an attribute. CEL compares it as a version."""

    text: str
    """The version."""


AttributeScalar = str | int | bool | Version

AttributeValue = (
    AttributeScalar | tuple[str, ...] | tuple[int, ...] | tuple[bool, ...] | tuple[Version, ...]
)
"""The types of an attribute (API: ``DeviceAttribute``). A string has at most 64 bytes. A tuple is a
list attribute (DRAListTypeAttributes): it has at least one value, and all values have the same
type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityRange:
    """The amounts of a capacity that a claim can consume (API: ``requestPolicy.validRange``), as
    quantities."""

    min: str
    """The smallest amount."""

    max: str | None = None
    """The largest amount. If None, the whole capacity."""

    step: str | None = None
    """The increment between consecutive valid amounts. If None, any amount is valid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """
    An amount that claims can share (API: ``DeviceCapacity``, DRAConsumableCapacity).

    The fields other than `value` have an effect only if the device sets
    `allow_multiple_allocations`.
    """

    value: str
    """The whole capacity, as a quantity."""

    default: str | None = None
    """The amount for a claim that requests none. If None, the whole capacity. Required if
    `valid_values` or `valid_range` is set, and must be an amount that they allow."""

    valid_values: tuple[str, ...] = ()
    """The amounts that a claim can consume, in ascending order, at most 10. Requests are rounded
    up to the next amount."""

    valid_range: CapacityRange | None = None
    """The valid amounts as a range. Do not set both `valid_values` and `valid_range`."""


TaintEffect = Literal["None", "NoSchedule", "NoExecute"]
"""``None`` has no effect. With ``NoSchedule``, new pods do not get the device. ``NoExecute`` also
evicts running pods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taint:
    """
    A reason not to use a device (API: ``DeviceTaint``, DRADeviceTaints); claims can tolerate it.

    The node plugin sets ``timeAdded`` when the taint appears.
    """

    key: str
    """A label key with the driver's domain as prefix (``camera.example.com/lens``)."""

    effect: TaintEffect
    """The effect on pods."""

    value: str = ""
    """A label value of at most 63 characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """
    The location of a device in the machine. It becomes the standard attributes that all drivers
    use, so that one claim can request devices from several drivers that are close to each other.
    """

    numa_node: int | None = None
    """The attribute ``resource.kubernetes.io/numaNode`` (KEP-6072)."""

    pcie_root: str | None = None
    """The attribute ``resource.kubernetes.io/pcieRoot``, such as ``pci0000:00``."""

    pci_bus_id: str | None = None
    """The attribute ``resource.kubernetes.io/pciBusID``, such as ``0000:01:00.0``."""


@dataclass(frozen=True, slots=True)
class Health:
    """
    The health of a device. Use :meth:`healthy`, :meth:`unhealthy` and :meth:`unknown` to create it.

    The node plugin taints an unhealthy device immediately, so that no new pod gets it. It reports
    the health in the status of the pods that have the device. It removes the taint when the device
    has been healthy for a while. After a restart of the node plugin, report the health of every
    device, even if it is :meth:`unknown`: without a report, the node plugin removes the taint of a
    device after about a minute.
    """

    status: Literal["healthy", "unhealthy", "unknown"]
    """The status of the device."""

    message: str = ""
    """The reason, as a human-readable sentence of at most 1,024 bytes, without times or
    counters."""

    evict_pods: bool = False
    """Whether the driver requests the eviction of the pods that use the device, because they can no
    longer work. The node plugin evicts them after the driver has reported this continuously for the
    configured ``evictionDelay``."""

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
        """The health is currently unknown. The taints of the device do not change."""
        return cls("unknown", message)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceNode:
    """A device node in the container (CDI: ``deviceNodes[]``)."""

    path: str
    """The absolute path in the container."""

    host_path: str | None = None
    """The path on the host, not a symbolic link. If None, `path`."""

    type: str | None = None
    """``b``, ``c``, ``u`` or ``p``. If None, the runtime reads it from the host path."""

    major: int | None = None
    """The major number. If None, the runtime reads it from the host path."""

    minor: int | None = None
    """The minor number. If None, the runtime reads it from the host path."""

    permissions: str | None = None
    """Any combination of ``r``, ``w`` and ``m``, or ``none`` for no access. If None, ``rwm``."""

    file_mode: int | None = None
    """The file mode in the container."""

    uid: int | None = None
    """The owner in the container."""

    gid: int | None = None
    """The group in the container."""

    identity: str | None = None
    """The identity of the hardware behind the device node: at most 256 characters that stay the
    same when the kernel gives the hardware another number, and that other hardware of the same kind
    does not have. Set `type`, `major` and `minor` with it. A claim that needs a number that another
    claim holds under another identity is refused. Nodes without an identity are not compared. The
    identity is not part of the CDI file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A mount into the container: of a host path, or of a file system (CDI: ``mounts[]``)."""

    host_path: str
    """The path on the host."""

    container_path: str
    """The path in the container."""

    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "bind")
    """The mount options."""

    type: str | None = None
    """A file system type, such as ``tmpfs``. A bind mount needs none."""


HookName = Literal[
    "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"
]
"""The point of the container's life cycle at which an OCI hook runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hook:
    """A program that the runtime runs in the container's life cycle (CDI: ``hooks[]``)."""

    name: HookName
    """``prestart``, ``createRuntime``, ``createContainer``, ``startContainer``, ``poststart`` or
    ``poststop``."""

    path: str
    """The absolute path on the host."""

    args: tuple[str, ...] = ()
    """All arguments, including the name of the program."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """The environment variables of the hook."""

    timeout_seconds: int | None = None
    """The time after which the runtime ends the hook, in seconds. If None, the runtime decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetDevice:
    """A network interface that the runtime moves into the container (CDI: ``netDevices[]``)."""

    host_interface_name: str
    """The name of the interface on the host."""

    name: str
    """The name of the interface in the container."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntelRdt:
    """Cache and memory bandwidth of the container (CDI: ``intelRdt``)."""

    clos_id: str | None = None
    """The class of service."""

    l3_cache_schema: str | None = None
    """The schema of the L3 cache."""

    mem_bw_schema: str | None = None
    """The schema of the memory bandwidth."""

    schemata: tuple[str, ...] = ()
    """Schemata as the kernel expects them."""

    enable_monitoring: bool = False
    """Whether to create a monitoring group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edits:
    """
    The edits that a device makes to its containers (CDI 1.1: ``containerEdits``). All fields are
    optional.
    """

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables."""

    device_nodes: tuple[DeviceNode, ...] = ()
    """Device nodes."""

    mounts: tuple[Mount, ...] = ()
    """Mounts."""

    hooks: tuple[Hook, ...] = ()
    """OCI hooks."""

    net_devices: tuple[NetDevice, ...] = ()
    """Network interfaces."""

    additional_gids: tuple[int, ...] = ()
    """Supplementary groups of the container's process."""

    intel_rdt: IntelRdt | None = None
    """Intel RDT settings."""

    cdi_devices: tuple[str, ...] = ()
    """Qualified names (``vendor.example/class=name``) of CDI devices from other CDI files on the
    node, which the container gets as well. The runtime resolves them when it creates the container,
    and fails if one is missing."""

    @classmethod
    def of_device_nodes(cls, *paths: str) -> Edits:
        """Return edits that add device nodes of the host to the container, at the same paths."""
        return cls(device_nodes=tuple([DeviceNode(path=path) for path in paths]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device that can be allocated (API: ``ResourceSlice.spec.devices[]``)."""

    name: str
    """A DNS label of at most 63 characters, unique in its pool. It must stay the same after a
    restart, because allocations refer to it."""

    pool: str = ""
    """The pool of the device: a DNS label, or several joined by dots. If empty, the device is in
    the pool that is named after the node. ``gpus`` is published as the pool ``<node>/gpus``. If all
    devices of a driver are of one kind, leave this field empty."""

    attributes: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    """Attributes that CEL selectors can match. A name is a C identifier of at most 32 characters,
    optionally with a domain prefix (``resource.kubernetes.io/pciBusID``)."""

    capacity: Mapping[str, str | Capacity] = field(default_factory=dict[str, "str | Capacity"])
    """Capacities by name: Kubernetes quantities (``"8Gi"``), or :class:`Capacity` for amounts that
    claims share."""

    topology: Topology = Topology()
    """The location of the device."""

    edits: Edits = field(default=Edits(), compare=False)
    """The edits for containers, if the driver does not override `prepare`. The node plugin does not
    publish them. Two devices that differ only in their edits are equal."""

    consumes: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict[str, "Mapping[str, str]"]
    )
    """The amounts that the device consumes while it is allocated, by :class:`CounterSet` in its
    pool and by counter (API: ``consumesCounters``, DRAPartitionableDevices). Devices that together
    exceed a counter are never allocated at the same time."""

    allow_multiple_allocations: bool = False
    """Whether claims can share the capacity of the device (DRAConsumableCapacity)."""

    taints: tuple[Taint, ...] = ()
    """The driver's own taints, besides those for health. At most 12: the API allows 16, and the
    node plugin reserves the others."""

    health: Health | None = None
    """The health of the device, for a driver that is notified of failures. A driver that polls
    defines `Driver.health` instead."""

    evict_if_gone: bool = False
    """Whether pods that use the device are evicted when the driver no longer lists it. A device
    that a claim holds stays published with the taint ``drakit.dev/gone`` until the claim is
    released. The effect of the taint is NoExecute if this is set, and NoSchedule otherwise. The
    node plugin evicts pods only if the device stays away for some seconds, because a hub that
    resets unplugs its devices for a moment."""

    prepare_again: bool = False
    """Whether the edits of the claims that hold the device are outdated, for example because the
    kernel gave the device another number. The node plugin then calls `prepare` again for these
    claims, and rewrites their CDI files. It does not call `unprepare` first. Running containers
    keep the old edits until they restart. Set it until the held nodes (`Driver.held_devices`) show
    that the claims have the new edits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterSet:
    """The counters that partitions of one piece of hardware share (API: ``sharedCounters[]``)."""

    name: str
    """A DNS label, unique in its pool."""

    counters: Mapping[str, str]
    """Quantities by counter. A name is a DNS label. At most 32 counters."""

    pool: str = ""
    """The pool whose devices consume the counters, in the same format as `Device.pool`."""


LeftOutReason = Literal[
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
"""
The reason why a driver does not publish a device.

* ``Dangerous``: a pod with the device could control the node or its data, and the policy or the
  driver's configuration does not allow this.
* ``InUse``: the node itself uses the device, or a claim holds the device under another name, its
  number, or another device with the same identity.
* ``Invalid``: the device breaks a rule of the API.
* ``NoIdentity``: the device cannot be identified with certainty after a reboot.
* ``NotSupported``: the driver does not publish such devices, or the node lacks a feature that the
  policy requires.
* ``Refused``: the API server rejects the device, or drops a field without which the device is
  unsafe.
* ``TooMany``: the number of devices exceeds a limit.
* ``Unreadable``: the driver cannot read the necessary properties of the device, or they contradict
  each other.
* ``WrongKind``: the device is not of the kind that its policy expects.
* ``Other``: another reason, which the message describes.

The node plugin sets ``Invalid`` and ``Refused``.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A device of the node that the driver does not publish, with the reason."""

    device: str
    """A name for the device that users recognize, such as its path. At most 256 characters."""

    reason: LeftOutReason
    """The reason."""

    message: str = ""
    """The reason and the remedy, as a human-readable sentence of at most 512 characters, without
    times or counters."""

    policy: str = ""
    """The policy that matches the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConflict:
    """A device that two policies match. Report the conflict for both policies."""

    device: str
    """A name for the device that users recognize, such as its path."""

    policy: str
    """The name of the other policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOutcome:
    """The result of a policy on this node."""

    policy: str
    """The name of the policy."""

    matched: int = 0
    """The number of devices on the node that the policy matches."""

    published: int = 0
    """The number of devices that the driver publishes because of the policy."""

    problem: str = ""
    """The problem with the policy and its remedy, as a human-readable sentence of at most 1,024
    characters that names the field. Empty if there is no problem."""

    conflicts: tuple[PolicyConflict, ...] = ()
    """Devices that another policy also matches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """
    All devices of a driver, with the counter sets of its partitions, the devices that it does not
    publish, and the outcomes of its policies.

    The node plugin reports the last two in the driver's NodeDeviceReport. It truncates long texts.
    If there are too many entries, it omits some, and reports their number.
    """

    devices: Collection[Device]
    """The devices."""

    counter_sets: Collection[CounterSet] = ()
    """The counters that the partitions consume."""

    fallback: Collection[Device] | None = None
    """The devices to publish instead if the API server drops a field that `devices` use, for
    example whole devices instead of partitions. Without a fallback, the node plugin omits the
    devices that are unsafe without the field."""

    left_out: Collection[LeftOut] = ()
    """The devices that the driver does not publish, with reasons."""

    policies: Collection[PolicyOutcome] = ()
    """The outcomes of the driver's policies (:meth:`drakit.Driver.apply_policies`)."""

    withdrawn: Collection[str] = ()
    """Names of held devices that the driver no longer lists although they are still there, for
    example because no policy matches them any more. Like other held devices that are not listed,
    they stay published with the taint ``drakit.dev/gone``, but their pods are not evicted. Name
    them in each inventory: a device that is neither listed nor named counts as unplugged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimReference:
    """The identity of a ResourceClaim. During unprepare, the object might no longer exist."""

    namespace: str
    """The namespace of the claim."""

    name: str
    """The name of the claim. A later claim can reuse the name."""

    uid: str
    """The UID, which is unique in the cluster and over time."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldNode:
    """A device node with an identity that claims hold (`DeviceNode.identity`)."""

    type: str
    """``b`` or ``c``."""

    major: int | None
    """The major number. None if the claim was prepared before the last boot: no container uses the
    number, and other hardware may have it since."""

    minor: int | None
    """The minor number, or None as above."""

    identity: str
    """The identity of the hardware."""

    current: bool = True
    """Whether the CDI file of a claim has this number. If not, the device got another number after
    it was prepared, and containers that were started before can still use the old one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldDevice:
    """A device that claims hold."""

    claims: tuple[ClaimReference, ...]
    """The claims, at least one."""

    nodes: tuple[HeldNode, ...] = ()
    """The device nodes with an identity that the claims hold."""


_NONE: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedDevice(Generic[ParametersT_co]):
    """
    One result of a claim's allocation (API: ``status.allocation.devices.results[]``).

    Generic in the type of the driver's parameters: ``AllocatedDevice[LampParameters]``.
    """

    name: str
    """The name of the device, as its driver published it."""

    pool: str
    """The pool, as in `Device.pool`: empty for the pool that is named after the node."""

    request: str
    """The full name of the request. ``main/small`` for a subrequest."""

    share_id: str | None = None
    """The ID of the share, if claims share the device (DRAConsumableCapacity)."""

    admin_access: bool = False
    """Whether the claim monitors a device that another claim may hold. If so, do not
    use the device exclusively, and do not reset it."""

    consumed_capacity: Mapping[str, str] = field(default_factory=dict[str, str])
    """The claim's share of the device's capacity, as quantities (DRAConsumableCapacity). The
    scheduler may use a different notation than the request, such as ``39062500Ki`` for ``40G``."""

    consumes: Mapping[str, Mapping[str, str]] = field(
        default_factory=dict[str, "Mapping[str, str]"]
    )
    """The amounts that the device consumes from the pool's counter sets, as the driver reported
    them when the device was prepared. Empty for admin access. Calls for devices that consume from
    the same counter set never overlap."""

    configs: tuple[Mapping[str, Any], ...] = ()
    """The opaque parameters for this driver and request, in ascending order of precedence: those of
    the DeviceClass before those of the claim. Users write them, so they can have any content."""

    parameters: ParametersT_co = _NONE
    """The configs, merged by key and validated: an object of the driver's `parameters_type`. None
    if the driver has no such type. In `unprepare` and `reset`, it is also None if the parameters
    were lost, or if a newer version of the driver rejects them."""

    edits: Edits | None = field(default=None, compare=False)
    """The device's `Device.edits`, as the driver last yielded them. None if the driver no longer
    yields the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedClaim(Generic[ParametersT_co]):
    """A claim, and this driver's devices that are allocated to it."""

    claim: ClaimReference
    """The claim."""

    devices: tuple[AllocatedDevice[ParametersT_co], ...]
    """Its devices, in the order of the allocation's results."""
