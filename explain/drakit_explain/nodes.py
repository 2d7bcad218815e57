"""
Determines which nodes a pod can use, regardless of free devices, and why it cannot use the others,
according to the rules of the scheduler's filters.

The module covers the node selector, required node affinity, taints, cordons, the resources that
other pods leave on each node, and the nodes of allocated claims. It does not cover rules that
depend on other pods (affinity between pods, topology spread, ports, volumes). Results are cached
for pods with equal rules.

Does not depend on clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from drakit_explain.allocation import tolerates
from drakit_explain.budget import Budget
from drakit_explain.devices import TaintFacts
from drakit_explain.loads import Requests
from drakit_explain.model import (
    LOWEST_PRIORITY,
    ClaimFacts,
    NodeFacts,
    Placement,
    PodFacts,
    Toleration,
)
from drakit_explain.pools import NodeView
from drakit_explain.recent import keep
from drakit_explain.world import World
from drakit_formats.resource.nodes import selects_node

# ---------------------------------------------------------------- one node


class NodeProblem(Enum):
    """The reason why a pod cannot run on a node."""

    SELECTOR = "selector"
    TAINT = "taint"
    CORDONED = "cordoned"
    RESOURCES = "resources"
    CLAIM = "claim"
    """One of the pod's claims is allocated for other nodes."""


class Unusable(NamedTuple):
    """The reason why a pod cannot use a node: a problem, and the taint, resource or claim that
    causes it."""

    problem: NodeProblem
    detail: str = ""
    """The name of the resource or claim, or ``key`` or ``key=value`` of the taint."""


def is_condition(taint: str) -> bool:
    """Return whether a taint reflects a condition of a node. Pods must not tolerate such a
    taint."""
    return taint.startswith(_CONDITIONS)


def unusable(placement: Placement, node: NodeFacts) -> Unusable | None:
    """Return the first reason, other than the pod's requests, why a pod cannot run on a node. None
    if it can."""
    if not _selected(placement, node):
        return Unusable(NodeProblem.SELECTOR)
    if node.unschedulable and not _tolerated(_CORDON, placement.tolerations):
        return Unusable(NodeProblem.CORDONED)
    for taint in node.taints:
        if not _tolerated(taint, placement.tolerations):
            if taint.key == _CORDON.key:
                return Unusable(NodeProblem.CORDONED)
            return Unusable(NodeProblem.TAINT, taint.shown)
    return None


def resolved(
    problem: Unusable, placement: Placement, node: NodeFacts
) -> tuple[Placement, NodeFacts]:
    """Return a placement and a node as they would be after one problem is resolved."""
    match problem.problem:
        case NodeProblem.SELECTOR:
            return replace(placement, node_selector=(), affinity=None), node
        case NodeProblem.TAINT:
            key = problem.detail.partition("=")[0]
            # Remove the taint instead of tolerating it, because the node must recover.
            if is_condition(key):
                taints = tuple(each for each in node.taints if each.key != key)
                return placement, replace(node, taints=taints)
            added = Toleration(key=key, operator="Exists")
            return replace(placement, tolerations=(*placement.tolerations, added)), node
        case NodeProblem.CORDONED:
            taints = tuple(each for each in node.taints if each.key != _CORDON.key)
            return placement, replace(node, unschedulable=False, taints=taints)
        case NodeProblem.RESOURCES | NodeProblem.CLAIM:
            return placement, node


def too_small(requests: Requests, free: Mapping[str, int]) -> Unusable | None:
    """Return the first resource for which a pod's request exceeds the free amount of a node, or
    None."""
    for resource, amount in requests:
        if amount and amount > free.get(resource, 0):
            return Unusable(NodeProblem.RESOURCES, _ROOM if resource == "pods" else resource)
    return None


