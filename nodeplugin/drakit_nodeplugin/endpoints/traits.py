"""
What can be said of a driver's class without an object of it: which calls it needs.

Known from the start and while the driver is stopped, so that a claim is undone in the right way
even then.

It must not know claims, slices or gRPC.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from drakit.driver import DeviceParameters, Driver

__all__ = ("DriverTraits", "Granularity", "traits_of")


class Granularity(Enum):
    """What one call of a driver is for."""

    DEVICE = "device"
    CLAIM = "claim"
    BATCH = "batch"
    """The claims of a pod, or whatever else comes together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverTraits:
    """Which calls a driver needs."""

    side_effects: bool = True
    """Its prepare does something that must be undone: an intent is written before it is called."""

    checks: bool = False
    """It wants to be asked whether a prepared device is still in order."""

    resets: bool = False
    """A device is reset after it was unprepared."""

    polls_health: bool = False
    """It is asked again and again how each device is."""

    health: bool = False
    """It has a source of health, of whatever kind: the kubelet is told of it."""

    plain_devices: bool = False
    """Its devices have neither taints, counters nor list attributes."""

    prepare_granularity: Granularity = Granularity.DEVICE
    unprepare_granularity: Granularity = Granularity.DEVICE
    parameters_type: type[DeviceParameters] | None = None


def traits_of(kind: type[Driver[Any]]) -> DriverTraits:
    """Look at a driver's class."""
    base: type[Driver[Any]] = Driver

    def grain(claim: str, claims: str) -> Granularity:
        if getattr(kind, claims) is not getattr(base, claims):
            return Granularity.BATCH
        return (
            Granularity.CLAIM
            if getattr(kind, claim) is not getattr(base, claim)
            else Granularity.DEVICE
        )

    polls = kind.health is not base.health
    return DriverTraits(
        side_effects=kind.side_effects,
        checks=kind.check is not base.check,
        resets=kind.reset is not base.reset,
        polls_health=polls,
        health=polls or kind.reports_health,
        plain_devices=kind.plain_devices,
        prepare_granularity=grain("prepare_claim", "prepare_claims"),
        unprepare_granularity=grain("unprepare_claim", "unprepare_claims"),
        parameters_type=kind.parameters_type,
    )
