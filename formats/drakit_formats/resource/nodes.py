"""
Determines which objects belong to a node: the pools that are named after it, and the objects whose
NodeSelector matches it.
"""

from __future__ import annotations

from collections.abc import Mapping
from sys import intern
from typing import NamedTuple

from drakit_formats.resource.objects import Object, children

# ---------------------------------------------------------------- pools


def pool_name(node: str, pool: str) -> str:
    """Return a pool's name in the API. The name of a node's pool includes the node's name, so that
    it is unique in the cluster."""
    return f"{node}/{pool}" if pool else node


def node_of_pool(name: str) -> str:
    """Return the node whose name an API pool's name contains, if any. Other pools contain devices
    that do not belong to a node, such as devices on a network."""
    return name.partition("/")[0]


def is_pool_of(node: str, name: str) -> bool:
    """Return whether a pool in the API belongs to the node."""
    return node_of_pool(name) == node


def short_pool(node: str, name: str) -> str:
    """Return a pool's name as its driver uses it. Return the name of another node's pool
    unchanged."""
    if name == node:
        return ""
    return name.removeprefix(f"{node}/")


def device_place(pool: str, name: str) -> str:
    """Return how a device's driver names it: ``gpu-0``, or ``gpus/gpu-0`` in a named pool."""
    return f"{pool}/{name}" if pool else name


# ---------------------------------------------------------------- selectors


class NodeLabelsUnknownError(Exception):
    """The selector needs labels, but the node's labels are not known yet."""


class Requirement(NamedTuple):
    """A condition on a label or on a field of a node."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    @property
    def is_one_value(self) -> bool:
        return self.operator == "In" and len(self.values) == 1


class NodeTerm(NamedTuple):
    """A list of requirements. A node must meet all of them."""

    fields: tuple[Requirement, ...] = ()
    expressions: tuple[Requirement, ...] = ()


NodeSelector = tuple[NodeTerm, ...]
"""The terms of a NodeSelector, without empty and duplicate terms. A node must match one of them."""


def node_selector(body: Object) -> NodeSelector:
    """Parse a NodeSelector (core/v1). Empty terms select nothing, and are omitted."""
    known: dict[Requirement, Requirement] = {}

    def read(term: Object, field: str) -> tuple[Requirement, ...]:
        found = map(_requirement, children(term, field))
        return tuple([known.setdefault(each, each) for each in found])

    terms = [
        NodeTerm(read(each, "matchFields"), read(each, "matchExpressions"))
        for each in children(body, "nodeSelectorTerms")
        if each
    ]
    return tuple(dict.fromkeys(each for each in terms if any(each)))


def selects_node(
    selector: NodeSelector | None, *, name: str, labels: Mapping[str, str] | None
) -> bool:
    """
    Evaluate a NodeSelector for one node. Without a selector, all nodes match.

    Raises :class:`NodeLabelsUnknownError` if the result depends on labels that are None.
    """
    if selector is None:
        return True
    unknown = False
    for fields, expressions in selector:
        if not all(_holds(field, {"metadata.name": name}) for field in fields):
            continue
        if expressions and labels is None:
            unknown = True
        elif all(_holds(expression, labels or {}) for expression in expressions):
            return True
    if unknown:
        raise NodeLabelsUnknownError
    return False


def selects_labels(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """Evaluate a LabelSelector (meta/v1). Without a selector, all labels match."""
    if selector is None:
        return True
    wanted: Mapping[str, str] = selector.get("matchLabels") or {}
    return wanted.items() <= labels.items() and all(
        _holds(_requirement(each), labels) for each in children(selector, "matchExpressions")
    )


def _requirement(body: Object) -> Requirement:
    values = body.get("values")
    return Requirement(body["key"], intern(body["operator"]), tuple(values or ()))


def _holds(requirement: Requirement, facts: Mapping[str, str]) -> bool:
    key, operator, values = requirement
    value = facts.get(key)
    match operator:
        case "In":
            return value is not None and value in values
        case "NotIn":
            return value is None or value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            try:
                have, want = int(value or ""), int(values[0])
            except (ValueError, IndexError):
                return False
            return have > want if operator == "Gt" else have < want
        case _:
            return False
