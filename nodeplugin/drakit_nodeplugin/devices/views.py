"""
What the endpoints of a driver come to together: for who publishes, for the kubelet, for people.

Where two endpoints have a pool of one name, who is there has it; all pure.

It must not know how an endpoint's state comes about, or when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain

from drakit_nodeplugin.devices.endpoint_state import EndpointState
from drakit_nodeplugin.devices.lifecycle import Phase
from drakit_nodeplugin.devices.pool_state import PoolState
from drakit_nodeplugin.devices.pools import (
    Capacity,
    DesiredPool,
    DeviceHealth,
    PoolCapacity,
    Publication,
)

__all__ = ("capacity_of", "health_of", "pools_of", "publication_of", "taken_from")


def pools_of(states: Iterable[EndpointState]) -> Collection[tuple[EndpointState, PoolState]]:
    """Give each pool once, with the endpoint that has it."""
    found: dict[str, tuple[EndpointState, PoolState]] = {}
    for state in states:
        for name, pool in state.pools.items():
            if name not in found or _rank(state, pool) < _rank(*found[name]):
                found[name] = state, pool
    return found.values()


def _rank(state: EndpointState, pool: PoolState) -> tuple[bool, bool, bool]:
    return (state.phase is not Phase.PRESENT, state.phase is Phase.REMOVING, not pool.names)


def taken_from(endpoint: EndpointState, states: Iterable[EndpointState]) -> frozenset[str]:
    """Give the pools that an endpoint cannot have, as another one that is there has them."""
    return frozenset(
        pool.name
        for state in states
        if state is not endpoint and state.phase is Phase.PRESENT
        for pool in state.pools.values()
        if pool.names
    )


def publication_of(
    states: Iterable[EndpointState], *, out: Callable[[EndpointState], bool], complete: bool
) -> Publication:
    """Say what is to be published; `out` tells whose pools are to be deleted."""
    pools: dict[str, DesiredPool] = {}
    held: set[str] = set()
    for state, pool in pools_of(states):
        if state.phase is Phase.AWAITED:
            held.add(pool.name)
        elif not out(state):
            pools[pool.name] = pool.desired()
    return Publication(pools=pools, held=frozenset(held), complete=complete)


def health_of(states: Iterable[EndpointState]) -> tuple[DeviceHealth, ...]:
    """Give the health of every device."""
    return tuple(chain.from_iterable(pool.health for _, pool in pools_of(states)))


def capacity_of(
    states: Iterable[EndpointState], allocated: Mapping[str, Collection[str]]
) -> Capacity:
    """Sort all devices."""
    pools: dict[str, PoolCapacity] = {}
    inactive: set[str] = set()
    for state, pool in pools_of(states):
        if state.phase is Phase.REMOVING:
            inactive.add(pool.name)
            continue
        pools[pool.name] = pool.capacity(
            away=state.phase is not Phase.PRESENT, allocated=allocated.get(pool.name, ())
        )
    return Capacity(pools=pools, inactive=frozenset(inactive))
