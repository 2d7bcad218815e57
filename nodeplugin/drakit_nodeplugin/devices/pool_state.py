"""
The devices of one pool of one endpoint: their health, their taints, and which of them claims block.

A device that an inventory no longer lists is *gone*. It remains, with a taint, until the manager
has found that no claim holds it. If the driver has requested it, the pods of a device that is not
withdrawn are evicted, but only after a delay, because a device that is only briefly unplugged
returns within that time. An eviction that has begun continues until the device returns.

The endpoint applies inventories, reports and time. All pools and endpoints of a driver share a
:class:`DriverState`, which records the resulting changes. The manager reads and resets these
changes when it notifies its listeners. A returned object is not replaced until something changes,
so readers compare objects by identity. The same applies to the devices of an inventory.
:mod:`.taints` decides the taints of a device.

Does not depend on other pools.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from drakit.device import CounterSet, Device, Health, TaintEffect
from drakit_driver.runtime.contract import validated_health
from drakit_formats.resource.device import (
    counter_set_body,
    counter_set_of,
    device_body,
    device_of,
)
from drakit_nodeplugin.config import DeviceHealthSettings
from drakit_nodeplugin.devices.model import (
    DesiredDevice,
    DesiredPool,
    DeviceHealth,
    PoolCapacity,
    PublishedTaints,
    keep_places,
)
from drakit_nodeplugin.devices.taints import (
    DOMAIN,
    GONE,
    MAINTENANCE,
    NOT_PUBLISHED,
    UNHEALTHY,
    UNKNOWN,
    Condition,
    adopted,
    listed,
    lost,
    next_change,
    observed,
    settled,
    stamped,
    taints,
)
from drakit_nodeplugin.state.holds import HeldDevice, PoolContent, blocked_by_unpreparing

_NEITHER: tuple[frozenset[str], frozenset[str]] = frozenset(), frozenset()
"""An empty pair of sets: for the main inventory, and for the fallback."""

_GONE_MESSAGE = (
    "the device is gone: its driver no longer lists it; a running container keeps its device node, "
    "which does not work, and cannot open another one"
)
_WITHDRAWN_MESSAGE = (
    "the device is withdrawn: it is present, but its driver no longer lists it; its pods keep it"
)

# ---------------------------------------------------------------- driver state


class DriverState:
    """The state that one driver's endpoints share: settings, clocks, claim holds, pending
    notifications."""

    def __init__(
        self,
        *,
        node: str,
        open_ended: bool,
        timing: DeviceHealthSettings,
        gone_eviction_seconds: float,
        now: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """Create the state. `open_ended` means that the number of endpoints is unknown. If the
        driver requests the eviction of a gone device's pods, it begins after
        `gone_eviction_seconds`. `now` returns the loop time, and `wall_clock` a Unix timestamp."""
        self.node = node
        self.open_ended = open_ended
        self.timing = timing
        self.gone_eviction_seconds = gone_eviction_seconds
        self.now = now
        self.wall = wall_clock
        self.in_use: Mapping[str, Collection[str]] | None = None
        """The devices that claims hold, keyed by pool. None if they have been unknown since the
        start."""
        self.held: Mapping[str, Collection[HeldDevice]] = {}
        """The claim holds in pools in which a claim is still being unprepared, keyed by pool. The
        object is not replaced until something changes."""
        self.maintenance: frozenset[tuple[str, str]] | None = frozenset()
        """The devices in maintenance, as pairs of pool and name. None if they have been unknown
        since the start."""
        self.published_changed = False
        """Whether the publication has changed since the last notification."""
        self.health_changed = False
        """Whether the health that the kubelet gets has changed since the last notification."""
        self.stored_changed = False
        """Whether the rows for the store have changed since the last notification."""
        self.vanished = False
        """Whether more devices may be gone since the last notification."""

    def changed(self) -> None:
        """Record that anything may have changed."""
        self.published_changed = self.health_changed = self.stored_changed = True
        self.vanished = True


# ---------------------------------------------------------------- pool state


class PoolState:
    """The devices of a pool, with their health and taints."""

    def __init__(self, name: str, driver: DriverState) -> None:
        self.name = name
        """The API name of the pool."""
        self._driver = driver
        self._devices: dict[str, DesiredDevice] = {}
        self._fallback: dict[str, DesiredDevice] | None = None
        self._counter_sets: tuple[CounterSet, ...] = ()
        self._held_content = ""
        self._inventory_health: dict[str, Health] = {}
        """The health in the last inventory. Only a change is applied, so a repeated value has no
        effect."""
        self._conditions: dict[str, Condition] = {}
        """The conditions of devices whose health has been reported."""
        self.due: dict[str, float] = {}
        """The time at which each device's condition changes without an event (loop clock)."""
        self._health: dict[str, DeviceHealth] = {}
        self._published: dict[str, PublishedTaints] = {}
        """The taints from before a restart, for devices that have not been listed since."""
        self.gone: frozenset[str] = frozenset()
        """Devices that the endpoint no longer lists. A claim holds each of them, or may hold it.
        They are included in the devices and in the fallback."""
        self._vanished = _NEITHER
        """For each inventory, the devices that only the other inventory still lists, and that
        remain unchanged in this one. A claim holds each of them, or may hold it, and either
        inventory may be published."""
        self._copied = _NEITHER
        """For each inventory, the held devices that only the other inventory lists. Their entries
        are updated when the other inventory changes."""
        self.evicting: frozenset[str] = frozenset()
        """Devices whose pods must be evicted if the device is gone. They may still be listed."""
        self._withdrawn: frozenset[str] = frozenset()
        """Gone devices that, according to the driver, are still present."""
        self.evict_at: dict[str, float] = {}
        """The time at which the pods of each gone device are evicted (loop clock). Empty while the
        endpoint is unavailable, because it is unknown whether the devices have returned."""
        self._evicted: frozenset[str] = frozenset()
        """Gone devices whose pods are evicted."""
        self.content: PoolContent | None = None
        """The endpoint's last inventory. None if it has not sent one since the plugin's start."""
        self._held: Collection[HeldDevice] = ()
        self._unpreparing: frozenset[str] = frozenset()
        """Devices that new claims cannot get, because of claims that are being unprepared."""
        self._counted: PoolContent | None = None
        """The content for which `_unpreparing` was computed."""

    # ------------------------------------------------------------ state

    @property
    def names(self) -> Collection[str]:
        """The device names. Gone devices are included, but devices that are only in the fallback
        are not."""
        return self._devices.keys()

    @property
    def empty(self) -> bool:
        """Whether neither the pool nor its fallback has devices."""
        return not (self._devices or self._fallback)

    @property
    def releasable(self) -> frozenset[str]:
        """The devices, in either inventory, that remain only while a claim holds them."""
        return self.gone.union(*self._vanished)

    @property
    def has_listed(self) -> bool:
        """Whether at least one device is not gone."""
        return bool(self._devices.keys() - self.gone)

    def __contains__(self, name: object) -> bool:
        """Return whether the pool or its fallback has a device with this name."""
        return name in self._devices or name in (self._fallback or ())

    def device(self, name: str) -> Device | None:
        """Return a device from the last inventory (from the main one, or otherwise from the
        fallback), or as it was last published. None if it is unknown."""
        if self.content is not None and (found := self.content.device(name)) is not None:
            return found
        published = self._devices.get(name)
        return None if published is None else published.device

    @property
    def health(self) -> Collection[DeviceHealth]:
        """The device health that is reported to the kubelet."""
        return self._health.values()

    def desired(self) -> DesiredPool:
        """Return the pool to publish."""
        fallback, content = self._fallback, self.content
        return DesiredPool(
            devices=tuple(self._devices.values()),
            counter_sets=self._counter_sets,
            keeps_counter_sets=content is None
            or any(entry.device is None for entry in self._kept_entries()),
            fallback=None if fallback is None else tuple(fallback.values()),
            ordered=content is not None and content.ordered,
            partition_type_attribute=content and content.partition_type_attribute,
        )

    def capacity(self, *, available: bool) -> PoolCapacity:
        """Return the devices, grouped by state. While the endpoint is unavailable, no device is
        healthy."""
        failed = {name for name, known in self._conditions.items() if known.tainted}
        names = frozenset(self._devices) - self.gone - self._kept(0)
        unhealthy = names & failed if available else names
        healthy = names - unhealthy
        tainted = frozenset(
            name
            for name in healthy
            if any(each.effect != "None" for each in self._devices[name].taints)
        )
        return PoolCapacity(healthy=healthy, tainted=tainted, unhealthy=unhealthy, gone=self.gone)

    # ------------------------------------------------------------ changes

    def restore(
        self,
        names: Iterable[str],
        *,
        gone: Collection[str],
        evicting: Iterable[str],
        held: str = "",
    ) -> None:
        """Initialize from stored names, and from the result of :meth:`held_content` before a
        restart."""
        stored: dict[str, list[Any]] = orjson.loads(held) if held else {}
        devices, fallback = (
            {device.name: device for device in map(device_of, stored.get(key, ()))}
            for key in ("devices", "fallback")
        )
        self._held_content = held
        self._counter_sets = tuple(map(counter_set_of, stored.get("sharedCounters", ())))
        self.gone, self.evicting = frozenset(gone), frozenset(evicting)

        def entries(known: Mapping[str, Device]) -> dict[str, DesiredDevice]:
            every = dict.fromkeys((*names, *gone, *known))
            return {name: DesiredDevice(name=name, device=known.get(name)) for name in every}

        # Either inventory may have been published, so keep devices that are known only by name in
        # both.
        self._devices = entries(fallback | devices)
        self._fallback = entries(devices | fallback) if fallback else None

    def held_content(self) -> str:
        """Return the published state of held devices, and the counter sets that they consume from,
        as JSON. Empty if no device is held."""
        if self._driver.in_use is None:
            return self._held_content
        names = self._driver.in_use.get(self.name, ())
        devices, fallback = (
            [
                entry.device
                for name, entry in sorted((entries or {}).items())
                if name in names and entry.device is not None
            ]
            for entries in (self._devices, self._fallback)
        )
        consumed = {name for device in devices for name in device.consumes}
        parts = {
            "devices": [_stored_body(each) for each in devices],
            "fallback": [_stored_body(each) for each in fallback],
            "sharedCounters": [
                counter_set_body(each) for each in self._counter_sets if each.name in consumed
            ],
        }
        parts = {key: value for key, value in parts.items() if value}
        text = orjson.dumps(parts, option=orjson.OPT_SORT_KEYS).decode() if parts else ""
        self._held_content = text
        return text

    def replace(
        self, content: PoolContent, *, returned: bool, withdrawn: frozenset[str] = frozenset()
    ) -> set[str]:
        """
        Replace the devices with those of an inventory. Return the devices that must be refreshed.

        Devices that remain keep their health. `returned` means that the endpoint was unavailable,
        so that it reports the health of all devices again. The pods of unlisted devices in
        `withdrawn` are not evicted.
        """
        old, old_fallback = self._devices, self._fallback
        old_sets, old_gone, old_evicting = self._counter_sets, self.gone, self.evicting
        old_evicted, old_content = self._evicted, self.content
        old_withdrawn = self._withdrawn
        old_kept = self._kept(0), self._kept(1)
        self.content = content
        self._devices = _merged(content.devices, old)
        fallback = content.fallback
        self._fallback = None if fallback is None else _merged(fallback, old_fallback or old)
        self._keep_vanished(content, old, old_fallback, old_content, withdrawn)
        self._copy_held(old, old_fallback or {})
        self._counter_sets = self._needed_sets(content, old_sets)
        present = self._devices.keys() | (self._fallback or {}).keys()
        dirty = {name for name in present if name not in self._health}
        for new, before in ((self._devices, old), (self._fallback or {}, old_fallback or {})):
            dirty |= {name for name, entry in new.items() if before.get(name) is not entry}
        dirty |= (self.gone ^ old_gone) | (self._evicted ^ old_evicted)
        dirty |= (self._withdrawn ^ old_withdrawn) & present
        dirty |= ((self._kept(0) ^ old_kept[0]) | (self._kept(1) ^ old_kept[1])) & present
        in_use = (self._driver.in_use or {}).get(self.name, ())
        if (
            (self._devices.keys(), self.gone, self.evicting) != (old.keys(), old_gone, old_evicting)
            or (in_use and self._counter_sets != old_sets)
            or not dirty.isdisjoint(in_use)
        ):
            self._driver.stored_changed = True
        if (
            dirty
            or list(old) != list(self._devices)
            or list(old_fallback or ()) != list(self._fallback or ())
            or (old_fallback is None) != (fallback is None)
            or self._counter_sets != old_sets
            or old_content is None
            or old_content.ordered != content.ordered
            or old_content.partition_type_attribute != content.partition_type_attribute
        ):
            self._driver.published_changed = True
        if self._forget_others(present):
            self._driver.health_changed = True
        for name in self.gone - old_gone:
            self._mark_unavailable(name)
        dirty |= self._observe_inventory(content, returned=returned)
        if returned:
            dirty |= {name for name in list(self._conditions) if self.list_again(name)}
        for name in old_gone - self.gone:
            self.list_again(name)
        return dirty

    def _keep_vanished(
        self,
        content: PoolContent,
        old: Mapping[str, DesiredDevice],
        old_fallback: Mapping[str, DesiredDevice] | None,
        old_content: PoolContent | None,
        withdrawn: frozenset[str],
    ) -> None:
        """Keep the devices that were listed before, but that an inventory no longer lists."""
        fallback = content.fallback or {}
        every = {**old, **(old_fallback or {})}
        gone = every.keys() - content.devices.keys() - fallback.keys()
        if content.fallback is None:
            self._vanished = _NEITHER
        else:
            before_main, before_fallback = old.keys(), (old_fallback or old).keys()
            if old_content is not None:
                before_main = old_content.devices.keys() | self._vanished[0]
                if old_content.fallback is not None:
                    before_fallback = old_content.fallback.keys() | self._vanished[1]
            elif old_fallback:  # restored after a restart
                held = (self._driver.in_use or {}).get(self.name, ())
                copied = {
                    name
                    for name in held
                    if (entry := old.get(name)) is not None
                    and entry.device is not None
                    and (other := old_fallback.get(name)) is not None
                    and entry.device == other.device
                }
                before_main, before_fallback = before_main - copied, before_fallback - copied
            self._vanished = (
                frozenset(before_main - content.devices.keys() - gone),
                frozenset(before_fallback - fallback.keys() - gone),
            )
        # Keep the devices in both inventories, whichever inventory contained them, and whichever is
        # published.
        for entries, before, missing in (
            (self._devices, {**every, **old}, gone | self._vanished[0]),
            (self._fallback, every, gone | self._vanished[1]),
        ):
            if entries is not None and missing:
                kept = [name for name in before if name in entries or name in missing]
                merged = {**before, **entries}
                names = keep_places([*entries], kept)
                entries.clear()
                entries |= {name: merged[name] for name in names}
        inventories = (content.devices, fallback)
        asking = {name for each in inventories for name, d in each.items() if d.evict_if_gone}
        self.gone = frozenset(gone)
        # A withdrawn device keeps its eviction request, because it may be unplugged later, and
        # because a driver that cannot read the host withdraws devices temporarily.
        self.evicting = frozenset(asking | (self.evicting & self.gone))
        if self.releasable:
            self._driver.vanished = True
        # Start the eviction delay of newly gone devices, and cancel the delay of devices that are
        # no longer due.
        self._withdrawn = self.gone & withdrawn
        due = self.gone & self.evicting - withdrawn
        self._evicted &= due
        at = self._driver.now() + self._driver.gone_eviction_seconds
        self.evict_at = {name: self.evict_at.get(name, at) for name in due - self._evicted}

    def _kept(self, side: int) -> frozenset[str]:
        """Return the devices that one inventory does not list but the other one does. `side` is 0
        for the main inventory, and 1 for the fallback."""
        return self._vanished[side] | self._copied[side]

    def _kept_entries(self) -> Iterable[DesiredDevice]:
        """Yield the entries of devices that remain in an inventory although it does not list
        them."""
        for side, entries in enumerate((self._devices, self._fallback or {})):
            names = self._kept(side) if side else self.gone | self._kept(side)
            yield from (entries[name] for name in names)

    def _copy_held(
        self, old: Mapping[str, DesiredDevice], old_fallback: Mapping[str, DesiredDevice]
    ) -> None:
        """Copy held devices that only one inventory lists into the other inventory."""
        if self._fallback is None or self.content is None:
            self._copied = _NEITHER
            return
        held = frozenset((self._driver.in_use or {}).get(self.name, ()))
        listed = self.content.devices.keys(), (self.content.fallback or {}).keys()
        inventories, before = (self._devices, self._fallback), (old, old_fallback)
        copied = [(held & listed[1 - i]) - listed[i] - self._vanished[i] for i in (0, 1)]
        for side, names in enumerate(copied):
            entries, others = inventories[side], inventories[1 - side]
            for name in self._copied[side] - names - listed[side] - self.releasable:
                entries.pop(name, None)
            for name in names:
                entry = before[side].get(name, others[name])
                if entry.device is not others[name].device:
                    entry = replace(entry, device=others[name].device)
                entries[name] = entry
        self._copied = frozenset(copied[0]), frozenset(copied[1])

    def follow_claims(self) -> Iterable[str]:
        """Update the pool after a change to the set of devices that claims hold. Return the devices
        that must be refreshed."""
        old = self._kept(0), self._kept(1)
        self._copy_held(self._devices, self._fallback or {})
        changed = (self._kept(0) ^ old[0]) | (self._kept(1) ^ old[1])
        if changed and self.content is not None:
            self._counter_sets = self._needed_sets(self.content, self._counter_sets)
            self._driver.published_changed = True
        return changed

    def _needed_sets(
        self, content: PoolContent, old: tuple[CounterSet, ...]
    ) -> tuple[CounterSet, ...]:
        """Return the counter sets of an inventory, and those that only gone devices consume from. A
        device whose counter set is missing would make the whole pool invalid."""
        listed = {each.name for each in content.counter_sets}
        consumed = {
            name
            for entry in self._kept_entries()
            if entry.device is not None
            for name in entry.device.consumes
        }
        kept = [each for each in old if each.name in consumed - listed]
        return (*content.counter_sets, *kept) if kept else content.counter_sets

    def keep_gone(self, name: str, *, evicting: bool) -> None:
        """Adopt a device that was published as gone before a restart, and that has not been listed
        since."""
        for entries in (self._devices, self._fallback):
            if entries is not None:
                entries[name] = DesiredDevice(name=name, device=None)
        self.gone |= {name}
        self.evicting |= {name} if evicting else frozenset[str]()
        self._driver.vanished = self._driver.stored_changed = True
        self._driver.published_changed = True

    def let_go(self, names: Collection[str]) -> None:
        """Forget gone devices, because no claim holds them. Ignore devices in `names` that have
        been listed again."""
        leaving = self.releasable & set(names)
        if not leaving:
            return
        for entries, vanished in zip((self._devices, self._fallback), self._vanished, strict=True):
            for name in leaving & (self.gone | vanished):
                if entries is not None:
                    entries.pop(name, None)
        self.gone -= leaving
        self._vanished = self._vanished[0] - leaving, self._vanished[1] - leaving
        present = self._devices.keys() | (self._fallback or {}).keys()
        self.evicting -= leaving - present
        if self.content is not None:
            self._counter_sets = self._needed_sets(self.content, self._counter_sets)
        self._forget_others(present)
        self._driver.stored_changed = self._driver.health_changed = True
        self._driver.published_changed = True

    def _forget_others(self, present: Collection[str]) -> bool:
        """Forget the state of all other devices. Return whether there was anything to forget."""
        forgotten = False
        self._evicted &= frozenset(present)
        for known in (
            self._conditions,
            self.due,
            self.evict_at,
            self._health,
            self._inventory_health,
            self._published,
        ):
            for name in [name for name in known if name not in present]:
                del known[name]
                forgotten = True
        return forgotten

    def _observe_inventory(self, content: PoolContent, *, returned: bool) -> set[str]:
        """Apply the health in an inventory. Return the devices whose health has changed or, if the
        endpoint has returned, all devices with a health."""
        reported: set[str] = set()
        # A device in the main inventory takes precedence over the device with the same name in the
        # fallback.
        for name, device in {**(content.fallback or {}), **content.devices}.items():
            health = None if device.health is None else validated_health(device.health)
            if not returned and self._inventory_health.get(name) == health:
                continue
            if health is not None:
                self._inventory_health[name] = health
            elif self._inventory_health.pop(name, None) is None or returned:
                continue  # this connection has not reported the device's health
            self.observe(name, health or Health.unknown())
            reported.add(name)
        return reported

    def observe(self, name: str, health: Health) -> bool:
        """Apply a health report. Return whether the device must be refreshed. Reports about unknown
        devices are ignored."""
        if name not in self or name in self.gone:
            return False
        old = self._conditions.get(name, UNKNOWN)
        if old.has_report and old.health == health:
            return False
        now = self._driver.now()
        new = settled(observed(old, health, now=now), self._driver.timing, now=now)
        return self._know(name, new)

    def mark_unavailable(self) -> None:
        """Record that the endpoint is unavailable, and no longer reports health or devices."""
        self.evict_at.clear()
        for name in list(self._conditions):
            self._mark_unavailable(name)

    def _mark_unavailable(self, name: str) -> None:
        self._inventory_health.pop(name, None)
        old = self._conditions.get(name, UNKNOWN)
        self._know(name, lost(old, now=self._driver.now()))

    def list_again(self, name: str) -> bool:
        """Record that the endpoint is available again and has listed the device. Do nothing if the
        device is gone, because it has then not been listed. Return whether the device must be
        refreshed."""
        if name in self.gone:
            return False
        old = self._conditions.get(name, UNKNOWN)
        return self._know(name, listed(old, now=self._driver.now()))

    def adopt(self, name: str, published: PublishedTaints) -> None:
        """Adopt the taints that a device had before a restart."""
        self._published[name] = published
        if name in self.gone & self.evicting and (GONE, "NoExecute") in published:
            self._evicted |= {name}
            self.evict_at.pop(name, None)
        effects = {effect for key, effect in published if key == UNHEALTHY}
        if effects:
            old = self._conditions.get(name, UNKNOWN)
            evicting = "NoExecute" in effects
            self._know(name, adopted(old, evicting=evicting, now=self._driver.now()))

    def settle(self) -> list[str]:
        """Update the conditions and evictions whose deadlines have passed. Return the devices that
        must be refreshed."""
        now = self._driver.now()
        due = [name for name, when in self.due.items() if when <= now]
        for name in due:
            self._know(name, settled(self._conditions[name], self._driver.timing, now=now))
        evicted = [name for name, when in self.evict_at.items() if when <= now]
        for name in evicted:
            del self.evict_at[name]
        self._evicted |= frozenset(evicted)
        return due + evicted

    def _know(self, name: str, condition: Condition) -> bool:
        if condition is self._conditions.get(name, UNKNOWN):
            return False
        if condition == UNKNOWN:
            self._conditions.pop(name, None)
        else:
            self._conditions[name] = condition
        when = next_change(condition, self._driver.timing)
        if when is None:
            self.due.pop(name, None)
        else:
            self.due[name] = when
        return True

    # ------------------------------------------------------------ device taints and health

    def refresh(self, names: Iterable[str] | None, *, unavailable: str | None) -> None:
        """Update the taints and health of devices, or of all devices if `names` is None.
        `unavailable` is the reason why the endpoint is unavailable, as a sentence."""
        held, blocked = self._driver.held.get(self.name, ()), frozenset[str]()
        if held is not self._held or (held and self.content is not self._counted):
            self._held, self._counted = held, self.content
            before = self._unpreparing
            self._unpreparing = blocked_by_unpreparing(self.content, held)
            blocked = before ^ self._unpreparing
        present = self._devices.keys() | (self._fallback or {}).keys()
        names = present if names is None else {*names, *(blocked & present)}
        wall = int(self._driver.wall())
        for name in names:
            condition = self._conditions.get(name, UNKNOWN)
            self._taint(name, condition, wall=wall, stopped=unavailable is not None)
            old = self._health.get(name)
            new = health_of(
                self.name,
                name,
                old,
                condition,
                wall=wall,
                unavailable=unavailable,
                gone=self._gone_message(name),
            )
            if new is not old:
                self._health[name] = new
                self._driver.health_changed = True

    def _gone_message(self, name: str) -> str | None:
        if name not in self.gone:
            return None
        if name in self._withdrawn:
            return _WITHDRAWN_MESSAGE
        if name in self.evicting:
            return f"{_GONE_MESSAGE}; Kubernetes evicts the pod after goneEvictionDelay"
        return f"{_GONE_MESSAGE}; if the device does not return, delete the pod to get another one"

    def _taint(self, name: str, condition: Condition, *, wall: int, stopped: bool) -> None:
        published, is_listed = self._published.pop(name, NOT_PUBLISHED), False
        unpreparing = name in self._unpreparing
        for side, entries in enumerate((self._devices, self._fallback or {})):
            if (entry := entries.get(name)) is None:
                continue
            gone: TaintEffect | None = None
            if name in self.gone or name in self._kept(side):
                gone = "NoExecute" if name in self._evicted else "NoSchedule"
            is_listed = is_listed or entry.device is not None
            own = () if entry.device is None else entry.device.taints
            maintenance = self._in_maintenance(name, entry, published)
            reasons = (own, entry.taints, condition.tainted, unpreparing, maintenance)
            if not (any(reasons) or stopped or gone):
                continue  # skip unchanged devices, which are nearly all of them
            wanted = taints(
                own,
                condition,
                stopped=stopped,
                unpreparing=unpreparing,
                maintenance=maintenance,
                gone=gone,
            )
            new = stamped(wanted, entry.taints, now=wall, published=published)
            if new is not entry.taints:
                entries[name] = replace(entry, taints=new)
                self._driver.published_changed = True
        if published and not is_listed:
            # Until the device is listed, it is unknown whether the driver's own taints still apply.
            own = {key: at for key, at in published.items() if not key[0].startswith(DOMAIN)}
            self._published[name] = own

    def _in_maintenance(self, name: str, entry: DesiredDevice, published: PublishedTaints) -> bool:
        """Return whether a device is in maintenance. If that is unknown, return the previous
        state."""
        if (known := self._driver.maintenance) is not None:
            return (self.name, name) in known
        return (MAINTENANCE, "NoSchedule") in published or any(
            each.key == MAINTENANCE for each in entry.taints
        )


