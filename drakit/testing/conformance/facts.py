"""
The observations that a kit provides to rules: published devices, stored claims, and responses to
the kubelet. The errors are all outcomes except a pass: a rule fails, a rule does not apply, or the
kit itself cannot continue.

Does not depend on rules, or on how the observations are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from drakit.device import ClaimReference

# ---------------------------------------------------------------- outcomes


class ConformanceError(Exception):
    """
    The kit cannot continue. The message is a sentence that states the reason.

    If raised while a rule is checked, this error fails the rule: for example, a driver that does
    not recover from a reboot violates the rule about reboots. If raised earlier, it means that the
    driver could not be tested.
    """


class RuleFailedError(ConformanceError):
    """The driver violates the rule. The message describes the observed behavior."""


class RuleSkippedError(Exception):
    """The rule does not apply to this driver, or to its devices in this kit. The message is the
    reason."""


class TargetError(ConformanceError):
    """The target's name or configuration is malformed."""


# ---------------------------------------------------------------- facts


@dataclass(frozen=True, kw_only=True)
class PublishedDevice:
    """A device published in one of the driver's ResourceSlices."""

    name: str
    pool: str

    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The attribute values, keyed by published name, without the API's type wrapper: ``"x"``,
    ``3``, ``True``, or a list."""

    capacity: Mapping[str, str] = field(default_factory=dict[str, str])
    """The capacities as quantity strings, keyed by published name."""

    taints: tuple[Mapping[str, Any], ...] = ()
    """The published taints: ``key``, ``value``, ``effect``, ``timeAdded``."""

    allow_multiple: bool = False
    """Whether several claims can use the device at the same time (``allowMultipleAllocations``)."""

    body: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    """The whole published device, as JSON."""


@dataclass(frozen=True, kw_only=True)
class ClaimUnderTest:
    """A claim that is allocated and stored in the API server."""

    reference: ClaimReference
    """The identity of the claim, as the kubelet sends it."""

    devices: tuple[PublishedDevice, ...] = ()
    """The allocated devices, in the order of the allocation results."""

    body: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    """The stored ResourceClaim, as JSON."""

    @property
    def uid(self) -> str:
        """The claim's ``metadata.uid``."""
        return self.reference.uid


@dataclass(frozen=True, kw_only=True)
class PreparedDevice:
    """A device in a response to NodePrepareResources."""

    requests: tuple[str, ...]
    pool: str
    name: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class PrepareResult:
    """The response to NodePrepareResources for one claim."""

    error: str
    """The error that the pod's Event shows. Empty if the claim was prepared."""

    devices: tuple[PreparedDevice, ...] = ()

    @classmethod
    def of(cls, answer: Any) -> PrepareResult:
        """Read the result from a NodePrepareResourceResponse of any version."""
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
        """The CDI device IDs of all devices, in order."""
        return tuple(name for device in self.devices for name in device.cdi_ids)


@dataclass(frozen=True, kw_only=True)
class DeviceHealth:
    """The health of a device, as the kubelet received it and would show it in the status of
    pods."""

    status: str
    """``Healthy``, ``Unhealthy`` or ``Unknown``."""

    message: str = ""


def merged(edits: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge CDI container edits into one, concatenating their lists."""
    together: dict[str, Any] = {}
    for each in edits:
        for key, value in each.items():
            both = isinstance(value, list) and isinstance(together.get(key), list)
            together[key] = [*together[key], *cast("list[Any]", value)] if both else value
    return together
