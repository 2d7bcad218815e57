"""
What rules get from a kit: published devices, stored claims, responses to the kubelet; and outcomes
other than a pass: a rule fails, does not apply, or the kit itself cannot continue.

It must not know rules, or where the facts come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from drakit.device import ClaimReference

# ---------------------------------------------------------------- outcomes


class ConformanceError(Exception):
    """
    The kit cannot go on; the text is a sentence with the reason.

    While a rule is checked this fails the rule: a driver that does not recover from a reboot
    violates the rule about reboots. Before that, the driver could not be tested.
    """


class RuleFailedError(ConformanceError):
    """The driver violates the rule; the text describes what was observed instead."""


class RuleSkippedError(Exception):
    """The rule does not apply to this driver, or its devices here; the text is the reason."""


class TargetError(ConformanceError):
    """The target's name or configuration is malformed."""


# ---------------------------------------------------------------- facts


@dataclass(frozen=True, kw_only=True)
class PublishedDevice:
    """A device as published in a ResourceSlice of the driver."""

    name: str
    pool: str

    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """By name as published; the value without its type: ``"x"``, ``3``, ``True``, a list."""

    capacity: Mapping[str, str] = field(default_factory=dict[str, str])
    """By name as published; quantities as text."""

    taints: tuple[Mapping[str, Any], ...] = ()
    """The published taints: ``key``, ``value``, ``effect``, ``timeAdded``."""

    allow_multiple: bool = False
    """Whether several claims may have it at the same time (``allowMultipleAllocations``)."""

    body: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    """All of it, as JSON."""


@dataclass(frozen=True, kw_only=True)
class ClaimUnderTest:
    """A claim that is allocated and stored in the API server."""

    reference: ClaimReference
    """The name that the kubelet uses."""

    devices: tuple[PublishedDevice, ...] = ()
    """The allocated devices, in the order of its results."""

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
    """The error in the pod's Event; empty if the claim is prepared."""

    devices: tuple[PreparedDevice, ...] = ()

    @classmethod
    def of(cls, answer: Any) -> PrepareResult:
        """Read it from a NodePrepareResourceResponse, of any version."""
        return cls(
            error=answer.error,
            devices=tuple(
                PreparedDevice(
                    requests=tuple(device.request_names),
                    pool=device.pool_name,
                    name=device.device_name,
                    cdi_ids=tuple(device.cdi_device_ids),
                    share_id=device.share_id if device.HasField("share_id") else None,
                )
                for device in answer.devices
            ),
        )

    @property
    def cdi_ids(self) -> tuple[str, ...]:
        """The CDI names of all devices, in their order."""
        return tuple(name for device in self.devices for name in device.cdi_ids)


@dataclass(frozen=True, kw_only=True)
class DeviceHealth:
    """The health of one device as the kubelet got it, and would show it in the status of pods."""

    status: str
    """``Healthy``, ``Unhealthy`` or ``Unknown``."""

    message: str = ""


def merged(edits: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return CDI container edits as one: lists are put one after another."""
    together: dict[str, Any] = {}
    for each in edits:
        for key, value in each.items():
            both = isinstance(value, list) and isinstance(together.get(key), list)
            together[key] = [*together[key], *cast("list[Any]", value)] if both else value
    return together
