"""
Selects the nodes and slices that must be checked again after a change.

It must not know queues, Kopf, or what a check finds.
"""

from __future__ import annotations

from collections.abc import Iterable

from drakit.explain.model import PoolID, SliceFacts
from drakit.explain.poolchecks import node_of_slice
from drakit_operator.kinds import NODES, SLICES, Name
from drakit_operator.store import Change, Store

__all__ = ("nodes_touched", "slices_touched")


def nodes_touched(changes: Iterable[Change], store: Store) -> set[Name]:
    """Return the nodes whose pools changed, and those with pools of the same names."""
    found: set[Name] = set()
    pools: set[PoolID] = set()
    for change in changes:
        if change.kind is NODES and _comes_or_goes(change):
            found.add(change.name)
            pools.update(each.of_pool for each in store.world.slices_of_node(change.name.name))
        elif change.kind is SLICES:
            for each in (change.old, change.new):
                if isinstance(each, SliceFacts) and (node := node_of_slice(each)):
                    found.add(Name("", node))
                    if _comes_or_goes(change):
                        pools.add(each.of_pool)
    # Once for each pool: a thousand nodes may have pools of one name.
    found.update(
        Name("", node)
        for pool in pools
        for each in store.world.slices_of_pool(pool)
        if (node := node_of_slice(each))
    )
    return found


def slices_touched(changes: Iterable[Change], store: Store) -> set[Name]:
    """Return the slices that are new, and those of nodes that came or went."""
    found: set[Name] = set()
    for change in changes:
        if change.kind is SLICES and change.old is None and change.new is not None:
            found.add(change.name)
        elif change.kind is NODES and _comes_or_goes(change):
            found.update(
                Name("", each.name) for each in store.world.slices_of_node(change.name.name)
            )
    return found


def _comes_or_goes(change: Change) -> bool:
    return change.old is None or change.new is None
