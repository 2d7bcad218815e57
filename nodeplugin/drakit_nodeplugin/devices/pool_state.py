"""
The devices of one pool of one endpoint: their health, their taints, and what claims block.

The endpoint applies inventories, reports and time; what has changed by that is noted in
:class:`DriverState`. An object that is given out stays the same one while nothing changes, so
readers compare by identity; the devices of an inventory do the same. Which taints a device gets is
decided in :mod:`.taints`.

It must not know other pools, or the life of the endpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from drakit.device import CounterSet, Device, Health
from drakit.resource.device import device_body
from drakit_nodeplugin.devices.hardware import HeldDevice, PoolContent, crowded_out
from drakit_nodeplugin.devices.model import (
    DesiredDevice,
    DesiredPool,
    DeviceHealth,
    PoolCapacity,
    PublishedTaints,
)
from drakit_nodeplugin.devices.taints import (
    DOMAIN,
    NOT_PUBLISHED,
    UNHEALTHY,
    UNKNOWN,
    Condition,
    HealthTiming,
    adopted,
    listed,
    lost,
    next_change,
    observed,
    settled,
    stamped,
    taints,
    validated,
)

__all__ = ("DriverState", "PoolState")


class DriverState:
    """What the endpoints of one driver share: settings, time, claims, and pending notifications."""

    def __init__(
        self,
        *,
        node: str,
        open_ended: bool,
        timing: HealthTiming,
        now: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`open_ended`: the number of endpoints is unknown. `now` returns the loop's time,
        `wall_clock` seconds since 1970."""
        self.node = node
        self.open_ended = open_ended
        self.timing = timing
        self.now = now
        self.wall = wall_clock
        self.held: Mapping[str, Collection[HeldDevice]] = {}
        """The holds of claims, in pools where a claim is still being unprepared. The same object
        while nothing changes."""
        self.published_changed = False
        """Whether the publication has changed since the last notification."""
        self.health_changed = False
        """The same of the health that is reported to the kubelet."""
        self.stored_changed = False
        """The same of the rows of the store: names, and whether endpoints are available."""

    def changed(self) -> None:
        """Everything may have changed."""
        self.published_changed = self.health_changed = self.stored_changed = True


