"""
The problems of the pools of one node, and of one slice, from the facts of the store. Pure.

It must not know queues, clocks, Kopf or sessions.
"""

from __future__ import annotations

from drakit.explain.codes import Reason
from drakit.explain.model import SliceFacts
from drakit.explain.poolchecks import node_problems, slice_problems
from drakit.explain.world import World
from drakit_operator.kinds import Name

__all__ = ("judge_node", "judge_slice")


def judge_node(name: Name, world: World) -> dict[str, list[Reason]]:
    """Return the problems of a node's pools by the node's UID; empty if there is no such node."""
    node = world.node(name.name)
    return {} if node is None else {node.uid: node_problems(node, world)}


def judge_slice(name: Name, world: World) -> dict[str, list[Reason]]:
    """Return a slice's problems by its UID; empty if there is no such slice."""
    of = world.of(SliceFacts).get(name)
    return {} if of is None else {of.uid: slice_problems(of, world)}
