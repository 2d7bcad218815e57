"""
Determines the pools of a node: the slices that are used, in the scheduler's order, and their
problems. The module also defines how device allocation in the scheduler differs between minor
versions of Kubernetes.

The rules follow ``GatherPools`` of ``k8s.io/dynamic-resource-allocation/structured``: only the
highest generation is used, a pool without all of its slices is *incomplete*, and one that
contradicts itself is *invalid*. The scheduler does not allocate devices from either.

The sources are the DynamicResources plugin
(``pkg/scheduler/framework/plugins/dynamicresources/dynamicresources.go`` in ``k8s.io/kubernetes``)
and the allocators (``structured/internal`` in ``k8s.io/dynamic-resource-allocation``), read in
0.34.13, 0.35.10, 0.36.6 and 0.37.2. The plugin was read in 1.36.3 and 1.37.2.

In all of these releases, each error of the allocator except ``ErrFailedAllocationOnNode`` makes
``Filter`` return an error. With this error, ``findNodesThatPassFilters``
(``pkg/scheduler/schedule_one.go``) gives up on the pod, on all nodes. These are the errors:

* a selector that fails or does not compile
* a request for all devices on a node with a pool that is incomplete or invalid
* a request for all devices if a constraint excludes one of them
* a claim for more than 32 devices
* a disabled feature

Does not depend on clients, claims, or selectors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import NamedTuple

from drakit.quantity import quantity_units
from drakit_explain.devices import Place
from drakit_explain.model import PoolID, SliceFacts
from drakit_formats.resource.nodes import selects_node

# ---------------------------------------------------------------- releases

FEASIBLE_NODES = 100
"""
If more nodes than this fit, the scheduler may stop before it has checked all nodes.

Source: ``minFeasibleNodesToFind`` and ``numFeasibleNodesToFind`` in
``pkg/scheduler/schedule_one.go`` of 1.36.3 and 1.37.2. The search is canceled when it has found
more nodes, and the configuration cannot lower the number.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules of one minor version."""

    skips_pools: bool
    """
    Whether the search skips incomplete and invalid pools, and continues.

    Since 1.35 (``allocateOne``: ``if pool.IsIncomplete || pool.IsInvalid``). Up to 1.34, an invalid
    pool ends the search with an error when it is reached, and an incomplete pool is used. Slices
    for other nodes are treated as missing (``GatherPools`` in ``pools_stable.go``).
    """

    places_counters: bool
    """
    Whether a slice that contains only counters affects only the nodes that it selects, like any
    other slice.

    Since 1.37 (``GatherPools``). Up to 1.36, it affects all nodes: on each of them, its pool may be
    incomplete or invalid.
    """

    ends_at_timeout: bool
    """
    Whether the scheduler gives up on the pod (on all nodes) if the filter reaches its timeout (10
    s). Before 1.36, it skips only the node.

    Source: the case ``context.DeadlineExceeded`` of ``Filter`` in 1.36.3 and 1.37.2.
    """


@cache
def rules_of(minor: int | None) -> Rules:
    """Return the rules of Kubernetes 1.`minor`. If the version is unknown, return the rules of the
    newest one."""
    return Rules(
        skips_pools=minor is None or minor >= 35,
        places_counters=minor is None or minor >= 37,
        ends_at_timeout=minor is None or minor >= 36,
    )


NEWEST = rules_of(None)


# ---------------------------------------------------------------- pools


class Counter(NamedTuple):
    """A counter of a pool."""

    counter_set: str
    counter: str


class PoolState(Enum):
    """Whether devices can be allocated from a pool."""

    READY = "ready"
    INCOMPLETE = "incomplete"
    INVALID = "invalid"
    UNREAD = "unread"  # the pool's devices are not known


class NodeView(NamedTuple):
    """The name and labels of a node, to compare with the place of a device."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePool:
    """A pool, as the scheduler sees it for one node."""

    identity: PoolID
    state: PoolState = PoolState.READY
    problem: str = ""
    """The reason why the pool is invalid, as a clause. Empty if it is valid."""

    missing: str = ""
    """How many slices an incomplete pool has, such as ``1 of 2 slices``."""

    node: NodeView
    slices: tuple[SliceFacts, ...] = ()
    """The slices with devices for the node, sorted by name."""

    elsewhere: tuple[SliceFacts, ...] = ()
    """The slices of the same generation for other nodes. Their devices consume the same
    counters."""

    counters: Mapping[Counter, int] = field(default_factory=dict[Counter, int])
    """The pool's shared counters, in billionths."""

    def reaches(self, of: SliceFacts, index: int) -> bool:
        """Return whether the node can use a device of one of these slices."""
        return not of.by_device or place_includes(_place(of, index), self.node)


def _place(of: SliceFacts, index: int) -> Place | None:
    return of.devices.places[index] if of.devices.places else None


def place_includes(place: Place | None, node: NodeView) -> bool:
    """Return whether a place includes a node. An unknown place does not include any nodes."""
    if place is None:
        return False
    if place.node:
        return place.node == node.name
    if place.every or place.selector is None:
        return place.every
    return selects_node(place.selector, name=node.name, labels=node.labels)


