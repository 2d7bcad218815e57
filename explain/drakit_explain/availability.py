"""
Counts the devices in a cluster that a request can use, and the obstacles to using the others.

Each device of a slice is counted once, under the obstacle that is hardest to remove: first a node
that the pod cannot use, then taints, then holders, because releasing a tainted device does not
help. The count of a slice is cached until the slice, or an allocation in its pool, changes. Counts
only explain a result. Kubernetes' allocator determines whether a pod fits.

Does not depend on clients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from drakit.quantity import quantity_units
from drakit_explain.allocation import (
    NotEvaluatedError,
    consumed_by,
    counters_of,
    short_capacities,
    tolerates,
)
from drakit_explain.budget import MAX_STEPS, Budget
from drakit_explain.codes import Code
from drakit_explain.devices import DeviceFacts, DeviceKind, TaintFacts, bits
from drakit_explain.model import ClaimFacts, DeviceID, PoolID, Request, Toleration
from drakit_explain.nodes import Unusable
from drakit_explain.pools import Counter, NodePool
from drakit_explain.reports import UNHEALTHY
from drakit_explain.world import Reachable, Selection, World

STEPS_PER_SLICE = 10
STEPS_PER_DEVICE = 5
"""How many steps a slice costs, and each of its devices if they are counted one by one."""

NAMED_DEVICES = 3
"""Maximum number of unhealthy devices to keep. A sentence quotes their drivers' messages."""

NAMED_HOLDERS = 3
"""Maximum number of holders to name in a sentence."""


# ---------------------------------------------------------------- one slice


@dataclass(slots=True)
class Obstacle:
    """Devices that are unavailable for one kind of reason."""

    devices: int = 0
    words: set[str] = field(default_factory=set[str])
    """The causes of the obstacle: taint keys, capacity names, or the reasons why nodes cannot be
    used."""

    holders: list[Mapping[str, ClaimFacts]] = field(
        default_factory=list["Mapping[str, ClaimFacts]"]
    )
    """The holding claims, keyed by UID, in one mapping per slice. The mappings are not copied,
    because in a large cluster, many requests have the same 100,000 holders."""

    @property
    def claims(self) -> dict[str, ClaimFacts]:
        """The claims that must release something, keyed by UID. Computed only if a message names
        them."""
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
    """How much of a device's capacity is left, in billionths."""

    amount: int
    total: int
    needed: int


class Tally(NamedTuple):
    """The number of devices in a slice or on a node that a request could use."""

    free: int = 0
    held: int = 0
    """Devices that become available when claims release them."""

    tainted: int = 0

    @property
    def total(self) -> int:
        return self.free + self.held + self.tainted

    def changed(self, old: Tally, new: Tally) -> Tally:
        """Return the updated sum after one summand has changed from `old` to `new`."""
        return _shared(
            self.free + new.free - old.free,
            self.held + new.held - old.held,
            self.tainted + new.tainted - old.tainted,
        )

    def suffices(self, request: Request) -> bool:
        """Return whether enough devices are free for the request."""
        if request.every:
            return 0 < self.free == self.total
        return self.free >= request.count

    def would_do(self, request: Request, *, untainted: bool = False) -> bool:
        """Return whether enough devices would be free if claims released them. If `untainted` is
        set, taints are also ignored."""
        if request.every:
            return bool(self.total) and (untainted or not self.tainted)
        return self.total - (0 if untainted else self.tainted) >= request.count


NOTHING = Tally()


@lru_cache(maxsize=1024)
def _shared(free: int, held: int, tainted: int) -> Tally:
    """Return the same object for equal numbers, because thousands of slices and nodes have the same
    numbers."""
    return Tally(free, held, tainted)


