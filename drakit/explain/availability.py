"""
How many devices there are for a request, and what stands in the way of the others.

Each device is counted once, under the obstacle that lasts longest: a node that the pod cannot use,
then taints, then holders, since a release does not help a tainted device. The counts explain;
:mod:`.search` decides whether a pod fits.

It must not know clients, or how a sentence is made of the counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from drakit.explain.allocation import NotEvaluatedError, bits, tolerates
from drakit.explain.capacity import short_capacities
from drakit.explain.constraints import counters_of
from drakit.explain.model import (
    ClaimFacts,
    DeviceFacts,
    DeviceID,
    PoolID,
    Request,
    TaintFacts,
    Toleration,
)
from drakit.explain.nodes import Unusable
from drakit.explain.pools import Counter, NodePool
from drakit.explain.world import Reachable, World

__all__ = ("Analysis", "Availability", "Hardware", "Obstacle", "SelectorError", "analyze", "needed")

_OPERATORS = ("", "Equal", "Exists")

NAMED_HOLDERS = 3
"""Holders that are kept per namespace: an Event names at most this many."""


@dataclass(slots=True)
class Obstacle:
    """Devices that are unavailable for one kind of reason."""

    devices: int = 0
    claims: dict[str, ClaimFacts] = field(default_factory=dict[str, ClaimFacts])
    """The claims that must release something, by UID."""

    words: set[str] = field(default_factory=set[str])
    """Keys of taints, names of capacities, or reasons against nodes."""

    def add(
        self, devices: int = 1, *, claims: Iterable[ClaimFacts] = (), words: Iterable[str] = ()
    ) -> None:
        self.devices += devices
        for claim in claims:
            self.claims[claim.uid] = claim
        self.words.update(words)

    def merge(self, other: Obstacle) -> None:
        self.devices += other.devices
        self.claims |= other.claims
        self.words |= other.words


@dataclass(slots=True)
class Availability:
    """Devices of a request: free, or behind an obstacle."""

    free: int = 0
    small: int = 0
    """Devices that can never have the requested capacity; `total` does not include them."""

    tainted: Obstacle = field(default_factory=Obstacle)
    effects: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Key and effect of each taint of `tainted`."""

    rules: set[str] = field(default_factory=set[str])
    """DeviceTaintRules that add taints of `tainted`."""

    allocated: Obstacle = field(default_factory=Obstacle)
    partitioned: Obstacle = field(default_factory=Obstacle)
    """Other devices use the hardware that they need."""

    used_up: Obstacle = field(default_factory=Obstacle)
    """They are shared, and too little of them is left."""

    elsewhere: Obstacle = field(default_factory=Obstacle)
    """Only nodes that the pod cannot use reach them."""

    most_free: tuple[str, int] = ("", 0)
    """The node with the most free devices, and their number."""

    @property
    def total(self) -> int:
        return self.free + self.tainted.devices + self.releasable + self.elsewhere.devices

    @property
    def releasable(self) -> int:
        """Devices that become available when claims release devices."""
        return self.allocated.devices + self.partitioned.devices + self.used_up.devices

    def merge(self, other: Availability) -> None:
        self.free += other.free
        self.small += other.small
        for name in ("tainted", "allocated", "partitioned", "used_up", "elsewhere"):
            getattr(self, name).merge(getattr(other, name))
        self.effects |= other.effects
        self.rules |= other.rules


