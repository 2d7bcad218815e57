"""
One pool of one endpoint, as it is in memory: its devices, their health and taints.

It is changed by what the endpoint says and by time, and says what has changed by that: an object
that is given out stays the same one for as long as nothing changes, so that whoever compares finds
that out at once. What is healthy is decided in :mod:`.health`, what is tainted in :mod:`.taints`.

It must not know clocks, other pools, or the life of the endpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from drakit.device import CounterSet, Device, Health
from drakit_nodeplugin.devices.hardware import HeldDevice, PoolContent, crowded_out
from drakit_nodeplugin.devices.health import (
    UNKNOWN,
    Condition,
    HealthTiming,
    adopted,
    listed,
    lost,
    next_look,
    observed,
    settled,
    sound,
)
from drakit_nodeplugin.devices.pools import (
    DesiredDevice,
    DesiredPool,
    DeviceHealth,
    PoolCapacity,
    PublishedTaints,
)
from drakit_nodeplugin.devices.taints import DOMAIN, NOT_PUBLISHED, UNHEALTHY, stamped, taints

__all__ = ("Changes", "Circumstances", "PoolState")

MAX_MESSAGE = 1024
"""Characters of a message that the kubelet keeps."""


@dataclass(kw_only=True, slots=True)
class Changes:
    """What something has changed; filled by those who change."""

    published: bool = False
    """What is to be published."""
    health: bool = False
    """What the kubelet is told."""
    stored: bool = False
    """What the store keeps: names of devices and pools, and whether their endpoint is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What is so of a pool's devices, whatever is said of them."""

    away: str | None
    """Why the endpoint is away, as a sentence; None while it is there."""
    held: Collection[HeldDevice] = ()
    """The holds of claims in the pool, if one of them is still being unprepared; otherwise empty.
    The same object while nothing changes."""
    wall: int
    """Seconds since 1970."""


