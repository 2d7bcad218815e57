"""
The endpoints of a driver together: which there are, how long they are awaited, and their pools.

Some are expected, some were stored, others just appear. If two endpoints have a pool of one name,
the available one has it. The state of each is :mod:`.endpoint_state`'s.

It must not know the store, or the callers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain

from drakit_nodeplugin.config import Devices
from drakit_nodeplugin.devices.endpoint_state import (
    SILENT,
    EndpointState,
    Graces,
    Moment,
    Phase,
    accounted,
    phase_ends,
)
from drakit_nodeplugin.devices.endpoint_store import StoredEndpoint
from drakit_nodeplugin.devices.model import (
    Capacity,
    DesiredPool,
    DeviceHealth,
    PoolCapacity,
    Publication,
)
from drakit_nodeplugin.devices.pool_state import Changes, PoolState

__all__ = ("EndpointRegistry",)


class EndpointRegistry:
    """Endpoints by name. Times are the loop's."""

    def __init__(
        self,
        expected: Collection[str],
        *,
        settings: Devices,
        make: Callable[[str], EndpointState],
        now: Callable[[], float],
    ) -> None:
        """`expected` are the configured endpoints. If there are none, the number of endpoints is
        unknown."""
        self._expected = frozenset(expected)
        self._open_ended = not self._expected
        self._settings = settings
        self._make = make
        self._now = now
        self._unknown_until = 0.0
        """Until when endpoints with unknown pools may appear, if their number is unknown."""
        self.graces = self._begin_graces(known=False)
        """The grace periods."""
        self._states = {name: make(name) for name in self._expected}

    def __iter__(self) -> Iterator[EndpointState]:
        """Iterate over a snapshot: the caller may forget endpoints meanwhile."""
        return iter([*self._states.values()])

    # ------------------------------------------------------------ which there are

    def _begin_graces(self, *, known: bool) -> Graces:
        """Begin the grace period of a start; `known`: the store has the pools of unavailable
        endpoints."""
        now, settings = self._now(), self._settings
        graces = Graces(
            start_until=now + settings.start_grace_period,
            stop_seconds=settings.endpoint_stop_grace_period,
        )
        # If the store was lost, published pools may be those of an endpoint that still returns.
        self._unknown_until = (
            graces.start_until if known else max(graces.start_until, now + graces.stop_seconds)
        )
        return graces

    @property
    def stop_reason(self) -> str | None:
        """Why a needed endpoint is unavailable; None if all are available, or may still come."""
        for state in self._states.values():
            # An endpoint that is not configured any more is unavailable as well, but not needed.
            needed = state.life.listed or state.name in self._expected
            waiting = state.phase is Phase.AWAITED and state.reason is SILENT
            if needed and state.phase is not Phase.PRESENT and not waiting:
                return (
                    f"endpoint {state.name}: {state.reason}" if self._open_ended else state.reason
                )
        return None

    def find(self, name: str) -> EndpointState | None:
        """Return an endpoint, if there is one of that name."""
        return self._states.get(name)

    def get(self, name: str) -> EndpointState:
        """Return an endpoint; a new one is not available yet."""
        if name not in self._states:
            self._states[name] = self._make(name)
        return self._states[name]

    def forget(self, state: EndpointState, *, changes: Changes) -> None:
        """The endpoint's pools are deleted; unless it is expected, it is unknown from now on."""
        if state.pools:
            state.forget(changes=changes)
        if state.name not in self._expected:
            del self._states[state.name]

    def accounted(self) -> bool:
        """Return whether the pools of all endpoints are known."""
        graces, now = self.graces, self._now()
        if self._open_ended and now < self._unknown_until:
            return False
        return all(accounted(state.life, graces, now=now) for state in self._states.values())

    def ends(self) -> Iterator[float]:
        """Yield the ends of all grace periods."""
        graces = self.graces
        yield graces.start_until
        if self._open_ended:
            yield self._unknown_until
        for state in self._states.values():
            if (end := phase_ends(state.life, graces)) is not None:
                yield end

    # ------------------------------------------------------------ the store

    def restore(
        self, rows: Mapping[str, StoredEndpoint], moment: Moment, *, changes: Changes
    ) -> None:
        """Begin with the endpoints that an earlier process, or another instance, has stored. An
        endpoint that has listed its devices meanwhile knows better."""
        if self._open_ended:
            # The time counts from when this instance is primary: these endpoints connect to that.
            self.graces = self._begin_graces(known=bool(rows))
        graces = self.graces
        for name, row in rows.items():
            state = self.get(name)
            if not state.life.listed:
                state.restore(row, moment)
                state.age(graces, moment, changes=changes)
        for state in self:
            if state.name not in rows and not state.life.listed and state.pools:
                state.forget(changes=changes)  # the former primary instance has removed it

    def rows(self, stored: Mapping[str, StoredEndpoint]) -> Mapping[str, StoredEndpoint]:
        """Return the rows to store; an awaited endpoint keeps its row."""
        rows: dict[str, StoredEndpoint] = {}
        for name, state in self._states.items():
            row = stored.get(name) if state.phase is Phase.AWAITED else state.row()
            if row is not None:
                rows[name] = row
        return rows

    # ------------------------------------------------------------ their pools

    def pools(self) -> Collection[tuple[EndpointState, PoolState]]:
        """Return each pool once, with the endpoint that has it."""
        found: dict[str, tuple[EndpointState, PoolState]] = {}
        for state in self._states.values():
            for name, pool in state.pools.items():
                if name not in found or _rank(state, pool) < _rank(*found[name]):
                    found[name] = state, pool
        return found.values()

    def taken_from(self, endpoint: EndpointState) -> frozenset[str]:
        """Return the pools that an endpoint cannot have, because another one that is available has
        them."""
        return frozenset(
            pool.name
            for state in self._states.values()
            if state is not endpoint and state.phase is Phase.PRESENT
            for pool in state.pools.values()
            if pool.names
        )

    def publication(
        self, *, is_deleted: Callable[[EndpointState], bool], complete: bool
    ) -> Publication:
        """Return what should be published; `is_deleted` decides whose pools are deleted."""
        pools: dict[str, DesiredPool] = {}
        held: set[str] = set()
        for state, pool in self.pools():
            if state.phase is Phase.AWAITED:
                held.add(pool.name)
            elif not is_deleted(state):
                pools[pool.name] = pool.desired()
        return Publication(pools=pools, held=frozenset(held), complete=complete)

    def health(self) -> tuple[DeviceHealth, ...]:
        """Return the health of every device."""
        return tuple(chain.from_iterable(pool.health for _, pool in self.pools()))

    def capacity(self, allocated: Mapping[str, Collection[str]]) -> Capacity:
        """Sort all devices; `allocated` are those that claims hold."""
        pools: dict[str, PoolCapacity] = {}
        inactive: set[str] = set()
        for state, pool in self.pools():
            if state.phase is Phase.REMOVING:
                inactive.add(pool.name)
                continue
            pools[pool.name] = pool.capacity(
                available=state.phase is Phase.PRESENT, allocated=allocated.get(pool.name, ())
            )
        return Capacity(pools=pools, inactive=frozenset(inactive))


def _rank(state: EndpointState, pool: PoolState) -> tuple[bool, bool, bool]:
    return (state.phase is not Phase.PRESENT, state.phase is Phase.REMOVING, not pool.names)