_ROOM = "room for pods"
_CONDITIONS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""The key prefixes of the taints that Kubernetes sets while a node has a problem."""

_CORDON = TaintFacts(key="node.kubernetes.io/unschedulable", effect="NoSchedule")


def _selected(placement: Placement, node: NodeFacts) -> bool:
    labels = node.labels
    if any(labels.get(key) != value for key, value in placement.node_selector):
        return False
    return placement.affinity is None or selects_node(
        placement.affinity, name=node.name, labels=labels
    )


def _tolerated(taint: TaintFacts, tolerations: tuple[Toleration, ...]) -> bool:
    return any(tolerates(each, taint) for each in tolerations)


# ---------------------------------------------------------------- all nodes

MAX_RULES = 32
"""Maximum number of distinct sets of pod rules to cache the nodes for. With 5,000 nodes, each takes
up to 1 MiB. The least recently used are dropped first."""

Nodes = Mapping[str, Unusable | None]
"""All nodes, keyed by name, each with the reason why a pod cannot use it."""


_STEPS_PER_NODE = 2


class UsableNodes:
    """Determines the nodes that pods can use. Results are cached until nodes, or the pods on them,
    change."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._views: Mapping[str, NodeView] = {}
        self._loads: int | None = None
        self._by_rules: dict[object, Nodes] = {}
        self._with_room: dict[object, Nodes] = {}

    def of(self, pod: PodFacts, allocated: Sequence[ClaimFacts], budget: Budget) -> Nodes:
        """Return all nodes, each with the reason why a pod with these allocated claims cannot use
        it, or None."""
        self._refresh()
        nodes = self._room(pod, budget)
        restricted = [claim for claim in allocated if claim.nodes is not None]
        if not restricted:
            return nodes
        budget.spend(_STEPS_PER_NODE * len(nodes) * len(restricted))
        return {
            name: problem or _other_claim(restricted, self._views[name])
            for name, problem in nodes.items()
        }

    def passes(self, pod: PodFacts, name: str) -> bool:
        """
        Return whether a node that a pod can use has room for the pod without preemption.

        The result is False while the loads are temporarily unknown, and True if the caller never
        provides loads.
        """
        if self._world.loads is not None and self._loads is None:
            return False
        return self._too_small(pod, name, priority=LOWEST_PRIORITY) is None

    def after(
        self, pod: PodFacts, allocated: Sequence[ClaimFacts], name: str, budget: Budget
    ) -> bool:
        """Return whether a pod could use a node if the node's current problem were resolved."""
        problem, node = self.of(pod, allocated, budget)[name], self._world.node(name)
        if node is None or problem is None:
            return False
        small = self._too_small(pod, name, priority=pod.displaces)
        if small is not None and small != problem:
            return False
        budget.spend(_STEPS_PER_NODE + pod.placement.steps)
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
        if self._loads != loads:  # loads change far more often than anything else
            self._loads = loads
            self._with_room.clear()

    def _room(self, pod: PodFacts, budget: Budget) -> Nodes:
        """Apply the pod's own rules, and the free resources of each node."""
        rules = self._rules(pod, budget)
        if self._loads is None:
            return rules

        def find() -> Nodes:
            budget.spend(len(rules) * (_STEPS_PER_NODE + len(pod.requests)))
            priority = pod.displaces
            return {
                name: problem or self._too_small(pod, name, priority=priority)
                for name, problem in rules.items()
            }

        return _used(self._with_room, (pod.placement, pod.requests, pod.displaces), find)

    def _rules(self, pod: PodFacts, budget: Budget) -> Nodes:
        def find() -> Nodes:
            budget.spend(len(self._views) * (_STEPS_PER_NODE + pod.placement.steps))
            nodes = {name: self._world.node(name) for name in self._views}
            return {
                name: None if node is None else unusable(pod.placement, node)
                for name, node in nodes.items()
            }

        return _used(self._by_rules, pod.placement, find)

    def _too_small(self, pod: PodFacts, name: str, *, priority: int) -> Unusable | None:
        """Return the resource that a node lacks for a pod of this priority. None if no resource is
        known to be lacking."""
        node, loads = self._world.node(name), self._world.loads
        if node is None or loads is None or self._loads is None or not loads.knows(name):
            return None
        return too_small(pod.requests, loads.free(node, priority=priority))


def _used(cache: dict[object, Nodes], key: object, find: Callable[[], Nodes]) -> Nodes:
    """Return a cached entry, or compute it, and mark it as the last one used."""
    entry = cache.get(key)
    if entry is None:
        entry = find()
    keep(cache, key, entry, limit=MAX_RULES)
    return entry


def _other_claim(claims: Sequence[ClaimFacts], view: NodeView) -> Unusable | None:
    for claim in claims:
        if isinstance(claim.nodes, str):
            is_here = claim.nodes == view.name
        else:
            is_here = selects_node(claim.nodes, name=view.name, labels=view.labels)
        if not is_here:
            return Unusable(NodeProblem.CLAIM, claim.name)
    return None
