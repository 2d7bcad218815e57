"""
The device manager of one driver: follows endpoints, and decides what to publish and report.

The endpoint is the source of truth, and no layer between it and the manager caches devices. Some
endpoints are expected, some are restored from the store, and others appear at any time. If two
endpoints report a pool with the same name, the one that is available keeps the pool. The manager
owns the clock, the store, and the listeners. :mod:`.endpoint_state` decides the effects of a stop,
and :mod:`.taints` the taints of a device.

Of a claim, the module knows only the devices. Does not depend on the API server, slices or gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Literal

from drakit.device import Device, Inventory, PolicyOutcome, RejectedDevice
from drakit_driver.runtime.contract import DeviceKey, HealthReport
from drakit_driver.runtime.latest_value import pause_after
from drakit_formats.resource.nodes import pool_name
from drakit_nodeplugin.changes import Revision
from drakit_nodeplugin.config import Devices
from drakit_nodeplugin.devices.endpoint_state import (
    SILENT,
    EndpointState,
    GracePeriods,
    Phase,
    are_pools_known,
    phase_ends,
)
from drakit_nodeplugin.devices.model import (
    Capacity,
    DesiredPool,
    DeviceHealth,
    EndpointStatus,
    EndpointStop,
    PoolCapacity,
    Publication,
    PublishedTaints,
)
from drakit_nodeplugin.devices.pool_state import DriverState, PoolState
from drakit_nodeplugin.devices.stored import EndpointWriter, GoneDevices
from drakit_nodeplugin.devices.taints import UNHEALTHY
from drakit_nodeplugin.state.checkpoint import Checkpoint
from drakit_nodeplugin.state.holds import Hardware, HeldDevice
from drakit_nodeplugin.state.records import StoredEndpoint

logger = logging.getLogger(__name__)

_STATES: Mapping[Phase, Literal["Running", "Waiting", "Stopped", "Removing"]] = {
    Phase.PRESENT: "Running",
    Phase.AWAITED: "Waiting",
    Phase.STOPPED: "Stopped",
    Phase.REMOVING: "Removing",
}


class DeviceManager:
    """Manages the devices of one driver. It is an
    :class:`~drakit_driver.runtime.endpoint.EndpointListener`."""

    def __init__(
        self,
        driver: str,
        *,
        node: str,
        endpoints: Collection[str],
        settings: Devices,
        store: Checkpoint,
        reports_health: bool,
        on_rejected: Callable[[Mapping[str, str]], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Create a manager. `endpoints` are the endpoints that are expected at startup. If there are
        none, any number of endpoints may appear, each with separate pools.

        Pools are removed only after `set_sources_ready`. `reports_health` means that the driver
        reports the health of its devices. `on_rejected` is called with the reasons for newly
        rejected devices, keyed by name.
        """
        self.driver = driver
        self.revision = Revision()
        """Advances when the publication or the health of devices changes."""

        self.endpoint_changes = Revision()
        """Advances when an endpoint lists its devices or stops, and when its state changes over
        time."""

        self.stop_changes = Revision()
        """Advances when an endpoint stops or becomes available again, and when its state changes
        over time."""

        self.mark_changes = Revision()
        """Advances when an endpoint lists its devices or stops, if it marks devices or has marked
        some."""

        self._stops: dict[str, EndpointStop] = {}
        """The stops of endpoints that have not listed their devices since then, keyed by name."""

        self.waiting: str | None = None
        """The reason why the endpoints must not list their devices yet. None if they can."""

        self._waiting_since = 0.0
        self._expected = frozenset(endpoints)
        self._sources_ready = False
        self._reports_health = reports_health
        self._on_rejected = on_rejected
        self._state = DriverState(
            node=node,
            open_ended=not endpoints,
            timing=settings.health,
            gone_eviction_seconds=settings.gone_eviction_delay,
            now=self._now,
            wall_clock=wall_clock,
        )
        self._adopted: dict[DeviceKey, PublishedTaints] = {}
        self._was_complete = False
        self._publication: Publication | None = None
        self._health_states: tuple[DeviceHealth, ...] | None = None
        self._awake = asyncio.Event()
        self._passed = -math.inf
        """The latest deadline that has been processed (loop clock)."""

        self._grace_periods = GracePeriods(stop_seconds=settings.endpoint_stop_grace_period)
        self._start_seconds = settings.start_grace_period
        self._grace_periods.begin(self._now(), start_seconds=self._start_seconds, known=False)
        self._endpoints = {name: self._make_endpoint(name) for name in self._expected}
        self._writer = EndpointWriter(
            driver,
            store,
            rows=self._rows,
            on_loaded=self._loaded,
            on_written=self._written,
        )
        self._gone = GoneDevices(
            driver,
            store,
            gone=lambda: chain.from_iterable(each.gone() for each in self._endpoints.values()),
            on_free=self._let_go,
        )

    def _make_endpoint(self, name: str) -> EndpointState:
        return EndpointState(name, self._state, self._grace_periods)

    # ------------------------------------------------------------ queries

    def publication(self) -> Publication:
        """Return the desired publication. Returns the same object until something changes."""
        complete = self._are_pools_known()
        known = self._publication
        if known is None or known.complete != complete:
            pools: dict[str, DesiredPool] = {}
            held: set[str] = set()
            for state, pool in self._pools():
                if state.phase is not Phase.AWAITED and self._is_deleted(state):
                    continue
                desired = None if state.phase is Phase.AWAITED else state.desired(pool)
                if desired is None:
                    held.add(pool.name)
                else:
                    pools[pool.name] = desired
            known = self._publication = Publication(
                pools=pools, held=frozenset(held), complete=complete
            )
            if self._state.published_changed:
                self._awake.set()  # report that a pool has just failed
        return known

    def health_states(self) -> Sequence[DeviceHealth]:
        """Return the health of every device. Returns the same object until something changes."""
        if self._health_states is None:
            self._health_states = tuple(
                chain(
                    chain.from_iterable(pool.health for _, pool in self._pools()),
                    chain.from_iterable(
                        each.unlisted.values() for each in self._endpoints.values()
                    ),
                )
            )
        return self._health_states

    def capacity(self) -> Capacity:
        """Return all devices, grouped by pool and state."""
        pools: dict[str, PoolCapacity] = {}
        inactive: set[str] = set()
        for state, pool in self._pools():
            if state.phase is Phase.REMOVING:
                inactive.add(pool.name)
            else:
                pools[pool.name] = pool.capacity(available=state.phase is Phase.PRESENT)
        return Capacity(pools=pools, inactive=frozenset(inactive))

    def hardware(self) -> Hardware | None:
        """
        Return the main inventories of the endpoints, even if the fallback is published.

        Return None for a driver with an unknown number of endpoints, such as the device plugin
        driver. The devices of such a driver do not share hardware.
        """
        if self._state.open_ended:
            return None
        return Hardware(
            pools={
                pool.name: pool.content
                for state, pool in self._pools()
                if state.phase is Phase.PRESENT and pool.content is not None
            }
        )

    def device(self, pool: str, name: str) -> Device | None:
        """Return a device as last listed by its endpoint, or None if no endpoint has listed it."""
        return next((each.device(name) for _, each in self._pools() if each.name == pool), None)

    def is_gone(self, pool: str, device: str) -> bool:
        """Return whether a device is published although its endpoint no longer lists it."""
        return any(device in each.gone for _, each in self._pools() if each.name == pool)

    @property
    def stop_reason(self) -> str | None:
        """Return the reason why a needed endpoint is unavailable, or None if all are available or
        may still appear."""
        for state in self._endpoints.values():
            # Skip endpoints that are no longer configured, which are unavailable but not needed.
            needed = state.life.listed or state.name in self._expected
            waiting = state.phase is Phase.AWAITED and state.reason is SILENT
            if needed and state.phase is not Phase.PRESENT and not waiting:
                open_ended = self._state.open_ended
                return f"endpoint {state.name}: {state.reason}" if open_ended else state.reason
        return None

    @property
    def known(self) -> bool:
        """Whether any endpoint is available, may still appear, or has left devices or rows
        behind."""
        states = self._endpoints.values()
        return any(state.pools or state.phase is not Phase.STOPPED for state in states)

    @property
    def rejected_count(self) -> int:
        """The number of devices that cannot be published."""
        return sum(state.rejected_count for state in self._endpoints.values())

    @property
    def rejected(self) -> Mapping[str, str]:
        """The reasons why devices cannot be published, keyed by name. Devices that are only counted
        are missing."""
        rejected: dict[str, str] = {}
        for state in self._endpoints.values():
            rejected |= state.rejected
        return rejected

    @property
    def rejected_policies(self) -> Mapping[str, str]:
        """The policies of the devices in `rejected`, keyed by the same names."""
        return {
            name: policy
            for state in self._endpoints.values()
            for name, policy in state.rejected_policies.items()
        }

    @property
    def rejected_by_drivers(self) -> Sequence[RejectedDevice]:
        """The devices that drivers themselves reject, with their reasons."""
        return [each for state in self._endpoints.values() for each in state.rejected_by_driver]

    @property
    def policy_outcomes(self) -> Sequence[PolicyOutcome]:
        """The outcomes of policies."""
        return [each for state in self._endpoints.values() for each in state.outcomes]

    @property
    def marked(self) -> frozenset[DeviceKey]:
        """The devices whose claims must be prepared again. Their pools have API names. Devices of
        unavailable endpoints are excluded."""
        return frozenset(chain.from_iterable(each.marked for each in self._endpoints.values()))

    @property
    def stops(self) -> Sequence[EndpointStop]:
        """The stops of unavailable endpoints, with their latest reasons. An expected endpoint that
        may still list its devices after the start is not treated as stopped. For example, after the
        first installation, it may be waiting for policies."""
        return [
            stop
            for name, stop in self._stops.items()
            if (state := self._endpoints.get(name)) is None or state.phase is not Phase.AWAITED
        ]

    def endpoint_statuses(self) -> Sequence[EndpointStatus]:
        """Return the state of each endpoint."""
        statuses: list[EndpointStatus] = []
        for state in self._endpoints.values():
            reason = "" if state.phase is Phase.PRESENT else state.reason
            if state.phase is Phase.AWAITED and self.waiting is not None:
                reason = self.waiting
            status = EndpointStatus(name=state.name, state=_STATES[state.phase], reason=reason)
            statuses.append(status)
        return statuses

    def _pools(self) -> Collection[tuple[EndpointState, PoolState]]:
        """Return each pool once, with its endpoint."""
        found: dict[str, tuple[EndpointState, PoolState]] = {}
        for state in self._endpoints.values():
            for name, pool in state.pools.items():
                if name not in found or _rank(state, pool) < _rank(*found[name]):
                    found[name] = state, pool
        return found.values()

    # ------------------------------------------------------------ endpoint events

    def replaced(self, endpoint: str, inventory: Inventory) -> None:
        """Record that the endpoint is available and has exactly these devices."""
        if (state := self._endpoints.get(endpoint)) is None:
            state = self._endpoints[endpoint] = self._make_endpoint(endpoint)
        taken = frozenset(
            pool.name
            for other in self._endpoints.values()
            if other is not state and other.phase is Phase.PRESENT
            for pool in other.pools.values()
            if pool.has_listed
        )
        marked = state.marked
        state.replace(inventory, taken=taken)
        if self._adopted:
            state.adopt(self._adopted)
        facts = {"driver": self.driver, "endpoint": endpoint}
        if self._state.stored_changed:
            size = len(state.checked.devices)
            logger.info("devices changed", extra=facts | {"devices": size})
        self._report_rejected(state)
        self._notify()
        if self._stops.pop(endpoint, None) is not None:
            self.stop_changes.advance()
        if marked or state.marked:
            self.mark_changes.advance()
        self.endpoint_changes.advance()

    def _report_rejected(self, state: EndpointState) -> None:
        if state.rejected and (rejected := state.newly_rejected()):
            facts = {"driver": self.driver, "endpoint": state.name}
            for name, why in rejected.items():
                logger.error("device is rejected", extra=facts | {"device": name, "error": why})
            self._on_rejected(rejected)

    def reported(self, endpoint: str, report: HealthReport) -> None:
        """Record changed health. Devices of this node that are not listed are ignored."""
        state = self._endpoints.get(endpoint)
        if state is None or state.phase is not Phase.PRESENT:
            return
        health = {
            DeviceKey(pool_name(self._state.node, key.pool), key.name): each
            for key, each in report.devices.items()
        }
        state.report(health, report.unlisted)
        self._notify()

    def stopped(self, endpoint: str, reason: str) -> None:
        """Record that the endpoint is unavailable. Its devices remain known until its grace
        period ends. For an endpoint that is not expected and never had devices, only the stop is
        recorded."""
        stop = self._stops.get(endpoint)
        if stop is None or stop.reason != reason:
            self._stops[endpoint] = EndpointStop(endpoint=endpoint, reason=reason)
        if (state := self._endpoints.get(endpoint)) is not None:
            if state.marked:
                self.mark_changes.advance()
            state.stop(reason)
            self._notify()
        self.stop_changes.advance()
        self.endpoint_changes.advance()

    # ------------------------------------------------------------ other events

    def set_sources_ready(self) -> None:
        """Record that endpoints that are still missing are gone, because the published pools are
        known, and the kubelet has registered the driver."""
        self._sources_ready = True
        self._notify()

    def set_in_use(self, devices: Mapping[str, Collection[str]]) -> None:
        """Set the devices that claims hold, keyed by pool. The endpoints' stored rows include the
        published state of these devices."""
        if devices != self._state.in_use:
            self._state.in_use = devices
            self._state.stored_changed = True
            for state in self._endpoints.values():
                if state.checked.fallback is not None:
                    state.follow_claims()
            self._notify()

    def set_unpreparing(self, held: Collection[HeldDevice]) -> None:
        """
        Set the holds of claims in all pools. Only pools in which a claim is still being unprepared
        are relevant.

        If such a claim blocks devices because of their names or hardware, these devices have a
        taint until this method is called without that claim.
        """
        by_pool: dict[str, list[HeldDevice]] = {}
        for each in held:
            by_pool.setdefault(each.pool, []).append(each)
        old = self._state.held
        self._state.held = {
            pool: old[pool] if old.get(pool) == devices else devices
            for pool, devices in by_pool.items()
            if any(each.unpreparing for each in devices)
        }
        for pool in old.keys() | self._state.held.keys():
            for state in self._endpoints.values():
                state.refresh_holds(pool)
        self._notify()

    def set_maintenance(self, devices: frozenset[tuple[str, str]] | None) -> None:
        """Set the devices in maintenance, as pairs of pool and name. None means that they are
        unknown."""
        if devices != self._state.maintenance:
            self._state.maintenance = devices
            for state in self._endpoints.values():
                state.refresh()
            self._notify()

    def adopt(self, published: Mapping[tuple[str, str], PublishedTaints]) -> None:
        """
        Adopt the taints from before a restart. Unhealthy devices recover as if there had been no
        restart, and all taints keep their times, even if the slices are deleted.

        The publisher calls this once, before it reads the first publication. The keys are pool
        names in the API and device names. If the driver does not report health, health taints are
        dropped, because nothing would ever remove them.
        """
        self._adopted = {
            DeviceKey(*device): {
                (key, effect): added_at
                for (key, effect), added_at in taints.items()
                if self._reports_health or key != UNHEALTHY
            }
            for device, taints in published.items()
        }
        for state in self._endpoints.values():
            state.adopt(self._adopted)
        self._notify()

    def observe_published(self, pools: Collection[str]) -> None:
        """
        Record that the API server has exactly these pools of the driver on this node.

        The publisher calls this after each change. Endpoints whose pools have been deleted are
        forgotten.
        """
        deleted = [state for state in self._endpoints.values() if self._is_deleted(state)]
        if not deleted:
            return
        # Don't wait for the deletion of a pool that another endpoint now publishes.
        pending = {pool.name for state, pool in self._pools() if state in deleted} & set(pools)
        for state in deleted:
            if state.pools.keys() & pending:
                continue
            logger.info("endpoint removed", extra={"driver": self.driver, "endpoint": state.name})
            self._forget(state)
        self._notify()

    def _forget(self, state: EndpointState) -> None:
        """Forget an endpoint whose pools have been deleted. Unless the endpoint is expected, it is
        unknown from now on."""
        if state.pools:
            state.forget()
        if state.name not in self._expected:
            del self._endpoints[state.name]

    # ------------------------------------------------------------ time

    async def restore(self) -> bool:
        """Read the store. Call this before any endpoint lists its devices. Return whether reading
        succeeded. If not, the manager retries later."""
        return await self._writer.load()

    def wait(self, reason: str | None) -> None:
        """
        Suspend the grace periods of the endpoints, which must not list their devices yet. `reason`
        is the cause.

        None ends the suspension. After that, the start grace period applies to the endpoints.
        Endpoints that have already listed their devices are not affected.
        """
        now = self._now()
        if reason is not None:
            self._waiting_since = now if self.waiting is None else self._waiting_since
            self._grace_periods.start_until = math.inf
        elif self.waiting is not None:
            self._grace_periods.start_until = now + self._start_seconds
            for state in self._endpoints.values():
                state.excuse(now - self._waiting_since)
        self.waiting = reason
        self._notify()

    async def run(self) -> None:
        """Process deadlines, and write to the store, until canceled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._writer.run())
            group.create_task(self._follow_time())
            group.create_task(self._gone.run())

    async def _follow_time(self) -> None:
        while True:
            loop = asyncio.get_running_loop()
            began_at = loop.time()
            now = self._now()
            self._pass_time(now)
            self._awake.clear()
            due = [math.inf, self._grace_periods.start_until]
            if self._state.open_ended:
                due.append(self._grace_periods.unknown_until)
            for state in self._endpoints.values():
                due += state.next_changes()
            until = min(when for when in due if when > now)
            await asyncio.sleep(pause_after(loop.time() - began_at))
            try:
                async with asyncio.timeout_at(None if until == math.inf else until):
                    await self._awake.wait()
            except TimeoutError:
                self._passed = max(self._passed, until)

    def _let_go(self, devices: Collection[DeviceKey]) -> None:
        """Forget these devices, which are gone and which no claim holds any longer."""
        for state in self._endpoints.values():
            state.let_go(devices)
        self._notify()

    def _pass_time(self, now: float) -> None:
        """Process all deadlines that have passed."""
        if now >= self._grace_periods.start_until:
            self._adopted = {}
        aged = False
        for state in [*self._endpoints.values()]:
            before = state.phase
            state.age()
            aged |= state.phase is not before
            end = phase_ends(state.life, self._grace_periods)
            if end is None or now < end:
                continue
            if not state.pools:
                self._forget(state)
            elif self._sources_ready:
                facts = {"driver": self.driver, "endpoint": state.name, "reason": state.reason}
                logger.warning(
                    "endpoint was unavailable for too long, its devices are removed", extra=facts
                )
                state.remove()
        if aged:
            self.stop_changes.advance()
            self.endpoint_changes.advance()
        if (complete := self._are_pools_known()) != self._was_complete:
            self._was_complete = complete
            self._state.published_changed = True
        self._notify()

    def _now(self) -> float:
        # A loop timer may fire slightly early. Treat its deadline as reached.
        return max(asyncio.get_running_loop().time(), self._passed)

    # ------------------------------------------------------------ the store, and notifications

    def _loaded(self, rows: Mapping[str, StoredEndpoint]) -> None:
        """Initialize the endpoints that an earlier process has stored. If an endpoint has listed
        its devices in the meantime, these take precedence."""
        if self._state.open_ended:
            known = bool(rows)
            self._grace_periods.begin(self._now(), start_seconds=self._start_seconds, known=known)
        for name, row in rows.items():
            state = self._endpoints.setdefault(name, self._make_endpoint(name))
            if not state.life.listed:
                state.restore(row)
        # If an endpoint listed its devices before the rows were read, its row is outdated.
        self._state.changed()
        self._notify()

    def _rows(self) -> Mapping[str, StoredEndpoint]:
        """Return the rows to store. The row of an awaited endpoint is unchanged."""
        rows: dict[str, StoredEndpoint] = {}
        for name, state in self._endpoints.items():
            awaited = state.phase is Phase.AWAITED
            row = self._writer.stored.get(name) if awaited else state.row()
            if row is not None:
                rows[name] = row
        return rows

    def _written(self) -> None:
        states = self._endpoints.values()
        self._state.published_changed = any(state.phase is Phase.REMOVING for state in states)
        self._notify()

    def _is_deleted(self, state: EndpointState) -> bool:
        """Return whether an endpoint's pools are to be deleted. The store must have recorded the
        removal first, so that it continues after a restart."""
        stored = self._writer.stored.get(state.name)
        return state.phase is Phase.REMOVING and stored is not None and stored.removing

    def _are_pools_known(self) -> bool:
        """Return whether the pools of all endpoints are known."""
        now = self._now()
        if not self._writer.loaded or (
            self._state.open_ended and now < self._grace_periods.unknown_until
        ):
            return False
        states = self._endpoints.values()
        return self._sources_ready and all(
            are_pools_known(state.life, self._grace_periods, now=now) for state in states
        )

    def _notify(self) -> None:
        self._awake.set()  # a deadline may have changed
        for each in self._endpoints.values():
            if each.failed:
                self._report_rejected(each)
        state = self._state
        published, health = state.published_changed, state.health_changed
        if published:
            self._publication = None
        if health:
            self._health_states = None
        if state.stored_changed:
            self._writer.changed()
        if state.vanished:
            self._gone.changed()
        state.published_changed = state.health_changed = state.stored_changed = False
        state.vanished = False
        if published or health:
            self.revision.advance()


def _rank(state: EndpointState, pool: PoolState) -> tuple[bool, bool, bool]:
    return (state.phase is not Phase.PRESENT, state.phase is Phase.REMOVING, not pool.has_listed)
