"""
How many devices there are for a request, and what stands in the way of the others.

Each device is counted once, under the obstacle that lasts longest: a node that the pod cannot use,
then taints, then holders, since a release does not help a tainted device. The counts explain;
:mod:`.search` decides whether a pod fits.

It must not know clients, or how a sentence is made of the counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from drakit.quantity import quantity_units
from drakit_explain.allocation import (
    NotEvaluatedError,
    Selected,
    consumed_by,
    counters_of,
    not_supported,
    short_capacities,
    tolerates,
)
from drakit_explain.budget import MAX_STEPS, Budget
from drakit_explain.codes import Code
from drakit_explain.devices import DeviceFacts, DeviceKind, TaintFacts, bits
from drakit_explain.model import ClaimFacts, DeviceID, PoolID, Request, SliceFacts, Toleration
from drakit_explain.nodes import Unusable
from drakit_explain.pools import Counter, NodePool
from drakit_explain.release import rules_of
from drakit_explain.reports import UNHEALTHY
from drakit_explain.world import Reachable, World

_OPERATORS = ("", "Equal", "Exists")

REQUESTS = 4
"""Different requests of one explanation for which the devices of the cluster are counted. Counts
are kept, so a later explanation counts less."""

_STEPS_PER_SLICE = 10
_STEPS_PER_DEVICE = 5
"""Steps of a slice, and of each of its devices if they are counted one by one."""

MAX_PLACEMENTS = 2
"""Sets of nodes for which the results of a request are kept. Each takes up to 0.6 MiB with 5,000
nodes, and each pod can have one of its own."""

SLICES_AT_ONCE = 250
"""Slices that are counted ahead of an explanation without a pause: about 10 ms."""

NAMED_DEVICES = 3
"""Unhealthy devices that are kept: a sentence names their drivers' words."""

NAMED_HOLDERS = 3
"""Holders that are kept per namespace: an Event names at most this many."""


@dataclass(slots=True)
class Obstacle:
    """Devices that are unavailable for one kind of reason."""

    devices: int = 0
    words: set[str] = field(default_factory=set[str])
    """Keys of taints, names of capacities, or reasons against nodes."""

    holders: list[Mapping[str, ClaimFacts]] = field(
        default_factory=list["Mapping[str, ClaimFacts]"]
    )
    """Claims by UID, slice by slice as the counts of the slices have them: they are not copied,
    because every second request of a large cluster has the same 100,000."""

    @property
    def claims(self) -> dict[str, ClaimFacts]:
        """The claims that must release something, by UID: computed for who names them."""
        united: dict[str, ClaimFacts] = {}
        for each in self.holders:
            united.update(each)
        return united

    def add(
        self, devices: int = 1, *, claims: Iterable[ClaimFacts] = (), words: Iterable[str] = ()
    ) -> None:
        self.devices += devices
        if found := {claim.uid: claim for claim in claims}:
            self.holders.append(found)
        self.words.update(words)

    def merge(self, other: Obstacle) -> None:
        self.devices += other.devices
        self.holders += other.holders
        self.words |= other.words


class Left(NamedTuple):
    """What a device has left of a capacity, in billionths."""

    amount: int
    total: int
    needed: int


