"""
The data that the device manager publishes and reports.

The publisher of slices and the kubelet's health streams read these objects. An object stays the
same one while nothing changes, so that they compare by identity.

It must not know the API's JSON, clocks, or the decisions behind the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from drakit.device import CounterSet, Device, TaintEffect


@dataclass(frozen=True, kw_only=True, slots=True)
class StampedTaint:
    """A taint with the time when it was added."""

    key: str
    value: str
    effect: TaintEffect
    added_at: int
    """Seconds since 1970. A taint that is already published keeps its published time."""


PublishedTaints = Mapping[tuple[str, str], int | None]
"""The taints of a device as they were published before a restart: when each was added, in seconds
since 1970, by key and effect; None if the slice does not have the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredDevice:
    """A device to publish."""

    name: str
    device: Device | None
    """None if only the name is known, because the endpoint is missing since a restart. The
    published device stays as it is, but for the node plugin's taints. If none is published, it is
    left out: without its attributes, it would break the selectors of all DeviceClasses that read
    one."""

    taints: tuple[StampedTaint, ...] = ()
    """All taints; without those of the driver if only the name is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredPool:
    """A pool to publish: validated, and in the endpoint's order."""

    devices: tuple[DesiredDevice, ...]
    counter_sets: tuple[CounterSet, ...] = ()

    keeps_counter_sets: bool = False
    """Whether other published counter sets stay, too: devices that are only known by name since a
    restart may consume them."""

    fallback: tuple[DesiredDevice, ...] | None = None
    """The devices that are published if the API server drops fields; see `Inventory.fallback`."""

    ordered: bool = False
    """Whether devices are published in this order; otherwise, each slice lists them by name."""

    partition_type_attribute: str | None = ""
    """None if the endpoint is missing since a restart: the published one stays, and the published
    order of the devices."""


def keep_places(listed: Iterable[str], before: Iterable[str]) -> list[str]:
    """Return the listed names, and those of `before` that are missing there: each missing one
    follows the name that it followed before."""
    present = dict.fromkeys(listed)
    following: dict[str | None, list[str]] = {}
    last: str | None = None
    for name in before:
        if name in present:
            last = name
        else:
            following.setdefault(last, []).append(name)
    if not following:
        return [*present]
    names = following.get(None, [])
    for name in present:
        names += [name, *following.get(name, ())]
    return names


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """The pools of one driver to publish."""

    pools: Mapping[str, DesiredPool]
    """Pools by their names in the API."""

    held: frozenset[str] = frozenset()
    """Pools that stay as they are: their endpoints may still return after a restart, or the node
    plugin has failed to process them."""

    complete: bool = False
    """Whether all other pools are to be deleted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHealth:
    """A device's health as it is reported to the kubelet."""

    pool: str
    """The pool's name in the API."""
    device: str
    status: Literal["healthy", "unhealthy", "unknown"]
    message: str
    changed_at: int
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointStatus:
    """The state of a source of devices, for reports."""

    name: str
    state: Literal["Running", "Waiting", "Stopped", "Removing"]
    """``Waiting``: it has not reported since the plugin's start."""

    reason: str = ""
    """The reason why it is not running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointStop:
    """A stop of an endpoint. The same object until the reason changes, or the endpoint lists its
    devices again."""

    endpoint: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolCapacity:
    """The devices of a pool, by name."""

    healthy: frozenset[str] = frozenset()
    tainted: frozenset[str] = frozenset()
    """Healthy devices with a taint that keeps new pods away."""
    unhealthy: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    """Devices that their endpoint does not list any more, but claims hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """The pools of a driver, by their names in the API."""

    pools: Mapping[str, PoolCapacity]
    inactive: frozenset[str]
    """Pools that are being removed, because the grace period of their endpoint has ended."""