@dataclass(frozen=True, slots=True)
class SelectorError:
    """A device on which a selector fails; a search that reaches it ends."""

    device: DeviceID
    text: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """What one request finds in the whole cluster, regardless of the pod that asks."""

    request: Request
    published: int
    rejected: tuple[tuple[str, str, int], ...]
    """For each selector in order: its owner, itself, and the devices that it rejects."""

    errors: tuple[SelectorError, ...]
    entries: tuple[tuple[Reachable, Availability], ...]
    """For each slice with matching devices."""

    free_by_node: Mapping[str, int]
    """How many devices each node could give to the request alone."""

    matching_by_node: Mapping[str, int]
    """How many devices of each node match, available or not."""

    @property
    def matching(self) -> int:
        return sum(found.total + found.small for _, found in self.entries)

    def for_nodes(self, nodes: Mapping[str, Unusable | None]) -> Availability:
        """
        Return what a pod finds on its nodes.

        :param nodes: all nodes, each with the reason why the pod cannot use it.
        """
        result = Availability()
        for reach, found in self.entries:
            reasons = [nodes.get(name) for name in reach.nodes]
            if all(reason is not None for reason in reasons):
                words = {_word(reason) for reason in reasons if reason is not None}
                result.elsewhere.add(found.total, words=words)
                result.small += found.small
            else:
                result.merge(found)
        usable = (
            (name, free) for name, free in self.free_by_node.items() if nodes.get(name) is None
        )
        result.most_free = max(usable, key=lambda each: (each[1], each[0]), default=("", 0))
        return result


def _word(reason: Unusable) -> str:
    return f"{reason.problem.value} {reason.detail}".strip()


def needed(request: Request, found: Availability | None = None) -> int:
    """Return how many devices there must be at least; "all" means at least one."""
    if request.every and found is not None:
        return max(found.total, 1)
    return max(request.count, 1)


def analyze(request: Request, world: World) -> Analysis:
    """
    Count the devices of the cluster for a request.

    Raises :class:`NotEvaluatedError` where a selector has no outcome.
    """
    for toleration in request.tolerations:
        if toleration.operator not in _OPERATORS:
            raise NotEvaluatedError(
                f"operator {toleration.operator} of a toleration is unknown to this version"
            )
    selectors = world.expressions(request)
    rejected = [0] * len(selectors)
    errors: list[SelectorError] = []
    entries: list[tuple[Reachable, Availability]] = []
    published = 0
    sorting = _Sorting(request, world)
    for reach in world.reachable():
        of = reach.slice
        published += len(of.devices)
        selected = world.selected(request, of)
        for number, count in enumerate(selected.rejected):
            rejected[number] += count
        for index, text in selected.errors.items():
            identity = DeviceID(of.driver, of.pool, of.devices[index].name)
            errors.append(SelectorError(identity, text, tuple(reach.nodes)))
        if matches := selected.matches:
            found = Availability()
            if reach.plain and not request.capacity and not sorting.has_rules:
                sorting.sort_plain(reach, matches, found)
            else:
                sorting.sort(reach, matches, found)
            entries.append((reach, found))
    return Analysis(
        request=request,
        published=published,
        rejected=tuple(
            (owner, expression, number)
            for (owner, expression), number in zip(selectors, rejected, strict=True)
        ),
        errors=tuple(errors),
        entries=tuple(entries),
        free_by_node=_free_by_node(request, entries),
        matching_by_node=_matching_by_node(entries),
    )


def _matching_by_node(entries: Sequence[tuple[Reachable, Availability]]) -> dict[str, int]:
    matching: dict[str, int] = {}
    for reach, found in entries:
        for node in reach.nodes:
            matching[node] = matching.get(node, 0) + found.total
    return matching


def _free_by_node(
    request: Request, entries: Sequence[tuple[Reachable, Availability]]
) -> dict[str, int]:
    free: dict[str, int] = {}
    taken: set[str] = set()
    for reach, found in entries:
        for node in reach.nodes if found.free else ():
            free[node] = free.get(node, 0) + found.free
        if request.every and found.free < found.total:
            taken.update(reach.nodes)
    return {node: number for node, number in free.items() if node not in taken}


