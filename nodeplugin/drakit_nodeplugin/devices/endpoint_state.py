"""
One endpoint as the manager knows it: its life, and the pools that it has.

What its life means is decided in :mod:`.lifecycle`; what becomes of a pool's devices in
:mod:`.pool_state`. Each change says which devices time will change next.

It must not know clocks, other endpoints, or the store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from drakit.device import CounterSet, Device, Health, Inventory
from drakit.resource.inventory import CheckedInventory, check_inventory
from drakit_nodeplugin.devices.hardware import HeldDevice, PoolContent
from drakit_nodeplugin.devices.health import HealthTiming
from drakit_nodeplugin.devices.lifecycle import Graces, Life, Phase, phase
from drakit_nodeplugin.devices.pool_state import Changes, Circumstances, PoolState
from drakit_nodeplugin.devices.pools import PublishedTaints, pool_name
from drakit_nodeplugin.devices.stored import StoredEndpoint
from drakit_nodeplugin.endpoints.endpoint import DeviceKey

__all__ = ("SILENT", "EndpointState", "Moment")

SILENT = "it has not listed its devices since the node plugin was started"
"""Why an endpoint is away that has said nothing yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When something happens, and what is so then."""

    now: float
    """The loop's time."""
    wall: float
    """Seconds since 1970."""
    held: Mapping[str, Collection[HeldDevice]]
    """The holds of claims in pools where a claim is still being unprepared."""


@dataclass(kw_only=True, slots=True)
class _Parts:
    """What an inventory says of one pool, while it is sorted."""

    devices: dict[str, Device] = field(default_factory=dict[str, Device])
    counter_sets: list[CounterSet] = field(default_factory=list[CounterSet])
    fallback: dict[str, Device] = field(default_factory=dict[str, Device])


