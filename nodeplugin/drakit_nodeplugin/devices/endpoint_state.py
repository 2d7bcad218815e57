"""
The manager's state of one endpoint: its life cycle, its grace period after a stop, and its pools.

As in the kubelet's own device manager, the devices of a stopped endpoint remain for a grace period,
with a taint. After that, the manager removes them. If the plugin restarts during a removal, it
finishes the removal after the restart. :mod:`.pool_state` holds the devices of a pool, and
:mod:`.manager` the endpoints of a driver.

Does not depend on other endpoints or the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import TypeVar, cast

from drakit.device import CounterSet, Device, Health, Inventory, PolicyOutcome, RejectedDevice
from drakit_driver.runtime.contract import DeviceKey
from drakit_formats.resource.inventory import (
    MAX_REJECTED,
    CheckedInventory,
    check_inventory,
    place_problems,
    shown_place,
)
from drakit_formats.resource.nodes import pool_name, short_pool
from drakit_nodeplugin.devices.model import DesiredPool, DeviceHealth, PublishedTaints
from drakit_nodeplugin.devices.pool_state import DriverState, PoolState, health_of
from drakit_nodeplugin.devices.taints import GONE, Condition
from drakit_nodeplugin.state.holds import PoolContent
from drakit_nodeplugin.state.records import StoredEndpoint

logger = logging.getLogger(__name__)

SILENT = "it has not listed its devices since the node plugin was started"
"""The reason why an endpoint that has not reported yet is unavailable."""

_T = TypeVar("_T")

MAX_REPORTED = 1000
"""Maximum total number of rejected devices to report per endpoint. An endpoint can return any
number of them."""

MAX_REPORTED_AT_ONCE = 100
"""Maximum number of rejected devices to report for one inventory. A check does not return more
reasons than this."""


# ---------------------------------------------------------------- life and grace periods


class Phase(Enum):
    """The phase of an endpoint's life cycle, which decides the state of its devices."""

    AWAITED = "awaited"
    """The endpoint has not reported since the plugin's start. Published devices remain
    unchanged."""
    PRESENT = "present"
    """The endpoint is available."""
    STOPPED = "stopped"
    """The endpoint is unavailable. Its devices are published with a taint."""
    REMOVING = "removing"
    """The grace period has ended. The pools are deleted once the store has recorded that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """The life cycle of an endpoint so far. Uses the loop clock."""

    stopped_since: float | None
    """The time at which the endpoint became unavailable. A time from the store is before the
    plugin's start. None while the endpoint is available."""
    listed: bool = False
    """Whether the endpoint has listed its devices since the plugin's start."""
    known: bool = False
    """Whether the store contained the endpoint. If so, its pools are known even if it does not
    return."""
    removing: bool = False


@dataclass(kw_only=True, slots=True)
class GracePeriods:
    """The grace periods of a driver's endpoints."""

    stop_seconds: float
    """The grace period of a stopped endpoint."""
    start_until: float = 0.0
    """The end of the grace period after the plugin's start (loop clock)."""
    unknown_until: float = 0.0
    """The time until which endpoints with unknown pools may appear, if the number of endpoints is
    unknown."""

    def begin(self, now: float, *, start_seconds: float, known: bool) -> None:
        """Begin the grace periods after a start. `known` means that the store contains the pools of
        unavailable endpoints."""
        self.start_until = self.unknown_until = now + start_seconds
        if not known:
            # If the store was lost, published pools may belong to an endpoint that has not returned
            # yet.
            self.unknown_until = max(self.start_until, now + self.stop_seconds)


def phase(life: Life, grace_periods: GracePeriods, *, now: float) -> Phase:
    """Return the phase of an endpoint."""
    if life.stopped_since is None:
        return Phase.PRESENT
    if life.removing:
        return Phase.REMOVING
    if not life.listed and now < grace_periods.start_until:
        return Phase.AWAITED
    return Phase.STOPPED


def phase_ends(life: Life, grace_periods: GracePeriods) -> float | None:
    """Return the time at which an endpoint's grace period ends, or None if none is running."""
    if life.stopped_since is None or life.removing:
        return None
    end = life.stopped_since + grace_periods.stop_seconds
    # Give the endpoint a chance to return, because the plugin itself was not running either.
    return end if life.listed else max(end, grace_periods.start_until)


def are_pools_known(life: Life, grace_periods: GracePeriods, *, now: float) -> bool:
    """
    Return whether an endpoint's pools are known. Only then can other pools be deleted.

    If neither the endpoint nor the store has listed them, because the checkpoint was lost, any
    published pool may belong to the endpoint as long as the endpoint may still return.
    """
    if life.listed:
        return True
    if life.known:
        return now >= grace_periods.start_until
    end = phase_ends(life, grace_periods)
    return end is None or now >= end


