"""
The numbers of devices by state, of each driver and of each DeviceClass, for metrics.

A device is in exactly one state, the first of these that applies: gone, unhealthy, allocated,
tainted, free (:mod:`drakit_cli.kubectl.devices` shows the same). DeviceTaintRules count.

It must not know metrics, or when the numbers are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.availability import Hardware
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    DeviceID,
    Request,
    SliceFacts,
    TaintRuleFacts,
)
from drakit_explain.pools import NodePool, newest
from drakit_explain.reports import UNHEALTHY
from drakit_explain.world import World

STATES = ("free", "allocated", "tainted", "unhealthy", "gone")

STOPPED = "drakit.dev/stopped"
"""The taint of the devices of a driver that has stopped."""

GONE = "drakit.dev/gone"
"""The taint of a device that its driver does not list any more, while a claim holds it."""

SLICES_AT_ONCE = 100


@dataclass(kw_only=True, slots=True)
class Numbers:
    """Numbers of devices by state."""

    drivers: dict[str, Counter[str]] = field(default_factory=dict[str, "Counter[str]"])
    classes: dict[str, Counter[str]] = field(default_factory=dict[str, "Counter[str]"])
    """Those of classes whose selectors are evaluated; a device can be in several of them."""


def count(world: World, numbers: Numbers) -> Iterator[None]:
    """Add the numbers of all devices; others can run after each part of the work."""
    ready = {each.slice.name: each.pool for each in world.reachable()}
    requests = {
        name.name: Request(name="", device_class=name.name) for name in world.of(ClassFacts)
    }
    numbers.classes |= {name: _zeros() for name in requests}
    hardware, held = Hardware(world), Counter[str]()
    pools = {each.of_pool for each in world.slices() if each.driver}
    for done, pool in enumerate(sorted(pools)):
        slices = world.slices_of_pool(pool)
        current = newest(slices)
        for each in slices:
            if each in current or each.name in ready:
                masks = _masks(each, ready.get(each.name), world, hardware)
                held[each.driver] += _held(each, world).bit_count()
                _add(numbers.drivers.setdefault(each.driver, _zeros()), masks)
                for name, request in list(requests.items()):
                    try:
                        matches = world.selected(request, each).matches
                    except NotEvaluatedError:
                        del requests[name], numbers.classes[name]
                    else:
                        _add(numbers.classes[name], masks, matches)
        if done % SLICES_AT_ONCE == SLICES_AT_ONCE - 1:
            yield
    yield
    shared: set[DeviceID] = set()
    for claim in list(world.of(ClaimFacts).values()):
        held.subtract(device.driver for device in claim.devices)
        shared.update(share.device for share in claim.shares)
    held.subtract(device.driver for device in shared)
    for driver, number in held.items():
        if number < 0:  # no slice has them
            numbers.drivers.setdefault(driver, _zeros())["gone"] -= number


def _zeros() -> Counter[str]:
    return Counter(dict.fromkeys(STATES, 0))


def _add(numbers: Counter[str], masks: Mapping[str, int], among: int = -1) -> None:
    for state, mask in masks.items():
        if found := mask & among:
            numbers[state] += found.bit_count()


def _masks(
    of: SliceFacts, pool: NodePool | None, world: World, hardware: Hardware
) -> dict[str, int]:
    """Return a bit for each device in each state. `pool` is None if it is not ready."""
    everything = (1 << len(of.devices)) - 1
    gone = unhealthy = tainted = 0
    for index, taints in enumerate(of.devices.taints):
        for taint in taints:
            tainted |= 1 << index
            if taint.key == GONE:
                gone |= 1 << index
            elif taint.key in (UNHEALTHY, STOPPED):
                unhealthy |= 1 << index
    for rule in world.of(TaintRuleFacts).values():
        if rule.selects(DeviceID(of.driver, of.pool, rule.device)):
            if not rule.device:
                tainted |= everything
            elif rule.device in of.devices.names:
                tainted |= 1 << of.devices.names.index(rule.device)
    allocated = _held(of, world)
    if of.devices.consumes and pool is not None:
        for index, device in enumerate(of.devices):
            if device.consumes and hardware.in_the_way(pool, device) is not None:
                allocated |= 1 << index
    if pool is None:  # nothing else can be allocated
        unhealthy |= everything & ~allocated
    masks: dict[str, int] = {}
    rest = everything
    for state, mask in (
        ("gone", gone),
        ("unhealthy", unhealthy),
        ("allocated", allocated),
        ("tainted", tainted),
        ("free", everything),
    ):
        masks[state] = rest & mask
        rest &= ~mask
    return masks


def _held(of: SliceFacts, world: World) -> int:
    """Return a bit for each device that claims have, or of which they have shares."""
    mask = world.allocated_in(of)
    if world.has_shares:
        for index, name in enumerate(of.devices.names):
            if world.is_shared(DeviceID(of.driver, of.pool, name)):
                mask |= 1 << index
    return mask