@dataclass(slots=True)
class Availability:
    """The devices for a request: those that are free, and those that have an obstacle."""

    free: int = 0
    small: int = 0
    """The number of devices that can never be allocated: they cannot provide the requested
    capacity, or consume more of a counter than their pool provides. `total` does not include
    them."""

    tainted: Obstacle = field(default_factory=Obstacle)
    effects: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """The key and the effect of each taint in `tainted`."""

    rules: set[str] = field(default_factory=set[str])
    """The DeviceTaintRules that add taints in `tainted`."""

    near: set[str] = field(default_factory=set[str])
    """Sentences about how the request's tolerations differ from those taints in `tainted` that have
    the same key."""

    unhealthy: set[DeviceID] = field(default_factory=set[DeviceID])
    """The first devices in `tainted` that drakit's node plugin reports as unhealthy."""

    allocated: Obstacle = field(default_factory=Obstacle)
    partitioned: Obstacle = field(default_factory=Obstacle)
    """Devices whose hardware is in use by other devices."""

    used_up: Obstacle = field(default_factory=Obstacle)
    """Shared devices that do not have enough capacity left."""

    left: dict[str, Left] = field(default_factory=dict[str, "Left"])
    """The maximum amount that any device in `used_up` has left, keyed by the name of the
    capacity."""

    elsewhere: Obstacle = field(default_factory=Obstacle)
    """Devices that are available only on nodes that the pod cannot use."""

    most_free: tuple[str, int] = ("", 0)
    """The node with the most free devices, and their number. If several nodes have the same number,
    the first one by name."""

    on_one_node: tuple[Code | None, int] | None = None
    """The result of :meth:`Analysis.on_one_node`, which equal pods share."""

    @property
    def total(self) -> int:
        return self.tally.total + self.elsewhere.devices

    @property
    def releasable(self) -> int:
        """The number of devices that become available when claims release devices."""
        return self.allocated.devices + self.partitioned.devices + self.used_up.devices

    @property
    def tally(self) -> Tally:
        return _shared(self.free, self.releasable, self.tainted.devices)

    def add_unhealthy(self, *devices: DeviceID) -> None:
        self.unhealthy = set(sorted(self.unhealthy.union(devices))[:NAMED_DEVICES])

    def merge(self, other: Availability) -> None:
        self.free += other.free
        self.small += other.small
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
    """A device for which a selector fails. The allocator fails when it reaches the device."""

    device: DeviceID
    text: str
    nodes: tuple[str, ...]


@dataclass(slots=True)
class SliceCount:
    """The counts of one slice's devices for a request. Valid until the slice or its pool
    changes."""

    reach: Reachable
    stamp: int
    """The world's revision when an allocation in the pool last changed."""

    rejected: tuple[int, ...]
    """How many devices each selector rejects, for the selectors that were reached."""

    errors: tuple[SelectorError, ...]
    tally: Tally = NOTHING
    small: int = 0
    """The same as :attr:`Availability.small`."""

    holders: Mapping[str, ClaimFacts] | None = None
    """The claims that hold devices of the slice, keyed by UID."""

    found: Availability | None = None
    """Details of the counts, if the slice has taints, counters or shares."""

    def merge_into(self, result: Availability) -> None:
        if self.found is not None:
            result.merge(self.found)
            return
        result.free += self.tally.free
        result.small += self.small
        if self.holders is not None:
            result.allocated.devices += self.tally.held
            result.allocated.holders.append(self.holders)


class SliceCounting:
    """Counts the devices of slices for one request."""

    def __init__(self, request: Request, world: World, budget: Budget) -> None:
        self._request = request
        self._world = world
        self._budget = budget
        self._selection = Selection(world, request)
        self._hardware = Hardware(world)
        self._fits: dict[int, tuple[DeviceKind, bool]] = {}

    def count(self, reach: Reachable) -> SliceCount:
        of = reach.slice
        self._budget.spend(STEPS_PER_SLICE)
        selected = self._selection.of(of)
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
            self._sort(count, selected.matches)
        if count.errors or count.found is not None:
            return count
        # Share equal counts, because many requests have the same count in a slice.
        key = (count.stamp, count.rejected, count.tally, count.small, id(count.holders))
        known = self._world.found_in(of)
        if (same := known.get(key)) is not None and same.reach is reach:
            return same
        known[key] = count
        return count

    def _sort(self, count: SliceCount, matches: int) -> None:
        reach, world = count.reach, self._world
        of = reach.slice
        if not reach.plain or world.rules_of_pool(of.of_pool):
            count.found = Availability()
            self._budget.spend(STEPS_PER_DEVICE * matches.bit_count())
            if of.devices.consumes:  # charge once for reading the pool's counters
                self._budget.spend(2 * len(of.devices))
            # Share the mappings, because many devices have the same holders.
            partitions: dict[int, Mapping[str, ClaimFacts]] = {}
            for index in bits(matches):
                device = of.devices[index]
                identity = DeviceID(of.driver, of.pool, device.name)
                self._sort_one(reach.pool, identity, device, count.found, partitions)
            count.found.partitioned.holders += partitions.values()
            count.tally, count.small = count.found.tally, count.found.small
            return
        fitting = matches
        for kind, mask, _ in of.devices.groups if self._request.capacity else ():
            if not self._can_fit(kind):
                fitting &= ~mask
        held = 0 if self._request.admin_access else fitting & world.allocated_in(of)
        count.tally = _shared((fitting ^ held).bit_count(), held.bit_count(), 0)
        count.small = (matches ^ fitting).bit_count()
        if held:
            count.holders = world.holders_in(of, held)

    def _can_fit(self, kind: DeviceKind) -> bool:
        known = self._fits.get(id(kind))
        if known is None:
            short = short_capacities(kind.capacity, self._request.capacity, used=())
            known = self._fits[id(kind)] = (kind, short is not None)
        return known[1]

    def _sort_one(
        self,
        pool: NodePool,
        identity: DeviceID,
        device: DeviceFacts,
        found: Availability,
        partitions: dict[int, Mapping[str, ClaimFacts]],
    ) -> None:
        """
        Count a device.

        :param partitions: receives the claims that hold the hardware of devices, keyed by the
            identity of their mapping.
        """
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
        if taints and (obstacles := not_tolerated(taints, request.tolerations)):
            found.tainted.add(words=(taint.key for taint in obstacles))
            found.effects.update((taint.key, taint.effect) for taint in obstacles)
            found.rules.update(world.taint_rules(identity, obstacles))
            found.near.update(_near(obstacles, request.tolerations))
            if any(taint.key == UNHEALTHY for taint in obstacles):
                found.add_unhealthy(identity)
        elif request.admin_access:
            found.free += 1  # admin access does not consume the device
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
        elif any(need > pool.counters.get(counter, 0) for counter, need in counters_of(device)):
            found.small += 1
        # Don't check which counters are left for a shared device, because it already consumes them.
        elif not sharers and (claims := self._hardware.in_the_way(pool, device)) is not None:
            found.partitioned.add()
            partitions.update((id(each), each) for each in claims)
        else:
            found.free += 1


