"""
The device manager of one driver: which devices there are, and how they are.

It hears from endpoints what they have, keeps it for as long as the kubelet's device manager would,
and says what is to be published and what the kubelet is told. The endpoint is the source of truth;
nothing between it and the manager caches devices. What a stop means is decided in
:mod:`.lifecycle`, what health means in :mod:`.health`; this is the shell around them: time, the
store, and who listens.

It must not know the API server, slices, claims beyond their devices, or gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from drakit.device import Health, Inventory
from drakit_nodeplugin.config import Devices
from drakit_nodeplugin.devices.endpoint_registry import EndpointRegistry
from drakit_nodeplugin.devices.endpoint_state import EndpointState, Moment
from drakit_nodeplugin.devices.hardware import Hardware, HeldDevice
from drakit_nodeplugin.devices.health import HealthTiming
from drakit_nodeplugin.devices.leftout import LeftOutTeller
from drakit_nodeplugin.devices.lifecycle import Phase, removal_due
from drakit_nodeplugin.devices.pauses import Pauses
from drakit_nodeplugin.devices.pool_state import Changes
from drakit_nodeplugin.devices.pools import (
    Capacity,
    DeviceHealth,
    Publication,
    PublishedTaints,
    pool_name,
)
from drakit_nodeplugin.devices.revision import Revision
from drakit_nodeplugin.devices.stored import EndpointStore, StoredEndpoint
from drakit_nodeplugin.devices.storing import EndpointWriter
from drakit_nodeplugin.devices.views import (
    capacity_of,
    health_of,
    pools_of,
    publication_of,
    taken_from,
)
from drakit_nodeplugin.devices.waking import Waking
from drakit_nodeplugin.endpoints.endpoint import DeviceKey, HealthReport

__all__ = ("DeviceManager",)

logger = logging.getLogger(__name__)


class DeviceManager:
    """An :class:`~drakit_nodeplugin.endpoints.endpoint.EndpointListener` that others can ask."""

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
        on_left_out: Callable[[Mapping[str, str]], None] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        `endpoints` are those that are expected at the start; others may come. If none is expected,
        any number may come, each with pools of its own. Nothing is stored while `primary` is not
        set: another instance of the driver does it. Pools are removed only while `sources_ready`
        says that what is missing is really gone.
        """
        self.driver = driver
        self.revision = Revision()
        """Advances when what is published or told to the kubelet changes."""

        self._node = node
        self._sources_ready = sources_ready
        self._wall_clock = wall_clock
        self._timing = HealthTiming(
            recovery_seconds=settings.health.recovery_period,
            eviction_seconds=settings.health.eviction_delay,
        )
        self._pauses = Pauses()
        self._held: dict[str, Collection[HeldDevice]] = {}
        self._adopted: dict[DeviceKey, PublishedTaints] = {}
        self._was_complete = False
        self._publication: Publication | None = None
        self._health_states: tuple[DeviceHealth, ...] | None = None
        self._waking: Waking[tuple[str, DeviceKey]] = Waking(
            pass_time=self._pass_time, ends=self._ends
        )
        self._endpoints = EndpointRegistry(
            endpoints, settings=settings, make=self._made_endpoint, now=self._waking.now
        )
        self._left_out = LeftOutTeller(driver, on_left_out)
        self._writer = EndpointWriter(
            driver,
            store,
            primary=primary,
            rows=self._rows,
            on_loaded=self._loaded,
            on_written=self._written,
        )

    # ------------------------------------------------------------ what others ask

    def publication(self) -> Publication:
        """Give what is to be published now. The same object for as long as nothing changed."""
        self._hear_waiting()
        complete = self._complete()
        known = self._publication
        if known is None or known.complete != complete:
            known = self._publication = publication_of(
                self._endpoints, out=self._out, complete=complete
            )
        return known

    def health_states(self) -> Sequence[DeviceHealth]:
        """Give the health of every device; the same object for as long as nothing changed."""
        self._hear_waiting()
        if self._health_states is None:
            self._health_states = health_of(self._endpoints)
        return self._health_states

    def capacity(self, allocated: Mapping[str, Collection[str]]) -> Capacity:
        """Sort all devices; `allocated` are those that claims hold, by the pool's API name."""
        self._hear_waiting()
        return capacity_of(self._endpoints, allocated)

    def hardware(self) -> Hardware | None:
        """
        Return the endpoints' main inventories, whichever is published.

        None for a driver with an unknown number of endpoints, such as a driver of device plugins:
        their devices consume only their names.
        """
        if self._endpoints.open_ended:
            return None
        self._hear_waiting()
        return Hardware(
            pools={
                pool.name: pool.content
                for state, pool in pools_of(self._endpoints)
                if state.phase is Phase.PRESENT and pool.content is not None
            }
        )

    @property
    def stop_reason(self) -> str | None:
        """Why an endpoint that should be there is away; None if all are, or may still come."""
        return self._endpoints.stop_reason

    @property
    def known(self) -> bool:
        """Whether any endpoint is there, may still come, or has left something behind."""
        gone = Phase.STOPPED
        return any(state.pools or state.phase is not gone for state in self._endpoints)

    @property
    def left_out(self) -> Mapping[str, str]:
        """What endpoints have and cannot be published, with the reason; the first 100 of each."""
        self._hear_waiting()
        states = self._endpoints
        return {name: why for state in states for name, why in state.left_out.items()}

    @property
    def left_out_count(self) -> int:
        """How many devices cannot be published, those without a reason in `left_out` included."""
        self._hear_waiting()
        states = self._endpoints
        return sum(state.checked.left_out_count + len(state.refused) for state in states)

    @property
    def device_count(self) -> int:
        """How many devices there are, in whatever state."""
        self._hear_waiting()
        return sum(len(pool.names) for _, pool in pools_of(self._endpoints))

    # ------------------------------------------------------------ what endpoints say

    def replaced(self, endpoint: str, inventory: Inventory) -> None:
        """The endpoint is there and has this, all of it."""
        state = self._endpoints.get(endpoint)
        moment = self._moment()
        if state.phase is Phase.PRESENT:
            until = self._pauses.put(endpoint, inventory, now=moment.now)
            if until is not None:
                self._waking.wake_by(until)
                return
        self._take(state, inventory, {}, moment)

    def reported(self, endpoint: str, report: HealthReport) -> None:
        """Devices of the endpoint are like this; a device that it does not have is ignored."""
        state = self._endpoints.find(endpoint)
        if state is None or state.phase is not Phase.PRESENT:
            return
        words = {
            DeviceKey(pool_name(self._node, key.pool), key.name): word
            for key, word in report.devices.items()
        }
        if self._pauses.put_words(endpoint, words):
            return
        changes = Changes()
        self._look_later(state, state.hear(words.items(), self._moment(), changes=changes))
        self._made(changes)

    def stopped(self, endpoint: str, reason: str) -> None:
        """The endpoint is away; what it had stays known until its grace period ends. One that had
        never anything, and that nobody expects, stays unknown."""
        if (state := self._endpoints.find(endpoint)) is None:
            return
        self._hear_waiting(endpoint)
        changes = Changes()
        state.stop(reason, self._moment(), changes=changes)
        self._made(changes)
        self._waking.wake()

    # ------------------------------------------------------------ what others say

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
        changes = Changes()
        moment = self._moment()
        for pool in old.keys() | self._held.keys():
            for state in self._endpoints:
                state.look_at(pool, (), moment, changes=changes)
        self._made(changes)

    def adopt(self, published: Mapping[tuple[str, str], PublishedTaints]) -> None:
        """
        Take over how devices were tainted before a restart: unhealthy ones recover as if there was
        none, and all taints keep their times, whatever becomes of what is published.

        Called once by who publishes, before it asks for the first publication: the taints by the
        pool's API name and the device's. For a driver without any source of health
        ``drakit.dev/unhealthy`` must not be among them.
        """
        moment = self._moment()
        devices = {DeviceKey(*key): taints for key, taints in published.items()}
        changes = Changes()
        for state in self._endpoints:
            adopted = state.adopt(devices, moment, changes=changes)
            self._look_later(state, adopted)
            for key in adopted:
                devices.pop(key, None)
        self._adopted = devices if moment.now < self._endpoints.graces.start_until else {}
        self._made(changes)

    def exist(self, pools: Collection[str]) -> None:
        """
        The API server holds these pools of the driver on this node, and no others.

        Called by who publishes, whenever it knows: a pool that was to be deleted, and is, can be
        forgotten.
        """
        changes = Changes()
        # A pool that somebody else has by now is not this one's to be deleted.
        pending = {
            pool.name for state, pool in pools_of(self._endpoints) if self._out(state)
        } & set(pools)
        for state in self._endpoints:
            if not self._out(state) or state.pools.keys() & pending:
                continue
            logger.info("endpoint removed", extra={"driver": self.driver, "endpoint": state.name})
            self._forget(state, changes=changes)
        self._made(changes)

    # ------------------------------------------------------------ time and the store

    async def restore(self) -> None:
        """Read the store, before anything runs; if it cannot be read, that is tried again later."""
        self._endpoints.begin()
        await self._writer.load()

    async def run(self) -> None:
        """Look at graces and health, and write to the store, until cancelled."""
        self._endpoints.begin()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._writer.run())
            group.create_task(self._waking.run())

    def _ends(self) -> Iterator[float]:
        yield from self._pauses.ends()
        yield from self._endpoints.ends()

    def look(self) -> None:
        """Something may have changed that was read so far: whether this instance is primary, and
        whether the sources are ready."""
        self._waking.wake()

    def _pass_time(self) -> bool:
        """Do all that is due by now; tell whether something is waited for that nobody tells of."""
        waiting = False
        self._writer.look()
        moment, graces, changes = self._moment(), self._endpoints.graces, Changes()
        for endpoint in self._pauses.over(moment.now):
            self._hear_waiting(endpoint)
        due: dict[str, list[DeviceKey]] = {}
        for endpoint, key in self._waking.due(moment.now):
            due.setdefault(endpoint, []).append(key)
        for endpoint, keys in due.items():
            if (state := self._endpoints.find(endpoint)) is not None:
                self._look_later(state, state.settle(keys, moment, changes=changes))
        if moment.now >= graces.start_until:
            self._adopted = {}
        for state in self._endpoints:
            state.age(graces, moment, changes=changes)
            if not removal_due(state.life, graces, now=moment.now):
                continue
            if not state.pools:
                self._forget(state, changes=changes)
            elif self._sources_ready():
                logger.warning(
                    "endpoint was away for too long, its devices are removed",
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
        self._made(changes)
        return waiting or not complete or not self._writer.current

    # ------------------------------------------------------------ the store

    def _rows(self) -> Mapping[str, StoredEndpoint]:
        return self._endpoints.rows(self._writer.stored)

    def _loaded(self, rows: Mapping[str, StoredEndpoint]) -> None:
        # Whatever was stored has changed where an endpoint has spoken before this could be read.
        changes = Changes(published=True, health=True, stored=True)
        self._endpoints.restore(rows, self._moment(), changes=changes)
        self._made(changes)

    def _written(self) -> None:
        removing = any(state.phase is Phase.REMOVING for state in self._endpoints)
        self._made(Changes(published=removing))

    # ------------------------------------------------------------ within

    def _made_endpoint(self, name: str) -> EndpointState:
        return EndpointState(
            name,
            node=self._node,
            timing=self._timing,
            moment=self._moment(),
            open_ended=self._endpoints.open_ended,
        )

    def _forget(self, state: EndpointState, *, changes: Changes) -> None:
        """What an endpoint had is deleted, or it had nothing."""
        self._endpoints.forget(state, changes=changes)
        self._pauses.forget(state.name)
        self._left_out.forget(state.name)

    def _moment(self) -> Moment:
        return Moment(
            now=self._waking.now(),
            wall=self._wall_clock(),
            held=self._held,
        )

    def _take(
        self,
        state: EndpointState,
        inventory: Inventory,
        words: Mapping[DeviceKey, Health],
        moment: Moment,
    ) -> None:
        changes = Changes()
        taken = taken_from(state, self._endpoints)
        later = state.take(inventory, moment, taken=taken, changes=changes)
        later += state.hear(words.items(), moment, changes=changes)
        if self._adopted:
            adopted = {key: self._adopted.pop(key) for key in later if key in self._adopted}
            later += state.adopt(adopted, moment, changes=changes)
        self._look_later(state, later)
        size = len(state.checked.devices)
        self._pauses.begin(state.name, devices=size, now=moment.now)
        if changes.stored:
            logger.info(
                "devices changed",
                extra={"driver": self.driver, "endpoint": state.name, "devices": size},
            )
        self._left_out.tell(state.name, state.left_out)
        self._made(changes)

    def _hear_waiting(self, endpoint: str | None = None) -> None:
        """Take what has come in a pause, of one endpoint or of all."""
        for name in self._pauses.waiting() if endpoint is None else [endpoint]:
            if (waiting := self._pauses.take(name)) is not None:
                state = self._endpoints.get(name)
                self._take(state, waiting.inventory, waiting.words, self._moment())

    def _look_later(self, state: EndpointState, keys: Iterable[DeviceKey]) -> None:
        for key in keys:
            pool = state.pools.get(key.pool)
            if pool is not None and (when := pool.next_look(key.name)) is not None:
                self._waking.want((state.name, key), when)

    def _out(self, state: EndpointState) -> bool:
        """Tell whether an endpoint's pools are to be deleted: a restart must know of it first."""
        stored = self._writer.stored.get(state.name)
        return state.phase is Phase.REMOVING and stored is not None and stored.removing

    def _complete(self) -> bool:
        return self._writer.loaded and self._endpoints.accounted() and self._sources_ready()

    def _made(self, changes: Changes) -> None:
        """Tell who must know of changes."""
        if changes.published:
            self._publication = None
        if changes.health:
            self._health_states = None
        if changes.stored:
            self._writer.changed()
        if changes.published or changes.health:
            self.revision.advance()