@dataclass(slots=True)
class Availability:
    """Devices of a request: free, or behind an obstacle."""

    free: int = 0
    small: int = 0
    """Devices that can never have the requested capacity; `total` does not include them."""

    left_out: int = 0
    """Shared devices with too little left. A request for all devices does not need them, as it does
    not need small ones (``validateDeviceRequest`` in ``allocator_incubating.go``)."""

    tainted: Obstacle = field(default_factory=Obstacle)
    effects: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Key and effect of each taint of `tainted`."""

    rules: set[str] = field(default_factory=set[str])
    """DeviceTaintRules that add taints of `tainted`."""

    near: set[str] = field(default_factory=set[str])
    """How tolerations of the request differ from taints of `tainted` with the same key."""

    unhealthy: set[DeviceID] = field(default_factory=set[DeviceID])
    """The first devices of `tainted` that drakit's node plugin reports as unhealthy."""

    allocated: Obstacle = field(default_factory=Obstacle)
    partitioned: Obstacle = field(default_factory=Obstacle)
    """Other devices use the hardware that they need."""

    used_up: Obstacle = field(default_factory=Obstacle)
    """They are shared, and too little of them is left."""

    left: dict[str, Left] = field(default_factory=dict[str, "Left"])
    """By the name of a capacity: the most that a device of `used_up` has left."""

    elsewhere: Obstacle = field(default_factory=Obstacle)
    """Only nodes that the pod cannot use reach them."""

    most_free: tuple[str, int] = ("", 0)
    """The node with the most free devices, the first by name of several, and their number."""

    on_one_node: tuple[Code | None, int] | None = None
    """What :meth:`Analysis.on_one_node` found: equal pods share it."""

    @property
    def total(self) -> int:
        return self.free + self.tainted.devices + self.releasable + self.elsewhere.devices

    @property
    def releasable(self) -> int:
        """Devices that become available when claims release devices."""
        return self.allocated.devices + self.partitioned.devices + self.used_up.devices

    def add_unhealthy(self, *devices: DeviceID) -> None:
        self.unhealthy = set(sorted(self.unhealthy.union(devices))[:NAMED_DEVICES])

    def merge(self, other: Availability) -> None:
        self.free += other.free
        self.small += other.small
        self.left_out += other.left_out
        for name in ("tainted", "allocated", "partitioned", "used_up", "elsewhere"):
            getattr(self, name).merge(getattr(other, name))
        self.effects |= other.effects
        self.rules |= other.rules
        self.near |= other.near
        if other.unhealthy:
            self.add_unhealthy(*other.unhealthy)
        for name, left in other.left.items():
            self.left[name] = max(left, self.left.get(name, left))


@dataclass(frozen=True, slots=True)
class SelectorError:
    """A device on which a selector fails; a search that reaches it ends."""

    device: DeviceID
    text: str
    nodes: tuple[str, ...]


@dataclass(slots=True)
class SliceCount:
    """The devices of one slice for a request; valid until the slice or its pool changes."""

    reach: Reachable
    stamp: int
    """The world's revision at the last change of an allocation in the pool."""

    rejected: tuple[int, ...]
    """For each selector that was reached: the devices that it rejects."""

    errors: tuple[SelectorError, ...]
    free: int = 0
    small: int = 0
    held: int = 0
    """Devices that `holders` have."""

    holders: Mapping[str, ClaimFacts] | None = None
    found: Availability | None = None
    """If the slice has taints, counters or shares, in place of the four numbers above."""

    def merge_into(self, result: Availability) -> None:
        if self.found is not None:
            result.merge(self.found)
            return
        result.free += self.free
        result.small += self.small
        if self.holders is not None:
            result.allocated.devices += self.held
            result.allocated.holders.append(self.holders)

    @property
    def available(self) -> int:
        return self.free if self.found is None else self.found.free

    @property
    def releasable(self) -> int:
        return self.held if self.found is None else self.found.releasable

    @property
    def tainted(self) -> int:
        return 0 if self.found is None else self.found.tainted.devices

    @property
    def total(self) -> int:
        """Devices without those that are too small."""
        return self.free + self.held if self.found is None else self.found.total

    @property
    def left_out(self) -> int:
        return 0 if self.found is None else self.found.left_out

    @property
    def too_small(self) -> int:
        return self.small if self.found is None else self.found.small


class OnNode(NamedTuple):
    """How many devices of a node a request could have."""

    free: int = 0
    held: int = 0
    tainted: int = 0

    @property
    def total(self) -> int:
        return self.free + self.held + self.tainted

    def changed(self, old: SliceCount, new: SliceCount) -> OnNode:
        return OnNode(
            self.free + new.available - old.available,
            self.held + new.releasable - old.releasable,
            self.tainted + new.tainted - old.tainted,
        )

    def would_do(self, request: Request, *, untainted: bool = False) -> bool:
        """Return whether they are enough when claims release them, and without taints."""
        if request.every:
            return bool(self.total) and (untainted or not self.tainted)
        return self.total - (0 if untainted else self.tainted) >= request.count