def _near(taints: Iterable[TaintFacts], tolerations: Sequence[Toleration]) -> Iterator[str]:
    """Yield sentences about how tolerations differ from taints with the same key."""
    for taint in taints:
        for each in tolerations:
            if each.key != taint.key:
                continue
            field, has, wants = "value", each.value, taint.value
            if each.effect not in ("", taint.effect):
                field, has, wants = "effect", each.effect, taint.effect
            given, wanted = has or '""', wants or '""'
            yield f"its toleration of {taint.key} has {field} {given}, not {wanted}"


def not_tolerated(
    taints: Iterable[TaintFacts], tolerations: Sequence[Toleration]
) -> list[TaintFacts]:
    """Return the taints that a request does not tolerate."""
    return [
        taint
        for taint in taints
        if not any(tolerates(toleration, taint) for toleration in tolerations)
    ]


@dataclass(slots=True)
class _Taken:
    """How much of a counter is consumed, and by which claims."""

    amount: int = 0
    claims: dict[str, ClaimFacts] = field(default_factory=dict[str, ClaimFacts])


class Hardware:
    """Determines how much of each pool's counters is left by the allocated partitions. A pool is
    read again only after an allocation in it changes."""

    def __init__(self, world: World) -> None:
        self.world: World = world
        self._pools: dict[PoolID, tuple[int, dict[Counter, _Taken]]] = {}
        """The counters of each pool, with the revision in which an allocation in the pool last
        changed."""

    def in_the_way(
        self, pool: NodePool, device: DeviceFacts
    ) -> list[Mapping[str, ClaimFacts]] | None:
        """
        Return the claims that hold the device's hardware, keyed by UID, or None if enough is left.

        Devices that consume the same counter get the same mapping.
        """
        if not device.consumes:
            return None
        taken = self._of_pool(pool)
        found: list[Mapping[str, ClaimFacts]] = []
        short = False
        for counter, need in counters_of(device):
            used = taken.get(counter)
            if (used.amount if used else 0) + need > pool.counters.get(counter, 0):
                short = True
                found += [used.claims] if used else []
        return found if short else None

    def _of_pool(self, pool: NodePool) -> Mapping[Counter, _Taken]:
        stamp, known = self.world.stamp(pool), self._pools.get(pool.identity)
        if known is None or known[0] != stamp:
            known = self._pools[pool.identity] = stamp, self._taken(pool)
        return known[1]

    def _taken(self, pool: NodePool) -> dict[Counter, _Taken]:
        taken: dict[Counter, _Taken] = {}
        driver, name = pool.identity
        for each in (*pool.slices, *pool.elsewhere):
            for device in each.devices:
                if not device.consumes:
                    continue
                identity = DeviceID(driver, name, device.name)
                holder = self.world.holder(identity)
                claims = [holder] if holder is not None else self.world.sharers(identity)
                for counter, amount in counters_of(device) if claims else ():
                    entry = taken.setdefault(counter, _Taken())
                    entry.amount += amount
                    entry.claims.update({claim.uid: claim for claim in claims})
        return taken


