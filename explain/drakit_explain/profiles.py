"""
Computes profiles of nodes for some claims. The allocator returns the same result for nodes with
equal profiles, so it is queried about only one of them.

The nodes of a cluster usually have the same hardware, but in different pools and with different
attribute values. Therefore, a profile does not contain the names of nodes, pools and devices. For
an attribute that a constraint compares, the profile contains only which devices have equal values.
A slice with fields that this version does not know is not equal to any other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from drakit_explain.allocation import AskedClaim
from drakit_explain.budget import Budget
from drakit_explain.devices import ListValue, bits
from drakit_explain.model import DeviceID, SliceFacts, exact_of
from drakit_explain.pools import NodePool, PoolState, rules_of
from drakit_explain.world import Selection, World


class Profiles:
    """Computes the profiles of nodes for some claims. Valid until a DeviceClass or DeviceTaintRule
    changes."""

    def __init__(
        self, world: World, claims: Sequence[AskedClaim], *, all_free: bool = False
    ) -> None:
        """
        Prepare to compare nodes.

        :param all_free: whether to treat all devices as unallocated and untainted.
        """
        self.revision: int = world.rules_revision
        self.known: dict[str, tuple[object, int, int]] = {}
        """The profile of each node, stored as its pools, the revision of their last change, and the
        hash of the profile."""

        self._world = world
        self._all_free = all_free
        self._counts_empty = not rules_of(world.minor).skips_pools
        """Whether the allocator treats slices for other nodes as missing, so that pools without
        slices for a node matter."""

        self._selections = [
            Selection(world, exact) for claim in claims for exact in exact_of(claim.requests)
        ]
        self._attributes = sorted({each.attribute for one in claims for each in one.constraints})

    def number(self, node: str, pools: Sequence[NodePool], budget: Budget) -> int:
        """Return a number that is the same for all nodes with equal profiles. Raises the same
        errors as :meth:`of`."""
        stamp = max(map(self._world.stamp, pools), default=0)
        known = self.known.get(node)
        if known is None or known[0] is not pools or known[1] != stamp:
            known = self.known[node] = pools, stamp, hash(self.of(pools, budget))
        return known[2]

    def of(self, pools: Sequence[NodePool], budget: Budget) -> Hashable:
        """
        Return the profile of a node with these pools.

        Raises :class:`BudgetSpentError`, and :class:`NotEvaluatedError` if a selector has no
        result.
        """
        slices = [of for pool in pools for of in pool.slices]
        one_by_one = 1 + len(self._attributes)
        budget.spend(
            1 + sum(2 * len(self._selections) + one_by_one * len(of.devices) for of in slices)
        )
        values: dict[object, int] = {}
        names: dict[str, int] = {}
        return tuple(
            [
                self._pool(pool, values, names)
                for pool in pools
                # Slices with counters affect all nodes, but most nodes do not have devices in the
                # pool.
                if pool.slices or self._counts_empty or pool.state is not PoolState.READY
            ]
        )

    def _pool(self, pool: NodePool, values: dict[object, int], names: dict[str, int]) -> Hashable:
        driver, name = pool.identity
        if pool.state is not PoolState.READY:
            return (driver, pool.state, pool.missing or pool.problem)
        slices = tuple([self._slice(each, pool, values) for each in pool.slices])
        if not (pool.counters or pool.elsewhere):
            return (driver, slices)
        return (
            driver,
            slices,
            # The name itself does not matter, so a number replaces it. But the allocator keys
            # counters by pool name only, so pools of two drivers with the same name share them.
            names.setdefault(name, len(names)),
            tuple(sorted(pool.counters.items())),
            # Devices on other nodes consume the same counters, so the pool differs from all others.
            name if pool.elsewhere else None,
        )

    def _slice(self, of: SliceFacts, pool: NodePool, values: dict[object, int]) -> Hashable:
        devices = of.devices
        outcomes: list[Hashable] = []
        relevant = 0
        for selection in self._selections:
            selected = selection.of(of)
            errors = 0
            for index in selected.errors:
                errors |= 1 << index
            outcomes.append((selected.matches, errors))
            relevant |= selected.matches | errors
        # All held devices of the pool are relevant, whether or not they are selected.
        if devices.consumes:
            relevant = (1 << len(devices)) - 1
        return (
            tuple(outcomes),
            tuple(
                [
                    (each.kind.capacity, each.kind.shareable, each.kind.binding, mask)
                    for each in devices.groups
                    if (mask := each.mask & relevant)
                ]
            ),
            devices.consumes,
            tuple(self._state(of, relevant)),
            tuple(self._values(of, relevant, values)) if self._attributes else (),
            tuple([pool.reaches(of, index) for index in bits(relevant)]) if of.by_device else (),
            of.name if of.raw else "",
        )

    def _state(self, of: SliceFacts, relevant: int) -> Iterator[Hashable]:
        """
        Yield the parts of the profile that depend on claims and taints.

        These are the allocated devices, the taints, and the consumed capacity of shared devices.
        If all devices are treated as free, there are none.
        """
        world = self._world
        if self._all_free:
            return
        yield world.allocated_in(of) & relevant
        if world.rules_of_pool(of.of_pool):
            for index in bits(relevant):
                device = of.devices[index]
                yield tuple(world.taints(DeviceID(of.driver, of.pool, device.name), device))
        elif of.devices.taints:
            yield tuple([of.devices.taints[index] for index in bits(relevant)])
        for index in bits(relevant) if world.has_shares else ():
            identity = DeviceID(of.driver, of.pool, of.devices.names[index])
            if world.is_shared(identity):
                consumed = world.consumed(identity)
                yield index, tuple(sorted(consumed.items())) if consumed is not None else None

    def _values(
        self, of: SliceFacts, relevant: int, values: dict[object, int]
    ) -> Iterator[Hashable]:
        for index in bits(relevant):
            device = of.devices[index]
            for name in self._attributes:
                value = device.attribute(name, of.driver)
                if isinstance(value, ListValue):
                    yield value  # use the value itself, because lists can be partly equal
                    continue
                key = (name, type(value), value)
                yield type(value), values.setdefault(key, len(values))
