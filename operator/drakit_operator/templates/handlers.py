"""
Which templates must be looked at again after a change.

It must not know queues, Kopf, or what is found when one looks.
"""

from __future__ import annotations

from collections.abc import Iterable

from drakit_operator.kinds import CLASSES, TEMPLATES, Name
from drakit_operator.store import Change, Store

__all__ = ("templates_touched",)


def templates_touched(change: Change, store: Store) -> Iterable[Name]:
    """Name the templates that may have begun or ceased to ask for a missing class."""
    if change.kind is TEMPLATES:
        return (change.name,)
    if change.kind is CLASSES:
        return store.templates_of_class(change.name.name)
    return ()
