"""
The device manager of one driver: it follows endpoints, and decides what is published and reported.

The endpoint is the source of truth; nothing between it and the manager caches devices. This is the
shell around the pure parts: it has the clock, the store, and the list of those to notify. What a
stop means is decided in :mod:`.endpoint_state`, which taints a device gets in :mod:`.taints`.

It must not know the API server, slices, claims beyond their devices, or gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from drakit.device import Inventory
from drakit.resource.pools import pool_name
from drakit_nodeplugin.config import Devices
from drakit_nodeplugin.devices.endpoint_registry import EndpointRegistry
from drakit_nodeplugin.devices.endpoint_state import EndpointState, Moment, Phase, removal_due
from drakit_nodeplugin.devices.endpoint_store import EndpointStore, EndpointWriter, StoredEndpoint
from drakit_nodeplugin.devices.hardware import Hardware, HeldDevice
from drakit_nodeplugin.devices.model import (
    Capacity,
    DeviceHealth,
    Publication,
    PublishedTaints,
    Revision,
)
from drakit_nodeplugin.devices.pool_state import Changes
from drakit_nodeplugin.devices.taints import HealthTiming
from drakit_nodeplugin.endpoints.contract import DeviceKey, HealthReport

__all__ = ("DeviceManager",)

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Between two checks whether the sources are ready, or this instance is primary, while the manager
waits for that: nobody reports either."""

IDLE_SECONDS = 60.0
"""The same while the manager waits for nothing: a node may have fifty drivers."""


