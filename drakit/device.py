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

__all__ = (
    "AllocatedDevice",
    "AttributeValue",
    "ClaimReference",
    "Device",
    "DeviceNode",
    "Edits",
    "Mount",
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
    """Letters of ``rwm``; all of them if none is given."""

    file_mode: int | None = None
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A bind mount into the container (CDI: ``mounts[]``)."""

    host_path: str
    container_path: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "bind")


@dataclass(frozen=True, kw_only=True, slots=True)
class Edits:
    """What a container gets for a device (CDI: ``containerEdits``); empty is allowed."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()


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
