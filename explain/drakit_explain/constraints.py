"""
Limits of devices that are allocated together: a claim's constraints, a pool's shared counters.

It follows the allocator of ``k8s.io/dynamic-resource-allocation/structured``, its odd cases
included.

It must not know the order of the search, selectors, or claims beyond their constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drakit.quantity import quantity_units
from drakit_explain.allocation import NotEvaluatedError
from drakit_explain.model import Constraint, DeviceFacts, DeviceID, ListValue
from drakit_explain.pools import Counter, NodePool

__all__ = ("SearchedConstraint", "SearchedCounters", "counters_of")


class SearchedConstraint:
    """One constraint of a claim, with the values of the devices that the search has taken."""

    def __init__(self, facts: Constraint) -> None:
        self.attribute: str = facts.attribute
        self.distinct: bool = facts.distinct
        self._requests = frozenset(facts.requests)
        self._number = 0
        self._value: object = None
        self._values: dict[str, object] = {}
        """By request: as in the allocator, a second device of a request replaces the first."""

    def _applies(self, base: str, sub: str) -> bool:
        requests = self._requests
        return not requests or base in requests or (bool(sub) and f"{base}/{sub}" in requests)

    def add(self, base: str, sub: str, device: DeviceFacts, driver: str) -> bool:
        if not self._applies(base, sub):
            return True
        value = device.attribute(self.attribute, driver)
        if value is None:
            return False
        if self._number == 0:
            self._value = value
            self._values = {base: value} if self.distinct else {}
        elif isinstance(value, ListValue) or isinstance(self._value, ListValue):
            # Releases of Kubernetes differ in how they compare lists.
            raise NotEvaluatedError(
                f"a constraint compares lists of attribute {self.attribute}, which drakit does not "
                f"support"
            )
        elif self.distinct:
            if any(_same(value, other) for other in self._values.values()):
                return False
            self._values[base] = value
        elif not _same(value, self._value):
            return False
        self._number += 1
        return True

    def remove(self, base: str, sub: str) -> None:
        if not self._applies(base, sub):
            return
        self._values.pop(base, None)
        self._number -= 1


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


class SearchedCounters:
    """The rest of the pools' counters, by the name of the pool, as in the allocator."""

    def __init__(self, is_held: Callable[[DeviceID], bool]) -> None:
        """
        Count the counters that are left.

        :param is_held: whether a claim has a device, or a share of it.
        """
        self._is_held = is_held
        self._available: dict[str, dict[Counter, int]] = {}
        self._consumed: dict[str, dict[Counter, int]] = {}

    def take(self, pool: NodePool, facts: DeviceFacts) -> bool:
        name = pool.identity.pool
        if name not in self._available:
            self._available[name] = self._left(pool)
        consumed = self._consumed.setdefault(name, {})
        for counter, amount in counters_of(facts):
            consumed[counter] = consumed.get(counter, 0) + amount
        available = self._available[name]
        if any(left < consumed.get(counter, 0) for counter, left in available.items()):
            self.give_back(pool, facts)
            return False
        return True

    def give_back(self, pool: NodePool, facts: DeviceFacts) -> None:
        consumed = self._consumed[pool.identity.pool]
        for counter, amount in counters_of(facts):
            consumed[counter] -= amount

    def _left(self, pool: NodePool) -> dict[Counter, int]:
        left = dict(pool.counters)
        driver, name = pool.identity
        if any(
            consumed.grouped
            for each in (*pool.slices, *pool.elsewhere)
            for device in each.devices
            for consumed in device.consumes
        ):
            raise NotEvaluatedError(
                f"devices of pool {name} of driver {driver} have compatibilityGroups, which "
                f"drakit does not support"
            )
        for each in (*pool.slices, *pool.elsewhere):
            for device in each.devices:
                if not device.consumes:
                    continue
                if self._is_held(DeviceID(driver, name, device.name)):
                    for counter, amount in counters_of(device):
                        if counter in left:
                            left[counter] -= amount
        return left


def counters_of(facts: DeviceFacts) -> Iterator[tuple[Counter, int]]:
    """Return the amounts that a device consumes of its pool's counters, in billionths."""
    for each in facts.consumes:
        for amount in each.counters:
            yield Counter(each.name, amount.name), quantity_units(amount.quantity)