# ---------------------------------------------------------------- the endpoint


@dataclass(kw_only=True, slots=True)
class _Parts:
    """The devices and counter sets of one pool, collected while an inventory is split by pool."""

    devices: dict[str, Device] = field(default_factory=dict[str, Device])
    counter_sets: list[CounterSet] = field(default_factory=list[CounterSet])
    fallback: dict[str, Device] = field(default_factory=dict[str, Device])


class EndpointState:
    """The in-memory state of an endpoint. Pool names, including those in device keys, are API
    names."""

    def __init__(self, name: str, driver: DriverState, grace_periods: GracePeriods) -> None:
        """Create an endpoint, which is unavailable until it lists its devices."""
        self.name = name
        self.life = Life(stopped_since=driver.now())
        self.phase = Phase.AWAITED
        self.reason = SILENT
        """The reason why the endpoint is unavailable. Ignored while it is available."""
        self.stopped_at = driver.wall()
        """The time at which the endpoint became unavailable, as a Unix timestamp. Ignored while it
        is available."""
        self.pools: dict[str, PoolState] = {}
        self.checked = CheckedInventory()
        """The endpoint's last inventory, without devices that cannot be published."""
        self.rejected_policies: Mapping[str, str] = {}
        """The policies of the rejected devices in the main inventory, keyed like `rejected`."""
        self.rejected_by_driver: Collection[RejectedDevice] = ()
        """The devices that the driver itself rejects, from the last inventory."""
        self.outcomes: Collection[PolicyOutcome] = ()
        """The outcomes of policies, from the last inventory."""
        self.marked: frozenset[DeviceKey] = frozenset()
        """The devices that are marked to be prepared again, while the endpoint is available."""
        self.refused: dict[str, str] = {}
        """The reasons for rejecting pools that another endpoint already publishes, keyed by
        pool."""
        self.failed: dict[str, str] = {}
        """The errors of pools for which a step in the node plugin has failed since the last
        inventory, keyed by pool. The slices of these pools remain unchanged."""
        self.malformed: Mapping[str, str] = {}
        """The problems with devices that the driver's process could not describe, keyed by device
        name."""
        self._driver = driver
        self._grace_periods = grace_periods
        self._listed_pools: Collection[str] = frozenset()
        """The pools of the last inventory."""
        self._reported_rejected: set[tuple[str, str]] = set()
        self.unlisted: Mapping[DeviceKey, DeviceHealth] = {}
        """The health of devices in pools that no node owns, reported since the endpoint became
        available."""

    @property
    def unavailable(self) -> str | None:
        """The reason why the devices cannot be used, as a sentence. None while the endpoint is
        available."""
        if self.phase is Phase.PRESENT:
            return None
        subject = f"endpoint {self.name}" if self._driver.open_ended else "the driver"
        return f"{subject} is unavailable: {self.reason}"

    @property
    def rejected(self) -> Mapping[str, str]:
        """The reasons why devices and other parts of the inventory are not published, keyed by
        name."""
        malformed = dict(islice(self.malformed.items(), MAX_REJECTED))
        return {**self.checked.rejected, **malformed, **self.refused, **self.failed}

    @property
    def rejected_count(self) -> int:
        """The number of all rejected parts, including those without a recorded reason."""
        others = (self.malformed, self.refused, self.failed)
        return self.checked.rejected_count + sum(map(len, others))

    def desired(self, pool: PoolState) -> DesiredPool | None:
        """Return the desired content of a pool, or None if a step for the pool failed."""
        desired: DesiredPool | None = None
        if pool.name not in self.failed:
            with self._guarding(pool):
                desired = pool.desired()
        return desired

    @contextmanager
    def _guarding(self, pool: PoolState) -> Generator[None]:
        """Run a step for one pool, so that an error does not affect the other pools."""
        try:
            yield
        except Exception:
            facts = {"endpoint": self.name, "pool": pool.name}
            logger.exception("a pool failed; its slices stay as they are", extra=facts)
            self.failed[pool.name] = (
                "because of an internal error of the node plugin, the slices of this pool do not "
                "change until the driver lists its devices again; report the error with the log of "
                "the node plugin on this node"
            )
            self._driver.changed()

    def _sound_pools(self) -> Collection[PoolState]:
        return [pool for name, pool in self.pools.items() if name not in self.failed]

    def newly_rejected(self) -> Mapping[str, str]:
        """Return the entries of `rejected` that have not been returned before. Their number is
        limited."""
        reported = self._reported_rejected
        new = [item for item in self.rejected.items() if item not in reported]
        new = new[: min(MAX_REPORTED_AT_ONCE, MAX_REPORTED - len(reported))]
        reported.update(new)
        return dict(new)

    def row(self) -> StoredEndpoint | None:
        """Return the endpoint's row for the store, or None if it has no pools."""
        if not self.pools:
            return None
        present = self.phase is Phase.PRESENT
        held: dict[str, str] = {}
        for pool in self._sound_pools():
            with self._guarding(pool):
                held[pool.name] = pool.held_content()
        return StoredEndpoint(
            name=self.name,
            pools={name: tuple(sorted(pool.names)) for name, pool in self.pools.items()},
            gone=_sorted({name: pool.gone for name, pool in self.pools.items()}),
            evicting=_sorted({name: pool.evicting for name, pool in self.pools.items()}),
            held={name: content for name, content in held.items() if content},
            stopped_at=None if present else self.stopped_at,
            removing=self.phase is Phase.REMOVING,
        )

    # ------------------------------------------------------------ changes

    def restore(self, row: StoredEndpoint) -> None:
        """
        Initialize from the stored row. The endpoint is unavailable: since the time in the row, if
        it has one, and otherwise since now.
        """
        wall = self._driver.wall()
        self.stopped_at = wall if row.stopped_at is None else min(row.stopped_at, wall)
        since = self._driver.now() - (wall - self.stopped_at)
        self.life = Life(stopped_since=since, known=True, removing=row.removing)
        self.pools = {name: self._pool(name) for name in row.pools}
        for name, pool in self.pools.items():
            with self._guarding(pool):
                pool.restore(
                    row.pools[name],
                    gone=row.gone.get(name, ()),
                    evicting=row.evicting.get(name, ()),
                    held=row.held.get(name, ""),
                )
        self.phase = phase(self.life, self._grace_periods, now=self._driver.now())
        self.refresh()

    def replace(self, inventory: Inventory, *, taken: Collection[str]) -> None:
        """Replace the devices with those of an inventory, whether or not the endpoint was
        available. Pools that other endpoints publish (`taken`) are rejected."""
        returned = self.life.stopped_since is not None
        self.checked = check_inventory(inventory, node=self._driver.node, previous=self.checked)
        rejected = self.checked.rejected
        self.rejected_policies = _policies_of_rejected(inventory, self.checked) if rejected else {}
        contents = self._contents()
        self.refused = {
            name: "another endpoint of the driver already uses this pool"
            for name, content in contents.items()
            if name in taken and content.devices
        }
        self.failed.clear()
        malformed = [each for each in inventory.rejected if each.reason == "Invalid"]
        self.malformed = {each.device: each.message for each in reversed(malformed)}
        self.rejected_by_driver = [e for e in inventory.rejected if e.reason != "Invalid"]
        self.outcomes = inventory.policies
        self.marked = frozenset(
            DeviceKey(pool_name(self._driver.node, each.pool), each.name)
            for each in inventory.devices
            # Drivers create these objects, so check their type.
            if isinstance(cast("object", each), Device)
            and isinstance(cast("object", each.name), str)
            and each.prepare_again
        )
        self.life = replace(self.life, stopped_since=None, listed=True, removing=False)
        self.phase = Phase.PRESENT
        self._listed_pools = contents.keys() - taken
        kept = {name: content for name, content in contents.items() if name not in taken}
        has_fallback = self.checked.fallback is not None
        for name, pool in self.pools.items():
            if name not in kept and name not in taken and not pool.empty:  # the devices are gone
                kept[name] = PoolContent(
                    devices={},
                    fallback={} if has_fallback else None,
                    ordered=self.checked.ordered,
                    partition_type_attribute=self.checked.partition_type_attribute,
                )
        if returned or self.pools.keys() != kept.keys():
            self._driver.changed()
        self.pools = {name: self._pool(name) for name in kept}
        withdrawn = self._withdrawn(inventory)
        for name, pool in self.pools.items():
            with self._guarding(pool):
                dirty = pool.replace(kept[name], returned=returned, withdrawn=withdrawn(pool))
                pool.refresh(None if returned else dirty, unavailable=None)

    def _withdrawn(self, inventory: Inventory) -> Callable[[PoolState], frozenset[str]]:
        """
        Return a function that returns the names of a pool's devices that are still present, whether
        or not they are listed.

        The driver reports some of them as withdrawn. Devices that cannot be published are also
        present: a malformed value, even a malformed pool name, must not cause pods to be evicted.
        """
        everywhere: set[str] = set()
        by_pool: dict[str, set[str]] = {}
        for each in inventory.withdrawn:
            pool, slash, name = each.rpartition("/")
            (by_pool.setdefault(pool, set()) if slash else everywhere).add(name)
        listed = (*inventory.devices, *(inventory.fallback or ()))
        for device in listed if self.checked.rejected_count else ():
            # Drivers create these objects, so check their type.
            if isinstance(cast("object", device), Device) and not [
                *place_problems(device.name, "")
            ]:
                is_pool = not [*place_problems("a", device.pool)]
                (by_pool.setdefault(device.pool, set()) if is_pool else everywhere).add(device.name)
        node = self._driver.node
        return lambda pool: frozenset(everywhere | by_pool.get(short_pool(node, pool.name), set()))

    def report(
        self, health: Mapping[DeviceKey, Health], unlisted: Mapping[DeviceKey, Health]
    ) -> None:
        """Apply health reports (see :class:`.HealthReport`)."""
        self._apply(health, lambda pool, name, report: pool.observe(name, report))
        new = {
            key: health_of(
                *(key.pool, key.name, self.unlisted.get(key), Condition(health=each)),
                wall=int(self._driver.wall()),
                unavailable=None,
                gone=None,
            )
            for key, each in unlisted.items()
            if key.pool not in self.pools
        }
        if new != self.unlisted:
            self.unlisted = new
            self._driver.health_changed = True

    def adopt(self, devices: dict[DeviceKey, PublishedTaints]) -> None:
        """Adopt the taints from before a restart. The devices of this endpoint are removed from
        `devices`."""

        def adopt(pool: PoolState, name: str, published: PublishedTaints) -> bool:
            if name not in pool:
                if not any(key == GONE for key, _ in published):
                    return False
                pool.keep_gone(name, evicting=(GONE, "NoExecute") in published)
            pool.adopt(name, published)
            if self.phase is Phase.PRESENT:
                pool.list_again(name)
            return True

        for key in self._apply(devices, adopt):
            del devices[key]

    def gone(self) -> Iterator[DeviceKey]:
        """Yield the devices that the endpoint, or one of its inventories, no longer lists, and that
        may be forgotten."""
        if self.phase in (Phase.PRESENT, Phase.STOPPED):
            for pool in self.pools.values():
                yield from (DeviceKey(pool.name, name) for name in pool.releasable)

    def let_go(self, devices: Iterable[DeviceKey]) -> None:
        """Forget the given devices that are gone, because no claim holds them."""
        names: dict[str, list[str]] = {}
        for key in devices:
            names.setdefault(key.pool, []).append(key.name)
        for name in names.keys() & self.pools.keys():
            pool = self.pools[name]
            with self._guarding(pool):
                pool.let_go(names[name])
            if pool.empty and name not in self._listed_pools and self.life.listed:
                del self.pools[name]
                self._driver.changed()

    def _apply(
        self, reports: Mapping[DeviceKey, _T], change: Callable[[PoolState, str, _T], bool]
    ) -> list[DeviceKey]:
        """Change devices, refresh those that have changed, and return them."""
        by_pool: dict[str, dict[str, _T]] = {}
        for key, each in reports.items():
            by_pool.setdefault(key.pool, {})[key.name] = each
        changed: list[DeviceKey] = []
        for pool in self._sound_pools():
            with self._guarding(pool):
                found = by_pool.get(pool.name, {}).items()
                if names := [name for name, each in found if change(pool, name, each)]:
                    pool.refresh(names, unavailable=self.unavailable)
                    changed += (DeviceKey(pool.name, name) for name in names)
        return changed

    def stop(self, reason: str) -> None:
        """Mark the endpoint as unavailable, or update the reason if it already is. Its devices
        remain known, but it cannot be called. Clears `marked`: when the endpoint is available
        again, its next inventory marks the devices to be prepared again."""
        self.marked = frozenset()
        if self.life.stopped_since is None:
            self.life = replace(self.life, stopped_since=self._driver.now())
            self.phase = Phase.STOPPED
            self.stopped_at = self._driver.wall()
            self.unlisted = {}
            self._driver.changed()
            for pool in self._sound_pools():
                with self._guarding(pool):
                    pool.mark_unavailable()
        elif reason == self.reason:
            return
        self.reason = reason
        self.refresh()

    def excuse(self, seconds: float) -> None:
        """Extend the grace period of an endpoint that has not listed its devices yet by the time
        during which it was not allowed to list them."""
        since = self.life.stopped_since
        if not self.life.listed and since is not None:
            now, wall = self._driver.now(), self._driver.wall()
            self.life = replace(self.life, stopped_since=min(since + seconds, now))
            self.stopped_at = min(self.stopped_at + seconds, wall)

    def age(self) -> None:
        """Update the life cycle and the devices for deadlines that have passed."""
        now = phase(self.life, self._grace_periods, now=self._driver.now())
        if now is not self.phase:
            self.phase = now
            self._driver.changed()
            self.refresh()
        for pool in self._sound_pools():
            with self._guarding(pool):
                if changed := pool.settle():
                    pool.refresh(changed, unavailable=self.unavailable)

    def next_changes(self) -> Iterator[float]:
        """Yield the times at which the state can change without an event."""
        if (end := phase_ends(self.life, self._grace_periods)) is not None:
            yield end
        for pool in self._sound_pools():
            yield from pool.due.values()
            yield from pool.evict_at.values()

    def remove(self) -> None:
        """Begin to remove the endpoint, because its grace period has ended."""
        self.life = replace(self.life, removing=True)
        self.phase = Phase.REMOVING
        self._driver.stored_changed = True

    def forget(self) -> None:
        """Forget the endpoint's pools, which have been deleted. The endpoint can still return."""
        self.life = replace(self.life, removing=False, known=False)
        self.phase = Phase.STOPPED  # no pool is left to delete
        self.pools = {}
        self.checked = CheckedInventory()
        self.rejected_policies = {}
        self.refused = {}
        self.malformed = {}
        self.failed.clear()
        self._reported_rejected.clear()
        self._driver.changed()

    def refresh(self) -> None:
        """Update all devices of the endpoint."""
        for pool in self._sound_pools():
            with self._guarding(pool):
                pool.refresh(None, unavailable=self.unavailable)

    def follow_claims(self) -> None:
        """Update the pools after a change to the set of devices that claims hold."""
        for pool in self._sound_pools():
            with self._guarding(pool):
                if changed := pool.follow_claims():
                    pool.refresh(changed, unavailable=self.unavailable)

    def refresh_holds(self, name: str) -> None:
        """Update a pool after a change to its holds."""
        for pool in self._sound_pools():
            if pool.name == name:
                with self._guarding(pool):
                    pool.refresh((), unavailable=self.unavailable)

    def _pool(self, name: str) -> PoolState:
        return self.pools.get(name) or PoolState(name, self._driver)

    def _contents(self) -> Mapping[str, PoolContent]:
        """
        Split the inventory by pool.

        A driver without devices has an empty pool, which distinguishes it from a missing driver. If
        the driver has several endpoints, an endpoint without devices keeps the pools that it had,
        as the kubelet keeps a resource without devices. If it never had a pool, it does not get
        one.
        """
        parts: dict[str, _Parts] = {}
        for device in self.checked.devices:
            parts.setdefault(device.pool, _Parts()).devices[device.name] = device
        for counters in self.checked.counter_sets:
            parts.setdefault(counters.pool, _Parts()).counter_sets.append(counters)
        for device in self.checked.fallback or ():
            parts.setdefault(device.pool, _Parts()).fallback[device.name] = device
        has_fallback = self.checked.fallback is not None
        if not parts and self._driver.open_ended:
            ordered = self.checked.ordered
            return {name: PoolContent(devices={}, ordered=ordered) for name in self.pools}
        return {
            pool_name(self._driver.node, pool): PoolContent(
                devices=part.devices,
                counter_sets=tuple(part.counter_sets),
                fallback=part.fallback if has_fallback else None,
                ordered=self.checked.ordered,
                partition_type_attribute=self.checked.partition_type_attribute,
            )
            for pool, part in (parts or {"": _Parts()}).items()
        }


def _policies_of_rejected(inventory: Inventory, checked: CheckedInventory) -> Mapping[str, str]:
    kept = {shown_place(each.pool, each.name) for each in checked.devices}
    found: dict[str, str] = {}
    for device in inventory.devices:
        if not isinstance(cast("object", device), Device):  # drivers create these objects
            continue
        place = shown_place(device.pool, device.name)
        attributes = cast("object", device.attributes)
        if place in kept or place not in checked.rejected or not isinstance(attributes, dict):
            continue
        policy = cast("dict[object, object]", attributes).get("policy")
        if isinstance(policy, str):
            found[place] = policy
    return found


def _sorted(names: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    return {pool: tuple(sorted(each)) for pool, each in names.items() if each}