class PoolState:
    """A pool in memory. Times are the loop's, but where it is said."""

    def __init__(self, name: str, *, timing: HealthTiming) -> None:
        self.name = name
        """In the API."""
        self._timing = timing
        self._devices: dict[str, DesiredDevice] = {}
        self._fallback: dict[str, DesiredDevice] | None = None
        self._counter_sets: tuple[CounterSet, ...] | None = None
        self._said: dict[str, Health] = {}
        """The inventory's own words on devices: a word counts when it is said, not each time that
        an inventory repeats it."""
        self._conditions: dict[str, Condition] = {}
        """Of the devices on which there was a word."""
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

    # ------------------------------------------------------------ what there is

    @property
    def names(self) -> Collection[str]:
        """The devices, without those of the fallback alone."""
        return self._devices.keys()

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a device of that name, be it in the fallback alone."""
        return name in self._devices or name in (self._fallback or ())

    @property
    def health(self) -> Collection[DeviceHealth]:
        """What the kubelet is told of the devices."""
        return self._health.values()

    def desired(self) -> DesiredPool:
        """Give the pool as it is to be published."""
        if self._desired is None:
            fallback = self._fallback
            self._desired = DesiredPool(
                devices=tuple(self._devices.values()),
                counter_sets=self._counter_sets,
                fallback=None if fallback is None else tuple(fallback.values()),
            )
        return self._desired

    def capacity(self, *, away: bool, allocated: Iterable[str]) -> PoolCapacity:
        """Sort the devices; while the endpoint is away none is healthy."""
        tainted = {name for name, known in self._conditions.items() if known.tainted}
        names = frozenset(self._devices)
        unhealthy = names if away else names & tainted
        return PoolCapacity(
            healthy=names - unhealthy, unhealthy=unhealthy, allocated=frozenset(allocated)
        )

    def next_look(self, name: str) -> float | None:
        """Say when time alone changes something of a device."""
        condition = self._conditions.get(name)
        return None if condition is None else next_look(condition, self._timing)

    # ------------------------------------------------------------ what changes it

    def restore(self, names: Iterable[str]) -> None:
        """Begin with names alone; what is known already of these devices stays."""
        old = self._devices
        self._devices = {
            name: old.get(name) or DesiredDevice(name=name, device=None) for name in names
        }
        self._counter_sets = None
        self._desired = None
        for known in (self._conditions, self._health, self._said, self._published):
            for name in [name for name in known if name not in self._devices]:
                del known[name]

    def replace(
        self, content: PoolContent, *, returned: bool, now: float, changes: Changes
    ) -> set[str]:
        """
        Take what the endpoint says that there is; give the devices that must be looked at.

        Devices that stay keep what is known of their health; an endpoint that has returned says
        all its words anew.
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
            changes.stored = True
        if (
            dirty
            or list(old) != list(self._devices)
            or list(old_fallback or ()) != list(self._fallback or ())
            or (old_fallback is None) != (fallback is None)
            or self._counter_sets != content.counter_sets
        ):
            self._counter_sets = content.counter_sets
            self._touched(changes)
        for known in (self._conditions, self._health, self._said, self._published):
            for name in [name for name in known if name not in present]:
                del known[name]
                changes.health = True
        dirty |= self._listen(content, returned=returned, now=now)
        if returned:
            dirty |= {name for name in list(self._conditions) if self.list_again(name, now=now)}
        return dirty

    def _listen(self, content: PoolContent, *, returned: bool, now: float) -> set[str]:
        """Take the words in the inventory; give the devices on which something new was said."""
        listened: set[str] = set()
        said = self._said
        for devices in (content.fallback or {}, content.devices):
            for name, device in devices.items():
                if devices is content.fallback and name in content.devices:
                    continue
                word = None if device.health is None else sound(device.health)
                if not returned and said.get(name) == word:
                    continue
                if word is not None:
                    said[name] = word
                elif said.pop(name, None) is None or returned:
                    continue  # nothing was said in this life
                self.observe(name, word or Health.unknown(), now=now)
                listened.add(name)
        return listened

    def observe(self, name: str, word: Health, *, now: float) -> bool:
        """Take in a word on a device; give whether it must be looked at, and is one of ours."""
        if name not in self:
            return False
        old, word = self._conditions.get(name, UNKNOWN), sound(word)
        if old.said and old.word == word:
            return False
        return self._know(name, settled(observed(old, word, now=now), self._timing, now=now))

    def lose_sight(self, *, now: float) -> None:
        """Nobody can say any more how the devices are."""
        for name, condition in list(self._conditions.items()):
            self._know(name, lost(condition, now=now))

    def list_again(self, name: str, *, now: float) -> bool:
        """The endpoint is there again, with what it has said of a device so far; give whether it
        must be looked at."""
        return self._know(name, listed(self._conditions.get(name, UNKNOWN), now=now))

    def adopt(self, name: str, published: PublishedTaints, *, now: float) -> None:
        """Take over the taints that a device had before a restart, as far as they are not known."""
        self._published[name] = published
        effects = {effect for key, effect in published if key == UNHEALTHY}
        if effects:
            old = self._conditions.get(name, UNKNOWN)
            self._know(name, adopted(old, evicting="NoExecute" in effects, now=now))

    def settle(self, name: str, *, now: float) -> bool:
        """See what time alone has changed of a device; give whether it must be looked at."""
        condition = self._conditions.get(name)
        if condition is None:
            return False
        return self._know(name, settled(condition, self._timing, now=now))

    def _know(self, name: str, condition: Condition) -> bool:
        if condition is self._conditions.get(name, UNKNOWN):
            return False
        if condition == UNKNOWN:
            self._conditions.pop(name, None)
        else:
            self._conditions[name] = condition
        return True

    def look(
        self, names: Iterable[str] | None, circumstances: Circumstances, *, changes: Changes
    ) -> None:
        """Bring taints and health of devices up to date; of all of them if none are named."""
        crowded = self._crowd(circumstances.held)
        present = self._devices.keys() | (self._fallback or {}).keys()
        names = present if names is None else {*names, *(crowded & present)}
        for name in names:
            condition = self._conditions.get(name, UNKNOWN)
            self._taint(name, condition, circumstances, changes=changes)
            old = self._health.get(name)
            told = _told(self.name, name, old, condition, circumstances)
            if told is not old:
                self._health[name] = told
                changes.health = True

    def _crowd(self, held: Collection[HeldDevice]) -> frozenset[str]:
        """Recompute the devices that new claims cannot have; return those that changed."""
        if held is self._held and (not held or self.content is self._counted):
            return frozenset()
        self._held, self._counted = held, self.content
        before, self._unpreparing = self._unpreparing, crowded_out(self.content, held)
        return before ^ self._unpreparing

    def _taint(
        self, name: str, condition: Condition, circumstances: Circumstances, *, changes: Changes
    ) -> None:
        published, listed = self._published.pop(name, NOT_PUBLISHED), False
        for entries in (self._devices, self._fallback):
            entry = None if entries is None else entries.get(name)
            if entries is None or entry is None:
                continue
            listed = listed or entry.device is not None
            unpreparing = name in self._unpreparing
            new = _tainted(entry, condition, circumstances, published, unpreparing=unpreparing)
            if new is not entry:
                entries[name] = new
                self._touched(changes)
        if published and not listed:
            # Whether its driver's own taints are still there is not known before it is listed.
            own = {key: at for key, at in published.items() if not key[0].startswith(DOMAIN)}
            self._published[name] = own

    def _touched(self, changes: Changes) -> None:
        self._desired = None
        changes.published = True