def pools_of_node(
    slices: Iterable[SliceFacts], node: NodeView, *, rules: Rules = NEWEST
) -> list[NodePool]:
    """
    Return the pools with slices for a node, in the allocator's order.

    :param slices: all slices of the cluster, or at least all slices of each pool that has a slice
        for the node.
    """
    pools: dict[PoolID, list[SliceFacts]] = {}
    for each in slices:
        pools.setdefault(each.of_pool, []).append(each)
    found = [
        pool
        for identity, of_pool in pools.items()
        if (pool := _pool(identity, of_pool, node, rules)) is not None
    ]
    found.sort(key=lambda pool: (_has_binding(pool), pool.identity))
    return found


def _pool(
    identity: PoolID, slices: Sequence[SliceFacts], node: NodeView, rules: Rules
) -> NodePool | None:
    relevant = [
        each
        for each in slices
        if _concerns(each, node) or (_has_only_counters(each) and not rules.places_counters)
    ]
    if not relevant:
        return None
    newest = max(each.generation for each in relevant)
    current = [each for each in relevant if each.generation == newest]
    elsewhere: list[SliceFacts] = []
    if len(current) != current[0].pool_slices:
        mine = {each.name for each in current}
        others = [each for each in slices if each.generation == newest and each.name not in mine]
        number, expected = len(current) + len(others), current[0].pool_slices
        is_outdated = any(each.generation > newest for each in slices)
        if is_outdated and rules.skips_pools:
            return None  # the newest generation does not have slices for this node
        if is_outdated or number != expected:
            return NodePool(
                identity=identity,
                state=PoolState.INCOMPLETE,
                missing=f"{number} of {expected} slices",
                node=node,
            )
        for each in others:
            (current if _has_only_counters(each) else elsewhere).append(each)
    if any(each.unread for each in current):
        return NodePool(identity=identity, state=PoolState.UNREAD, node=node)
    current.sort(key=lambda each: each.name)
    with_devices = [each for each in current if not _has_only_counters(each)]
    problem = _problem(with_devices, current, elsewhere)
    if problem:
        return NodePool(identity=identity, state=PoolState.INVALID, problem=problem, node=node)
    return NodePool(
        identity=identity,
        node=node,
        slices=tuple(with_devices),
        elsewhere=tuple(each for each in elsewhere if not _has_only_counters(each)),
        counters=_counters((*current, *elsewhere)),
    )


def _concerns(each: SliceFacts, node: NodeView) -> bool:
    if each.place is not None:
        return place_includes(each.place, node)
    return each.by_device and any(place_includes(place, node) for place in each.devices.places)


def _has_only_counters(each: SliceFacts) -> bool:
    """Return whether a slice contains only counters. Since Kubernetes 1.35, no slice contains both
    counters and devices."""
    return bool(each.counter_sets) and not len(each.devices)


def _counters(slices: Iterable[SliceFacts]) -> dict[Counter, int]:
    return {
        Counter(counters.name, amount.name): quantity_units(amount.quantity)
        for each in slices
        for counters in each.counter_sets
        for amount in counters.counters
    }


def _problem(
    with_devices: Sequence[SliceFacts],
    current: Sequence[SliceFacts],
    elsewhere: Sequence[SliceFacts],
) -> str:
    """Return the first contradiction in a pool, in the order in which the scheduler checks."""
    names: set[str] = set()
    for each in with_devices:
        for name in each.devices.names:
            if name in names:
                return f"two of its devices have the name {name}"
            names.add(name)
    sets: dict[str, set[str]] = {}
    for each in (*current, *elsewhere):
        for counters in each.counter_sets:
            if counters.name in sets:
                return f"two of its counter sets have the name {counters.name}"
            sets[counters.name] = {amount.name for amount in counters.counters}
    missing = _missing_counters((*current, *elsewhere), sets)
    return next(missing, "")


def _missing_counters(slices: Iterable[SliceFacts], sets: Mapping[str, set[str]]) -> Iterator[str]:
    for each in slices:
        for device in each.devices if each.devices.consumes else ():
            for consumed in device.consumes:
                what = f"device {device.name} consumes counter set {consumed.name}"
                if consumed.name not in sets:
                    yield f"{what}, which the pool does not have"
                elif unknown := {each.name for each in consumed.counters} - sets[consumed.name]:
                    yield f"{what}, which has no counter {min(unknown)}"


def _has_binding(pool: NodePool) -> bool:
    return any(group.kind.binding for each in pool.slices for group in each.devices.groups)


def newest(slices: Collection[SliceFacts]) -> list[SliceFacts]:
    """Return the slices of the highest generation."""
    generation = max((each.generation for each in slices), default=0)
    return [each for each in slices if each.generation == generation]


def is_complete(slices: Collection[SliceFacts]) -> bool:
    """Return whether the highest generation has the expected number of slices."""
    current = newest(slices)
    return bool(current) and len(current) == current[0].pool_slices