class DeviceManager:
    """An :class:`~drakit_nodeplugin.endpoints.endpoint.EndpointListener` that others can query."""

    def __init__(
        self,
        driver: str,
        *,
        node: str,
        endpoints: Collection[str],
        settings: Devices,
        store: EndpointStore,
        primary: asyncio.Event,
        sources_ready: Callable[[], bool],
        on_left_out: Callable[[Mapping[str, str]], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        `endpoints` are those that are expected at the start; others may come. If none is expected,
        any number may come, each with pools of its own.

        Nothing is stored while `primary` is not set: another instance of the driver does that.
        Pools are removed only while `sources_ready` returns that a missing endpoint is really gone.
        `on_left_out` receives the reasons why devices are newly not published, by name.
        """
        self.driver = driver
        self.revision = Revision()
        """Advances when the publication or the health of devices changes."""

        self._node = node
        self._open_ended = not endpoints
        self._sources_ready = sources_ready
        self._on_left_out = on_left_out
        self._wall_clock = wall_clock
        self._timing = HealthTiming(
            recovery_seconds=settings.health.recovery_period,
            eviction_seconds=settings.health.eviction_delay,
        )
        self._held: dict[str, Collection[HeldDevice]] = {}
        self._adopted: dict[DeviceKey, PublishedTaints] = {}
        self._was_complete = False
        self._publication: Publication | None = None
        self._health_states: tuple[DeviceHealth, ...] | None = None
        self._awake = asyncio.Event()
        self._passed = -math.inf
        """The latest time for which something was due, and done."""

        self._timers: dict[tuple[str, DeviceKey], asyncio.TimerHandle] = {}
        """When time alone may change something of a device, by endpoint and device."""

        self._endpoints = EndpointRegistry(
            endpoints, settings=settings, make=self._make_endpoint, now=self._now
        )
        self._writer = EndpointWriter(
            driver,
            store,
            primary=primary,
            rows=lambda: self._endpoints.rows(self._writer.stored),
            on_loaded=self._loaded,
            on_written=self._written,
        )

    # ------------------------------------------------------------ queries

    def publication(self) -> Publication:
        """Return what should be published now. The same object while nothing changes."""
        complete = self._complete()
        known = self._publication
        if known is None or known.complete != complete:
            known = self._publication = self._endpoints.publication(
                is_deleted=self._is_deleted, complete=complete
            )
        return known

    def health_states(self) -> Sequence[DeviceHealth]:
        """Return the health of every device; the same object while nothing changes."""
        if self._health_states is None:
            self._health_states = self._endpoints.health()
        return self._health_states

    def capacity(self, allocated: Mapping[str, Collection[str]]) -> Capacity:
        """Sort all devices; `allocated` are those that claims hold, by the pool's API name."""
        return self._endpoints.capacity(allocated)

    def hardware(self) -> Hardware | None:
        """
        Return the endpoints' main inventories, whichever is published.

        None for a driver with an unknown number of endpoints, such as a driver of device plugins:
        their devices consume only their names.
        """
        if self._open_ended:
            return None
        return Hardware(
            pools={
                pool.name: pool.content
                for state, pool in self._endpoints.pools()
                if state.phase is Phase.PRESENT and pool.content is not None
            }
        )

    @property
    def stop_reason(self) -> str | None:
        """Why a needed endpoint is unavailable; None if all are available, or may still come."""
        return self._endpoints.stop_reason

    @property
    def known(self) -> bool:
        """Whether any endpoint is available, may still come, or has left something behind."""
        stopped = Phase.STOPPED
        return any(state.pools or state.phase is not stopped for state in self._endpoints)

    @property
    def left_out_count(self) -> int:
        """The number of devices that cannot be published."""
        states = self._endpoints
        return sum(state.checked.left_out_count + len(state.refused) for state in states)

    # ------------------------------------------------------------ events of endpoints

    def replaced(self, endpoint: str, inventory: Inventory) -> None:
        """The endpoint is available and has these devices, and no others."""
        state, moment, changes = self._endpoints.get(endpoint), self._moment(), Changes()
        later = state.replace(
            inventory, moment, taken=self._endpoints.taken_from(state), changes=changes
        )
        if self._adopted:
            adopted = {key: self._adopted.pop(key) for key in later if key in self._adopted}
            later += state.adopt(adopted, moment, changes=changes)
        self._schedule(state, later)
        facts = {"driver": self.driver, "endpoint": endpoint}
        if changes.stored:
            size = len(state.checked.devices)
            logger.info("devices changed", extra=facts | {"devices": size})
        if left_out := state.newly_left_out():
            for name, why in left_out.items():
                logger.error("device is left out", extra=facts | {"device": name, "error": why})
            self._on_left_out(left_out)
        self._notify(changes)

    def reported(self, endpoint: str, report: HealthReport) -> None:
        """The health of devices has changed; devices that the endpoint does not have are
        ignored."""
        state = self._endpoints.find(endpoint)
        if state is None or state.phase is not Phase.PRESENT:
            return
        health = {
            DeviceKey(pool_name(self._node, key.pool), key.name): each
            for key, each in report.devices.items()
        }
        changes = Changes()
        self._schedule(state, state.report(health, self._moment(), changes=changes))
        self._notify(changes)

    def stopped(self, endpoint: str, reason: str) -> None:
        """The endpoint is unavailable; its devices stay known until its grace period ends. An
        endpoint that is not expected and never had devices stays unknown."""
        if (state := self._endpoints.find(endpoint)) is None:
            return
        changes = Changes()
        state.stop(reason, self._moment(), changes=changes)
        self._notify(changes)
        self.wake()

    # ------------------------------------------------------------ events of others

    def set_unpreparing(self, held: Collection[HeldDevice]) -> None:
        """
        Set the holds of claims in the pools in which a claim is still being unprepared.

        Devices that such a claim blocks, by name or because they do not fit beside the holds, are
        tainted until a call without it.
        """
        by_pool: dict[str, list[HeldDevice]] = {}
        for each in held:
            by_pool.setdefault(each.pool, []).append(each)
        old = self._held
        self._held = {
            pool: old[pool] if old.get(pool) == devices else devices
            for pool, devices in by_pool.items()
            if any(each.unpreparing for each in devices)
        }
        changes, moment = Changes(), self._moment()
        for pool in old.keys() | self._held.keys():
            for state in self._endpoints:
                state.refresh_holds(pool, moment, changes=changes)
        self._notify(changes)

    def adopt(self, published: Mapping[tuple[str, str], PublishedTaints]) -> None:
        """
        Take over how devices were tainted before a restart: unhealthy ones recover as if there was
        none, and all taints keep their times, whatever becomes of the slices.

        The publisher calls this once, before it reads the first publication: the taints by the
        pool's API name and the device's. For a driver without any source of health,
        ``drakit.dev/unhealthy`` must not be among them.
        """
        devices = {DeviceKey(*key): taints for key, taints in published.items()}
        changes, moment = Changes(), self._moment()
        for state in self._endpoints:
            adopted = state.adopt(devices, moment, changes=changes)
            self._schedule(state, adopted)
            for key in adopted:
                devices.pop(key, None)
        self._adopted = devices if moment.now < self._endpoints.graces.start_until else {}
        self._notify(changes)

    def observe_published(self, pools: Collection[str]) -> None:
        """
        The API server holds these pools of the driver on this node, and no others.

        The publisher calls this at each change: endpoints whose pools are deleted are forgotten.
        """
        changes = Changes()
        # A pool that another endpoint has by now is not deleted for this one.
        pending = {
            pool.name for state, pool in self._endpoints.pools() if self._is_deleted(state)
        } & set(pools)
        for state in self._endpoints:
            if not self._is_deleted(state) or state.pools.keys() & pending:
                continue
            logger.info("endpoint removed", extra={"driver": self.driver, "endpoint": state.name})
            self._endpoints.forget(state, changes=changes)
        self._notify(changes)

    # ------------------------------------------------------------ time

    async def restore(self) -> None:
        """Read the store, before anything runs; if that fails, it is tried again later."""
        await self._writer.load()

    async def run(self) -> None:
        """Follow the time, and write to the store, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._writer.run())
            group.create_task(self._follow_time())

    def wake(self) -> None:
        """Check again whether this instance is primary, and whether the sources are ready."""
        self._awake.set()

    async def _follow_time(self) -> None:
        try:
            while True:
                self._awake.clear()
                poll_seconds = POLL_SECONDS if self._pass_time() else IDLE_SECONDS
                now = self._now()
                ends = [when for when in self._endpoints.ends() if when > now]
                until = min([*ends, now + poll_seconds])
                try:
                    async with asyncio.timeout_at(until):
                        await self._awake.wait()
                except TimeoutError:
                    self._passed = max(self._passed, until)
        finally:
            for timer in self._timers.values():
                timer.cancel()

    def _pass_time(self) -> bool:
        """Do all that is due by now; return whether the manager waits for something that nobody
        reports."""
        waiting = False
        self._writer.check_primary()
        moment, graces, changes = self._moment(), self._endpoints.graces, Changes()
        if moment.now >= graces.start_until:
            self._adopted = {}
        for state in self._endpoints:
            state.age(graces, moment, changes=changes)
            if not removal_due(state.life, graces, now=moment.now):
                continue
            if not state.pools:
                self._endpoints.forget(state, changes=changes)
            elif self._sources_ready():
                logger.warning(
                    "endpoint was unavailable for too long, its devices are removed",
                    extra={
                        "driver": self.driver,
                        "endpoint": state.name,
                        "reason": state.reason,
                    },
                )
                state.remove(changes=changes)
            else:
                waiting = True
        if (complete := self._complete()) != self._was_complete:
            self._was_complete = complete
            changes.published = True
        self._notify(changes)
        return waiting or not complete or not self._writer.current

    def _schedule(self, state: EndpointState, keys: Iterable[DeviceKey]) -> None:
        """Have devices settled when time alone changes them."""
        loop = asyncio.get_running_loop()
        for key in keys:
            pool = state.pools.get(key.pool)
            if pool is None or (when := pool.next_change(key.name)) is None:
                continue
            timer = self._timers.get((state.name, key))
            if timer is not None:
                if timer.when() <= when:
                    continue  # a device that flaps puts its time off again and again
                timer.cancel()
            self._timers[state.name, key] = loop.call_at(when, self._settle, state.name, key, when)

    def _settle(self, endpoint: str, key: DeviceKey, when: float) -> None:
        del self._timers[endpoint, key]
        self._passed = max(self._passed, when)
        if (state := self._endpoints.find(endpoint)) is None:
            return
        changes = Changes()
        state.settle(key, self._moment(), changes=changes)
        self._schedule(state, [key])
        self._notify(changes)

    def _now(self) -> float:
        # A loop's timer may fire a hair before its time; for us the time has come.
        return max(asyncio.get_running_loop().time(), self._passed)

    def _moment(self) -> Moment:
        return Moment(now=self._now(), wall=self._wall_clock(), held=self._held)

    # ------------------------------------------------------------ the store, and notifications

    def _loaded(self, rows: Mapping[str, StoredEndpoint]) -> None:
        # An endpoint that has listed its devices before the rows were read differs from its row.
        changes = Changes()
        changes.mark_all()
        self._endpoints.restore(rows, self._moment(), changes=changes)
        self._notify(changes)

    def _written(self) -> None:
        removing = any(state.phase is Phase.REMOVING for state in self._endpoints)
        self._notify(Changes(published=removing))

    def _make_endpoint(self, name: str) -> EndpointState:
        return EndpointState(
            name,
            node=self._node,
            timing=self._timing,
            moment=self._moment(),
            open_ended=self._open_ended,
        )

    def _is_deleted(self, state: EndpointState) -> bool:
        """Return whether an endpoint's pools are deleted: the store must have recorded it first, so
        that a restart goes on with it."""
        stored = self._writer.stored.get(state.name)
        return state.phase is Phase.REMOVING and stored is not None and stored.removing

    def _complete(self) -> bool:
        return self._writer.loaded and self._endpoints.accounted() and self._sources_ready()

    def _notify(self, changes: Changes) -> None:
        if changes.published:
            self._publication = None
        if changes.health:
            self._health_states = None
        if changes.stored:
            self._writer.changed()
        if changes.published or changes.health:
            self.revision.advance()
