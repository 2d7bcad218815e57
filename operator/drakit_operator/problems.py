"""
The problems of one pod or claim, from the facts of the store. Pure.

Why a claim is not allocated depends on the pod that waits for it, so :func:`problems_of_pod` also
reports the claims of the pod. :func:`claim_problems` reports problems that do not depend on a pod.

:mod:`drakit_explain` makes the sentences, :mod:`drakit_operator.announcing` reports them. It must
not know queues, clocks or sessions.
"""

from __future__ import annotations

from dataclasses import replace

from drakit_explain.broken import broken_claim, is_placed
from drakit_explain.codes import Code, Reason, certain, no_remedy, with_limits
from drakit_explain.model import ClaimFacts, PodFacts, ReportFacts
from drakit_explain.pending import Explainer, waits
from drakit_explain.pending_claims import missing_classes
from drakit_explain.world import Name, World

_REPORTED_BY_KUBELET = frozenset([Code.NOT_PREPARED])
"""The kubelet's own Events on the same pod have the cause, which no fact of the store has."""

_REPORTED_BY_KUBERNETES = frozenset([Code.NODE_NOT_READY])
"""The node controller reports it about the node and each of its pods: not again for each claim."""

_AFTER_RESTARTS = frozenset([Code.DRIVER_UNAVAILABLE, Code.POOL_GONE])
"""Slices are missing for seconds after a restart of a driver or kubelet, and pods start anyway."""

_BINDING = frozenset([Code.BINDING_OUTSTANDING, Code.BINDING_FAILED])
"""Problems of an allocated claim because of which its pod waits for a node."""

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
        claim = world.claim(pod.namespace, each.regarding.name)
        if claim is not None and claim.owner_uid == pod.uid:
            continue  # the Event of its pod has the same sentence
        if _represents(pod, each.regarding.name, world):
            problems.setdefault(each.regarding.uid, []).append(with_limits(each, world))
    # A fact that is not seen may prevent the remedy.
    find_remedy = no_remedy if world.hidden - {ReportFacts} else found.find_remedy
    return {
        uid: [
            replace(each, find_remedy=find_remedy, find_confirmation=found.find_confirmation)
            for each in reasons
        ]
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


def claim_problems(claim: ClaimFacts, world: World) -> list[Reason]:
    """Return what is wrong with a claim, whatever pod waits for it."""
    if claim.deleting:
        return []
    found = _broken(claim, world) if claim.allocated else missing_classes(claim, world)
    return [each for each in found if not _is_reported_by_pod(each.code, claim, world)]


def _is_reported_by_pod(code: Code, claim: ClaimFacts, world: World) -> bool:
    """Return whether a claim was made for a pod that gets an Event with the same sentence."""
    pod = world.pod(claim.namespace, claim.owner_pod or "")
    if pod is None or pod.uid != claim.owner_uid:
        return False
    if claim.allocated and waits(pod):
        return code in _BINDING
    return is_placed(pod) if claim.allocated else waits(pod)


def _broken(claim: ClaimFacts, world: World) -> list[Reason]:
    if not claim.consumers:  # it is about to be deallocated
        return []
    return [
        each if each.code in _AT_ONCE else replace(each, transient=each.code)
        for each in broken_claim(claim, world)
        if each.code not in _REPORTED_BY_KUBERNETES
    ]
