"""
Whether a pod can run on a node, apart from its devices: what the scheduler's own filters decide.

Covered are node selector and required affinity, taints, cordons and resources. Rules that depend on
other pods (affinity between pods, topology spread, ports, volumes) are not.

It must not know claims, devices, clients or the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from drakit_explain.loads import Requests
from drakit_explain.model import NodeFacts, Placement, PodToleration, TaintFacts
from drakit_formats.resource.nodes import selects_node

__all__ = ("NodeProblem", "Unusable", "resolved", "too_small", "unusable")


class NodeProblem(Enum):
    """Why a pod cannot run on a node."""

    SELECTOR = "selector"
    TAINT = "taint"
    CORDONED = "cordoned"
    RESOURCES = "resources"
    CLAIM = "claim"
    """A claim of the pod is allocated for other nodes."""


class Unusable(NamedTuple):
    """A problem, and the taint or resource that it is about."""

    problem: NodeProblem
    detail: str = ""


def unusable(placement: Placement, node: NodeFacts) -> Unusable | None:
    """Return the first reason why a pod cannot run on a node, whatever it requests, or None."""
    if not _selected(placement, node):
        return Unusable(NodeProblem.SELECTOR)
    if node.unschedulable and not _tolerated(_CORDON, placement.tolerations):
        return Unusable(NodeProblem.CORDONED)
    for taint in node.taints:
        if not _tolerated(taint, placement.tolerations):
            if taint.key == _CORDON.key:
                return Unusable(NodeProblem.CORDONED)
            return Unusable(NodeProblem.TAINT, taint.key)
    return None


def resolved(
    problem: Unusable, placement: Placement, node: NodeFacts
) -> tuple[Placement, NodeFacts]:
    """Return a placement and a node without one problem between them."""
    match problem.problem:
        case NodeProblem.SELECTOR:
            return replace(placement, node_selector=(), affinity=None), node
        case NodeProblem.TAINT:
            added = PodToleration(key=problem.detail, operator="Exists")
            return replace(placement, tolerations=(*placement.tolerations, added)), node
        case NodeProblem.CORDONED:
            taints = tuple(each for each in node.taints if each.key != _CORDON.key)
            return placement, replace(node, unschedulable=False, taints=taints)
        case NodeProblem.RESOURCES | NodeProblem.CLAIM:
            return placement, node


def too_small(requests: Requests, free: Mapping[str, int]) -> Unusable | None:
    """Return the first resource of which a node has less left than a pod requests, or None."""
    for resource, amount in requests:
        if amount and amount > free.get(resource, 0):
            return Unusable(NodeProblem.RESOURCES, _ROOM if resource == "pods" else resource)
    return None


_ROOM = "room for pods"
_CORDON = TaintFacts(key="node.kubernetes.io/unschedulable", effect="NoSchedule")


def _selected(placement: Placement, node: NodeFacts) -> bool:
    labels = node.labels
    if any(labels.get(key) != value for key, value in placement.node_selector):
        return False
    return placement.affinity is None or selects_node(
        placement.affinity, name=node.name, labels=labels
    )


def _tolerated(taint: TaintFacts, tolerations: tuple[PodToleration, ...]) -> bool:
    return any(_tolerates(each, taint) for each in tolerations)


def _tolerates(toleration: PodToleration, taint: TaintFacts) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    return toleration.operator in ("", "Equal") and toleration.value == taint.value
