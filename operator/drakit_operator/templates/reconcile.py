"""
The problems of one template, from the facts of the store. Pure.

It must not know queues, clocks, Kopf or sessions.
"""

from __future__ import annotations

from drakit.explain import Reason, missing_classes_of_template
from drakit_operator.kinds import Name
from drakit_operator.store import Store

__all__ = ("judge_template",)


def judge_template(name: Name, store: Store) -> tuple[str, list[Reason]] | None:
    """Return a template's UID and its problems; None if there is no such template."""
    template = store.template(name.namespace, name.name)
    return (
        None if template is None else (template.uid, missing_classes_of_template(template, store))
    )
