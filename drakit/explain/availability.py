"""
Which of the devices that a request means could be had, and what stands in the way of the others.

Each device is counted once, under what keeps it longest: taints before holders, since a release
does not help what is tainted. What a device needs is never reckoned higher than the scheduler does;
where that cannot be reckoned, the answer is that nobody can tell.

It must not know clients, selectors, or how a sentence is made of the answer.
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
from drakit.explain.pools import Counter, PoolCounters
from drakit.explain.selectors import Matches

__all__ = ("Availability", "Obstacle", "Users", "availability", "needed", "tolerates")

_PLAIN = DeviceFacts(name="", attributes={})
"""What there is to know of a device that is not special: nothing but its holder."""


class Users(Protocol):
    """What must be known of who has what."""

    def holder(self, device: DeviceID) -> ClaimFacts | None: ...
    def sharers(self, device: DeviceID) -> Sequence[ClaimFacts]: ...
    def counters(self, pool: PoolID) -> PoolCounters | None: ...


@dataclass(slots=True)
class Obstacle:
    """Devices that cannot be had for one sort of reason."""

    devices: int = 0
    claims: dict[tuple[str, str], ClaimFacts] = field(
        default_factory=dict[tuple[str, str], ClaimFacts]
    )
    """Who has to release something, by namespace and name."""

    words: set[str] = field(default_factory=set[str])
    """Keys of taints, or names of capacities."""

    def add(self, *, claims: Iterable[ClaimFacts] = (), words: Iterable[str] = ()) -> None:
        self.devices += 1
        self.claims.update({(claim.namespace, claim.name): claim for claim in claims})
        self.words.update(words)


@dataclass(slots=True)
class Availability:
    """How many devices there are for a request, and why they cannot be had."""

    free: int = 0
    small: int = 0
    """Devices that would never have the capacity that is asked for; they are none of `total`."""

    tainted: Obstacle = field(default_factory=Obstacle)
    allocated: Obstacle = field(default_factory=Obstacle)
    partitioned: Obstacle = field(default_factory=Obstacle)
    """What they would take of their hardware is taken by other devices."""

    used_up: Obstacle = field(default_factory=Obstacle)
    """They are shared, and too little of them is left."""

    @property
    def total(self) -> int:
        return self.free + self.tainted.devices + self.releasable

    @property
    def releasable(self) -> int:
        """Devices that can be had when others have released something."""
        return self.allocated.devices + self.partitioned.devices + self.used_up.devices


def needed(request: Request) -> int:
    """Give how many devices there must be at least; "all" means one, too."""
    return max(request.count, 1)


def availability(matches: Matches, request: Request, users: Users) -> Availability | None:
    """Sort the devices; None if there are enough free ones, or if that is not certain."""
    if matches.possible:
        return None
    found = Availability()
    hardware = _Hardware(users)
    for identity in matches.certain:
        try:
            _sort(identity, matches.special.get(identity, _PLAIN), request, users, hardware, found)
        except ValueError:
            return None  # a quantity or a counter that we cannot read
        if found.free >= needed(request):
            return None
    return found


def _sort(
    identity: DeviceID,
    device: DeviceFacts,
    request: Request,
    users: Users,
    hardware: _Hardware,
    found: Availability,
) -> None:
    sharers = users.sharers(identity) if device.shareable else ()
    short = short_capacities(
        device,
        driver=identity.driver,
        asked=request.capacity,
        consumed=_consumed_of(identity, sharers) if sharers else {},
    )
    if short is None:
        found.small += 1
    elif keys := _keys_not_tolerated(device.taints, request.tolerations):
        found.tainted.add(words=keys)
    elif request.admin_access:
        found.free += 1  # it takes nothing from anybody
    elif (holder := users.holder(identity)) is not None:
        found.allocated.add(claims=[holder])
    elif short:
        found.used_up.add(claims=sharers, words=(_short(name, identity.driver) for name in short))
    # A device of which somebody has a share has its counters already.
    elif not sharers and (claims := hardware.in_the_way(identity, device)) is not None:
        found.partitioned.add(claims=claims)
    else:
        found.free += 1


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
    """Tell whether a taint is tolerated; by an operator that we do not know it may well be."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    return toleration.operator != "Equal" or toleration.value == taint.value


@dataclass(slots=True)
class _Taken:
    """What is taken of a counter, and who has it."""

    amount: int = 0
    claims: dict[str, ClaimFacts] = field(default_factory=dict[str, ClaimFacts])


class _Hardware:
    """What allocated partitions leave of their pools' counters. Each pool is looked at once."""

    def __init__(self, users: Users) -> None:
        self._users = users
        self._pools: dict[PoolID, tuple[PoolCounters, dict[Counter, _Taken]]] = {}

    def in_the_way(self, identity: DeviceID, device: DeviceFacts) -> list[ClaimFacts] | None:
        """Give the claims that have what the device would take; None if enough is left of it."""
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