def _stored_body(device: Device) -> dict[str, Any]:
    taints = [{"key": t.key, "value": t.value, "effect": t.effect} for t in device.taints]
    return device_body(device, taints=taints)


def _merged(
    devices: Mapping[str, Device], old: Mapping[str, DesiredDevice]
) -> dict[str, DesiredDevice]:
    merged: dict[str, DesiredDevice] = {}
    for name, device in devices.items():
        entry = old.get(name)
        if entry is None:
            entry = DesiredDevice(name=name, device=device)
        elif (before := entry.device) is not device and (
            before is None
            or before.taints != device.taints
            or device_body(before) != device_body(device)
        ):
            entry = replace(entry, device=device)  # more than the device's health has changed
        merged[name] = entry
    return merged


def health_of(
    pool: str,
    name: str,
    old: DeviceHealth | None,
    condition: Condition,
    *,
    wall: int,
    unavailable: str | None,
    gone: str | None,
) -> DeviceHealth:
    """Return a device's health. `changed_at` advances when the status changes, but not when only
    the message changes."""
    status, message = condition.health.status, condition.health.message
    if unavailable is not None:
        status, message = "unknown", unavailable
    elif gone is not None:
        status, message = "unhealthy", gone
    elif condition.tainted:
        status, message = "unhealthy", condition.message
    if old is not None and (old.status, old.message) == (status, message):
        return old
    changed_at = old.changed_at if old is not None and old.status == status else wall
    return DeviceHealth(
        pool=pool, device=name, status=status, message=message, changed_at=changed_at
    )