class PoolState:
    """A pool in memory."""

    def __init__(self, name: str, driver: DriverState) -> None:
        self.name = name
        """In the API."""
        self._driver = driver
        self._devices: dict[str, DesiredDevice] = {}
        self._fallback: dict[str, DesiredDevice] | None = None
        self._counter_sets: tuple[CounterSet, ...] | None = None
        self._inventory_health: dict[str, Health] = {}
        """The health in the last inventory. It counts when it changes, not each time that an
        inventory repeats it."""
        self._conditions: dict[str, Condition] = {}
        """Of the devices whose health was reported."""
        self._due: dict[str, float] = {}
        """When time alone changes the condition of a device; loop time."""
        self._health: dict[str, DeviceHealth] = {}
        self._published: dict[str, PublishedTaints] = {}
        """Before a restart, of devices that have not been listed since then."""
        self._desired: DesiredPool | None = None
        self.content: PoolContent | None = None
        """The last inventory of the endpoint; None if there is none since the plugin's start."""
        self._held: Collection[HeldDevice] = ()
        self._unpreparing: frozenset[str] = frozenset()
        """Devices that new claims cannot have, because of claims that are being unprepared."""
        self._counted: PoolContent | None = None
        """The content for which they were computed."""

    # ------------------------------------------------------------ state

    @property
    def names(self) -> Collection[str]:
        """The devices, without those that only the fallback has."""
        return self._devices.keys()

    def __contains__(self, name: object) -> bool:
        """Return whether the pool or its fallback has a device of that name."""
        return name in self._devices or name in (self._fallback or ())

    @property
    def health(self) -> Collection[DeviceHealth]:
        """The health of the devices that is reported to the kubelet."""
        return self._health.values()

    def desired(self) -> DesiredPool:
        """Return the pool to publish."""
        if self._desired is None:
            fallback = self._fallback
            self._desired = DesiredPool(
                devices=tuple(self._devices.values()),
                counter_sets=self._counter_sets,
                fallback=None if fallback is None else tuple(fallback.values()),
            )
        return self._desired

    def capacity(self, *, available: bool) -> PoolCapacity:
        """Sort the devices; while the endpoint is unavailable none is healthy."""
        tainted = {name for name, known in self._conditions.items() if known.tainted}
        names = frozenset(self._devices)
        unhealthy = names & tainted if available else names
        return PoolCapacity(healthy=names - unhealthy, unhealthy=unhealthy)

    def next_change(self) -> float | None:
        """Return when time alone changes something of a device; None if it does not."""
        return min(self._due.values(), default=None)

    # ------------------------------------------------------------ changes

    def restore(self, names: Iterable[str]) -> None:
        """Begin with names alone; whatever is known of these devices stays."""
        old = self._devices
        self._devices = {
            name: old.get(name) or DesiredDevice(name=name, device=None) for name in names
        }
        self._counter_sets = None
        self._desired = None
        self._forget_others(self._devices.keys())

    def replace(self, content: PoolContent, *, returned: bool) -> set[str]:
        """
        Replace the devices by those of an inventory; return those that must be refreshed.

        Devices that stay keep their health. An endpoint that has `returned` reports all health
        again.
        """
        old, old_fallback = self._devices, self._fallback
        self.content = content
        self._devices = _merged(content.devices, old)
        fallback = content.fallback
        self._fallback = None if fallback is None else _merged(fallback, old_fallback or old)
        present = self._devices if fallback is None else self._devices.keys() | fallback.keys()
        dirty = {name for name in present if name not in self._health}
        for new, before in ((self._devices, old), (self._fallback or {}, old_fallback or {})):
            dirty |= {name for name, entry in new.items() if before.get(name) is not entry}
        if self._devices.keys() != old.keys():
            self._driver.stored_changed = True
        if (
            dirty
            or list(old) != list(self._devices)
            or list(old_fallback or ()) != list(self._fallback or ())
            or (old_fallback is None) != (fallback is None)
            or self._counter_sets != content.counter_sets
        ):
            self._counter_sets = content.counter_sets
            self._touch()
        if self._forget_others(present):
            self._driver.health_changed = True
        dirty |= self._observe_inventory(content, returned=returned)
        if returned:
            dirty |= {name for name in list(self._conditions) if self.list_again(name)}
        return dirty

    def _forget_others(self, present: Collection[str]) -> bool:
        """Forget the health of all other devices; return whether there was any."""
        forgotten = False
        for known in (
            self._conditions,
            self._due,
            self._health,
            self._inventory_health,
            self._published,
        ):
            for name in [name for name in known if name not in present]:
                del known[name]
                forgotten = True
        return forgotten

    def _observe_inventory(self, content: PoolContent, *, returned: bool) -> set[str]:
        """Apply the health in an inventory; return the devices whose health is reported newly."""
        reported: set[str] = set()
        # A device's own health wins over that of its namesake in the fallback.
        for name, device in {**(content.fallback or {}), **content.devices}.items():
            health = None if device.health is None else validated(device.health)
            if not returned and self._inventory_health.get(name) == health:
                continue
            if health is not None:
                self._inventory_health[name] = health
            elif self._inventory_health.pop(name, None) is None or returned:
                continue  # this life of the endpoint has reported nothing
            self.observe(name, health or Health.unknown())
            reported.add(name)
        return reported

    def observe(self, name: str, health: Health) -> bool:
        """Apply a report; return whether the device must be refreshed. Reports on devices that the
        pool does not have are ignored."""
        if name not in self:
            return False
        old = self._conditions.get(name, UNKNOWN)
        if old.has_report and old.health == health:
            return False
        now = self._driver.now()
        new = settled(observed(old, health, now=now), self._driver.timing, now=now)
        return self._know(name, new)

    def lose_sight(self) -> None:
        """The endpoint is unavailable: it no longer reports health."""
        for name, condition in list(self._conditions.items()):
            self._know(name, lost(condition, now=self._driver.now()))

    def list_again(self, name: str) -> bool:
        """The endpoint is available again, and has listed the device; return whether the device
        must be refreshed."""
        old = self._conditions.get(name, UNKNOWN)
        return self._know(name, listed(old, now=self._driver.now()))

    def adopt(self, name: str, published: PublishedTaints) -> None:
        """Take over the taints that a device had before a restart, as far as they are unknown."""
        self._published[name] = published
        effects = {effect for key, effect in published if key == UNHEALTHY}
        if effects:
            old = self._conditions.get(name, UNKNOWN)
            evicting = "NoExecute" in effects
            self._know(name, adopted(old, evicting=evicting, now=self._driver.now()))

    def settle(self) -> list[str]:
        """Apply the time that has passed; return the devices that must be refreshed."""
        now = self._driver.now()
        due = [name for name, when in self._due.items() if when <= now]
        for name in due:
            self._know(name, settled(self._conditions[name], self._driver.timing, now=now))
        return due

    def _know(self, name: str, condition: Condition) -> bool:
        if condition is self._conditions.get(name, UNKNOWN):
            return False
        if condition == UNKNOWN:
            self._conditions.pop(name, None)
        else:
            self._conditions[name] = condition
        when = next_change(condition, self._driver.timing)
        if when is None:
            self._due.pop(name, None)
        else:
            self._due[name] = when
        return True

    # ------------------------------------------------------------ taints and health of devices

    def refresh(self, names: Iterable[str] | None, *, unavailable: str | None) -> None:
        """Bring taints and health of devices up to date; of all devices if `names` is None.
        `unavailable` is the sentence why the endpoint is."""
        crowded = self._crowd(self._driver.held.get(self.name, ()))
        present = self._devices.keys() | (self._fallback or {}).keys()
        names = present if names is None else {*names, *(crowded & present)}
        wall = int(self._driver.wall())
        for name in names:
            condition = self._conditions.get(name, UNKNOWN)
            self._taint(name, condition, wall=wall, stopped=unavailable is not None)
            old = self._health.get(name)
            new = _health_of(self.name, name, old, condition, wall=wall, unavailable=unavailable)
            if new is not old:
                self._health[name] = new
                self._driver.health_changed = True

    def _crowd(self, held: Collection[HeldDevice]) -> frozenset[str]:
        """Recompute the devices that new claims cannot have; return those that changed."""
        if held is self._held and (not held or self.content is self._counted):
            return frozenset()
        self._held, self._counted = held, self.content
        before, self._unpreparing = self._unpreparing, crowded_out(self.content, held)
        return before ^ self._unpreparing

    def _taint(self, name: str, condition: Condition, *, wall: int, stopped: bool) -> None:
        published, is_listed = self._published.pop(name, NOT_PUBLISHED), False
        unpreparing = name in self._unpreparing
        for entries in (self._devices, self._fallback or {}):
            if (entry := entries.get(name)) is None:
                continue
            is_listed = is_listed or entry.device is not None
            own = () if entry.device is None else entry.device.taints
            if not (own or entry.taints or condition.tainted or unpreparing or stopped):
                continue  # as nearly all of them are
            wanted = taints(own, condition, stopped=stopped, unpreparing=unpreparing)
            new = stamped(wanted, entry.taints, now=wall, published=published)
            if new is not entry.taints:
                entries[name] = replace(entry, taints=new)
                self._touch()
        if published and not is_listed:
            # Whether its driver's own taints still exist is unknown before it is listed.
            own = {key: at for key, at in published.items() if not key[0].startswith(DOMAIN)}
            self._published[name] = own

    def _touch(self) -> None:
        self._desired = None
        self._driver.published_changed = True


