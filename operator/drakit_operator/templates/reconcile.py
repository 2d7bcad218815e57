"""
The problems of one template, from the facts of the store. Pure.

It must not know queues, clocks, Kopf or sessions.
"""

from __future__ import annotations

from drakit.explain.codes import Reason
from drakit.explain.pending import missing_classes_of_template
from drakit.explain.world import World
from drakit_operator.kinds import Name

__all__ = ("judge_template",)


def judge_template(name: Name, world: World) -> tuple[str, list[Reason]] | None:
    """Return a template's UID and its problems; None if there is no such template."""
    template = world.template(name.namespace, name.name)
    if template is None:
        return None
    return template.uid, missing_classes_of_template(template, world)
