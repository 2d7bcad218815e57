"""
The publishable part of an inventory: checks each device, and the rules for several devices.

A device that is malformed, that has another's name, or that consumes missing counters is left out
with a reason; the rest is published. A driver lists all of its devices at each change: a
device that is the same object as before is not checked again.

It must not know clients, clocks, or the callers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import cast

from drakit.device import CounterSet, Device, Inventory
from drakit.quantity import parse_quantity
from drakit_formats.resource.checks import counters_problems, device_problems, place_problems, shown

__all__ = ("CheckedInventory", "check_inventory")

MAX_LEFT_OUT = 100
"""Devices that are reported with a reason: this many suffice to find a driver's bug."""

_Pools = dict[str, dict[str, Device]]
"""Devices by name, by pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedInventory:
    """The part of an inventory without malformed devices."""

    devices: tuple[Device, ...] = ()
    """In the endpoint's order."""

    counter_sets: tuple[CounterSet, ...] = ()
    fallback: tuple[Device, ...] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reasons in sentences, by ``pool/name``, or the name alone in the pool without a name. At
    most 100 of them."""

    left_out_count: int = 0
    """All that were left out, those without a reason included."""

    known: _Pools = field(default_factory=dict[str, dict[str, Device]], repr=False, compare=False)
    """Only for the next check: the devices whose own values are valid."""


def check_inventory(
    inventory: Inventory, *, node: str = "", previous: CheckedInventory | None = None
) -> CheckedInventory:
    """
    Return the publishable part of an inventory, and why the rest is not.

    With the node's name, the names of pools are checked for their length. `previous` is the result
    of the previous check, which saves time for unchanged devices.
    """
    refusals = _Refusals()
    sets = _checked_sets(inventory.counter_sets, refusals, node=node)
    known: _Pools = {}
    before: _Pools = previous.known if previous is not None else {}
    check = _Check(sets=sets, before=before, refusals=refusals, node=node)
    devices = check.devices(inventory.devices, known=known)
    fallback = None
    if inventory.fallback is not None:
        fallback = check.devices(inventory.fallback, known={}, prefix="as a fallback, ")
    return CheckedInventory(
        devices=devices,
        counter_sets=tuple(each for pool in sets.values() for each in pool.values()),
        fallback=fallback,
        left_out=refusals.reasons,
        left_out_count=refusals.count,
        known=known,
    )


class _Refusals:
    """Collects the devices that are left out, and the reasons of the first ones."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.count = 0

    def add(self, pool: object, name: object, problems: Collection[str]) -> None:
        self.count += 1
        if len(self.reasons) < MAX_LEFT_OUT:
            # Of two with one name the first was kept, or its reason is as good.
            self.reasons.setdefault(_place(pool, name), "; ".join(problems))


def _place(pool: object, name: object) -> str:
    words = [_word(name)] if pool == "" else [_word(pool), _word(name)]
    return "/".join(words)


def _word(given: object) -> str:
    """Show a name as it is; anything that is not printable text as its Python representation."""
    plain = isinstance(given, str) and 0 < len(given) <= 80 and given.isprintable()
    return str(given) if plain else shown(given)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Check:
    """The data against which the devices of one inventory are checked."""

    sets: Mapping[str, Mapping[str, CounterSet]]
    before: _Pools
    refusals: _Refusals
    node: str

    def devices(
        self, given: Collection[object], *, known: _Pools, prefix: str = ""
    ) -> tuple[Device, ...]:
        """Return the valid devices; add those with valid values of their own to `known`."""
        kept: list[Device] = []
        for each in given:
            device, problems = self._sound(each)
            if device is not None:
                pool = known.setdefault(device.pool, {})
                if device.name in pool:
                    problems = ["another device of its pool has the same name"]
                else:
                    pool[device.name] = device
                    problems = _consumption_problems(device, self.sets) if device.consumes else []
            if device is not None and not problems:
                kept.append(device)
            else:
                pool, name = (each.pool, each.name) if isinstance(each, Device) else ("", each)
                self.refusals.add(pool, name, [prefix + problems[0], *problems[1:]])
        return tuple(kept)

    def _sound(self, given: object) -> tuple[Device | None, list[str]]:
        """Return the device if its own values are valid. One that was valid before still is."""
        if isinstance(given, Device) and self._known(given) is given:
            return given, []
        problems = device_problems(given, node=self.node)
        return (None, problems) if problems else (cast("Device", given), [])

    def _known(self, device: Device) -> Device | None:
        pool, name = cast("object", device.pool), cast("object", device.name)
        if not isinstance(pool, str) or not isinstance(name, str):
            return None
        return self.before.get(pool, {}).get(name)


def _checked_sets(
    given: Collection[object], refusals: _Refusals, *, node: str
) -> dict[str, dict[str, CounterSet]]:
    sets: dict[str, dict[str, CounterSet]] = {}
    for each in given:
        if not isinstance(each, CounterSet):
            kind = type(each).__name__
            refusals.add("", "counter sets", [f"one of them is of type {kind}, not a CounterSet"])
            continue
        problems = _set_problems(each, node=node)
        pool = {} if problems else sets.setdefault(each.pool, {})
        if each.name in pool:
            problems = ["another counter set of its pool has the same name"]
        if problems:
            refusals.add(each.pool, each.name, ["as a counter set, " + problems[0], *problems[1:]])
        else:
            pool[each.name] = each
    return sets


def _set_problems(given: CounterSet, *, node: str) -> list[str]:
    try:
        problems = list(place_problems(given.name, given.pool, node=node))
        return problems + [f"it {problem}" for problem in counters_problems(given.counters)]
    except Exception as error:  # its mapping can be the vendor's own class
        return [f"it cannot be checked ({type(error).__name__}: {str(error)[:200]})"]


def _consumption_problems(
    device: Device, sets: Mapping[str, Mapping[str, CounterSet]]
) -> list[str]:
    """Compare the consumption of a valid device with its counter sets."""
    pool = sets.get(device.pool, {})
    problems: list[str] = []
    for name, counters in device.consumes.items():
        if (source := pool.get(name)) is None:
            problems.append(
                f"it consumes from the counter set {name!r}, which its pool does not have"
            )
            continue
        for counter, amount in counters.items():
            if (there := source.counters.get(counter)) is None:
                problems.append(
                    f"it consumes the counter {counter!r}, which the counter set {name!r} "
                    f"does not have"
                )
            elif parse_quantity(amount) > parse_quantity(there):
                problems.append(
                    f"it consumes {amount} of the counter {counter!r}, and the counter set "
                    f"{name!r} has {there}"
                )
    return problems[:5]
