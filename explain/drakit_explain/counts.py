"""
Counts devices by state for each driver, DeviceClass and HostDevicePolicy. The numbers are used in
metrics.

A device is in exactly one state, the first of these that applies: gone, unhealthy, allocated,
tainted, free. :func:`states_in` determines the state, also for ``kubectl drakit devices``.
DeviceTaintRules are included.

Does not depend on metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.availability import Hardware
from drakit_explain.devices import bits, unpacked
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    DeviceID,
    Request,
    SliceFacts,
)
from drakit_explain.pools import NodePool, newest
from drakit_explain.reports import GONE, HOSTDEV, STOPPED, UNHEALTHY
from drakit_explain.world import Selection, World

STATES = ("free", "allocated", "tainted", "unhealthy", "gone")

MAX_NAMES = 100
"""Maximum number of drivers, classes and policies to count separately, because each has a series
for each state. The drivers and policies with the most devices, and the first classes by name, take
precedence."""

OTHERS = "(others)"
"""The name under which the other drivers or policies are added up. No object can have this name."""

POLICY = ("policy", f"{HOSTDEV}/policy")
"""The short and the full name of the attribute that contains a host device's policy."""

POOLS_AT_ONCE = 20
CLAIMS_AT_ONCE = 5000
"""How many pools, and how many claims, to count before other tasks can run. Either takes a few
milliseconds."""


@dataclass(kw_only=True, slots=True)
class Numbers:
    """The number of devices in each state, by driver, class and policy."""

    drivers: dict[str, Counter[str]] = field(default_factory=dict[str, "Counter[str]"])
    classes: dict[str, Counter[str]] = field(default_factory=dict[str, "Counter[str]"])
    """The numbers for classes whose selectors are evaluated. The numbers for the other classes are
    not added up, because a device can be in several classes."""

    policies: dict[str, Counter[str]] = field(default_factory=dict[str, "Counter[str]"])
    """The numbers for policies with devices in slices."""


def count(world: World, numbers: Numbers) -> Iterator[None]:
    """Add up all devices. Other tasks can run after each part of the work."""
    ready = {each.slice.name: each.pool for each in world.reachable()}
    classes = sorted(world.of(ClassFacts).values(), key=lambda each: each.name)[:MAX_NAMES]
    selections = {
        each.name: Selection(world, Request(name="", device_class=each.name)) for each in classes
    }
    numbers.classes |= {name: _zeros() for name in selections}
    hardware, in_slices, held = Hardware(world), Counter[str](), Counter[str]()
    pools = {each.of_pool for each in world.slices() if each.driver}
    for done, pool in enumerate(sorted(pools)):
        if done % POOLS_AT_ONCE == POOLS_AT_ONCE - 1:
            yield
        slices = world.slices_of_pool(pool)
        current = {each.name for each in newest(slices)}
        of_driver = numbers.drivers.setdefault(pool.driver, _zeros())
        for each in slices:
            if each.name not in current and each.name not in ready:
                continue
            pool_of_node = ready.get(each.name)
            masks = states_in(each, pool_of_node, world, hardware, usable=pool_of_node is not None)
            in_slices[pool.driver] += _held(each, world).bit_count()
            _add(of_driver, masks)
            for name, mask in devices_of_policies(each).items() if pool.driver == HOSTDEV else ():
                _add(numbers.policies.setdefault(name, _zeros()), masks, mask)
            for name, selection in list(selections.items()):
                try:
                    _add(numbers.classes[name], masks, selection.of(each).matches)
                except NotEvaluatedError:
                    del selections[name], numbers.classes[name]
    numbers.policies = _largest(numbers.policies)
    shared: set[DeviceID] = set()
    for done, claim in enumerate(list(world.of(ClaimFacts).values())):
        if done % CLAIMS_AT_ONCE == 0:
            yield
        for device in claim.devices:
            held[device.driver] += 1
        if claim.shares:
            shared.update(share.device for share in claim.shares)
    held.update(device.driver for device in shared)
    for driver, number in held.items():
        if (missing := number - in_slices[driver]) > 0:  # devices that no slice contains
            numbers.drivers.setdefault(driver, _zeros())["gone"] += missing
    numbers.drivers = _largest(numbers.drivers)


def _largest(numbers: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    """Return the entries with the most devices, keyed by name, and the sum of the other entries."""
    names = sorted(numbers, key=lambda name: (-numbers[name].total(), name))
    found = {name: numbers[name] for name in sorted(names[:MAX_NAMES])}
    if others := [numbers[name] for name in names[MAX_NAMES:]]:
        found[OTHERS] = _zeros()
        for each in others:
            found[OTHERS].update(each)
    return found


def _zeros() -> Counter[str]:
    return Counter(dict.fromkeys(STATES, 0))


def _add(numbers: Counter[str], masks: Mapping[str, int], among: int = -1) -> None:
    for state, mask in masks.items():
        if found := mask & among:
            numbers[state] += found.bit_count()


def devices_of_policies(of: SliceFacts) -> dict[str, int]:
    """Return a bitmask of each policy's devices."""
    found: dict[str, int] = {}
    for group in of.devices.groups:
        for name, column in zip(group.kind.attributes, group.columns, strict=True):
            if name not in POLICY:
                continue
            for index, value in zip(bits(group.mask), unpacked(column), strict=True):
                if isinstance(value, str):
                    found[value] = found.get(value, 0) | 1 << index
    return found


def states_in(
    of: SliceFacts, pool: NodePool | None, world: World, hardware: Hardware, *, usable: bool
) -> dict[str, int]:
    """
    Return a bitmask of a slice's devices for each state.

    :param pool: the pool as one node sees it, if the pool is ready. It determines whether enough
        counters are left.
    :param usable: whether devices can be allocated from the pool. If not, no device is free.
    """
    everything = (1 << len(of.devices)) - 1
    gone = unhealthy = tainted = 0
    for index, taints in enumerate(of.devices.taints):
        for taint in taints:
            tainted |= 1 << index
            if taint.key == GONE:
                gone |= 1 << index
            elif taint.key in (UNHEALTHY, STOPPED):
                unhealthy |= 1 << index
    for rule in world.rules_of_pool(of.of_pool):
        if not rule.device:
            tainted |= everything
        elif rule.device in of.devices.names:
            tainted |= 1 << of.devices.names.index(rule.device)
    allocated = _held(of, world)
    if of.devices.consumes and pool is not None:
        for index, device in enumerate(of.devices):
            if device.consumes and hardware.in_the_way(pool, device) is not None:
                allocated |= 1 << index
    if not usable:
        unhealthy |= everything & ~allocated
    unhealthy &= ~gone
    allocated &= ~(gone | unhealthy)
    tainted &= ~(gone | unhealthy | allocated)
    free = everything & ~(gone | unhealthy | allocated | tainted)
    masks = zip(STATES, (free, allocated, tainted, unhealthy, gone), strict=True)
    return {state: mask for state, mask in masks if mask}


def _held(of: SliceFacts, world: World) -> int:
    """Return a bitmask of the devices that are allocated or shared."""
    mask = world.allocated_in(of)
    if world.has_shares:
        for index, name in enumerate(of.devices.names):
            if world.is_shared(DeviceID(of.driver, of.pool, name)):
                mask |= 1 << index
    return mask
