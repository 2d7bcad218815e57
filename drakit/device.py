"""
What a driver says of its devices, and what a container gets of them.

Plain values: a vendor's driver makes them, the node plugin turns them into ResourceSlices and CDI
specs. What is allowed in them is checked where they are used (limits of the API in
:mod:`drakit.resource`, CDI's rules in :mod:`drakit.cdi`), so that one bad device costs that
device alone.

It must not know Kubernetes clients, gRPC, files, or either daemon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = (
    "AllocatedDevice",
    "AttributeValue",
    "ClaimReference",
    "Device",
    "DeviceNode",
    "Edits",
    "Hook",
    "IntelRdt",
    "Mount",
    "NetDevice",
    "Version",
)


@dataclass(frozen=True, slots=True)
class Version:
    """A semantic version (2.0.0) as an attribute: CEL compares it as one, not as text."""

    text: str


AttributeValue = str | int | bool | Version
"""The scalar types of an attribute (API: ``DeviceAttribute``); strings up to 64 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device that can be allocated (API: ``ResourceSlice.spec.devices[]``)."""

    name: str
    """A DNS label of at most 63 characters, unique among the driver's devices of this node. It must
    be the same after a restart: it is what an allocation names."""

    attributes: Mapping[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    """What CEL selectors can ask for. A name is a C identifier of at most 32 characters, or one
    with a domain before it (``resource.kubernetes.io/pciBusID``)."""

    capacity: Mapping[str, str] = field(default_factory=dict[str, str])
    """Amounts as Kubernetes quantities (``"8Gi"``)."""


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
    request: str
    """The request's name in full; ``main/small`` for a subrequest."""

    share_id: str | None = None
    """Set where the device may be allocated several times (DRAConsumableCapacity)."""

    admin_access: bool = False
    """The claim looks at the device beside its holder: do nothing exclusive, reset nothing."""

    consumed_capacity: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the claim has of the device's capacity, as quantities (DRAConsumableCapacity)."""

    configs: tuple[Mapping[str, Any], ...] = ()
    """The opaque parameters that are meant for this driver and request, the weakest first: those
    of the DeviceClass come before those of the claim, so a later one has the last word. Users write
    them: they can hold anything that JSON can."""
