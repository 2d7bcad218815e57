"""
Whether two devices of slices mean the same: what we would write, and what the API server holds.

Quantities are compared by value, absent and empty fields are the same, the order of taints and of
counters means nothing. Both are JSON of ``resource.k8s.io/v1``.

It must not know slices, or where either of the two comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from drakit.resource.quantity import same_quantity
from drakit.resource.raw import Object, child, children

__all__ = ("same_counter_sets", "same_device", "same_taints")

TIME_TOLERANCE_SECONDS = 1.0
"""The API server keeps whole seconds."""

_BY_MEANING = ("attributes", "capacity", "taints", "consumesCounters")


def same_device(ours: Object, stored: Object) -> bool:
    """Compare two devices of slices by meaning."""
    if ours == stored:
        return True
    return (
        _same_rest(ours, stored, besides=_BY_MEANING)
        and (ours.get("attributes") or {}) == (stored.get("attributes") or {})
        and _same_capacities(child(ours, "capacity"), child(stored, "capacity"))
        and same_taints(children(ours, "taints"), children(stored, "taints"))
        and _same_consumption(
            children(ours, "consumesCounters"), children(stored, "consumesCounters")
        )
    )


def same_taints(ours: Sequence[Object], stored: Sequence[Object]) -> bool:
    """Compare taints; one without the time when it was added is the same as with any time."""
    mine = {_taint_key(taint): taint.get("timeAdded") for taint in ours}
    theirs = {_taint_key(taint): taint.get("timeAdded") for taint in stored}
    return (
        len(ours) == len(stored)
        and mine.keys() == theirs.keys()
        and all(_same_time(mine[key], theirs[key]) for key in mine)
    )


def same_counter_sets(ours: Sequence[Object], stored: Sequence[Object]) -> bool:
    """Compare ``sharedCounters`` of two slices by meaning."""
    return _same_sets(ours, stored, name="name")


def _same_rest(ours: Object, stored: Object, *, besides: Sequence[str]) -> bool:
    keys = {key for each in (ours, stored) for key, value in each.items() if value}
    return all(ours.get(key) == stored.get(key) for key in keys.difference(besides))


def _same_consumption(ours: Sequence[Object], stored: Sequence[Object]) -> bool:
    return _same_sets(ours, stored, name="counterSet")


def _same_sets(ours: Sequence[Object], stored: Sequence[Object], *, name: str) -> bool:
    mine = {each.get(name): each for each in ours}
    theirs = {each.get(name): each for each in stored}
    return (
        len(ours) == len(stored)
        and mine.keys() == theirs.keys()
        and all(
            _same_rest(mine[key], theirs[key], besides=("counters",))
            and _same_counters(child(mine[key], "counters"), child(theirs[key], "counters"))
            for key in mine
        )
    )


def _same_counters(mine: Object, theirs: Object) -> bool:
    return mine.keys() == theirs.keys() and all(
        same_quantity(mine[name].get("value"), theirs[name].get("value")) for name in mine
    )


def _same_capacities(mine: Object, theirs: Object) -> bool:
    return mine.keys() == theirs.keys() and all(
        _same_capacity(mine[name], theirs[name]) for name in mine
    )


def _same_capacity(mine: Object, theirs: Object) -> bool:
    return (
        _same_rest(mine, theirs, besides=("value", "requestPolicy"))
        and same_quantity(mine.get("value"), theirs.get("value"))
        and _same_policy(child(mine, "requestPolicy"), child(theirs, "requestPolicy"))
    )


def _same_policy(mine: Object, theirs: Object) -> bool:
    values: list[Any] = mine.get("validValues") or []
    others: list[Any] = theirs.get("validValues") or []
    span, other = child(mine, "validRange"), child(theirs, "validRange")
    return (
        _same_rest(mine, theirs, besides=("default", "validValues", "validRange"))
        and same_quantity(mine.get("default"), theirs.get("default"))
        and len(values) == len(others)
        and all(same_quantity(one, two) for one, two in zip(values, others, strict=True))
        and span.keys() == other.keys()
        and all(same_quantity(span[key], other[key]) for key in span)
    )


def _taint_key(taint: Object) -> tuple[Any, ...]:
    return taint.get("key"), taint.get("value") or "", taint.get("effect")


def _same_time(mine: Any, theirs: Any) -> bool:
    if not mine or not theirs or mine == theirs:
        return True
    try:
        distance = datetime.fromisoformat(mine) - datetime.fromisoformat(theirs)
    except (TypeError, ValueError):
        return False
    return abs(distance.total_seconds()) <= TIME_TOLERANCE_SECONDS
