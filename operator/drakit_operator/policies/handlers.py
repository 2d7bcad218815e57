"""
Selects the HostDevicePolicies that must be reconciled again after a change.

It must not know queues, Kopf, or what is reconciled.
"""

from __future__ import annotations

from collections.abc import Sequence

from drakit.explain.model import ClaimFacts, ClassFacts, SliceFacts
from drakit.explain.reports import PolicyFacts, ReportFacts
from drakit.explain.world import Fact, World
from drakit_operator.policies.reconcile import DRIVER
from drakit_operator.store import Change

__all__ = ("policies_touched",)


def policies_touched(changes: Sequence[Change], world: World) -> set[str]:
    """Return the names of the policies whose DeviceClass or status may have to change."""
    found: set[str] = set()
    policies = world.of(PolicyFacts)
    if not policies and not any(isinstance(each.old, PolicyFacts) for each in changes):
        return found
    for change in changes:
        for fact in (change.old, change.new):
            if isinstance(fact, PolicyFacts):
                found.add(fact.name)
            elif isinstance(fact, ReportFacts):
                found |= {each.name for each in fact.policies}
            elif isinstance(fact, ClassFacts):
                found |= {each.name for each in policies.values() if each.class_name == fact.name}
            elif fact is not None and _has_our_devices(fact):
                return {name.name for name in policies} | found
    return found


def _has_our_devices(fact: Fact) -> bool:
    if isinstance(fact, SliceFacts):
        return fact.driver == DRIVER
    if isinstance(fact, ClaimFacts):
        shared = (share.device for share in fact.shares)
        return any(device.driver == DRIVER for device in (*fact.devices, *shared))
    return False
