"""
Which devices of a request are available, and why the others are not.

Each device is counted once, under its longest obstacle: taints before holders, since a release
does not help a tainted device. The needs of a device are never estimated higher than the scheduler
does; if they cannot be estimated, the answer is unknown.

It must not know clients, selectors, or how the answer is phrased.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from drakit.explain.capacity import billionths, short_capacities, summed
from drakit.explain.model import (
    ClaimFacts,
    DeviceFacts,
    DeviceID,
    PoolID,
    Request,
    TaintFacts,
    Toleration,
)
from drakit.explain.pools import Counter, PoolCounters, Published
from drakit.explain.selectors import Matches

__all__ = ("Availability", "Obstacle", "Users", "availability", "needed", "tolerates")

NAMED_HOLDERS = 3
"""Holders that are kept per namespace: an Event names at most this many."""


class Users(Protocol):
    """The facts of which claim holds which devices."""

    def holder(self, device: DeviceID) -> ClaimFacts | None: ...
    def sharers(self, device: DeviceID) -> Sequence[ClaimFacts]: ...
    def counters(self, pool: PoolID) -> PoolCounters | None: ...


@dataclass(slots=True)
class Obstacle:
    """Devices that are unavailable for one kind of reason."""

    devices: int = 0
    claims: dict[str, ClaimFacts] = field(default_factory=dict[str, ClaimFacts])
    """The claims that must release something, by UID; after :meth:`trim`, the first ones of each
    namespace."""

    words: set[str] = field(default_factory=set[str])
    """Keys of taints, or names of capacities."""

    count_by_namespace: dict[str, int] = field(default_factory=dict[str, int])
    """The number of claims; set by :meth:`trim`."""

    def add(self, *, claims: Iterable[ClaimFacts] = (), words: Iterable[str] = ()) -> None:
        self.devices += 1
        for claim in claims:
            self.claims[claim.uid] = claim
        self.words.update(words)

    def trim(self) -> None:
        """Keep only the claims that an Event can name: there can be one per device."""
        kept: dict[str, ClaimFacts] = {}
        for claim in sorted(self.claims.values(), key=lambda each: (each.namespace, each.name)):
            count = self.count_by_namespace.get(claim.namespace, 0)
            if count < NAMED_HOLDERS:
                kept[claim.uid] = claim
            self.count_by_namespace[claim.namespace] = count + 1
        self.claims = kept


@dataclass(slots=True)
class Availability:
    """How many devices match a request, and why they are unavailable."""

    free: int = 0
    small: int = 0
    """Devices that can never have the requested capacity; `total` does not include them."""

    tainted: Obstacle = field(default_factory=Obstacle)
    allocated: Obstacle = field(default_factory=Obstacle)
    partitioned: Obstacle = field(default_factory=Obstacle)
    """Other devices use the hardware that they need."""

    used_up: Obstacle = field(default_factory=Obstacle)
    """They are shared, and too little of them is left."""

    def __len__(self) -> int:
        """The number of claims and namespaces that it holds."""
        return sum(
            len(each.claims) + len(each.count_by_namespace)
            for each in (self.allocated, self.partitioned, self.used_up)
        )

    def __bool__(self) -> bool:
        return True

    @property
    def total(self) -> int:
        return self.free + self.tainted.devices + self.releasable

    @property
    def releasable(self) -> int:
        """Devices that become available when claims release devices."""
        return self.allocated.devices + self.partitioned.devices + self.used_up.devices


def needed(request: Request) -> int:
    """Return how many devices must exist at least; "all" also means one."""
    return max(request.count, 1)


def availability(matches: Matches, request: Request, users: Users) -> Availability | None:
    """Sort the devices; None if there are enough free ones, or if that is not certain."""
    if matches.possible:
        return None
    sorting = _Sorting(request, users)
    enough = needed(request)
    for published in matches.certain:
        try:
            sorting.sort(published)
        except ValueError:
            return None  # a quantity or a counter that we cannot read
        if sorting.found.free >= enough:
            return None
    for obstacle in (sorting.found.allocated, sorting.found.partitioned, sorting.found.used_up):
        obstacle.trim()
    return sorting.found


class _Sorting:
    """Sorts the devices of one request; it evaluates equal devices only once."""

    def __init__(self, request: Request, users: Users) -> None:
        self._request = request
        self._users = users
        self._hardware = _Hardware(users)
        self._short: dict[tuple[str, int], tuple[str, ...] | None] = {}
        self.found = Availability()

    def sort(self, published: Published) -> None:
        identity, device, _ = published
        found, users = self.found, self._users
        sharers = users.sharers(identity) if device.shareable else ()
        short = self._short_capacities(identity, device, sharers)
        if short is None:
            found.small += 1
        elif device.taints and (
            keys := _keys_not_tolerated(device.taints, self._request.tolerations)
        ):
            found.tainted.add(words=keys)
        elif self._request.admin_access:
            found.free += 1  # it consumes nothing
        elif (holder := users.holder(identity)) is not None:
            found.allocated.add(claims=(holder,))
        elif short:
            words = (_short(name, identity.driver) for name in short)
            found.used_up.add(claims=sharers, words=words)
        # A shared device already consumes its counters.
        elif not sharers and (claims := self._hardware.in_the_way(identity, device)) is not None:
            found.partitioned.add(claims=claims)
        else:
            found.free += 1

    def _short_capacities(
        self, identity: DeviceID, device: DeviceFacts, sharers: Sequence[ClaimFacts]
    ) -> tuple[str, ...] | None:
        asked = self._request.capacity
        if sharers:
            consumed = _consumed_of(identity, sharers)
            return short_capacities(device, driver=identity.driver, asked=asked, consumed=consumed)
        # Equal devices share one tuple of capacities, and the device keeps it alive.
        key = (identity.driver, id(device.capacity))
        if key not in self._short:
            self._short[key] = short_capacities(
                device, driver=identity.driver, asked=asked, consumed={}
            )
        return self._short[key]


def _consumed_of(identity: DeviceID, sharers: Iterable[ClaimFacts]) -> dict[str, int]:
    shares = (share for claim in sharers for share in claim.shares if share.device == identity)
    return summed(amount for share in shares for amount in share.consumed)


def _short(name: str, driver: str) -> str:
    return name.removeprefix(f"{driver}/")


def _keys_not_tolerated(
    taints: Iterable[TaintFacts], tolerations: Sequence[Toleration]
) -> list[str]:
    return [
        taint.key
        for taint in taints
        if not any(tolerates(toleration, taint) for toleration in tolerations)
    ]


def tolerates(toleration: Toleration, taint: TaintFacts) -> bool:
    """Return whether a taint is tolerated; an unknown operator may well tolerate it."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    return toleration.operator != "Equal" or toleration.value == taint.value