def _merged(
    devices: Mapping[str, Device], old: Mapping[str, DesiredDevice]
) -> dict[str, DesiredDevice]:
    merged: dict[str, DesiredDevice] = {}
    for name, device in devices.items():
        entry = old.get(name)
        if entry is None:
            entry = DesiredDevice(name=name, device=device)
        elif entry.device is None or not _is_published_alike(entry.device, device):
            entry = replace(entry, device=device)
        merged[name] = entry
    return merged


def _is_published_alike(old: Device, new: Device) -> bool:
    """Return whether two devices differ in their health at most."""
    return old is new or (old.taints == new.taints and device_body(old) == device_body(new))


def _health_of(
    pool: str,
    name: str,
    old: DeviceHealth | None,
    condition: Condition,
    *,
    wall: int,
    unavailable: str | None,
) -> DeviceHealth:
    """Return a device's health; its time is that of the status, not of the message."""
    status, message = condition.health.status, condition.health.message
    if unavailable is not None:
        status, message = "unknown", unavailable
    elif condition.tainted:
        status, message = "unhealthy", condition.message
    if old is not None and (old.status, old.message) == (status, message):
        return old
    changed_at = old.changed_at if old is not None and old.status == status else wall
    return DeviceHealth(
        pool=pool, device=name, status=status, message=message, changed_at=changed_at
    )
