"""
The data that the device manager publishes and reports.

The slice publisher and the kubelet's health streams read these objects. An object is not replaced
until something changes, so readers can compare objects by identity.

Does not depend on the API's JSON or on clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from drakit.device import CounterSet, Device, TaintEffect


@dataclass(frozen=True, kw_only=True, slots=True)
class StampedTaint:
    """A taint with the time at which it was added."""

    key: str
    value: str
    effect: TaintEffect
    added_at: int
    """The time as a Unix timestamp. A taint that is already published keeps its published time."""


PublishedTaints = Mapping[tuple[str, str], int | None]
"""The taints that a device had before a restart, keyed by key and effect. Each value is the time at
which the taint was added, as a Unix timestamp, or None if the slice does not contain the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredDevice:
    """A device to publish."""

    name: str
    device: Device | None
    """The device. None if only its name is known, because the endpoint has been missing since a
    restart. The published device then remains unchanged except for the node plugin's taints. If the
    device is not published, it is omitted: without attributes, it would break all DeviceClass
    selectors that read an attribute."""

    taints: tuple[StampedTaint, ...] = ()
    """All taints of the device. If only the name is known, the driver's own taints are missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DesiredPool:
    """A validated pool to publish. The devices are in the endpoint's order."""

    devices: tuple[DesiredDevice, ...]
    counter_sets: tuple[CounterSet, ...] = ()

    keeps_counter_sets: bool = False
    """Whether other published counter sets also remain, because devices that are known only by name
    since a restart may consume from them."""

    fallback: tuple[DesiredDevice, ...] | None = None
    """The devices to publish if the API server drops fields (see `Inventory.fallback`)."""

    ordered: bool = False
    """Whether devices are published in this order. Otherwise, each slice lists them in name
    order."""

    partition_type_attribute: str | None = ""
    """The attribute that contains the partition type. None if the endpoint has been missing since a
    restart. In that case, the published attribute and the published device order remain."""


def keep_places(listed: Iterable[str], before: Iterable[str]) -> list[str]:
    """Merge the listed names with the names in `before` that are no longer listed. Each unlisted
    name is placed after the name that it followed before."""
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
    """The pools to publish for one driver."""

    pools: Mapping[str, DesiredPool]
    """The pools, keyed by API name."""

    held: frozenset[str] = frozenset()
    """Pools that remain unchanged, because their endpoints may still return after a restart, or
    because the node plugin failed to process them."""

    complete: bool = False
    """Whether to delete all other pools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHealth:
    """A device's health, as reported to the kubelet."""

    pool: str
    """The API name of the pool."""
    device: str
    status: Literal["healthy", "unhealthy", "unknown"]
    message: str
    changed_at: int
    """The time of the last change, as a Unix timestamp."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointStatus:
    """The state of a source of devices, for reports."""

    name: str
    state: Literal["Running", "Waiting", "Stopped", "Removing"]
    """``Waiting``: the endpoint has not reported since the plugin's start."""

    reason: str = ""
    """The reason why the endpoint is not running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointStop:
    """A period during which an endpoint is stopped. The object is not replaced until the reason
    changes, or the endpoint lists its devices again."""

    endpoint: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolCapacity:
    """The names of a pool's devices, by state."""

    healthy: frozenset[str] = frozenset()
    tainted: frozenset[str] = frozenset()
    """Healthy devices with a taint that new pods do not tolerate."""
    unhealthy: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    """Devices that claims hold, but that their endpoint no longer lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """The devices of a driver, keyed by the API names of their pools."""

    pools: Mapping[str, PoolCapacity]
    inactive: frozenset[str]
    """The names of pools that are being removed, because their endpoint's grace period has
    ended."""