_NOTHING = OnNode()


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """The devices of the whole cluster for one request, regardless of the pod."""

    request: Request
    revision: int
    """The world's revision."""

    selectors: tuple[tuple[str, str], ...]
    """In order: the owner, and the expression."""

    counts: Mapping[str, SliceCount]
    """By the slice's name."""

    published: int
    rejected: tuple[tuple[str, str, int], ...]
    """For each selector in order: its owner, itself, and the devices that it rejects."""

    errors: tuple[SelectorError, ...]
    matching: int
    free_by_node: Mapping[str, int]
    """How many devices each node could give to the request alone."""

    matching_by_node: Mapping[str, int]
    """How many devices of each node match, available or not."""

    by_nodes: list[tuple[Mapping[str, Unusable | None], Availability]] = field(
        default_factory=list["tuple[Mapping[str, Unusable | None], Availability]"]
    )
    """Results by the nodes that a pod can use: most pods can use the same nodes."""

    on_nodes: dict[str, OnNode] = field(default_factory=dict[str, "OnNode"])
    """The devices of each node, found by the first pod that needs them."""

    kinds: set[tuple[str, DeviceKind]] = field(default_factory=set[tuple[str, DeviceKind]])
    """The kinds of the devices that match, each with its driver: found by the first pod that needs
    them, and kept until a slice, node or class changes."""

    def count_on_nodes(self) -> Mapping[str, OnNode]:
        """Count the devices of each node, whether a pod can use the node or not."""
        if not self.on_nodes:
            same: dict[OnNode, OnNode] = {}  # few numbers for many nodes
            for count in self.counts.values():
                free, held, tainted = count.available, count.releasable, count.tainted
                for node in count.reach.nodes:
                    known = self.on_nodes.get(node, _NOTHING)
                    number = OnNode(known.free + free, known.held + held, known.tainted + tainted)
                    self.on_nodes[node] = same.setdefault(number, number)
        return self.on_nodes

    def on_one_node(
        self, nodes: Mapping[str, Unusable | None], found: Availability
    ) -> tuple[Code | None, int]:
        """Return why no node has enough devices for the request; None if none publishes enough,
        and the most that a node publishes."""
        request, on_nodes = self.request, self.count_on_nodes()
        usable = [each for node, each in on_nodes.items() if nodes.get(node, _NOTHING) is None]
        code: Code | None = None
        if any(each.would_do(request) for each in usable):
            code = Code.DEVICES_ALLOCATED
        elif any(each.would_do(request, untainted=True) for each in usable):
            code = Code.DEVICES_TAINTED
        elif any(each.would_do(request, untainted=True) for each in on_nodes.values()):
            code = Code.DEVICES_ON_OTHER_NODES
        found.on_one_node = code, max((each.total for each in on_nodes.values()), default=0)
        return found.on_one_node

    def find_kinds(self, world: World) -> Collection[tuple[str, DeviceKind]]:
        """Return the kinds of the devices that match, each with its driver."""
        if not self.kinds:
            found: set[tuple[str, int]] = set()  # the hash of a kind costs more than the rest
            for count in self.counts.values():
                of = count.reach.slice
                groups = [
                    each for each in of.devices.groups if (of.driver, id(each.kind)) not in found
                ]
                if not groups or not (count.total or count.too_small):
                    continue
                matches = world.selected(self.request, of).matches
                for kind, mask, _ in groups:
                    if mask & matches:
                        found.add((of.driver, id(kind)))
                        self.kinds.add((of.driver, kind))
        return self.kinds

    def for_nodes(self, nodes: Mapping[str, Unusable | None], budget: Budget) -> Availability:
        """
        Return what a pod finds on its nodes.

        :param nodes: all nodes, each with the reason why the pod cannot use it.
        """
        budget.spend()
        for known, found in self.by_nodes:
            if known is nodes:
                return found
        budget.spend(len(self.counts) + len(self.free_by_node))
        found = self._for_nodes(nodes)
        self.by_nodes.insert(0, (nodes, found))
        del self.by_nodes[MAX_PLACEMENTS:]
        return found

    def _for_nodes(self, nodes: Mapping[str, Unusable | None]) -> Availability:
        result = Availability()
        bad = {name for name, reason in nodes.items() if reason is not None}
        for count in self.counts.values():
            if bad and bad.issuperset(count.reach.nodes):
                if total := count.total:
                    reasons = [nodes[name] for name in count.reach.nodes]
                    words = {_word(reason) for reason in reasons if reason is not None}
                    result.elsewhere.add(total, words=words)
                result.small += count.too_small
            else:
                count.merge_into(result)
        usable = ((-free, name) for name, free in self.free_by_node.items() if name not in bad)
        less, name = min(usable, default=(0, ""))
        result.most_free = (name, -less)
        return result

    def nodes_with(self, number: int, budget: Budget) -> set[str]:
        """Return the nodes that could give so many devices to the request alone."""
        budget.spend(1 + len(self.free_by_node) // 10)
        return {name for name, free in self.free_by_node.items() if free >= number}


def _word(reason: Unusable) -> str:
    return f"{reason.problem.value} {reason.detail}".strip()


def needed(request: Request, found: Availability | None = None) -> int:
    """Return how many devices there must be at least; "all" means at least one."""
    if request.every and found is not None:
        return max(found.total, 1)
    return max(request.count, 1)


def budget_of(world: World) -> Budget:
    """Return the budget of one explanation: larger clusters take longer."""
    slices = len(world.reachable())
    devices = world.counted_one_by_one()
    steps = _STEPS_PER_SLICE * slices + _STEPS_PER_DEVICE * devices
    return Budget(MAX_STEPS + REQUESTS * steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Slices that were counted for a request ahead of its analysis."""

    revision: int
    """The world's revision when the count began."""

    selectors: tuple[tuple[str, str], ...]
    counts: dict[str, SliceCount] = field(default_factory=dict[str, SliceCount])


def count_ahead(
    request: Request, world: World, counted: Counted, budget: Budget, *, before: Analysis | None
) -> Iterator[None]:
    """
    Count the slices of the cluster for a request, as :func:`analyze` does, and yield in between.

    It ends early if slices or rules change meanwhile. Raises as :func:`analyze` does.
    """
    _check(request)
    known = _still_known(before, counted.selectors, world)
    counting = _Counting(request, world, counted.selectors, budget)
    revision, number = _cluster_revision(world), 0
    for reach in world.reachable():
        count = _unchanged(reach, known, world)
        if count is None:
            count = counting.count(reach)
            number += 1
        counted.counts[reach.slice.name] = count
        if number == SLICES_AT_ONCE:
            number = 0
            yield
            if _cluster_revision(world) != revision:
                return


def _cluster_revision(world: World) -> int:
    return max(world.slices_revision, world.rules_revision)


def analyze(
    request: Request, world: World, budget: Budget, *, before: Analysis | Counted | None = None
) -> Analysis:
    """
    Count the devices of the cluster for a request.

    :param before: an earlier analysis of the request in this world, or a part of one: slices that
        have not changed are not counted again.

    Raises :class:`NotEvaluatedError` where a selector has no outcome.
    """
    _check(request)
    selectors = world.expressions(request)
    known = _still_known(before, selectors, world)
    counting = _Counting(request, world, selectors, budget)
    is_recent = isinstance(before, Analysis) and before.revision >= world.slices_revision
    if isinstance(before, Analysis) and is_recent and known and not request.every:
        return _updated(before, world, counting)
    counts: dict[str, SliceCount] = {}
    reachable = world.reachable()
    budget.spend(1 + len(reachable))
    rejected = [0] * len(selectors)
    published = matching = 0
    errors: list[SelectorError] = []
    for reach in reachable:
        count = _unchanged(reach, known, world) or counting.count(reach)
        counts[reach.slice.name] = count
        published += len(reach.slice.devices)
        matching += count.total + count.too_small
        errors += count.errors
        for number, devices in enumerate(count.rejected):
            rejected[number] += devices
    return Analysis(
        request=request,
        revision=world.revision,
        selectors=selectors,
        counts=counts,
        published=published,
        rejected=tuple(
            (owner, expression, number)
            for (owner, expression), number in zip(selectors, rejected, strict=True)
        ),
        errors=tuple(errors),
        matching=matching,
        free_by_node=_free_by_node(request, counts.values()),
        matching_by_node=_matching_by_node(counts.values()),
        kinds=before.kinds if isinstance(before, Analysis) and known and is_recent else set(),
    )


def _check(request: Request) -> None:
    if request.unsupported:
        raise NotEvaluatedError(not_supported(request, request.name))
    for toleration in request.tolerations:
        if toleration.operator not in _OPERATORS:
            raise NotEvaluatedError(
                f"operator {toleration.operator} of a toleration is unknown to this version"
            )


def _still_known(
    before: Analysis | Counted | None, selectors: tuple[tuple[str, str], ...], world: World
) -> Mapping[str, SliceCount]:
    # Rules concern all slices, and seldom change.
    if before is None or before.revision < world.rules_revision or before.selectors != selectors:
        return {}
    return before.counts


def _unchanged(
    reach: Reachable, known: Mapping[str, SliceCount], world: World
) -> SliceCount | None:
    count = known.get(reach.slice.name)
    if count is None or count.reach is not reach or count.stamp != world.stamp(reach.pool):
        return None
    return count


def _updated(before: Analysis, world: World, counting: _Counting) -> Analysis:
    """Return an analysis after changes of allocations: what nodes reach is the same."""
    counts, on_nodes, matching = dict(before.counts), dict(before.on_nodes), before.matching
    free_by_node, matching_by_node = dict(before.free_by_node), dict(before.matching_by_node)
    for pool in world.pools_changed_since(before.revision):
        for of in world.slices_of_pool(pool):
            old = counts.get(of.name)
            if old is None:  # no node reaches it
                continue
            new = counts[of.name] = counting.count(old.reach)
            matching += new.total + new.too_small - old.total - old.too_small
            for node in new.reach.nodes:
                _add(free_by_node, node, new.available - old.available)
                _add(matching_by_node, node, new.total - old.total)
                if on_nodes:
                    on_nodes[node] = on_nodes[node].changed(old, new)
    return replace(
        before,
        revision=world.revision,
        counts=counts,
        matching=matching,
        free_by_node=free_by_node,
        matching_by_node=matching_by_node,
        by_nodes=[],
        on_nodes=on_nodes,
    )


def _add(numbers: dict[str, int], node: str, number: int) -> None:
    if total := numbers.get(node, 0) + number:
        numbers[node] = total
    else:
        numbers.pop(node, None)


def _matching_by_node(counts: Iterable[SliceCount]) -> dict[str, int]:
    matching: dict[str, int] = {}
    for count in counts:
        if total := count.total:
            for node in count.reach.nodes:
                matching[node] = matching.get(node, 0) + total
    return matching


def _free_by_node(request: Request, counts: Iterable[SliceCount]) -> dict[str, int]:
    free: dict[str, int] = {}
    taken: set[str] = set()
    for count in counts:
        if number := count.available:
            for node in count.reach.nodes:
                free[node] = free.get(node, 0) + number
        # Where each device has a place of its own, it may concern another node.
        every = request.every and not count.reach.slice.by_device
        if every and count.available + count.left_out < count.total:
            taken.update(count.reach.nodes)
    return {node: number for node, number in free.items() if node not in taken}


class _Counting:
    """Counts the devices of slices for one request."""

    def __init__(
        self,
        request: Request,
        world: World,
        selectors: Sequence[tuple[str, str]],
        budget: Budget,
    ) -> None:
        self._request = request
        self._world = world
        self._selectors = selectors
        self._budget = budget
        self._sorting = _Sorting(request, world, budget)
        self._passed: dict[object, Selected] = {}
        """By the number of devices and the outcomes of all selectors: slices share them."""

    def count(self, reach: Reachable) -> SliceCount:
        of = reach.slice
        self._budget.spend(_STEPS_PER_SLICE)
        selected = self._select(of)
        count = SliceCount(
            reach=reach,
            stamp=self._world.stamp(reach.pool),
            rejected=selected.rejected,
            errors=tuple(
                SelectorError(
                    DeviceID(of.driver, of.pool, of.devices.names[index]), text, tuple(reach.nodes)
                )
                for index, text in selected.errors.items()
            ),
        )
        if selected.matches:
            self._sorting.sort(count, selected.matches)
        if count.errors or count.found is not None:
            return count
        # Requests find the same in a slice, and the counts of many requests are kept.
        key = (count.stamp, count.rejected, count.free, count.small, id(count.holders))
        known = self._world.found_in(of)
        if (same := known.get(key)) is not None and same.reach is reach:
            return same
        known[key] = count
        return count

    def _select(self, of: SliceFacts) -> Selected:
        """Return the devices that pass all selectors."""
        index = self._world.selectors
        try:
            evaluated = [index.evaluated(each, of) for _, each in self._selectors]
        except KeyError:
            return self._world.selected(self._request, of)  # its error names what is missing
        key = (len(of.devices), *map(id, evaluated))
        if key not in self._passed:
            self._passed[key] = self._world.selected(self._request, of)
        return self._passed[key]


class _Sorting:
    """Sorts the devices of one request."""

    def __init__(self, request: Request, world: World, budget: Budget) -> None:
        self._request = request
        self._world = world
        self._budget = budget
        self._hardware = Hardware(world)
        self._fits: dict[int, tuple[DeviceKind, bool]] = {}
        self._leaves_out = rules_of(world.minor).leaves_out_used_up

    def sort(self, count: SliceCount, matches: int) -> None:
        """Sort devices of a slice."""
        reach, world = count.reach, self._world
        of = reach.slice
        if not reach.plain or world.has_taint_rules:
            count.found = Availability()
            self._budget.spend(_STEPS_PER_DEVICE * matches.bit_count())
            if of.devices.consumes:  # the counters of a pool are read once
                self._budget.spend(2 * len(of.devices))
            for index in bits(matches):
                device = of.devices[index]
                identity = DeviceID(of.driver, of.pool, device.name)
                self._sort_one(reach.pool, identity, device, count.found)
            return
        fitting = matches
        for kind, mask, _ in of.devices.groups if self._request.capacity else ():
            if not self._can_fit(kind):
                fitting &= ~mask
        held = 0 if self._request.admin_access else fitting & world.allocated_in(of)
        count.free, count.small = (fitting ^ held).bit_count(), (matches ^ fitting).bit_count()
        if held:
            count.held, count.holders = held.bit_count(), world.holders_in(of, held)

    def _can_fit(self, kind: DeviceKind) -> bool:
        known = self._fits.get(id(kind))
        if known is None:
            short = short_capacities(kind.capacity, self._request.capacity, used=())
            known = self._fits[id(kind)] = (kind, short is not None)
        return known[1]

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
        found.left_out += bool(short) and self._leaves_out
        taints = world.taints(identity, device)
        if taints and (obstacles := _not_tolerated(taints, request.tolerations)):
            found.tainted.add(words=(taint.key for taint in obstacles))
            found.effects.update((taint.key, taint.effect) for taint in obstacles)
            found.rules.update(world.taint_rules(identity, obstacles))
            found.near.update(_near(obstacles, request.tolerations))
            if any(taint.key == UNHEALTHY for taint in obstacles):
                found.add_unhealthy(identity)
        elif request.admin_access:
            found.free += 1  # it consumes nothing
        elif (holder := world.holder(identity)) is not None:
            found.allocated.add(claims=(holder,))
        elif short:
            need = consumed_by(device.kind.capacity, request.capacity)
            totals = {each.name: quantity_units(each.value) for each in device.kind.capacity}
            for name in short:
                used = consumed.get(name, 0) if consumed else 0
                word = name.removeprefix(f"{identity.driver}/")
                left = Left(max(totals[name] - used, 0), totals[name], need[name])
                found.left[word] = max(left, found.left.get(word, left))
                found.used_up.words.add(word)
            found.used_up.add(claims=sharers)
        # A shared device already consumes its counters.
        elif any(need > pool.counters.get(counter, 0) for counter, need in counters_of(device)):
            found.small += 1
        elif not sharers and (claims := self._hardware.in_the_way(pool, device)) is not None:
            found.partitioned.add(claims=claims)
        else:
            found.free += 1


def _near(taints: Iterable[TaintFacts], tolerations: Sequence[Toleration]) -> Iterator[str]:
    """Return how tolerations differ from taints of the same key."""
    for taint in taints:
        for each in tolerations:
            if each.key != taint.key:
                continue
            field, has, wants = "value", each.value, taint.value
            if each.effect not in ("", taint.effect):
                field, has, wants = "effect", each.effect, taint.effect
            given, wanted = has or '""', wants or '""'
            yield f"its toleration of {taint.key} has {field} {given}, not {wanted}"


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
