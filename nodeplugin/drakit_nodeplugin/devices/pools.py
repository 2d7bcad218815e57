"""
What the device manager says of its devices to those who publish or report them: plain data.

It must not know the API's JSON, clocks, or how any of it is decided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from drakit.device import CounterSet, Device, TaintEffect
from drakit.resource.pools import pool_name, short_pool

__all__ = (
    "Capacity",
    "DesiredDevice",
    "DesiredPool",
    "DeviceHealth",
    "PoolCapacity",
    "Publication",
    "PublishedTaints",
    "StampedTaint",
    "pool_name",
    "short_pool",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StampedTaint:
    """A taint as it is published."""

    key: str
    value: str
    effect: TaintEffect
    added_at: int
    """Seconds since 1970. What is published with another time already keeps that one."""


PublishedTaints = Mapping[tuple[str, str], int | None]
"""A device's taints as they were published before a restart, by key and effect: since when each is
there, seconds since 1970; None if that is not said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredDevice:
    """A device as it is to be published."""

    name: str
    device: Device | None
    """None if only its name is known: its endpoint is missing since a restart. What is published of
    it stays as it is, but for the node plugin's taints; if nothing is, it returns without
    attributes."""

    taints: tuple[StampedTaint, ...] = ()
    """All of them, the driver's own included; without those where only its name is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredPool:
    """A pool as it is to be published: checked, and in the endpoint's order."""

    devices: tuple[DesiredDevice, ...]
    counter_sets: tuple[CounterSet, ...] | None = ()
    """None if the endpoint is missing since a restart: what is published stays."""

    fallback: tuple[DesiredDevice, ...] | None = None
    """What is published instead where the API server drops fields; see `Inventory.fallback`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """What is to be published of one driver."""

    pools: Mapping[str, DesiredPool]
    """By the pool's name in the API."""

    held: frozenset[str] = frozenset()
    """Pools that are left as they are: their endpoints may still return after a restart."""

    complete: bool = False
    """Whether pools that are named in neither are to be deleted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHealth:
    """A device's health as the kubelet is told of it."""

    pool: str
    """The pool's name in the API."""
    device: str
    status: Literal["healthy", "unhealthy", "unknown"]
    message: str
    changed_at: int
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolCapacity:
    """The devices of a pool, by name."""

    healthy: frozenset[str]
    unhealthy: frozenset[str]
    allocated: frozenset[str]
    """Those that the checkpoint holds for claims; healthy or not."""

    @property
    def capacity(self) -> int:
        """How many devices there are."""
        return len(self.healthy) + len(self.unhealthy)

    @property
    def allocatable(self) -> int:
        """How many of them can be given to new pods, or are."""
        return len(self.healthy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """The pools of a driver, by their names in the API."""

    pools: Mapping[str, PoolCapacity]
    inactive: frozenset[str]
    """Pools that are being removed: their endpoint was away for longer than the grace period."""
