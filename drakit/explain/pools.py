"""
The combined slices of a pool: its devices, and the counters that its partitions share.

:mod:`.selectors` selects the devices of a request; :mod:`.availability` decides which of them are
available.

It must not know clients, claims, or the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drakit.explain.model import CounterSetFacts, DeviceFacts, DeviceID, PoolID, SliceFacts

__all__ = ("Counter", "PoolCounters", "Published", "current_counters", "current_devices")


class Published(NamedTuple):
    """A device of a slice; all selections share one object."""

    identity: DeviceID
    device: DeviceFacts
    complete: bool
    """Whether its pool is complete; the scheduler waits for missing slices."""


class Counter(NamedTuple):
    """A counter of a pool."""

    counter_set: str
    counter: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolCounters:
    """The counters of a pool, and the devices that consume them."""

    totals: Mapping[Counter, str]
    """Quantities."""

    consumers: tuple[tuple[DeviceID, DeviceFacts], ...]


def current_devices(slices: Iterable[SliceFacts]) -> list[Published]:
    """
    Return the devices of each pool's highest generation; older slices will be deleted.

    A pool that lacks slices of that generation is being rewritten, and nothing is allocated from it
    until it is complete: any of its devices may be available in a moment, the older ones too.
    """
    return [
        Published(DeviceID(each.driver, each.pool, device.name), device, complete)
        for _, pool in _pools(slices).items()
        for current, complete in [_newest(pool)]
        for each in (current if complete else pool)
        for device in each.devices
    ]


def current_counters(slices: Iterable[SliceFacts]) -> dict[PoolID, PoolCounters]:
    """Return the counters of each pool that has some; only complete pools count."""
    return {
        identity: PoolCounters(
            totals=dict(_quantities(sets for each in current for sets in each.counter_sets)),
            consumers=tuple(
                (DeviceID(each.driver, each.pool, device.name), device)
                for each in current
                for device in each.devices
                if device.consumes
            ),
        )
        for identity, pool in _pools(slices).items()
        for current, _ in [_newest(pool)]
        if any(each.counter_sets for each in current)
    }


def _pools(slices: Iterable[SliceFacts]) -> dict[PoolID, list[SliceFacts]]:
    pools: dict[PoolID, list[SliceFacts]] = {}
    for each in slices:
        pools.setdefault(PoolID(each.driver, each.pool), []).append(each)
    return pools


def _newest(pool: Sequence[SliceFacts]) -> tuple[list[SliceFacts], bool]:
    """Return the slices of the highest generation, and whether all of them exist."""
    newest = max(each.generation for each in pool)
    current = [each for each in pool if each.generation == newest]
    return current, all(each.pool_slices == len(current) for each in current)


def _quantities(sets: Iterable[CounterSetFacts]) -> Iterator[tuple[Counter, str]]:
    for each in sets:
        for amount in each.counters:
            yield Counter(each.name, amount.name), amount.quantity
