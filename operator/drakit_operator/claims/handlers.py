"""
Which pods and claims must be looked at again after a change.

Too many are harmless (they are queued once each, and nothing is told twice), too few are not.

It must not know queues, Kopf, or what is found when one looks.
"""

from __future__ import annotations

from collections.abc import Iterable

from drakit.explain import ClaimFacts
from drakit_operator.kinds import CLAIMS, CLASSES, PODS, SLICES, TEMPLATES, Name
from drakit_operator.store import Change, Store

__all__ = ("claims_touched", "pods_touched")


def pods_touched(change: Change, store: Store) -> Iterable[Name]:
    """Name the pods whose reason to wait may have changed."""
    if change.kind is PODS:
        return (change.name,)
    if change.kind is TEMPLATES:
        return store.pods_of_template(change.name)
    if change.kind in (CLASSES, SLICES):
        return store.waiting_pods()
    if change.kind is CLAIMS:
        if _held(change.old) != _held(change.new):
            return store.waiting_pods()  # devices became free or taken, or changed hands
        return store.pods_of_claim(change.name)
    return ()


def claims_touched(change: Change, store: Store) -> Iterable[Name]:
    """Name the claims that may have begun or ceased to ask for a missing class."""
    if change.kind is CLAIMS:
        return (change.name,)
    if change.kind is CLASSES:
        return store.claims_of_class(change.name.name)
    return ()


def _held(claim: object) -> object:
    """Tell what a claim takes from others, and for whom: the sentences name both."""
    if not isinstance(claim, ClaimFacts) or not claim.devices:
        return None
    return (claim.devices, claim.reserved_for)
