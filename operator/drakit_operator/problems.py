"""
The problems of one object, from the facts of the store. Pure.

Why a claim is not allocated depends on the pod that waits for it, so :func:`problems_of_pod` also
reports the claims of the pod. :func:`problems_of_claim` reports problems that do not depend on a
pod. Templates and classes are checked when they appear, not whenever devices change: a pod that
waits gets Events then. Problems of pools are reported about their Node, because slices come and go
with each update.

:mod:`drakit_explain` makes the sentences, :mod:`drakit_operator.announcing` reports them. It must
not know queues, clocks or sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drakit_explain import templates
from drakit_explain.broken import broken_claim
from drakit_explain.codes import Code, Reason, certain, with_limits
from drakit_explain.model import ClaimFacts, PodFacts, SliceFacts
from drakit_explain.pending import Explainer, waits
from drakit_explain.pending_claims import missing_classes
from drakit_explain.poolchecks import node_problems, slice_problems
from drakit_explain.reports import ReportFacts
from drakit_explain.world import World
from drakit_operator.kinds import Name

_REPORTED_BY_KUBELET = frozenset([Code.NOT_PREPARED])
"""The kubelet's own Events on the same pod have the cause, which no fact of the store has."""

_REPORTED_BY_KUBERNETES = frozenset([Code.NODE_NOT_READY])
"""The node controller reports it about the node and each of its pods: not again for each claim."""

_AFTER_RESTARTS = frozenset([Code.DRIVER_UNAVAILABLE, Code.POOL_GONE])
"""Slices are missing for seconds after a restart of a driver or kubelet, and pods start anyway."""

_AT_ONCE = frozenset([Code.BINDING_FAILED, Code.DEVICE_UNHEALTHY, Code.EVICTION_BY_TAINT])
"""Problems of allocated claims that are reported at once; others may occur in a driver's update."""


def problems_of_pod(
    name: Name, world: World, explainer: Explainer, *, settled: bool
) -> dict[str, list[Reason]]:
    """
    Return why a pod does not start, by its UID, and why its claims are not allocated, by theirs.

    Empty if there is no such pending pod.

    :param settled: the pod is known for a while.
    """
    pod = world.pod(name.namespace, name.name)
    if pod is None:
        return {}
    if pod.deleting:  # a deletion can take long, and no problem of it is known
        return {pod.uid: []}
    found = explainer.explain(pod, settled=settled)
    reasons = [
        with_limits(each, world)
        for each in certain(found.reasons, world)
        if each.code not in _REPORTED_BY_KUBELET and (settled or each.code not in _AFTER_RESTARTS)
    ]
    problems = {pod.uid: reasons}
    for each in certain(found.claim_reasons, world):
        if _represents(pod, each.regarding.name, world):
            problems.setdefault(each.regarding.uid, []).append(with_limits(each, world))
    if world.hidden - {ReportFacts}:  # a fact that is not seen may prevent the remedy
        return problems
    return {
        uid: [replace(each, find_remedy=found.find_remedy) for each in reasons]
        for uid, reasons in problems.items()
    }


def _represents(pod: PodFacts, claim: str, world: World) -> bool:
    """Return whether a pod is the first by name that waits for a claim: pods may share one."""
    waiting = [
        other.name
        for name in world.pods_of_claim(Name(pod.namespace, claim))
        if (other := world.pod(*name)) is not None and waits(other)
    ]
    return pod.name == min(waiting, default="")


def problems_of_claim(name: Name, world: World) -> dict[str, list[Reason]]:
    """Return by its UID what is wrong with a claim; empty if there is no such claim."""
    claim = world.claim(name.namespace, name.name)
    if claim is None:
        return {}
    if claim.deleting:
        return {claim.uid: []}
    return {claim.uid: _broken(claim, world) if claim.allocated else missing_classes(claim, world)}


def _broken(claim: ClaimFacts, world: World) -> list[Reason]:
    if not claim.consumers:  # it is about to be deallocated
        return []
    return [
        each if each.code in _AT_ONCE else replace(each, transient=each.code)
        for each in broken_claim(claim, world)
        if each.code not in _REPORTED_BY_KUBERNETES
    ]


def problems_of_template(name: Name, world: World) -> dict[str, list[Reason]]:
    """Return a template's problems by its UID; empty if there is no such template."""
    template = world.template(name.namespace, name.name)
    if template is None:
        return {}
    return {template.uid: templates.template_problems(template, world)}


def problems_of_class(name: Name, world: World) -> dict[str, list[Reason]]:
    """Return a class's problems by its UID; empty if there is no such class."""
    device_class = world.device_class(name.name)
    if device_class is None:
        return {}
    return {device_class.uid: templates.class_problems(device_class, world)}


def expressions_of_template(name: Name, world: World) -> Sequence[str]:
    """Return the selectors that must be evaluated before the problems of a template are found."""
    template = world.template(name.namespace, name.name)
    return templates.expressions_of(template.requests, world) if template is not None else ()


def expressions_of_class(name: Name, world: World) -> Sequence[str]:
    """Return the selectors that must be evaluated before the problems of a class are found."""
    device_class = world.device_class(name.name)
    return [each for each in device_class.selectors if each] if device_class is not None else ()


def problems_of_node(name: Name, world: World) -> dict[str, list[Reason]]:
    """Return the problems of a node's pools by the node's UID; empty if there is no such node."""
    node = world.node(name.name)
    return {} if node is None else {node.uid: node_problems(node, world)}


def problems_of_slice(name: Name, world: World) -> dict[str, list[Reason]]:
    """Return a slice's problems by its UID; empty if there is no such slice."""
    of = world.of(SliceFacts).get(name)
    return {} if of is None else {of.uid: slice_problems(of, world)}
