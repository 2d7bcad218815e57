"""
Reasons that stay certain when the objects of a kind may not be listed.

The operator and ``kubectl drakit`` drop the others: a missing permission could be their cause.

It must not know why a kind is hidden, or how a reason is reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from drakit_explain.codes import Code, Reason
from drakit_explain.model import (
    ClaimFacts,
    ClassFacts,
    NodeFacts,
    SliceFacts,
    TaintRuleFacts,
    TemplateFacts,
)
from drakit_explain.world import Fact, World

__all__ = ("certain", "with_limits")

_MISSING: dict[Code, type[Fact]] = {
    Code.DEVICE_CLASS_MISSING: ClassFacts,
    Code.RESOURCE_CLAIM_MISSING: ClaimFacts,
    Code.RESOURCE_CLAIM_TEMPLATE_MISSING: TemplateFacts,
}
"""Reasons that need no devices, and the kind without which they are uncertain."""

_WITHOUT_SLICES = frozenset(
    {
        Code.RESOURCE_CLAIM_NOT_CREATED,
        Code.QUOTA_EXCEEDED,
        Code.ADMIN_ACCESS_DENIED,
        Code.CLAIM_OF_OTHER_POD,
        Code.CLAIM_BEING_DELETED,
        Code.CLAIM_NOT_ALLOCATED,
        Code.CLAIM_NOT_RESERVED,
        Code.BINDING_OUTSTANDING,
        Code.BINDING_FAILED,
        Code.NODE_GONE,
        Code.NODE_NOT_READY,
        Code.CLAIM_IN_USE,
        Code.FINALIZER_HOLDS,
        Code.NOT_UNPREPARED,
    }
)
"""Reasons that follow from pods, claims and nodes alone."""

_LIMITS: tuple[tuple[type[Fact], str], ...] = (
    (NodeFacts, "nodes"),
    (TaintRuleFacts, "DeviceTaintRules"),
)
"""The facts that a reason about devices does not consider while a kind is hidden."""


def certain(reasons: Iterable[Reason], world: World) -> list[Reason]:
    """Return the reasons that no hidden object can refute."""
    return [each for each in reasons if _is_certain(each, world)]


def with_limits(reason: Reason, world: World) -> Reason:
    """Name in the sentence of a reason about devices what it does not consider."""
    if reason.code in _MISSING or reason.code in _WITHOUT_SLICES:
        return reason
    words = [word for kind, word in _LIMITS if kind in world.hidden]
    if not words:
        return reason
    named = " and ".join(words)
    limits = f"(not considered, because the operator lacks permission: {named})"
    return replace(reason, sentence=f"{reason.sentence} {limits}")


def _is_certain(reason: Reason, world: World) -> bool:
    if (kind := _MISSING.get(reason.code)) is not None:
        return kind not in world.hidden
    if reason.code in _WITHOUT_SLICES:
        return True
    if SliceFacts in world.hidden:
        return False
    # Without nodes, only the devices of slices that set nodeName are found.
    return NodeFacts not in world.hidden or all(_names_node(each) for each in world.slices())


def _names_node(of: SliceFacts) -> bool:
    return of.place is not None and bool(of.place.node)
