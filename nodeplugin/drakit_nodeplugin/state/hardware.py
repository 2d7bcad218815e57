"""
The hardware behind devices: their consumption, and the devices that fit beside held ones. Pure.

Devices that consume the same counters, and shares of one device, overlap without a common name. A
counter counts once for each device, regardless of the number of claims that share it. Amounts are
integers (:func:`.quantity_units`), so that sums are exact.

It must not know claims, the checkpoint, the lifecycle of endpoints, or taints.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from drakit.device import Capacity, CounterSet, Device
from drakit.quantity import quantity_units

__all__ = ("Amounts", "Hardware", "HeldDevice", "PoolContent", "blocked_by_unpreparing", "units_of")

Amounts = Mapping[str, int]
"""Amounts in billionths, by the name of a counter or capacity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolContent:
    """An endpoint's validated inventory of a pool. Immutable."""

    devices: Mapping[str, Device]
    counter_sets: tuple[CounterSet, ...] = ()
    fallback: Mapping[str, Device] | None = None

    def device(self, name: str) -> Device | None:
        """Return a device of the main inventory, whichever inventory is published."""
        found = self.devices.get(name)
        return found if found is not None or self.fallback is None else self.fallback.get(name)

    def totals(self, counter_set: str) -> Amounts:
        """Return the totals of a counter set; empty if it does not exist."""
        for each in self.counter_sets:
            if each.name == counter_set:
                return units_of(each.counters)
        return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The main inventories of a driver at one moment; safe to read in another thread."""

    pools: Mapping[str, PoolContent] = field(default_factory=dict[str, PoolContent])
    """Pools by their names in the API, without pools of stopped endpoints."""

    def device(self, pool: str, name: str) -> Device | None:
        """Return a device; None if no endpoint lists it."""
        content = self.pools.get(pool)
        return None if content is None else content.device(name)

    def totals(self, pool: str, counter_set: str) -> Amounts:
        """Return the totals of a counter set."""
        content = self.pools.get(pool)
        return {} if content is None else content.totals(counter_set)

    def capacity(self, pool: str, name: str) -> Amounts:
        """Return the shareable capacity of a device."""
        found = self.device(pool, name)
        return {} if found is None else _capacity(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldDevice:
    """The holds of claims on one device, without admin access."""

    pool: str
    """The pool's name in the API."""
    device: str
    consumes: Mapping[str, Amounts] | None
    """Consumption by counter set; None if no inventory has listed the device since a rebuild."""

    shared: Amounts | None = field(default_factory=dict[str, int])
    """The consumption of all shares of its capacity; None if it is unknown for one."""

    exclusive: bool = True
    """Whether one claim holds it exclusively."""

    unpreparing: bool = False
    """Whether a claim that is still being unprepared holds it."""


def units_of(quantities: Mapping[str, str]) -> Amounts:
    """Return quantities as integers; raises ValueError for an invalid quantity."""
    return {name: quantity_units(text) for name, text in quantities.items()}


def blocked_by_unpreparing(
    content: PoolContent | None, held: Collection[HeldDevice]
) -> frozenset[str]:
    """
    Return the devices of a pool that unpreparing claims block for new claims.

    These are the devices that such claims hold exclusively, and all others that do not fit beside
    the holds. The scheduler does not know those claims: it counts their devices as free.
    """
    leaving = [each for each in held if each.unpreparing]
    names = {each.device for each in leaving if each.exclusive}
    if content is None or not leaving:
        return frozenset(names)
    names |= {each.device for each in leaving if not each.exclusive and _is_full(each, content)}
    consumed = {each.device: _consumed(each, content) for each in held}
    unknown = any(consumed[each.device] is None for each in leaving)
    wanted = {name for each in leaving for name in consumed[each.device] or ()}
    used: dict[str, dict[str, int]] = {name: {} for name in wanted}
    for counters in consumed.values():
        for counter_set in wanted & (counters or {}).keys():
            _add(used[counter_set], (counters or {})[counter_set])
    totals = {name: content.totals(name) for name in wanted}
    for name, device in content.devices.items():
        if not device.consumes or name in consumed:
            continue
        if unknown or any(
            _exceeds(used[counter_set], units_of(counters), totals[counter_set])
            for counter_set, counters in device.consumes.items()
            if counter_set in wanted
        ):
            names.add(name)
    return frozenset(names)


def _consumed(held: HeldDevice, content: PoolContent) -> Mapping[str, Amounts] | None:
    if held.consumes is not None:
        return held.consumes
    device = content.device(held.device)
    if device is None:
        return None
    return {name: units_of(counters) for name, counters in device.consumes.items()}


def _is_full(held: HeldDevice, content: PoolContent) -> bool:
    """Return whether not even the smallest share fits beside the held ones."""
    device = content.device(held.device)
    if device is None:
        return False
    if held.shared is None:
        return bool(device.capacity)
    least = {name: _least(capacity) for name, capacity in device.capacity.items()}
    return _exceeds(held.shared, least, _capacity(device))


def _least(capacity: str | Capacity) -> int:
    """Return the smallest amount of a capacity that a claim can have."""
    if isinstance(capacity, str):
        return quantity_units(capacity)
    if capacity.valid_range is not None:
        return quantity_units(capacity.valid_range.min)
    if capacity.valid_values:
        return quantity_units(capacity.valid_values[0])
    # If claims can divide a capacity freely, the smallest amount is one unit.
    return quantity_units(capacity.value) if capacity.default is None else 1


def _capacity(device: Device) -> Amounts:
    return units_of(
        {
            name: amount.value if isinstance(amount, Capacity) else amount
            for name, amount in device.capacity.items()
        }
    )


def _add(total: dict[str, int], amounts: Amounts) -> None:
    for name, amount in amounts.items():
        total[name] = total.get(name, 0) + amount


def _exceeds(used: Amounts, wanted: Amounts, limit: Amounts) -> bool:
    return any(
        amount > 0 and used.get(name, 0) + amount > limit.get(name, 0)
        for name, amount in wanted.items()
    )