# ---------------------------------------------------------------- the cluster

REQUESTS = 4
"""Maximum number of distinct requests per explanation to count the cluster's devices for. Counts
are cached, so later explanations have less to count."""

MAX_PLACEMENTS = 2
"""Maximum number of node sets to cache the results of a request for. With 5,000 nodes, each takes
up to 0.6 MiB, and each pod can have a different set."""

SLICES_AT_ONCE = 250
"""Maximum number of slices to count without a pause before an explanation, which takes about 10
ms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """The devices in the whole cluster for one request, regardless of the pod."""

    request: Request
    revision: int
    """The world's revision of the analysis."""

    selectors: tuple[tuple[str, str], ...]
    """The selectors in order, each as a pair of its owner and expression."""

    counts: Mapping[str, SliceCount]
    """The counts, keyed by slice name."""

    published: int
    rejected: tuple[tuple[str, str, int], ...]
    """For each selector in order: its owner, the selector, and the number of devices that it
    rejects."""

    errors: tuple[SelectorError, ...]
    matching: int
    on_nodes: Mapping[str, Tally]
    """The devices of each node, whether or not a pod can use the node."""

    by_nodes: list[tuple[Mapping[str, Unusable | None], Availability]] = field(
        default_factory=list["tuple[Mapping[str, Unusable | None], Availability]"]
    )
    """Cached results, each with the nodes that a pod can use. Most pods can use the same nodes."""

    kinds: set[tuple[str, DeviceKind]] = field(default_factory=set[tuple[str, DeviceKind]])
    """The kinds of the matching devices, each with its driver. They are computed for the first pod
    that needs them, and cached until a slice, node or class changes."""

    def on_one_node(
        self, nodes: Mapping[str, Unusable | None], found: Availability
    ) -> tuple[Code | None, int]:
        """Return the reason why no node has enough devices for the request, and the largest number
        of devices that a node publishes. The reason is None if no node publishes enough."""
        request, on_nodes = self.request, self.on_nodes
        usable = [each for node, each in on_nodes.items() if nodes.get(node, NOTHING) is None]
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
        """Return the kinds of the matching devices, each with its driver."""
        if not self.kinds:
            selection = Selection(world, self.request)
            found: set[tuple[str, int]] = set()  # hashing a kind would be slower
            for count in self.counts.values():
                of = count.reach.slice
                groups = [
                    each for each in of.devices.groups if (of.driver, id(each.kind)) not in found
                ]
                if not groups or not (count.tally.total or count.small):
                    continue
                matches = selection.of(of).matches
                for kind, mask, _ in groups:
                    if mask & matches:
                        found.add((of.driver, id(kind)))
                        self.kinds.add((of.driver, kind))
        return self.kinds

    def for_nodes(self, nodes: Mapping[str, Unusable | None], budget: Budget) -> Availability:
        """
        Return the devices on a pod's nodes.

        :param nodes: all nodes, each with the reason why the pod cannot use it.
        """
        budget.spend()
        for known, found in self.by_nodes:
            if known is nodes:
                return found
        budget.spend(len(self.counts) + len(self.on_nodes))
        found = self._for_nodes(nodes)
        self.by_nodes.insert(0, (nodes, found))
        del self.by_nodes[MAX_PLACEMENTS:]
        return found

    def _for_nodes(self, nodes: Mapping[str, Unusable | None]) -> Availability:
        result = Availability()
        bad = {name for name, reason in nodes.items() if reason is not None}
        for count in self.counts.values():
            if bad and bad.issuperset(count.reach.nodes):
                if total := count.tally.total:
                    reasons = [nodes[name] for name in count.reach.nodes]
                    words = {_word(reason) for reason in reasons if reason is not None}
                    result.elsewhere.add(total, words=words)
                result.small += count.small
            else:
                count.merge_into(result)
        usable = ((-each.free, name) for name, each in self.on_nodes.items() if name not in bad)
        less, name = min(usable, default=(0, ""))
        result.most_free = (name, -less)
        return result

    def able(self, budget: Budget) -> set[str]:
        """Return the nodes that have enough free devices for this request by itself."""
        budget.spend(1 + len(self.on_nodes) // 10)
        able = {name for name, each in self.on_nodes.items() if each.suffices(self.request)}
        if self.request.every:
            # The counts of these slices can include devices for other nodes, or devices that a
            # request for all devices skips because their shares are used up. For such a node, one
            # free device is enough.
            more = (
                name
                for each in self.counts.values()
                if each.reach.slice.by_device or (each.found and each.found.used_up.devices)
                for name in each.reach.nodes
            )
            able.update(name for name in more if self.on_nodes.get(name, NOTHING).free)
        return able


def _word(reason: Unusable) -> str:
    return f"{reason.problem.value} {reason.detail}".strip()


def needed(request: Request, found: Availability | None = None) -> int:
    """Return the minimum number of devices for a request. For a request for all devices, it is at
    least one."""
    if request.every and found is not None:
        return max(found.total, 1)
    return max(request.count, 1)


def budget_of(world: World) -> Budget:
    """Return the budget of an explanation. Larger clusters have a larger budget."""
    slices = len(world.reachable())
    devices = world.counted_one_by_one()
    steps = STEPS_PER_SLICE * slices + STEPS_PER_DEVICE * devices
    return Budget(MAX_STEPS + REQUESTS * steps)


def analyze(
    request: Request, world: World, budget: Budget, *, before: Analysis | None = None
) -> Analysis:
    """
    Count the devices of the cluster for a request.

    :param before: an earlier analysis of the request in this world. Slices that have not changed
        since are not counted again.

    Raises :class:`NotEvaluatedError` if a selector has no result.
    """
    return next(filter(None, analyze_in_steps(request, world, budget, before=before)))


def analyze_in_steps(
    request: Request, world: World, budget: Budget, *, before: Analysis | None
) -> Iterator[Analysis | None]:
    """
    Do the same as :func:`analyze`, in steps. Yield None after each step, and the analysis at the
    end.

    The analysis has the revision of the first step, so that later changes are counted again. It
    ends early if slices or rules change.
    """
    if request.unsupported:
        raise NotEvaluatedError(
            f'drakit does not support {request.unsupported} of request "{request.name}"'
        )
    selectors = world.expressions(request)
    # If a rule has changed, count everything again. Rules affect all slices, and rarely change.
    if before is not None and (
        before.revision < world.rules_revision or before.selectors != selectors
    ):
        before = None
    counting = SliceCounting(request, world, budget)
    if before is not None and before.revision >= world.slices_revision:
        yield _updated(before, world, counting)
        return
    revision, of_cluster = world.revision, _cluster_revision(world)
    reachable = world.reachable()
    budget.spend(1 + len(reachable))
    counts: dict[str, SliceCount] = {}
    on_nodes: dict[str, Tally] = {}
    rejected = [0] * len(selectors)
    errors: list[SelectorError] = []
    matching = counted = 0
    for reach in reachable:
        count = _unchanged(reach, before, world)
        if count is None:
            count = counting.count(reach)
            counted += 1
        counts[reach.slice.name] = count
        matching += count.tally.total + count.small
        errors += count.errors
        for number, devices in enumerate(count.rejected):
            rejected[number] += devices
        for node in reach.nodes if count.tally.total else ():
            known = on_nodes.get(node)
            tally = count.tally if known is None else known.changed(NOTHING, count.tally)
            on_nodes[node] = tally
        if counted == SLICES_AT_ONCE:
            counted = 0
            yield None
            if _cluster_revision(world) != of_cluster:
                break
    yield Analysis(
        request=request,
        revision=revision,
        selectors=selectors,
        counts=counts,
        published=sum(len(each.slice.devices) for each in reachable),
        rejected=tuple(
            (owner, expression, number)
            for (owner, expression), number in zip(selectors, rejected, strict=True)
        ),
        errors=tuple(errors),
        matching=matching,
        on_nodes=on_nodes,
    )


def _cluster_revision(world: World) -> int:
    return max(world.slices_revision, world.rules_revision)


def _unchanged(reach: Reachable, before: Analysis | None, world: World) -> SliceCount | None:
    count = before.counts.get(reach.slice.name) if before is not None else None
    if count is None or count.reach is not reach or count.stamp != world.stamp(reach.pool):
        return None
    return count


def _updated(before: Analysis, world: World, counting: SliceCounting) -> Analysis:
    """Update an analysis after changes to allocations, which do not change the reachable
    devices."""
    counts, on_nodes, matching = dict(before.counts), dict(before.on_nodes), before.matching
    for pool in world.pools_changed_since(before.revision):
        for of in world.slices_of_pool(pool):
            old = counts.get(of.name)
            if old is None:  # the slice is not reachable from any node
                continue
            new = counts[of.name] = counting.count(old.reach)
            matching += new.tally.total + new.small - old.tally.total - old.small
            for node in new.reach.nodes:
                on_nodes[node] = on_nodes.get(node, NOTHING).changed(old.tally, new.tally)
                if not on_nodes[node].total:
                    del on_nodes[node]
    return replace(
        before,
        revision=world.revision,
        counts=counts,
        matching=matching,
        on_nodes=on_nodes,
        by_nodes=[],
    )
