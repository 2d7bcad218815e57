"""
Whether the API server accepts a capacity and its sharing rules.

Amounts with a fraction are checked for two ways of the API server: exactly, as it does since
Kubernetes 1.37, and rounded up to whole numbers where steps and equal amounts are concerned.

It must not know devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import ROUND_CEILING, Decimal
from itertools import pairwise
from typing import cast

from drakit.device import Capacity, CapacityRange
from drakit.resource.limits import MAX_VALID_VALUES
from drakit.resource.quantity import EXACT, parse_quantity, quantity_problem

__all__ = ("capacity_problems", "has_policy")

MAX_INTEGER = 2**63 - 1
"""The API server counts steps in 64 bits: in thousandths where an amount has a fraction."""


def has_policy(capacity: object) -> bool:
    """Return whether a capacity limits what claims can request of it (API: ``requestPolicy``)."""
    return isinstance(capacity, Capacity) and (
        capacity.default is not None
        or bool(capacity.valid_values)
        or capacity.valid_range is not None
    )


def capacity_problems(capacity: object) -> list[str]:
    """Return the problems of a capacity as sentences; it may be of any type."""
    if not isinstance(capacity, Capacity):
        problem = quantity_problem(capacity)
        return [f"{capacity!r:.80} {problem}"] if problem else []
    problems = list(_amount_problems(capacity))
    return problems or list(_policy_problems(capacity))


def _amount_problems(capacity: Capacity) -> Iterator[str]:
    """Check each amount alone; types first, because the values come from vendors."""
    amounts: list[tuple[str, object]] = [("value", capacity.value)]
    if capacity.default is not None:
        amounts.append(("default", capacity.default))
    values = cast("object", capacity.valid_values)
    if not isinstance(values, tuple | list):
        yield f"its valid_values are of type {type(values).__name__}, not a tuple of quantities"
    elif len(given := cast("tuple[object, ...]", values)) > MAX_VALID_VALUES:
        yield f"it has {len(given)} valid_values, but at most {MAX_VALID_VALUES} are allowed"
    else:
        amounts += [("valid value", value) for value in given]
    span: object = capacity.valid_range
    if isinstance(span, CapacityRange):
        amounts.append(("min", span.min))
        amounts += [
            (name, amount)
            for name, amount in (("max", span.max), ("step", span.step))
            if amount is not None
        ]
    elif span is not None:
        yield f"its valid_range is of type {type(span).__name__}, not a CapacityRange"
    for name, amount in amounts:
        if problem := quantity_problem(amount):
            yield f"its {name} {amount!r:.80} {problem}"


def _policy_problems(capacity: Capacity) -> Iterator[str]:
    """Check the amounts together; each alone is valid."""
    value = parse_quantity(capacity.value)
    if capacity.valid_values and capacity.valid_range is not None:
        yield "it has valid_values and a valid_range, only one of the two is allowed"
        return
    if capacity.default is None:
        if capacity.valid_values or capacity.valid_range is not None:
            yield "it has no default, which valid_values and valid_range require"
        return
    default = parse_quantity(capacity.default)
    amounts = [default, *_chosen(capacity)]
    whole = all(_units(amount) % 10**9 == 0 for amount in amounts)
    most = MAX_INTEGER if whole else MAX_INTEGER // 1000
    if max(amounts) > most:
        yield f"one of the amounts that claims can consume is more than {most}"
        return
    if capacity.valid_range is not None and any(_units(amount) % 10**6 for amount in amounts):
        yield "an amount of its valid_range, or its default, has more than three decimal places"
        return
    if default > value:
        yield f"its default {capacity.default} is more than the capacity ({capacity.value})"
    if capacity.valid_values:
        yield from _valid_values_problems(capacity.valid_values, default=default, value=value)
    if capacity.valid_range is not None:
        yield from _range_problems(capacity.valid_range, default=default, value=value)


def _chosen(capacity: Capacity) -> list[Decimal]:
    span = capacity.valid_range
    texts = [span.min, span.max, span.step] if span is not None else []
    return [parse_quantity(text) for text in (*capacity.valid_values, *texts) if text is not None]


def _valid_values_problems(
    texts: tuple[str, ...], *, default: Decimal, value: Decimal
) -> Iterator[str]:
    values = [parse_quantity(text) for text in texts]
    if any(one > other for one, other in pairwise(values)):
        yield "its valid_values are not in ascending order"
    if len({_whole(each) for each in values}) < len(values):
        yield "two of its valid_values are the same when they are rounded up to whole numbers"
    if any(each > value for each in values):
        yield "one of its valid_values is more than the capacity"
    if default not in values:
        yield "its default is none of its valid_values"


def _range_problems(span: CapacityRange, *, default: Decimal, value: Decimal) -> Iterator[str]:
    least = parse_quantity(span.min)
    most = value if span.max is None else parse_quantity(span.max)
    if least > most:
        yield "the min of its valid_range is more than the max"
    if most > value:
        yield "the max of its valid_range is more than the capacity"
    if not least <= default <= most:
        yield "its default is not within its valid_range"
    if span.step is None:
        return
    step = parse_quantity(span.step)
    if step == 0:
        yield "the step of its valid_range is zero"
        return
    if least + step > value:
        yield "the min of its valid_range and one step are more than the capacity"
    if not _steps_fit(default - least, step) or not _whole_steps_fit(default, least, step):
        yield "its default is not the min of its valid_range plus a whole number of steps"
    if span.max is not None and (
        not _steps_fit(most - least, step) or not _whole_steps_fit(most, least, step)
    ):
        yield "the max of its valid_range is not the min plus a whole number of steps"


def _steps_fit(distance: Decimal, step: Decimal) -> bool:
    return _units(distance) % _units(step) == 0


def _whole_steps_fit(amount: Decimal, least: Decimal, step: Decimal) -> bool:
    return (_whole(amount) - _whole(least)) % _whole(step) == 0


def _units(amount: Decimal) -> int:
    """Return billionths, the finest unit: integers of any size divide exactly."""
    return int(amount.scaleb(9, context=EXACT))


def _whole(amount: Decimal) -> int:
    return int(amount.to_integral_value(rounding=ROUND_CEILING))
