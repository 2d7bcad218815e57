"""
The nodes that a pod can use, regardless of free devices, and why it cannot use the others.

:mod:`.nodes` has the rules for one pod and one node. This module applies them to all nodes, adds
what other pods have left of each and where allocated claims are available, and keeps the results
for pods with equal rules.

It must not know requests for devices, or how a result is worded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drakit_explain.model import ClaimFacts, PodFacts
from drakit_explain.nodes import NodeProblem, Unusable, resolved, too_small, unusable
from drakit_explain.pools import NodeView
from drakit_explain.world import World
from drakit_formats.resource.nodes import selects_node

__all__ = ("Nodes", "UsableNodes")

Nodes = Mapping[str, Unusable | None]
"""All nodes by name, each with the reason why a pod cannot use it."""


class UsableNodes:
    """The nodes that pods can use; results are kept until nodes, or the pods on them, change."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._views: Mapping[str, NodeView] = {}
        self._loads: int | None = None
        self._by_rules: dict[object, Nodes] = {}
        self._with_room: dict[object, Nodes] = {}

    def of(self, pod: PodFacts, allocated: Sequence[ClaimFacts]) -> Nodes:
        """Return the nodes for a pod with these claims that are allocated already."""
        self._refresh()
        nodes = self._room(pod)
        restricted = [claim for claim in allocated if claim.nodes is not None]
        if not restricted:
            return nodes
        return {
            name: problem or _other_claim(restricted, self._views[name])
            for name, problem in nodes.items()
        }

    def after(self, pod: PodFacts, allocated: Sequence[ClaimFacts], name: str) -> bool:
        """Return whether a pod could use a node if the reason against it were resolved."""
        problem, node = self.of(pod, allocated)[name], self._world.node(name)
        if node is None or problem is None:
            return False
        small = self._too_small(pod, name)
        if small is not None and small != problem:
            return False
        placement, node = resolved(problem, pod.placement, node)
        others = [
            each
            for each in allocated
            if each.nodes is not None
            and (problem.problem, problem.detail) != (NodeProblem.CLAIM, each.name)
        ]
        view = NodeView(node.name, node.labels)
        return unusable(placement, node) is None and _other_claim(others, view) is None

    def _refresh(self) -> None:
        if self._views is not (views := self._world.views()):
            self._views = views
            self._by_rules.clear()
            self._with_room.clear()
        loads = self._world.loads.revision if self._world.loads is not None else None
        if self._loads != loads:  # far more often than anything else
            self._loads = loads
            self._with_room.clear()

    def _room(self, pod: PodFacts) -> Nodes:
        """Apply the pod's own rules, and what each node has left."""
        rules = self._rules(pod)
        if self._loads is None:
            return rules
        key = (pod.placement.key, pod.requests, pod.priority)
        if key not in self._with_room:
            self._with_room[key] = {
                name: problem or self._too_small(pod, name) for name, problem in rules.items()
            }
        return self._with_room[key]

    def _rules(self, pod: PodFacts) -> Nodes:
        key = pod.placement.key
        if key not in self._by_rules:
            nodes = {name: self._world.node(name) for name in self._views}
            self._by_rules[key] = {
                name: None if node is None else unusable(pod.placement, node)
                for name, node in nodes.items()
            }
        return self._by_rules[key]

    def _too_small(self, pod: PodFacts, name: str) -> Unusable | None:
        node, loads = self._world.node(name), self._world.loads
        if node is None or loads is None or self._loads is None:  # unknown, or outdated
            return None
        return too_small(pod.requests, loads.free(node, priority=pod.priority))


def _other_claim(claims: Sequence[ClaimFacts], view: NodeView) -> Unusable | None:
    for claim in claims:
        if not selects_node(claim.nodes, name=view.name, labels=view.labels):
            return Unusable(NodeProblem.CLAIM, claim.name)
    return None
