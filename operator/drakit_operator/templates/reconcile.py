"""
The problems of one template or class, from the facts of the store. Pure.

It must not know queues, clocks, Kopf or sessions.
"""

from __future__ import annotations

from collections.abc import Sequence

from drakit.explain import templates
from drakit.explain.codes import Reason
from drakit.explain.world import World
from drakit_operator.kinds import Name

__all__ = ("expressions_of_class", "expressions_of_template", "judge_class", "judge_template")


def judge_template(name: Name, world: World) -> dict[str, list[Reason]]:
    """Return a template's problems by its UID; empty if there is no such template."""
    template = world.template(name.namespace, name.name)
    if template is None:
        return {}
    return {template.uid: templates.template_problems(template, world)}


def judge_class(name: Name, world: World) -> dict[str, list[Reason]]:
    """Return a class's problems by its UID; empty if there is no such class."""
    device_class = world.device_class(name.name)
    if device_class is None:
        return {}
    return {device_class.uid: templates.class_problems(device_class, world)}


def expressions_of_template(name: Name, world: World) -> Sequence[str]:
    """Return the selectors that must be evaluated before a template is judged."""
    template = world.template(name.namespace, name.name)
    return templates.expressions_of(template.requests, world) if template is not None else ()


def expressions_of_class(name: Name, world: World) -> Sequence[str]:
    """Return the selectors that must be evaluated before a class is judged."""
    device_class = world.device_class(name.name)
    return [each for each in device_class.selectors if each] if device_class is not None else ()