class _Sorting:
    """Sorts the devices of one request."""

    def __init__(self, request: Request, world: World) -> None:
        self._request = request
        self._world = world
        self._hardware = Hardware(world)
        self.has_rules = world.has_taint_rules

    def sort_plain(self, reach: Reachable, matches: int, found: Availability) -> None:
        """Count devices that are free unless a claim has them."""
        of, world = reach.slice, self._world
        if self._request.admin_access:
            found.free += matches.bit_count()
            return
        held = matches & world.allocated_in(of)
        found.free += (matches ^ held).bit_count()
        for index in bits(held):
            holder = world.holder(DeviceID(of.driver, of.pool, of.devices[index].name))
            found.allocated.add(claims=[holder] if holder is not None else ())

    def sort(self, reach: Reachable, matches: int, found: Availability) -> None:
        of = reach.slice
        for index in bits(matches):
            device = of.devices[index]
            identity = DeviceID(of.driver, of.pool, device.name)
            self._sort_one(reach.pool, identity, device, found)

    def _sort_one(
        self, pool: NodePool, identity: DeviceID, device: DeviceFacts, found: Availability
    ) -> None:
        world = self._world
        request = self._request
        shareable = device.kind.shareable
        sharers = world.sharers(identity) if shareable else ()
        consumed = world.consumed(identity) if sharers else None
        short = short_capacities(
            device.kind.capacity, request.capacity, used=[consumed] if consumed else ()
        )
        if short is None:
            found.small += 1
            return
        taints = world.taints(identity, device)
        if taints and (obstacles := _not_tolerated(taints, request.tolerations)):
            found.tainted.add(words=(taint.key for taint in obstacles))
            found.effects.update((taint.key, taint.effect) for taint in obstacles)
            found.rules.update(world.taint_rules(identity, obstacles))
        elif request.admin_access:
            found.free += 1  # it consumes nothing
        elif (holder := world.holder(identity)) is not None:
            found.allocated.add(claims=(holder,))
        elif short:
            words = (name.removeprefix(f"{identity.driver}/") for name in short)
            found.used_up.add(claims=sharers, words=words)
        # A shared device already consumes its counters.
        elif any(need > pool.counters.get(counter, 0) for counter, need in counters_of(device)):
            found.small += 1
        elif not sharers and (claims := self._hardware.in_the_way(pool, device)) is not None:
            found.partitioned.add(claims=claims)
        else:
            found.free += 1


def _not_tolerated(
    taints: Iterable[TaintFacts], tolerations: Sequence[Toleration]
) -> list[TaintFacts]:
    return [
        taint
        for taint in taints
        if not any(tolerates(toleration, taint) for toleration in tolerations)
    ]


@dataclass(slots=True)
class _Taken:
    """The amount taken of a counter, and its holders."""

    amount: int = 0
    claims: dict[str, ClaimFacts] = field(default_factory=dict[str, ClaimFacts])


class Hardware:
    """The rest of each pool's counters beside allocated partitions. Each pool is read once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pools: dict[PoolID, dict[Counter, _Taken]] = {}

    def in_the_way(self, pool: NodePool, device: DeviceFacts) -> list[ClaimFacts] | None:
        """Return the claims that hold the device's hardware; None if enough is left."""
        if not device.consumes:
            return None
        if pool.identity not in self._pools:
            self._pools[pool.identity] = self._taken(pool)
        taken = self._pools[pool.identity]
        found: list[ClaimFacts] = []
        short = False
        for counter, need in counters_of(device):
            used = taken.get(counter)
            if (used.amount if used else 0) + need > pool.counters.get(counter, 0):
                short = True
                found.extend(used.claims.values() if used else ())
        return found if short else None

    def _taken(self, pool: NodePool) -> dict[Counter, _Taken]:
        taken: dict[Counter, _Taken] = {}
        driver, name = pool.identity
        for each in (*pool.slices, *pool.elsewhere):
            for device in each.devices:
                if not device.consumes:
                    continue
                identity = DeviceID(driver, name, device.name)
                holder = self._world.holder(identity)
                claims = [holder] if holder is not None else self._world.sharers(identity)
                for counter, amount in counters_of(device) if claims else ():
                    entry = taken.setdefault(counter, _Taken())
                    entry.amount += amount
                    entry.claims.update({claim.uid: claim for claim in claims})
        return taken
