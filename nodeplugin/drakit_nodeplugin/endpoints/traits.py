"""
What can be said of a driver's class without an object of it: which calls it needs.

Known from the start and while the driver is stopped, so that a claim is undone in the right way
even then.

It must not know claims, slices or gRPC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drakit.driver import Driver

__all__ = ("DriverTraits", "traits_of")


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverTraits:
    """Which calls a driver needs."""

    side_effects: bool = True
    """Its prepare does something that must be undone: an intent is written before it is called."""

    checks: bool = False
    """It wants to be asked whether a prepared device is still in order."""


def traits_of(kind: type[Driver[Any]]) -> DriverTraits:
    """Look at a driver's class."""
    base: type[Driver[Any]] = Driver
    return DriverTraits(side_effects=kind.side_effects, checks=kind.check is not base.check)
