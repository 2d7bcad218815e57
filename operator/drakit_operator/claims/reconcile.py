"""
The problems of one pod or one claim, from the facts of the store.

Pure: :mod:`drakit.explain` makes the sentences, :mod:`drakit_operator.announcing` reports them.

It must not know queues, clocks, Kopf or sessions.
"""

from __future__ import annotations

from drakit.explain import Reason, explain, missing_classes_of_claim
from drakit_operator.kinds import Name
from drakit_operator.store import Store

__all__ = ("judge_claim", "judge_pod")


def judge_pod(
    name: Name, store: Store, *, name_all_holders: bool = False
) -> tuple[str, list[Reason]] | None:
    """Return a pod's UID and why it is pending; None if there is no such pending pod."""
    pod = store.pod(name.namespace, name.name)
    if pod is None:
        return None
    return pod.uid, explain(pod, store, name_all_holders=name_all_holders)


def judge_claim(name: Name, store: Store) -> tuple[str, list[Reason]] | None:
    """Return a claim's UID and why it cannot be allocated; None if there is no such claim."""
    claim = store.claim(name.namespace, name.name)
    return None if claim is None else (claim.uid, missing_classes_of_claim(claim, store))