class EndpointState:
    """An endpoint in memory. Pools have their names in the API."""

    def __init__(
        self,
        name: str,
        *,
        node: str,
        timing: HealthTiming,
        moment: Moment,
        open_ended: bool = False,
    ) -> None:
        """It is away until it says what it has. `open_ended`: it is one of the endpoints of a
        driver of which nobody knows beforehand how many it has."""
        self.name = name
        self.life = Life(stopped_since=moment.now)
        self.phase = Phase.AWAITED
        self.reason = SILENT
        """Why it is away, if it is."""
        self.stopped_at = moment.wall
        """Since when it is away, if it is; seconds since 1970."""
        self.pools: dict[str, PoolState] = {}
        self.checked = CheckedInventory()
        """What it said last, without what cannot be published."""
        self.refused: dict[str, str] = {}
        """Pools of its that another endpoint has, and why they are left out."""
        self._node = node
        self._timing = timing
        self._open_ended = open_ended

    @property
    def away(self) -> str | None:
        """Why its devices cannot be used, as a sentence; None while it is there."""
        if self.phase is Phase.PRESENT:
            return None
        who = f"endpoint {self.name}" if self._open_ended else "the driver"
        return f"{who} is stopped: {self.reason}"

    @property
    def left_out(self) -> Mapping[str, str]:
        """Reasons by what is not published of what it has."""
        return {**self.checked.left_out, **self.refused}

    def row(self) -> StoredEndpoint | None:
        """Give what is to be stored of it; None if there is nothing."""
        if not self.pools:
            return None
        present = self.phase is Phase.PRESENT
        return StoredEndpoint(
            name=self.name,
            pools={name: tuple(sorted(pool.names)) for name, pool in self.pools.items()},
            stopped_at=None if present else self.stopped_at,
            removing=self.phase is Phase.REMOVING,
        )

    # ------------------------------------------------------------ what changes it

    def restore(self, row: StoredEndpoint, moment: Moment) -> None:
        """
        Begin with what was stored of it: it is away, and was before the plugin's start.

        Again with what another instance of the driver has stored since, if it is that one's turn no
        more: it was there until now, unless that one says otherwise.
        """
        stopped_at = moment.wall if row.stopped_at is None else row.stopped_at
        self.stopped_at = min(stopped_at, moment.wall)
        since = moment.now - (moment.wall - self.stopped_at)
        self.life = Life(stopped_since=since, known=True, removing=row.removing)
        self.pools = {name: self.pools.get(name) or self._pool(name) for name in row.pools}
        for name, devices in row.pools.items():
            pool = self.pools[name]
            pool.restore(devices)
            pool.look(None, self._circumstances(name, moment), changes=Changes())

    def take(
        self, inventory: Inventory, moment: Moment, *, taken: Collection[str], changes: Changes
    ) -> list[DeviceKey]:
        """
        Take what it has, whether it was away or not; pools that others have are left out.

        Gives the devices that must be looked at later. Their keys have the pool's name in the API.
        """
        returned = self.life.stopped_since is not None
        self.checked = check_inventory(inventory, node=self._node, previous=self.checked)
        contents = self._contents()
        self.refused = {
            name: "another source of the driver's devices has this pool already"
            for name, content in contents.items()
            if name in taken and content.devices
        }
        self.life = replace(self.life, stopped_since=None, spoken=True, removing=False)
        self.phase = Phase.PRESENT
        for name in [name for name in self.pools if name not in contents or name in taken]:
            del self.pools[name]
            changes.published = changes.health = changes.stored = True
        if returned:
            changes.published = changes.health = changes.stored = True
        later: list[DeviceKey] = []
        for name, content in contents.items():
            if name in taken:
                continue
            if name not in self.pools:
                self.pools[name] = self._pool(name)
                changes.published = changes.stored = True
            pool = self.pools[name]
            dirty = pool.replace(content, returned=returned, now=moment.now, changes=changes)
            names = None if returned else dirty
            pool.look(names, self._circumstances(name, moment), changes=changes)
            later += [DeviceKey(name, device) for device in dirty]
        return later

    def hear(
        self, words: Iterable[tuple[DeviceKey, Health]], moment: Moment, *, changes: Changes
    ) -> list[DeviceKey]:
        """Take in words on its devices; gives those that must be looked at later."""
        heard: dict[str, list[str]] = {}
        for (name, device), word in words:
            pool = self.pools.get(name)
            if pool is not None and pool.observe(device, word, now=moment.now):
                heard.setdefault(name, []).append(device)
        return self._look(heard, moment, changes=changes)

    def settle(
        self, devices: Iterable[DeviceKey], moment: Moment, *, changes: Changes
    ) -> list[DeviceKey]:
        """See what time alone has changed of devices; gives those to be looked at later."""
        settled: dict[str, list[str]] = {}
        later: list[DeviceKey] = []
        for key in devices:
            pool = self.pools.get(key.pool)
            if pool is None:
                continue
            if pool.settle(key.name, now=moment.now):
                settled.setdefault(key.pool, []).append(key.name)
            else:
                later.append(key)
        return later + self._look(settled, moment, changes=changes)

    def adopt(
        self, devices: Mapping[DeviceKey, PublishedTaints], moment: Moment, *, changes: Changes
    ) -> list[DeviceKey]:
        """Take over which devices were tainted before a restart, and since when; gives those."""
        adopted: dict[str, list[str]] = {}
        for key, published in devices.items():
            pool = self.pools.get(key.pool)
            if pool is not None and key.name in pool:
                pool.adopt(key.name, published, now=moment.now)
                if self.phase is Phase.PRESENT:
                    pool.list_again(key.name, now=moment.now)
                adopted.setdefault(key.pool, []).append(key.name)
        return self._look(adopted, moment, changes=changes)

    def stop(self, reason: str, moment: Moment, *, changes: Changes) -> None:
        """It is away, or is away for another reason; what it has stays known."""
        if self.life.stopped_since is None:
            self.life = replace(self.life, stopped_since=moment.now)
            self.phase = Phase.STOPPED
            self.stopped_at = moment.wall
            changes.published = changes.health = changes.stored = True
            for pool in self.pools.values():
                pool.lose_sight(now=moment.now)
        elif reason == self.reason:
            return
        self.reason = reason
        self.look_at_all(moment, changes=changes)

    def age(self, graces: Graces, moment: Moment, *, changes: Changes) -> None:
        """See what time alone has changed of its life."""
        now = phase(self.life, graces, now=moment.now)
        if now is not self.phase:
            self.phase = now
            changes.published = changes.health = changes.stored = True
            self.look_at_all(moment, changes=changes)

    def remove(self, *, changes: Changes) -> None:
        """Its grace period has ended."""
        self.life = replace(self.life, removing=True)
        self.phase = Phase.REMOVING
        changes.stored = True

    def forget(self, *, changes: Changes) -> None:
        """What it had is deleted; it can still return."""
        self.life = replace(self.life, removing=False, known=False)
        self.phase = Phase.STOPPED  # nothing is to be deleted any more, from this moment on
        self.pools = {}
        self.checked = CheckedInventory()
        self.refused = {}
        changes.published = changes.health = changes.stored = True

    def look_at_all(self, moment: Moment, *, changes: Changes) -> None:
        """Bring all of its devices up to date with what is so now."""
        for name, pool in self.pools.items():
            pool.look(None, self._circumstances(name, moment), changes=changes)

    def look_at(
        self, pool: str, names: Collection[str], moment: Moment, *, changes: Changes
    ) -> None:
        """Bring some devices of a pool up to date."""
        if (state := self.pools.get(pool)) is not None:
            known = [name for name in names if name in state]
            state.look(known, self._circumstances(pool, moment), changes=changes)

    def _look(
        self, devices: Mapping[str, Collection[str]], moment: Moment, *, changes: Changes
    ) -> list[DeviceKey]:
        for pool, names in devices.items():
            self.pools[pool].look(names, self._circumstances(pool, moment), changes=changes)
        return [DeviceKey(pool, name) for pool, names in devices.items() for name in names]

    def _circumstances(self, pool: str, moment: Moment) -> Circumstances:
        return Circumstances(
            away=self.away,
            held=moment.held.get(pool, ()),
            wall=int(moment.wall),
        )

    def _pool(self, name: str) -> PoolState:
        return PoolState(name, timing=self._timing)

    def _contents(self) -> Mapping[str, PoolContent]:
        """
        Sort what it said by pool.

        A driver that has nothing has an empty pool, by which observers tell it from no driver. Of
        several endpoints one that has nothing any more keeps the pools that it had, as with the
        kubelet a resource without devices stays; one that had none yet has none.
        """
        parts: dict[str, _Parts] = {}
        for device in self.checked.devices:
            parts.setdefault(device.pool, _Parts()).devices[device.name] = device
        for counters in self.checked.counter_sets:
            parts.setdefault(counters.pool, _Parts()).counter_sets.append(counters)
        for device in self.checked.fallback or ():
            parts.setdefault(device.pool, _Parts()).fallback[device.name] = device
        has_fallback = self.checked.fallback is not None
        if not parts and self._open_ended:
            return {name: PoolContent(devices={}) for name in self.pools}
        return {
            pool_name(self._node, pool): PoolContent(
                devices=part.devices,
                counter_sets=tuple(part.counter_sets),
                fallback=part.fallback if has_fallback else None,
            )
            for pool, part in (parts or {"": _Parts()}).items()
        }
