"""
What a kit tells rules: devices as published, claims as stored, answers as the kubelet gets them.

It must not know where these come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drakit.device import ClaimReference

__all__ = (
    "ClaimUnderTest",
    "DeviceHealth",
    "PrepareResult",
    "PreparedDevice",
    "PublishedDevice",
)


@dataclass(frozen=True, kw_only=True)
class PublishedDevice:
    """A device as it stands in a ResourceSlice of the driver."""

    name: str
    pool: str

    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """By name as published; the value without its type: ``"x"``, ``3``, ``True``, a list."""

    capacity: Mapping[str, str] = field(default_factory=dict[str, str])
    """By name as published; quantities as text."""

    taints: tuple[Mapping[str, Any], ...] = ()
    """As published: ``key``, ``value``, ``effect``, ``timeAdded``."""

    allow_multiple: bool = False
    """Whether several claims may have it at a time (``allowMultipleAllocations``)."""

    body: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    """All of it, as JSON."""


@dataclass(frozen=True, kw_only=True)
class ClaimUnderTest:
    """A claim that is allocated and stored in the API server."""

    reference: ClaimReference
    """What the kubelet names it with."""

    devices: tuple[PublishedDevice, ...] = ()
    """The devices it was allocated, in the order of its results."""

    body: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    """The ResourceClaim as stored, as JSON."""

    @property
    def uid(self) -> str:
        """``metadata.uid``."""
        return self.reference.uid


@dataclass(frozen=True, kw_only=True)
class PreparedDevice:
    """One device of an answer to NodePrepareResources."""

    requests: tuple[str, ...]
    pool: str
    name: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class PrepareResult:
    """The answer to NodePrepareResources for one claim."""

    error: str
    """What the user reads in the pod's Event; empty if the claim is prepared."""

    devices: tuple[PreparedDevice, ...] = ()

    @property
    def cdi_ids(self) -> tuple[str, ...]:
        """The CDI names of all devices, in their order."""
        return tuple(name for device in self.devices for name in device.cdi_ids)


@dataclass(frozen=True, kw_only=True)
class DeviceHealth:
    """What the kubelet was told of one device, and would show in the status of pods."""

    status: str
    """``Healthy``, ``Unhealthy`` or ``Unknown``."""

    message: str = ""