@dataclass(slots=True)
class _Taken:
    """The amount taken of a counter, and its holders."""

    amount: int = 0
    claims: dict[str, ClaimFacts] = field(default_factory=dict[str, ClaimFacts])


class _Hardware:
    """The rest of each pool's counters beside allocated partitions. Each pool is read once."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self._pools: dict[PoolID, tuple[PoolCounters, dict[Counter, _Taken]]] = {}

    def in_the_way(self, identity: DeviceID, device: DeviceFacts) -> list[ClaimFacts] | None:
        """Return the claims that hold the device's hardware; None if enough is left."""
        if not device.consumes:
            return None
        counters, taken = self._pool(identity.of_pool)
        found: list[ClaimFacts] = []
        short = False
        for counter, need in _consumed(device):
            if counter not in counters.totals or need > billionths(counters.totals[counter]):
                raise ValueError(f"{counter} of {identity} can never be enough")
            used = taken.get(counter)
            if used is not None and used.amount + need > billionths(counters.totals[counter]):
                short = True
                found.extend(used.claims.values())
        return found if short else None

    def _pool(self, pool: PoolID) -> tuple[PoolCounters, dict[Counter, _Taken]]:
        if pool not in self._pools:
            counters = self._users.counters(pool)
            if counters is None:
                raise ValueError(f"pool {pool} has partitions and no counters")
            self._pools[pool] = (counters, self._taken(counters))
        return self._pools[pool]

    def _taken(self, counters: PoolCounters) -> dict[Counter, _Taken]:
        taken: dict[Counter, _Taken] = {}
        for identity, device in counters.consumers:
            holder = self._users.holder(identity)
            claims = [holder] if holder is not None else self._users.sharers(identity)
            for counter, amount in _consumed(device) if claims else ():
                entry = taken.setdefault(counter, _Taken())
                entry.amount += amount
                entry.claims.update({claim.uid: claim for claim in claims})
        return taken


def _consumed(device: DeviceFacts) -> Iterable[tuple[Counter, int]]:
    for each in device.consumes:
        for amount in each.counters:
            yield Counter(each.name, amount.name), billionths(amount.quantity)
