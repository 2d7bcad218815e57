"""
What distinguishes nodes for the search of some claims: on nodes with equal profiles it takes the
same course, so one of them is searched for all.

The nodes of a cluster usually have equal hardware, in pools and with values of their own. So names
of nodes, pools and devices do not count. Of an attribute that a constraint compares, only which
devices have equal values counts.

It must not know the order of the search, or how an answer is worded.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from drakit_explain.allocation import SearchedClaim
from drakit_explain.budget import Budget
from drakit_explain.devices import bits
from drakit_explain.model import DeviceID, SliceFacts
from drakit_explain.pools import NodePool, PoolState
from drakit_explain.release import rules_of
from drakit_explain.selection import Selection
from drakit_explain.world import World

_STEPS_PER_REQUEST = 2
"""Steps of the selectors of a request in a slice."""


class Profiles:
    """The profiles of nodes for some claims; valid until the world changes."""

    def __init__(
        self,
        world: World,
        claims: Sequence[SearchedClaim],
        budget: Budget,
        *,
        all_free: bool = False,
    ) -> None:
        """
        Compare nodes.

        :param all_free: no device is allocated or tainted.
        """
        self._world = world
        self._budget = budget
        self._all_free = all_free
        self._counts_empty = not rules_of(world.minor).skips_pools
        """Whether devices on other nodes only make a pool incomplete."""

        self._selections = [
            Selection(world, exact)
            for claim in claims
            for request in claim.requests
            for exact in request.alternatives or (request,)
        ]
        self._attributes = sorted({each.attribute for one in claims for each in one.constraints})

    def of(self, pools: Sequence[NodePool]) -> Hashable:
        """
        Return the profile of a node with these pools.

        Raises :class:`NotEvaluatedError` where a selector has no outcome.
        """
        values: dict[object, int] = {}
        names: dict[str, int] = {}
        self._budget.spend(1 + len(pools))
        return tuple(
            [
                self._pool(pool, values, names)
                for pool in pools
                # Slices with counters concern all nodes, but most have no device of the pool.
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
            names.setdefault(name, len(names)),  # the allocator knows counters by this name
            tuple(sorted(pool.counters.items())),
            # Devices of other nodes consume the same counters: no other pool is like it.
            name if pool.elsewhere else None,
        )

    def _slice(self, of: SliceFacts, pool: NodePool, values: dict[object, int]) -> Hashable:
        devices = of.devices
        self._budget.spend(_STEPS_PER_REQUEST * len(self._selections))
        outcomes: list[Hashable] = []
        relevant = 0
        for selection in self._selections:
            selected = selection.of(of)
            errors = 0
            for index in selected.errors:
                errors |= 1 << index
            outcomes.append((selected.matches, errors))
            relevant |= selected.matches | errors
        if devices.consumes:  # what is held of a pool counts, whether it is selected or not
            relevant = (1 << len(devices)) - 1
        self._budget.spend(relevant.bit_count() * (1 + len(self._attributes)))
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
        )

    def _state(self, of: SliceFacts, relevant: int) -> Iterator[Hashable]:
        """Return what claims and taints make of the devices."""
        world = self._world
        if self._all_free:
            return
        yield world.allocated_in(of) & relevant
        if world.has_taint_rules:
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
                key = (name, type(value), value)
                yield type(value), values.setdefault(key, len(values))
