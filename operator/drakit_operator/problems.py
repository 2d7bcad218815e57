"""
Finds the problems of a pod or claim from the facts in the store, with pure functions.

The reason why a claim is not allocated depends on the pod that waits for it, so
:func:`problems_of_pod` also reports why the pod's claims are not allocated.
:func:`problems_of_claim` reports problems that do not depend on a waiting pod, including problems
of running pods.

:mod:`drakit_explain` composes the sentences, and :mod:`drakit_operator.announcing` reports them.
Does not depend on queues, clocks or sessions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from drakit_explain.broken import broken_claim, gone_under, is_placed
from drakit_explain.codes import Code, Reason, certain, no_remedy, with_limits
from drakit_explain.model import ClaimFacts, Consumer, PodFacts, ReportFacts
from drakit_explain.pending import Explainer, waits
from drakit_explain.pending_claims import missing_classes
from drakit_explain.world import Name, World

_REPORTED_BY_KUBELET = frozenset([Code.NOT_PREPARED, Code.POD_NOT_STARTED, Code.POD_FAILED])
"""Reasons that the kubelet itself reports in Events on the same pod, but without a remedy."""

_REPORTED_BY_KUBERNETES = frozenset([Code.NODE_NOT_READY])
"""Reasons that the node controller reports about the node and each of its pods, so the claims do
not need Events."""

_AFTER_RESTARTS = frozenset([Code.DRIVER_UNAVAILABLE, Code.POOL_GONE])
"""Reasons that a restart of a driver or kubelet can cause. Slices are missing for a few seconds,
but pods start anyway."""

_BINDING = frozenset([Code.BINDING_OUTSTANDING, Code.BINDING_FAILED])
"""Problems of an allocated claim that keep its pod waiting for a node."""

_AT_ONCE = frozenset([Code.BINDING_FAILED, Code.DEVICE_UNHEALTHY, Code.EVICTION_BY_TAINT])
"""Problems of allocated claims that are reported immediately. Others may occur during an update of
a driver. A missing device has its own delay."""


def problems_of_pod(
    pod: PodFacts, world: World, explainer: Explainer, *, settled: bool
) -> dict[str, list[Reason]]:
    """
    Return the reasons why a pod does not start, keyed by its UID, and why its claims are not
    allocated, keyed by their UIDs.

    :param settled: whether the pod has been known for a while.
    """
    if pod.deleting:  # a deletion can take a long time without being a problem
        return {pod.uid: []}
    found = explainer.explain(pod, settled=settled)
    reasons = [
        with_limits(each, world)
        for each in certain(found.reasons, world)
        if (each.code not in _REPORTED_BY_KUBELET or each.advice)
        and (settled or each.code not in _AFTER_RESTARTS)
    ]
    problems = {pod.uid: reasons}
    for each in certain(found.claim_reasons, world):
        claim = world.claim(pod.namespace, each.regarding.name)
        if claim is not None and claim.owner_uid == pod.uid:
            continue  # the Event about the pod contains the same sentence
        if _represents(pod, each.regarding.name, world):
            problems.setdefault(each.regarding.uid, []).append(with_limits(each, world))
    # If the operator is not allowed to read some objects, the remedy may fail because of one of
    # them.
    find_remedy = no_remedy if world.hidden - {ReportFacts} else found.find_remedy
    return {
        uid: [replace(each, find_remedy=find_remedy) for each in reasons]
        for uid, reasons in problems.items()
    }


def _represents(pod: PodFacts, claim: str, world: World) -> bool:
    """Return whether a pod represents all pods that wait for a claim: the first one by name."""
    waiting = [
        other.name
        for name in world.pods_of_claim(Name(pod.namespace, claim))
        if (other := world.pod(*name)) is not None and waits(other)
    ]
    return pod.name == min(waiting, default="")


def problems_of_claim(claim: ClaimFacts, world: World) -> dict[str, list[Reason]]:
    """
    Return the problems of a claim that do not depend on a waiting pod, keyed by the claim's UID.

    A missing device is also a problem of the pods that are running with it, so it is also keyed by
    their UIDs. Such a pod can fail, and then its claim is deleted.
    """
    if claim.deleting:
        return {claim.uid: []}
    found = _broken(claim, world) if claim.allocated else missing_classes(claim, world)
    of_claim = [each for each in found if not _is_reported_by_pod(each.code, claim, world)]
    gone = any(each.code is Code.DEVICE_GONE for each in found)
    of_pods = {
        each.uid: _lasting(gone_under(claim, each, world)) if gone else []
        for each in running_pods(claim, world)
    }
    return {claim.uid: of_claim, **of_pods}


def running_pods(claim: ClaimFacts, world: World) -> list[Consumer]:
    """Return the pods for which a claim is reserved and that have started."""
    pods = [each for each in claim.consumers if each.resource == "pods"]
    waiting = {pod.uid for each in pods if (pod := world.pod(claim.namespace, each.name))}
    return [each for each in pods if each.uid not in waiting]


def _is_reported_by_pod(code: Code, claim: ClaimFacts, world: World) -> bool:
    """Return whether an Event about the pod for which a claim was created contains the same
    sentence."""
    pod = world.pod(claim.namespace, claim.owner_pod or "")
    if pod is None or pod.uid != claim.owner_uid:
        return False
    if claim.allocated and waits(pod):
        return code in _BINDING
    return is_placed(pod) if claim.allocated else waits(pod)


def _broken(claim: ClaimFacts, world: World) -> list[Reason]:
    if not claim.consumers:  # the claim is about to be deallocated
        return []
    return [
        each
        for each in _lasting(broken_claim(claim, world))
        if each.code not in _REPORTED_BY_KUBERNETES
    ]


def _lasting(reasons: Iterable[Reason]) -> list[Reason]:
    """Mark the reasons that are reported only if they last, because they also occur during an
    update of a driver."""
    return [
        each if each.code in _AT_ONCE else replace(each, transient=each.code) for each in reasons
    ]
