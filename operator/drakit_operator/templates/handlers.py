"""
Selects the templates and classes that must be checked again after a change.

It must not know queues, Kopf, or what a check finds.
"""

from __future__ import annotations

from collections.abc import Iterable

from drakit_operator.kinds import CLASSES, TEMPLATES, Name
from drakit_operator.store import Change, Store

__all__ = ("classes_touched", "templates_touched")


def templates_touched(changes: Iterable[Change], store: Store) -> set[Name]:
    """Return the templates that changed, or whose classes did."""
    found: set[Name] = set()
    for change in changes:
        if change.kind is TEMPLATES:
            found.add(change.name)
        elif change.kind is CLASSES:
            found |= store.world.templates_of_class(change.name.name)
    return found


def classes_touched(changes: Iterable[Change], store: Store) -> set[Name]:
    """Return the classes that changed."""
    return {change.name for change in changes if change.kind is CLASSES}
