"""
The problems of one pod or one claim, from the facts of the store.

Pure: :mod:`drakit.explain` makes the sentences, :mod:`drakit_operator.announcing` reports them.

It must not know queues, clocks, Kopf or sessions.
"""

from __future__ import annotations

from dataclasses import replace

from drakit.explain.certainty import certain, with_limits
from drakit.explain.codes import Code, Reason
from drakit.explain.pending import Explainer, missing_classes_of_claim
from drakit.explain.world import World
from drakit_operator.kinds import Name

__all__ = ("judge_claim", "judge_pod")


_REPORTED_BY_KUBELET = frozenset([Code.NOT_PREPARED])
"""The kubelet's own Events on the same pod have the cause, which no fact of the store has."""


def judge_pod(
    name: Name, world: World, explainer: Explainer, *, settled: bool
) -> tuple[str, list[Reason]] | None:
    """
    Return a pod's UID and why it does not start; None if there is no such pending pod.

    :param settled: the pod is known for a while.
    """
    pod = world.pod(name.namespace, name.name)
    if pod is None:
        return None
    if pod.deleting:  # an end takes its time, and nobody is known to wait for it
        return pod.uid, []
    found = explainer.explain(pod, settled=settled)
    reasons = [
        with_limits(each, world)
        for each in certain(found.reasons, world)
        if each.code not in _REPORTED_BY_KUBELET
    ]
    if reasons and found.remedy and not world.hidden:  # a fact that is not seen may prevent it
        reasons[0] = replace(reasons[0], sentence=f"{reasons[0].sentence}; {found.remedy}")
    return pod.uid, reasons


def judge_claim(name: Name, world: World) -> tuple[str, list[Reason]] | None:
    """Return a claim's UID and why it cannot be allocated; None if there is no such claim."""
    claim = world.claim(name.namespace, name.name)
    return None if claim is None else (claim.uid, missing_classes_of_claim(claim, world))