def _merged(
    devices: Mapping[str, Device], old: Mapping[str, DesiredDevice]
) -> dict[str, DesiredDevice]:
    merged: dict[str, DesiredDevice] = {}
    for name, device in devices.items():
        entry = old.get(name)
        if entry is None:
            entry = DesiredDevice(name=name, device=device)
        elif entry.device is None or not _same(entry.device, device):
            entry = replace(entry, device=device)
        merged[name] = entry
    return merged


def _same(old: Device, new: Device) -> bool:
    """Compare what is published; health is not, and True is not 1 in a CEL expression."""
    if old is new:
        return True
    try:
        if old.health is not new.health:
            old = replace(old, health=new.health)
        return old == new and all(
            _kinds(value) == _kinds(new.attributes[name]) for name, value in old.attributes.items()
        )
    except Exception:  # a vendor's value may refuse to be compared
        return False


def _kinds(value: object) -> tuple[type, ...]:
    """Give the types of an attribute and of what a list holds."""
    if type(value) is tuple:
        return (tuple, *map(type, cast("tuple[object, ...]", value)))
    return (type(value),)


def _tainted(
    entry: DesiredDevice,
    condition: Condition,
    now: Circumstances,
    published: PublishedTaints,
    *,
    unpreparing: bool,
) -> DesiredDevice:
    own = () if entry.device is None else entry.device.taints
    if not (own or entry.taints or condition.tainted or unpreparing or now.away):
        return entry  # which is what nearly all of them are
    wanted = taints(own, condition, stopped=now.away is not None, unpreparing=unpreparing)
    new = stamped(wanted, entry.taints, now=now.wall, published=published)
    return entry if new is entry.taints else replace(entry, taints=new)


def _told(
    pool: str, name: str, old: DeviceHealth | None, condition: Condition, now: Circumstances
) -> DeviceHealth:
    """Say a device's health; since when it is so counts from the status, not from the message."""
    status = condition.word.status
    message = condition.word.message
    if now.away is not None:
        status, message = "unknown", now.away
    elif condition.tainted:
        status, message = "unhealthy", condition.message
    message = message[:MAX_MESSAGE]
    if old is not None and (old.status, old.message) == (status, message):
        return old
    changed_at = old.changed_at if old is not None and old.status == status else now.wall
    return DeviceHealth(
        pool=pool, device=name, status=status, message=message, changed_at=changed_at
    )
