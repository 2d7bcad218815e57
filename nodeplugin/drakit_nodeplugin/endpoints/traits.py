"""
The traits of a driver: which calls it needs, and in which granularity.

They are read from the driver's class, without an object of it: known from the start and while the
driver is stopped, so that a claim is undone in the right way even then.

It must not know claims, slices or gRPC.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from drakit.driver import UNDO_METHODS, DeviceParameters, Driver, overrides

__all__ = ("DriverTraits", "Granularity", "traits_of")


class Granularity(Enum):
    """What one call of a driver covers."""

    DEVICE = "device"
    BATCH = "batch"
    """The claims of a pod, or of whatever else comes together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverTraits:
    """Which calls a driver needs."""

    side_effects: bool = True
    """Its prepare does something that must be undone: an intent is stored before it is called."""

    checks: bool = False
    """It is asked whether a prepared device is still in order."""

    resets: bool = False
    """A device is reset after it was unprepared."""

    polls_health: bool = False
    """It is polled for the health of each device."""

    health: bool = False
    """It reports health, in whichever way: the plugin serves the kubelet's health stream."""

    prepare_granularity: Granularity = Granularity.DEVICE
    unprepare_granularity: Granularity = Granularity.DEVICE
    parameters_type: type[DeviceParameters] | None = None


def traits_of(kind: type[Driver[Any, Any]]) -> DriverTraits:
    """Read the traits from a driver's class."""

    def granularity(batch_method: str) -> Granularity:
        return Granularity.BATCH if overrides(kind, batch_method) else Granularity.DEVICE

    polls = overrides(kind, "health")
    return DriverTraits(
        side_effects=getattr(kind, "side_effects", overrides(kind, *UNDO_METHODS)),
        checks=overrides(kind, "check"),
        resets=overrides(kind, "reset"),
        polls_health=polls,
        health=polls or kind.reports_health,
        prepare_granularity=granularity("prepare_claims"),
        unprepare_granularity=granularity("unprepare_claims"),
        parameters_type=kind.parameters_type,
    )
