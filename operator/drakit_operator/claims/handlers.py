"""
Which pods and claims must be checked again after a change.

Too many are harmless (each is queued once, and nothing is announced twice); too few are not.

It must not know queues, Kopf, or what a check finds.
"""

from __future__ import annotations

from collections.abc import Iterable

from drakit.explain.model import ClaimFacts
from drakit_operator.kinds import CLAIMS, CLASSES, NODES, PODS, RULES, SLICES, TEMPLATES, Name
from drakit_operator.store import Change, Store

__all__ = ("claims_touched", "pods_touched")


def pods_touched(changes: Iterable[Change], store: Store) -> set[Name]:
    """Return the pods whose reason to be pending may have changed."""
    found: set[Name] = set()
    all_that_wait = False
    for change in changes:
        if _touches_all_that_wait(change):
            all_that_wait = True
        elif change.kind is PODS:
            found.add(change.name)
        elif change.kind is TEMPLATES:
            found |= store.world.pods_of_template(change.name)
        elif change.kind is CLAIMS:
            found |= store.world.pods_of_claim(change.name)
    if all_that_wait:
        # Once: thousands of slices times thousands of pods would keep the Lease from its renewal.
        found.update(store.world.waiting_pods())
    return found


def claims_touched(changes: Iterable[Change], store: Store) -> set[Name]:
    """Return the claims whose request for a missing class may have appeared or ended."""
    found: set[Name] = set()
    for change in changes:
        if change.kind is CLAIMS:
            found.add(change.name)
        elif change.kind is CLASSES:
            found |= store.world.claims_of_class(change.name.name)
    return found


def _touches_all_that_wait(change: Change) -> bool:
    if change.kind is CLAIMS:  # devices became free or taken, or changed hands
        return _held(change.old) != _held(change.new)
    return change.kind in (CLASSES, SLICES, NODES, RULES)


def _held(claim: object) -> object:
    """Return the devices that a claim holds, and its pods: the sentences name both."""
    if not isinstance(claim, ClaimFacts) or not (claim.devices or claim.shares):
        return None
    return (claim.devices, claim.shares, claim.reserved_for)
