"""
Device counts by state, for metrics and reports.

Each device is in exactly one state, the first of these that applies: gone, unhealthy, allocated,
tainted, free. Therefore, the numbers of all states add up to the devices that are published or
held. The node plugin does not read DeviceTaintRules, so only the taints in slices are taken into
account.

Does not depend on the database.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields

from drakit_nodeplugin.devices.model import Capacity, PoolCapacity
from drakit_nodeplugin.state.holds import Hardware, PoolContent, blocked_by_held


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCounts:
    """The number of devices in each state. Each device is counted only once."""

    free: int = 0
    """Devices that new claims can get."""

    allocated: int = 0
    """Devices that claims hold, fully or in shares, or that share hardware with held devices."""

    tainted: int = 0
    """Healthy devices that no claim holds, and that are published with a taint that new pods do not
    tolerate."""

    unhealthy: int = 0
    """Devices that are unhealthy or whose driver is stopped, whether or not a claim holds them."""

    gone: int = 0
    """Devices that claims hold, although the driver no longer lists them."""


DEVICE_STATES = tuple(each.name for each in fields(DeviceCounts))


def count_devices(
    capacity: Capacity, held: Mapping[str, Collection[str]], hardware: Hardware | None = None
) -> Mapping[str, DeviceCounts]:
    """
    Return the device counts of each pool.

    :param held: the devices that claims hold, keyed by pool, not counting admin access.
    :param hardware: the inventories, or None if devices never share hardware.
    """
    contents: Mapping[str, PoolContent] = {} if hardware is None else hardware.pools
    removed = {
        pool: PoolCapacity(gone=frozenset(devices))
        for pool, devices in held.items()
        if devices and pool not in capacity.pools
    }
    return {
        name: _count(pool, frozenset(held.get(name, ())), contents.get(name))
        for name, pool in sorted({**capacity.pools, **removed}.items())
    }


def total(counts: Iterable[DeviceCounts]) -> DeviceCounts:
    """Return the sum of the counts of several pools."""
    pools = list(counts)
    return DeviceCounts(
        **{state: sum(getattr(each, state) for each in pools) for state in DEVICE_STATES}
    )


def _count(pool: PoolCapacity, held: frozenset[str], content: PoolContent | None) -> DeviceCounts:
    # Include held devices that are not in the main inventory, because they are in the fallback.
    allocated = held - pool.gone - pool.unhealthy
    if content is not None and held:
        allocated |= blocked_by_held(content, held) & pool.healthy
    return DeviceCounts(
        free=len(pool.healthy - pool.tainted - allocated),
        allocated=len(allocated),
        tainted=len(pool.tainted - allocated),
        unhealthy=len(pool.unhealthy),
        gone=len(pool.gone),
    )
