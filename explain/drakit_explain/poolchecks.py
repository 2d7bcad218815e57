"""
Finds the problems of published pools, for a node or a ResourceSlice, and counts the pools in the
cluster that have problems.

A pool that is being updated is briefly incomplete, so a state is a problem only if it lasts. The
caller measures how long it lasts. Whether a slice's driver is installed on its node cannot be
determined, because the API does not list the drivers of a node. A missing node can be detected.

:mod:`.pools` determines which slices are used, according to the scheduler's rules. Does not depend
on clients, clocks, or Events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum

from drakit_explain.codes import Code, Finding, Reason
from drakit_explain.model import NodeFacts, PoolID, SliceFacts
from drakit_explain.pools import NodeView, PoolState, is_complete, newest
from drakit_explain.world import EVERYWHERE, World


class PoolCondition(StrEnum):
    """The state of a pool. If several states apply, the first one in this order is used."""

    NODE_MISSING = "node-missing"
    """The node of the pool does not exist."""

    CONFLICTING = "conflicting"
    """Other nodes publish pools with the same name."""

    INVALID = "invalid"
    """The pool contradicts itself."""

    INCOMPLETE = "incomplete"
    """The number of slices differs from resourceSliceCount."""

    OUTDATED = "outdated"
    """The pool is complete, but slices of an older generation remain."""

    READY = "ready"


def node_of_slice(of: SliceFacts) -> str:
    """Return the node that a slice names. Empty if the slice is for several nodes."""
    return of.place.node if of.place is not None else ""


def node_problems(node: NodeFacts, world: World) -> list[Reason]:
    """Return the problems of the pools that a node publishes."""
    view = world.views()[node.name]
    found = [
        (identity, finding)
        for identity in _pools_of(node.name, world)
        if (finding := _finding(identity, view, world, _rivals(identity, world))) is not None
    ]
    return [
        replace(finding, transient=f"{finding.code} {driver} {pool}").about(
            node.reference, f"pool {pool} of driver {driver} "
        )
        for (driver, pool), finding in found
    ]


def slice_problems(of: SliceFacts, world: World) -> list[Reason]:
    """Return the problem that a slice's node does not exist. It is returned only once per pool, for
    the first slice by name."""
    node = node_of_slice(of)
    if not node or not world.of(NodeFacts) or world.node(node) is not None:
        return []
    if of.name != min(each.name for each in _of_node(of.of_pool, node, world)):
        return []
    return [
        Reason(
            code=Code.NODE_GONE,
            sentence=f"pool {of.pool} of driver {of.driver} is for node {node}, which does not "
            f"exist; delete its ResourceSlices if the node does not return (Kubernetes does so "
            f"if the Node is their owner)",
            regarding=of.reference,
            transient=Code.NODE_GONE,
        )
    ]


def pool_conditions(world: World) -> Mapping[PoolCondition, int]:
    """Count the pools by condition."""
    found = Counter(dict.fromkeys(PoolCondition, 0))
    found.update(condition for _, _, condition in conditions_of_pools(world))
    return found


def conditions_of_pools(world: World) -> Iterator[tuple[PoolID, str, PoolCondition]]:
    """Return each pool with its condition, and with its node if the pool belongs to one node. Pools
    with the same name on two nodes are different pools."""
    views = world.views()
    rivals: dict[PoolID, Collection[str]] = {}  # cached, because a pool can be on all nodes
    for name in list(world.nodes_with_slices()):
        view = views.get(name)
        for identity in _pools_of(name, world):
            if view is None:
                yield identity, name, PoolCondition.NODE_MISSING
                continue
            if identity not in rivals:
                rivals[identity] = _rivals(identity, world)
            yield identity, name, _condition(identity, view, world, rivals[identity])[0]
    shared = {each.of_pool for each in world.slices_of_node(EVERYWHERE)} - rivals.keys()
    for view in views.values():
        if not shared:  # the first node is usually sufficient
            return
        for pool in world.pools_of_node(view):
            if pool.identity in shared:
                shared.remove(pool.identity)
                yield pool.identity, "", _STATES[pool.state]


_STATES = {
    PoolState.READY: PoolCondition.READY,
    PoolState.INCOMPLETE: PoolCondition.INCOMPLETE,
    PoolState.INVALID: PoolCondition.INVALID,
    PoolState.UNREAD: PoolCondition.READY,
}


def _pools_of(node: str, world: World) -> list[PoolID]:
    return sorted({each.of_pool for each in world.slices_of_node(node)})


def _condition(
    identity: PoolID, view: NodeView, world: World, rivals: Collection[str]
) -> tuple[PoolCondition, str]:
    """Return the condition of a pool on a node. For an invalid pool, also return its problem."""
    if rivals:
        return PoolCondition.CONFLICTING, ""
    of_node = (each for each in world.pools_of_node(view) if each.identity == identity)
    if (pool := next(of_node, None)) is None:
        return PoolCondition.OUTDATED, ""
    condition, slices = _STATES[pool.state], _of_node(identity, view.name, world)
    if condition is PoolCondition.READY and len(newest(slices)) < len(slices):
        condition = PoolCondition.OUTDATED
    return condition, pool.problem


def _finding(
    identity: PoolID, view: NodeView, world: World, rivals: Collection[str]
) -> Finding | None:
    """Return the problem of a pool on a node, as the rest of a sentence about the pool."""
    match _condition(identity, view, world, rivals):
        case PoolCondition.CONFLICTING, _:
            first, *more = [each for each in rivals if each != view.name]
            others = f"node {first} and others" if more else f"node {first}"
            return Finding(
                code=Code.POOL_NAME_CONFLICT,
                what=f"is also published by {others}, and the scheduler treats devices with the "
                f"same name as one device; configure the driver to name its pools after their "
                f"nodes",
            )
        case PoolCondition.INVALID, problem:
            return Finding(
                code=Code.POOL_INVALID,
                what=f"is invalid, so no device can be allocated from it: {problem}; correct the "
                f"driver",
            )
        case PoolCondition.INCOMPLETE, _ if not world.unreadable():
            return Finding(code=Code.POOL_INCOMPLETE, what=_missing(identity, view, world))
        case PoolCondition.OUTDATED, _:
            generation = max(each.generation for each in world.slices_of_pool(identity))
            return Finding(
                code=Code.SLICES_OUTDATED,
                what=f"has slices of older generations than {generation}, and the scheduler "
                f"ignores their devices; the driver must delete them, so check its log on this "
                f"node",
            )
        case _:
            return None


def _missing(identity: PoolID, view: NodeView, world: World) -> str:
    """Return the reason why a pool is incomplete: the actual and the expected number of slices,
    which the scheduler compares."""
    newest = max(each.generation for each in _of_node(identity, view.name, world))
    slices = [each for each in world.slices_of_pool(identity) if each.generation == newest]
    stated = sorted({each.pool_slices for each in slices})
    if len(stated) > 1:
        counts = ", ".join(map(str, stated))
        what = f"has slices of generation {newest} with different resourceSliceCount ({counts})"
    else:
        what = f"has {len(slices)} of {stated[0]} slices of generation {newest}"
    return (
        f"{what}, so no device can be allocated from it; check the log of the driver on this node"
    )


def _rivals(identity: PoolID, world: World) -> list[str]:
    """
    Return the nodes that publish different pools with the same name. Empty if they are all slices
    of one pool.

    One pool can have slices for several nodes. In that case, none of the nodes has all slices, and
    each device occurs on only one node.
    """
    by_node: dict[str, list[SliceFacts]] = {}
    for each in world.slices_of_pool(identity):
        name = node_of_slice(each)
        if name and (not world.of(NodeFacts) or world.node(name) is not None):
            by_node.setdefault(name, []).append(each)
    if len(by_node) < 2:
        return []
    if any(map(is_complete, by_node.values())) or _has_one_device_twice(by_node.values()):
        return sorted(by_node)
    return []


def _has_one_device_twice(pools: Iterable[Collection[SliceFacts]]) -> bool:
    names = [device.name for slices in pools for of in newest(slices) for device in of.devices]
    return len(set(names)) < len(names)


def _of_node(identity: PoolID, node: str, world: World) -> list[SliceFacts]:
    return [each for each in world.slices_of_pool(identity) if node_of_slice(each) == node]
